//! The node's end of the conversation with a container's child process.

use super::{Command, Report, Request};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

/// Why there is no conversation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandleError {
    /// The child could not be started, or the pipes to it failed.
    #[error("cannot talk to the container's process")]
    Io(#[from] std::io::Error),
    /// It ended without a word.
    #[error("the container's process ended without a report")]
    Silent,
    /// It said something else.
    #[error("the container's process sent something else than a report")]
    Malformed(#[from] serde_json::Error),
}

/// A child process that runs one container, or one command in a container.
#[derive(Debug)]
pub(crate) struct Handle {
    commands: ChildStdin,
    reports: Lines<BufReader<ChildStdout>>,
    /// Reaped when it ends; not killed when dropped, as its container would go on without it.
    _child: Child,
}

impl Handle {
    /// Starts the child, which then waits to be told what to do.
    pub(crate) fn spawn() -> Result<Self, HandleError> {
        let mut child = tokio::process::Command::new("/proc/self/exe")
            .arg("container")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let commands = child.stdin.take().ok_or(HandleError::Silent)?;
        let reports = child.stdout.take().ok_or(HandleError::Silent)?;
        Ok(Self {
            commands,
            reports: BufReader::new(reports).lines(),
            _child: child,
        })
    }

    /// Starts the child and tells it what to do.
    pub(crate) async fn start(request: &Request) -> Result<Self, HandleError> {
        let mut handle = Self::spawn()?;
        handle.begin(request).await?;
        Ok(handle)
    }

    /// Tells a waiting child what to do.
    pub(crate) async fn begin(&mut self, request: &Request) -> Result<(), HandleError> {
        self.send(request).await
    }

    async fn send<M: serde::Serialize>(&mut self, message: &M) -> Result<(), HandleError> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        Ok(self.commands.write_all(&line).await?)
    }

    /// The child's next report. Safe to abandon and call again.
    pub(crate) async fn report(&mut self) -> Result<Report, HandleError> {
        match self.reports.next_line().await? {
            Some(line) => Ok(serde_json::from_str(&line)?),
            None => Err(HandleError::Silent),
        }
    }

    /// Sends a signal to the process.
    pub(crate) async fn signal(&mut self, number: i32) -> Result<(), HandleError> {
        self.send(&Command::Signal(number)).await
    }
}

/// Waits at a socket for the terminal's end that libcontainer sends.
pub(crate) async fn receive_console(
    listener: tokio::net::UnixListener,
) -> Result<OwnedFd, HandleError> {
    let (stream, _) = listener.accept().await?;
    loop {
        stream.readable().await?;
        let received = stream.try_io(tokio::io::Interest::READABLE, || {
            let mut byte = [0; 64];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
            rustix::net::recvmsg(
                &stream,
                &mut [IoSliceMut::new(&mut byte)],
                &mut control,
                rustix::net::RecvFlags::CMSG_CLOEXEC,
            )?;
            let descriptor = control.drain().find_map(|message| match message {
                rustix::net::RecvAncillaryMessage::ScmRights(mut list) => list.next(),
                _ => None,
            });
            Ok(descriptor)
        });
        match received {
            Ok(Some(descriptor)) => return Ok(descriptor),
            Ok(None) => return Err(HandleError::Silent),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Path by which another process opens a descriptor of this one.
pub(crate) fn descriptor_path(descriptor: &impl std::os::fd::AsRawFd) -> std::path::PathBuf {
    Path::new("/proc")
        .join(std::process::id().to_string())
        .join("fd")
        .join(descriptor.as_raw_fd().to_string())
}
