//! The guest's side of the link to the host, and the metadata endpoint.
//!
//! Lives in the network namespace `platform` and is the only process with the link. It keeps what
//! the host said last (task, credentials, images) and what the guest reached (phases), so that
//! either side may come back: the host after a restart, by a Hello that is answered with the whole
//! state; the node by asking again.

mod clock;
mod endpoint;
mod logs;
mod port;
mod state;

use crate::internal::{self, Notice, Order};
use anyhow::{Context, Result};
use clock::Clock;
use monopod_wire::{CONTROL_PORT, GuestMessage, Hello, HostMessage, LOGS_PORT, VERSION};
use port::{Incoming, Outgoing};
use state::{Post, State};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Messages that wait to be handled; each source waits while it is full.
const QUEUE: usize = 16;

/// Runs this part until pid1 says that the guest ends.
pub(crate) fn main() -> Result<()> {
    internal::log("platform");
    let pid1 = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    logs::forward(port::open(LOGS_PORT)?)?;
    let (incoming, outgoing) = port::start(port::open(CONTROL_PORT)?);
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()?
        .block_on(run(pid1, incoming, outgoing))
}

async fn run(
    pid1: UnixStream,
    mut host: mpsc::Receiver<Incoming>,
    mut link: Outgoing,
) -> Result<()> {
    let mut notices = receive_notices(pid1.try_clone()?);
    let state = Arc::new(State::default());
    let (posts, mut posted) = mpsc::channel(QUEUE);
    tokio::spawn(endpoint::serve(
        endpoint::listen().await?,
        Arc::clone(&state),
        posts,
    ));
    let mut epoch = 0;
    let mut clock = Clock::default();
    loop {
        tokio::select! {
            incoming = host.recv() => match incoming.context("the link's reader ended")? {
                Incoming::Message(HostMessage::Hello(hello)) => {
                    epoch += 1;
                    state.connect(true);
                    greet(&hello, epoch, &state, &link);
                }
                Incoming::Message(HostMessage::Time(host)) => {
                    let now = internal::now_ns();
                    if let Some(time) = clock.correction(host, now) {
                        // A time that the kernel does not take is no reason to end the pod.
                        let set = internal::set_clock(time);
                        tracing::warn!(from = now, to = time, ?set, "the clock is wrong; it is set");
                    }
                }
                Incoming::Message(message) => obey(message, &state, &pid1)?,
                Incoming::Garbled(error) => {
                    tracing::warn!(%error, "the host sent something else than a message");
                }
                Incoming::Disconnected => {
                    state.connect(false);
                    tracing::info!("the host left the link");
                }
            },
            notice = notices.recv() => match notice.context("pid1 closed the channel")? {
                Notice::Phase(phase) => {
                    state.reached(phase.clone());
                    link.send(&GuestMessage::Phase(phase));
                }
                Notice::Became => state.became(),
                Notice::Forget => {
                    state.forget();
                    clock = Clock::default();
                    internal::send(&pid1, &Order::Forgotten)?;
                }
                Notice::Rehearsed => link.send(&GuestMessage::Rehearsed),
                Notice::Ended(ended) => {
                    link.send(&GuestMessage::Ended(ended));
                    link.finish();
                    return Ok(());
                }
            },
            post = posted.recv() => match post.context("the endpoint ended")? {
                Post::Phase(phase) => {
                    state.reached(phase.clone());
                    link.send(&GuestMessage::Phase(phase));
                }
                Post::Report(mut report) => {
                    report.number = clock.ask(internal::now_ns());
                    link.send(&GuestMessage::Report(report));
                }
                Post::Log(piece) => link.send_if_clear(&GuestMessage::Log(piece)),
                Post::LogsComplete => link.send(&GuestMessage::LogsComplete),
                Post::Ended(ended) => internal::send(&pid1, &Order::End(ended))?,
            },
        }
    }
}

/// Answers a Hello with everything that the host may have missed.
fn greet(hello: &Hello, epoch: u64, state: &State, link: &Outgoing) {
    if hello.version != VERSION {
        tracing::warn!(
            theirs = hello.version,
            ours = VERSION,
            "another protocol version"
        );
    }
    let reached = state.stage();
    link.send(&GuestMessage::Hello(Hello {
        version: VERSION,
        epoch,
        stage: reached,
    }));
    match reached {
        monopod_wire::Stage::Boot | monopod_wire::Stage::Ready => link.send(&GuestMessage::Ready),
        monopod_wire::Stage::Going => {
            for phase in state.phases() {
                link.send(&GuestMessage::Phase(phase));
            }
        }
    }
}

fn obey(message: HostMessage, state: &State, pid1: &UnixStream) -> Result<()> {
    match message {
        HostMessage::Go(go) => {
            if state.start(&go.task) {
                internal::send(pid1, &Order::Go(go))?;
            }
        }
        HostMessage::Rehearse(rehearsal) => {
            if state.start(&rehearsal.go.task) {
                state.set_credentials(rehearsal.credentials.clone());
                state.set_image(rehearsal.image.clone());
                internal::send(pid1, &Order::Rehearse(rehearsal))?;
            }
        }
        HostMessage::Credentials(credentials) => state.set_credentials(*credentials),
        HostMessage::Image(image) => state.set_image(image),
        HostMessage::LogStored(stored) => {
            state.stored.send_replace(Some(stored));
        }
        HostMessage::LogsTaken => {
            state.taken.send_replace(true);
        }
        HostMessage::Stop => {
            internal::send(pid1, &Order::End(monopod_wire::Ended::Stopped))?;
        }
        HostMessage::Hello(_) | HostMessage::Time(_) | HostMessage::Unknown => {}
    }
    Ok(())
}

fn receive_notices(stream: UnixStream) -> mpsc::Receiver<Notice> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    std::thread::spawn(move || {
        let mut pid1 = internal::Receiver::new(stream);
        loop {
            match pid1.next() {
                Ok(notice) => {
                    if sender.blocking_send(notice).is_err() {
                        return;
                    }
                }
                Err(error) => {
                    tracing::error!(%error, "pid1 cannot be heard");
                    return;
                }
            }
        }
    });
    receiver
}
