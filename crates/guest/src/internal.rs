//! What `pid1` and `platform` say to each other, over a socket pair that is `platform`'s standard
//! input. The frames are those of the link to the host.

use monopod_wire::{Ended, FrameError, Go, GuestPhase, Rehearsal};
use rustix::time::{ClockId, Timespec};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// Named pipe into which all of the guest's own processes log; `platform` carries it to the host.
pub(crate) const LOG_PIPE: &str = "/run/monopod/logs";

/// From `platform` to `pid1`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub(crate) enum Order {
    /// Become this guest. Sent once.
    Go(Box<Go>),
    /// Go through a start for practice.
    Rehearse(Box<Rehearsal>),
    /// Nothing of the rehearsal is known any more.
    Forgotten,
    /// End everything; the reason is already on its way to the host.
    End(Ended),
}

/// From `pid1` to `platform`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub(crate) enum Notice {
    /// A phase was reached.
    Phase(GuestPhase),
    /// Everything that Go asks for is done: the node may have its task.
    Became,
    /// Forget the rehearsal.
    Forget,
    /// As new: the guest may be told who it is.
    Rehearsed,
    /// The guest ends; tell the host, then exit.
    Ended(Ended),
}

/// Why the socket pair gave nothing.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChannelError {
    /// The other process is gone.
    #[error("the other process closed the channel")]
    Closed,
    /// Reading or writing failed.
    #[error("the channel failed")]
    Io(#[from] std::io::Error),
    /// The bytes are no message.
    #[error("the channel carried something else than a message")]
    Frame(#[from] FrameError),
}

/// Sends one message, waiting if need be.
pub(crate) fn send<M: Serialize>(mut stream: &UnixStream, message: &M) -> Result<(), ChannelError> {
    Ok(stream.write_all(&monopod_wire::encode(message)?)?)
}

/// Receives messages one by one.
#[derive(Debug)]
pub(crate) struct Receiver {
    stream: UnixStream,
    decoder: monopod_wire::Decoder,
}

impl Receiver {
    /// Reads from this stream.
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            decoder: monopod_wire::Decoder::default(),
        }
    }

    /// The next message; waits for it.
    pub(crate) fn next<M: DeserializeOwned>(&mut self) -> Result<M, ChannelError> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(message) = self.decoder.next()? {
                return Ok(message);
            }
            match self.stream.read(&mut buffer)? {
                0 => return Err(ChannelError::Closed),
                length => self.decoder.push(&buffer[..length]),
            }
        }
    }
}

/// The guest's clock in nanoseconds since 1970.
pub(crate) fn now_ns() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .ok()
        .and_then(|elapsed| u64::try_from(elapsed.as_nanos()).ok())
        .unwrap_or(0)
}

/// Sets the wall clock to these nanoseconds since 1970.
pub(crate) fn set_clock(time_ns: u64) -> anyhow::Result<()> {
    const SECOND: u64 = 1_000_000_000;
    let time = Timespec {
        tv_sec: i64::try_from(time_ns / SECOND)?,
        tv_nsec: i64::try_from(time_ns % SECOND)?,
    };
    Ok(rustix::time::clock_settime(ClockId::Realtime, time)?)
}

/// Runs a part that speaks TLS, on one thread.
pub(crate) fn run(
    part: &'static str,
    work: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    log(part);
    // Fails only if one is installed already.
    let _installed = rustls::crypto::ring::default_provider()
        .install_default()
        .is_ok();
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(work)
}

/// Starts logging to standard error: one line per event, without colours or the time of day,
/// which is wrong before Go and which the host notes anyway.
pub(crate) fn log(part: &'static str) {
    let outcome = tracing_subscriber::fmt()
        .compact()
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .with_max_level(tracing::Level::INFO)
        // It would panic where standard error takes no more.
        .log_internal_errors(false)
        .try_init();
    match outcome {
        Ok(()) => tracing::info!(part, "started"),
        Err(error) => tracing::warn!(part, %error, "logging was set up before"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::fake_api;

    /// Not every type that compiles can be encoded.
    #[test]
    fn every_message_arrives() {
        let go = Go {
            seed: "00".repeat(32),
            time_ns: 1,
            task: fake_api::task(),
        };
        let end = Ended::Failed {
            message: "m".into(),
        };
        let phase = GuestPhase {
            name: "go".into(),
            time_ns: 1,
        };
        let (here, there) = UnixStream::pair().unwrap();
        let mut channel = Receiver::new(there);
        for order in [
            Order::Go(Box::new(go)),
            Order::Forgotten,
            Order::End(end.clone()),
        ] {
            send(&here, &order).unwrap();
            let heard: Order = channel.next().unwrap();
            assert_eq!(format!("{heard:?}"), format!("{order:?}"));
        }
        for notice in [
            Notice::Phase(phase),
            Notice::Became,
            Notice::Forget,
            Notice::Rehearsed,
            Notice::Ended(end),
        ] {
            send(&here, &notice).unwrap();
            let heard: Notice = channel.next().unwrap();
            assert_eq!(format!("{heard:?}"), format!("{notice:?}"));
        }
    }
}
