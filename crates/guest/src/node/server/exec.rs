//! Exec and attach: the process' side.

use super::protocol::{Outcome, STDERR, STDOUT};
use super::session::{FromProcess, Streams};
use crate::container::{Action, Handle, HandleError, Report, Request};
use crate::node::names::new_id;
use crate::node::shared::Run;
use crate::node::stdio::Prepared;
use bytes::Bytes;
use monopod_kubelet::request::ExecOptions;
use serde_json::json;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{mpsc, watch};

/// Where the processes to execute are described.
const PROCESSES: &str = "/run/monopod/exec";
/// Bytes read at once.
const READ: usize = 32 * 1024;
/// Chunks that wait for a slow client; then the process waits.
const QUEUE: usize = 8;

/// The channels that a client reads; a terminal has only one.
pub(crate) fn writes(options: &ExecOptions) -> Vec<u8> {
    let mut list = Vec::new();
    if options.stdout {
        list.push(STDOUT);
    }
    if options.stderr && !options.terminal {
        list.push(STDERR);
    }
    list
}

/// Why nothing was executed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecError {
    /// A file or pipe.
    #[error("cannot prepare the command")]
    Io(#[from] io::Error),
    /// The child process.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// libcontainer.
    #[error("{0}")]
    Start(String),
}

/// A command that runs in a container.
pub(crate) struct Running {
    /// What it reads and writes.
    pub(crate) streams: Streams,
    signals: mpsc::Sender<i32>,
}

impl Running {
    /// Sends it a signal.
    pub(crate) async fn signal(&self, number: i32) {
        if self.signals.send(number).await.is_err() {
            tracing::debug!("the command ended before the signal");
        }
    }

    /// Waits for its end. Keeps what it writes, at most so many bytes.
    pub(crate) async fn collect(&mut self, output: &mut Vec<u8>, limit: usize) -> Outcome {
        loop {
            match self.streams.from.recv().await {
                Some(FromProcess::Bytes(_, bytes)) => {
                    let room = limit.saturating_sub(output.len());
                    output.extend_from_slice(&bytes[..bytes.len().min(room)]);
                }
                Some(FromProcess::Ended(outcome)) => return outcome,
                None => return Outcome::Failed("the process was lost".to_owned()),
            }
        }
    }
}

/// Executes a command in a running container.
pub(crate) async fn execute(run: &Run, options: &ExecOptions) -> Result<Running, ExecError> {
    let id = new_id()?;
    std::fs::create_dir_all(PROCESSES)?;
    let description = Description(Path::new(PROCESSES).join(&id));
    let mut process = run.process.clone();
    process["args"] = json!(options.command);
    process["terminal"] = json!(options.terminal);
    std::fs::write(&description.0, process.to_string())?;
    let prepared = if options.terminal {
        Prepared::terminal(&id)?
    } else {
        Prepared::pipes(options.stdin)?
    };
    let mut handle = Handle::start(&Request {
        id: run.id.clone(),
        action: Action::Join(description.0.clone()),
        stdio: prepared.request(),
        uid: run.uid,
    })
    .await?;
    match handle.report().await? {
        Report::Started { .. } => {}
        Report::Failed { message } => return Err(ExecError::Start(message)),
        Report::Exited(_) => return Err(HandleError::Silent.into()),
    }
    let connected = prepared.connect(options.stdin).await?;
    let (sender, from) = mpsc::channel(QUEUE);
    let stdin = connected.input.map(|mut writer| {
        let (stdin, mut bytes) = mpsc::channel::<Bytes>(QUEUE);
        tokio::spawn(async move {
            while let Some(bytes) = bytes.recv().await {
                if writer.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        });
        stdin
    });
    let mut copies = vec![tokio::spawn(copy(connected.output, STDOUT, sender.clone()))];
    if let Some(error) = connected.error {
        copies.push(tokio::spawn(copy(error, STDERR, sender.clone())));
    }
    let (signals, orders) = mpsc::channel(1);
    tokio::spawn(async move {
        // Kept until the process is gone, also if the client leaves before.
        let outcome = wait(&mut handle, orders).await;
        let drained = futures::future::join_all(copies);
        // A process that it left behind may hold the pipes for ever.
        let _late = tokio::time::timeout(std::time::Duration::from_secs(2), drained)
            .await
            .is_err();
        let _client_left = sender.send(FromProcess::Ended(outcome)).await.is_err();
    });
    drop(description);
    Ok(Running {
        streams: Streams {
            from,
            stdin,
            terminal: connected.terminal,
            writes: writes(options),
        },
        signals,
    })
}

async fn wait(handle: &mut Handle, mut orders: mpsc::Receiver<i32>) -> Outcome {
    loop {
        tokio::select! {
            report = handle.report() => return match report {
                Ok(Report::Exited(exit)) => Outcome::Exited(exit.code),
                Ok(Report::Started { .. } | Report::Failed { .. }) => {
                    Outcome::Failed("the process was lost".to_owned())
                }
                Err(error) => Outcome::Failed(error.to_string()),
            },
            Some(number) = orders.recv() => if let Err(error) = handle.signal(number).await {
                tracing::debug!(%error, "a command got no signal");
            },
        }
    }
}

/// A file that is deleted when it is no longer needed.
struct Description(PathBuf);

impl Drop for Description {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            tracing::warn!(%error, "the description of a command was not deleted");
        }
    }
}

