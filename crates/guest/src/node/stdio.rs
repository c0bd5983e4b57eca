//! What a process in a container reads and writes, seen from the node: pipes or a terminal.

use crate::container::{HandleError, Stdio, descriptor_path, receive_console};
use rustix::termios::{Winsize, tcsetwinsize};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixListener;
use tokio::net::unix::pipe;

/// Where terminals are handed over.
const CONSOLES: &str = "/run/monopod/consoles";
/// Standard input of a process that reads nothing.
const NOTHING: &str = "/dev/null";

/// Before the process started.
#[derive(Debug)]
pub(crate) enum Prepared {
    /// Pipes.
    Pipes {
        /// To the process, if it reads.
        input: Option<pipe::Sender>,
        /// From its standard output.
        output: pipe::Receiver,
        /// From its standard error.
        error: pipe::Receiver,
        /// The process' ends; dropped once it has opened them.
        theirs: (Option<pipe::Receiver>, pipe::Sender, pipe::Sender),
    },
    /// A terminal that is still to be handed over.
    Terminal {
        /// Where.
        listener: UnixListener,
        /// Its path, which goes away with this.
        path: PathBuf,
    },
}

/// After the process started.
pub(crate) struct Connected {
    /// To the process, if it reads.
    pub(crate) input: Option<Pin<Box<dyn AsyncWrite + Send>>>,
    /// From its standard output, or its terminal.
    pub(crate) output: Pin<Box<dyn AsyncRead + Send>>,
    /// From its standard error; none with a terminal.
    pub(crate) error: Option<Pin<Box<dyn AsyncRead + Send>>>,
    /// The terminal, to change its size.
    pub(crate) terminal: Option<Arc<OwnedFd>>,
}

impl Prepared {
    /// Pipes; `reads` if the process is to have an input.
    pub(crate) fn pipes(reads: bool) -> io::Result<Self> {
        let (out_theirs, output) = pipe::pipe()?;
        let (err_theirs, error) = pipe::pipe()?;
        let (input, in_theirs) = if reads { Some(pipe::pipe()?) } else { None }.unzip();
        Ok(Self::Pipes {
            input,
            output,
            error,
            theirs: (in_theirs, out_theirs, err_theirs),
        })
    }

    /// A terminal; `name` must be unique.
    pub(crate) fn terminal(name: &str) -> io::Result<Self> {
        std::fs::create_dir_all(CONSOLES)?;
        let path = Path::new(CONSOLES).join(name);
        let listener = UnixListener::bind(&path)?;
        Ok(Self::Terminal { listener, path })
    }

    /// What the child process is told.
    pub(crate) fn request(&self) -> Stdio {
        match self {
            Self::Pipes { theirs, .. } => Stdio::Files {
                stdin: theirs
                    .0
                    .as_ref()
                    .map_or_else(|| PathBuf::from(NOTHING), descriptor_path),
                stdout: descriptor_path(&theirs.1),
                stderr: descriptor_path(&theirs.2),
            },
            Self::Terminal { path, .. } => Stdio::Terminal(path.clone()),
        }
    }

    /// Once the process runs.
    pub(crate) async fn connect(self, reads: bool) -> Result<Connected, HandleError> {
        match self {
            Self::Pipes {
                input,
                output,
                error,
                theirs,
            } => {
                drop(theirs);
                Ok(Connected {
                    input: input.map(|input| Box::pin(input) as _),
                    output: Box::pin(output),
                    error: Some(Box::pin(error)),
                    terminal: None,
                })
            }
            Self::Terminal { listener, path } => {
                let descriptor = receive_console(listener).await;
                std::fs::remove_file(path)?;
                let descriptor = descriptor?;
                let terminal = Arc::new(descriptor.try_clone()?);
                rustix::io::ioctl_fionbio(&descriptor, true).map_err(io::Error::from)?;
                // Terminals are read and written like pipes, except that a read after the last
                // process closed its end is an error.
                let reader = pipe::Receiver::from_owned_fd_unchecked(descriptor.try_clone()?)?;
                let writer = pipe::Sender::from_owned_fd_unchecked(descriptor)?;
                Ok(Connected {
                    input: reads.then(|| Box::pin(writer) as _),
                    output: Box::pin(reader),
                    error: None,
                    terminal: Some(terminal),
                })
            }
        }
    }
}

/// Changes a terminal's size.
pub(crate) fn resize(terminal: &OwnedFd, columns: u16, rows: u16) -> io::Result<()> {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    Ok(tcsetwinsize(terminal, size)?)
}
