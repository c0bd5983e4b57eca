//! The host's end of the link to a guest.
//!
//! Says Hello on each connection, and again until the guest answers: the guest may have been in
//! the middle of a frame when a former host process vanished.

use super::VmEvent;
use super::pace::Pace;
use monopod_wire::{Decoder, FrameError, GuestMessage, Hello, HostMessage, Stage, VERSION};
use std::path::PathBuf;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

/// Pause before a lost connection is made again, long enough for the guest to notice the loss.
const PAUSE: Duration = Duration::from_millis(100);
/// The pause doubles up to this while connections end as soon as they are made.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A connection that lasted so long was one.
const LASTING: Duration = Duration::from_secs(1);
/// How often Hello is repeated until it is answered.
const HELLO: Duration = Duration::from_secs(2);

/// What a guest may say in a second, in bytes; each message counts as [`MESSAGE`] more, as it also
/// costs its owner something. A log that is shipped as fast as it can be stays below.
const RATE: u32 = 32 << 20;
const MESSAGE: usize = 32 << 10;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error("the VM closed the link")]
    Closed,
    #[error("the link failed")]
    Io(#[from] std::io::Error),
    #[error("the guest sent something else than a message")]
    Frame(#[from] FrameError),
    #[error("the VM's owner is gone")]
    Owner,
}

/// Carries messages both ways until the owner or, with everything read that it left, the VM is gone.
pub(super) async fn run(
    mut connection: Option<UnixStream>,
    socket: PathBuf,
    mut messages: mpsc::Receiver<HostMessage>,
    events: mpsc::Sender<VmEvent>,
    gone: CancellationToken,
) {
    let (mut epoch, mut pause) = (0, PAUSE);
    let mut pace = Pace::new(RATE, Instant::now());
    while !gone.is_cancelled() {
        epoch += 1;
        let stream = match connection.take() {
            Some(stream) => Ok(stream),
            None => UnixStream::connect(&socket).await,
        };
        // While the VM's process ends nobody listens; its end is seen elsewhere.
        let Ok(stream) = stream else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let mut talk = Talk::new(stream, epoch);
        let begun = Instant::now();
        match talk.run(&mut messages, &events, &mut pace).await {
            LinkError::Owner => return,
            error @ (LinkError::Closed | LinkError::Io(_) | LinkError::Frame(_)) => {
                tracing::info!(error = %chain(&error), "link lost");
            }
        }
        if talk.greeted && events.send(VmEvent::Disconnected).await.is_err() {
            return;
        }
        // What was meant for the old connection is sent again by the owner.
        while messages.try_recv().is_ok() {}
        tokio::time::sleep(pause).await;
        let short = begun.elapsed() < LASTING + pause;
        pause = if short {
            LONGEST_PAUSE.min(2 * pause)
        } else {
            PAUSE
        };
    }
}

fn chain(error: &LinkError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// One connection.
struct Talk {
    stream: UnixStream,
    decoder: Decoder,
    greeted: bool,
    /// Writing failed. What can still be read may be the guest's last word.
    mute: bool,
    epoch: u64,
    hello: Interval,
}

impl Talk {
    fn new(stream: UnixStream, epoch: u64) -> Self {
        let mut hello = tokio::time::interval_at(Instant::now(), HELLO);
        hello.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            stream,
            decoder: Decoder::default(),
            greeted: false,
            mute: false,
            epoch,
            hello,
        }
    }

    async fn run(
        &mut self,
        messages: &mut mpsc::Receiver<HostMessage>,
        events: &mpsc::Sender<VmEvent>,
        pace: &mut Pace,
    ) -> LinkError {
        let outcome: Result<std::convert::Infallible, LinkError> = async {
            let mut buffer = vec![0; 64 << 10];
            loop {
                tokio::select! {
                    _ = self.hello.tick(), if !self.greeted && !self.mute => {
                        let hello = Hello { version: VERSION, epoch: self.epoch, stage: Stage::Boot };
                        self.send(&HostMessage::Hello(hello)).await?;
                    }
                    message = messages.recv(), if !self.mute => {
                        self.send(&message.ok_or(LinkError::Owner)?).await?;
                    }
                    read = self.stream.read(&mut buffer) => {
                        match read? {
                            0 => return Err(LinkError::Closed),
                            read => {
                                self.decoder.push(&buffer[..read]);
                                pace.spend(read).await;
                            }
                        }
                        while let Some(message) = self.decoder.next()? {
                            self.heard(message, events).await?;
                            pace.spend(MESSAGE).await;
                        }
                    }
                }
            }
        }
        .await;
        match outcome {
            Err(error) => error,
        }
    }

    async fn send(&mut self, message: &HostMessage) -> Result<(), LinkError> {
        let frame = monopod_wire::encode(message)?;
        self.mute = self.stream.write_all(&frame).await.is_err();
        Ok(())
    }

    async fn heard(
        &mut self,
        message: GuestMessage,
        events: &mpsc::Sender<VmEvent>,
    ) -> Result<(), LinkError> {
        let event = match message {
            GuestMessage::Hello(hello) if hello.version == VERSION => {
                self.greeted = true;
                VmEvent::Connected(hello.stage)
            }
            GuestMessage::Hello(hello) => VmEvent::Incompatible {
                version: hello.version,
            },
            GuestMessage::Ready
            | GuestMessage::Rehearsed
            | GuestMessage::Phase(_)
            | GuestMessage::Report(_)
            | GuestMessage::Log(_)
            | GuestMessage::LogsComplete
            | GuestMessage::Ended(_)
            | GuestMessage::Unknown => VmEvent::Guest(message),
        };
        events.send(event).await.map_err(|_unsent| LinkError::Owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    async fn read(stream: &mut UnixStream, decoder: &mut Decoder) -> HostMessage {
        loop {
            if let Some(message) = decoder.next().unwrap() {
                return message;
            }
            let mut buffer = [0; 1024];
            let length = stream.read(&mut buffer).await.unwrap();
            assert_ne!(length, 0, "the host closed the link");
            decoder.push(&buffer[..length]);
        }
    }

    async fn say(stream: &mut UnixStream, message: &GuestMessage) {
        stream
            .write_all(&monopod_wire::encode(message).unwrap())
            .await
            .unwrap();
    }

    fn hello(version: u16) -> GuestMessage {
        GuestMessage::Hello(Hello {
            version,
            epoch: 1,
            stage: Stage::Ready,
        })
    }

    struct Host {
        _directory: tempfile::TempDir,
        listener: UnixListener,
        messages: mpsc::Sender<HostMessage>,
        events: mpsc::Receiver<VmEvent>,
        gone: CancellationToken,
    }

    fn host() -> Host {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let listener = UnixListener::bind(&path).unwrap();
        let (messages, queued) = mpsc::channel(8);
        let (sender, events) = mpsc::channel(8);
        let gone = CancellationToken::new();
        tokio::spawn(run(None, path, queued, sender, gone.clone()));
        Host {
            _directory: directory,
            listener,
            messages,
            events,
            gone,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn hello_is_repeated_until_answered_and_after_each_reconnect() {
        let mut host = host();
        for _ in 0..2 {
            let (mut guest, _) = host.listener.accept().await.unwrap();
            let mut decoder = Decoder::default();
            for _ in 0..2 {
                assert!(matches!(
                    read(&mut guest, &mut decoder).await,
                    HostMessage::Hello(_)
                ));
            }
            say(&mut guest, &hello(VERSION)).await;
            say(&mut guest, &GuestMessage::Ready).await;
            assert_eq!(
                host.events.recv().await,
                Some(VmEvent::Connected(Stage::Ready))
            );
            assert_eq!(
                host.events.recv().await,
                Some(VmEvent::Guest(GuestMessage::Ready))
            );
            host.messages.send(HostMessage::Stop).await.unwrap();
            assert_eq!(read(&mut guest, &mut decoder).await, HostMessage::Stop);
            drop(guest);
            assert_eq!(host.events.recv().await, Some(VmEvent::Disconnected));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn garbage_closes_the_connection() {
        let mut host = host();
        let (mut guest, _) = host.listener.accept().await.unwrap();
        say(&mut guest, &hello(VERSION)).await;
        guest.write_all(&[0xff; 64]).await.unwrap();
        assert_eq!(
            host.events.recv().await,
            Some(VmEvent::Connected(Stage::Ready))
        );
        assert_eq!(host.events.recv().await, Some(VmEvent::Disconnected));
    }

    /// The last word comes together with the end of the process.
    #[tokio::test(start_paused = true)]
    async fn what_a_dead_vm_left_is_read() {
        let mut host = host();
        let (mut guest, _) = host.listener.accept().await.unwrap();
        say(&mut guest, &hello(VERSION)).await;
        say(
            &mut guest,
            &GuestMessage::Ended(monopod_wire::Ended::Stopped),
        )
        .await;
        host.gone.cancel();
        drop(guest);
        let mut heard = Vec::new();
        while let Some(event) = host.events.recv().await {
            heard.push(event);
        }
        let ended = VmEvent::Guest(GuestMessage::Ended(monopod_wire::Ended::Stopped));
        assert_eq!(
            heard,
            [
                VmEvent::Connected(Stage::Ready),
                ended,
                VmEvent::Disconnected
            ]
        );
    }

    /// It gets the time of its own task, and room for what fits into the queue.
    #[tokio::test(start_paused = true)]
    async fn a_guest_that_floods_waits() {
        let mut host = host();
        let (mut guest, _) = host.listener.accept().await.unwrap();
        let flood = tokio::spawn(async move {
            let message = monopod_wire::encode(&GuestMessage::Ready).unwrap();
            while guest.write_all(&message).await.is_ok() {}
        });
        let mut heard = 0u32;
        let hearing = async {
            while host.events.recv().await.is_some() {
                heard += 1;
            }
        };
        let end = tokio::time::timeout(Duration::from_secs(10), hearing).await;
        assert!(end.is_err());
        let rate = RATE / u32::try_from(MESSAGE).unwrap();
        assert!((9 * rate..12 * rate).contains(&heard), "{heard}");
        flood.abort();
    }

    /// The owner's messages pile up to a limit, and then it is told.
    #[tokio::test(start_paused = true)]
    async fn a_guest_that_does_not_read_blocks_nobody() {
        let mut host = host();
        let (mut guest, _) = host.listener.accept().await.unwrap();
        say(&mut guest, &hello(VERSION)).await;
        assert!(matches!(
            host.events.recv().await,
            Some(VmEvent::Connected(_))
        ));
        let large = HostMessage::Image(monopod_wire::Image {
            reference: "x".repeat(100 << 10),
            state: monopod_wire::ImageState::Pulling { done: 0, total: 0 },
        });
        let full = async {
            while host.messages.try_send(large.clone()).is_ok() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), full)
            .await
            .unwrap();
        // It is let go of as soon as it goes away.
        drop(guest);
        assert_eq!(host.events.recv().await, Some(VmEvent::Disconnected));
    }

    #[tokio::test(start_paused = true)]
    async fn another_version_is_told() {
        let mut host = host();
        let (mut guest, _) = host.listener.accept().await.unwrap();
        say(&mut guest, &hello(VERSION + 1)).await;
        let version = VERSION + 1;
        assert_eq!(
            host.events.recv().await,
            Some(VmEvent::Incompatible { version })
        );
    }
}