async fn copy(
    mut stream: Pin<Box<dyn AsyncRead + Send>>,
    channel: u8,
    out: mpsc::Sender<FromProcess>,
) {
    let mut buffer = vec![0; READ];
    loop {
        let length = stream.read(&mut buffer).await.unwrap_or(0);
        if length == 0 {
            return;
        }
        let bytes = Bytes::copy_from_slice(&buffer[..length]);
        if out.send(FromProcess::Bytes(channel, bytes)).await.is_err() {
            return;
        }
    }
}

/// Attaches to the container's own process.
pub(crate) fn attach(run: &Run, options: &ExecOptions) -> Streams {
    let (sender, from) = mpsc::channel(QUEUE);
    let mut output = run.output.subscribe();
    let mut running = run.running.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                biased;
                received = output.recv() => match received {
                    Ok(output) => {
                        let channel = if output.stderr { STDERR } else { STDOUT };
                        let bytes = FromProcess::Bytes(channel, output.bytes);
                        if sender.send(bytes).await.is_err() {
                            return;
                        }
                    }
                    // A slow client misses something, the container does not wait.
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => break,
                },
                () = ended(&mut running) => break,
                () = sender.closed() => return,
            }
        }
        let _client_left = sender
            .send(FromProcess::Ended(Outcome::Exited(0)))
            .await
            .is_err();
    });
    let stdin = run
        .input
        .as_ref()
        .filter(|_| options.stdin)
        .map(|(input, once)| forward(input.clone(), *once));
    Streams {
        from,
        stdin,
        terminal: run.terminal.clone(),
        writes: writes(options),
    }
}

/// Waits until a container ended, or is forgotten.
async fn ended(running: &mut watch::Receiver<bool>) {
    let _forgotten = running.wait_for(|running| !running).await.is_err();
}

/// The client's end does not end the container's input, unless the spec says so (`stdinOnce`).
fn forward(input: mpsc::Sender<Bytes>, once: bool) -> mpsc::Sender<Bytes> {
    let (sender, mut receiver) = mpsc::channel::<Bytes>(1);
    tokio::spawn(async move {
        while let Some(bytes) = receiver.recv().await {
            if input.send(bytes).await.is_err() {
                return;
            }
        }
        if once {
            let _ended_already = input.send(Bytes::new()).await.is_err();
        }
    });
    sender
}
