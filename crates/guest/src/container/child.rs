//! The child process. Single-threaded: it waits for its process and its node at once by poll.

use super::{
    Action, CGROUP_PARENT, CGROUP_ROOT, Command, Exit, Report, Request, STATE_ROOT, Stdio,
};
use anyhow::{Context as _, bail};
use libcontainer::container::Container;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::syscall::syscall::SyscallType;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid,
};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Longest request or command; a path or two.
const MAX_LINE: usize = 64 * 1024;

/// Runs the child process until its container's process ended.
pub(crate) fn main() -> anyhow::Result<()> {
    let mut node = Lines::default();
    let request = loop {
        if let Some(line) = node.next_line() {
            break serde_json::from_slice::<Request>(&line).context("no request")?;
        }
        if !node.fill()? {
            bail!("the node closed the conversation before its request");
        }
    };
    match start(&request) {
        Ok((pid, container)) => {
            report(&Report::Started {
                pid: pid.as_raw_nonzero().get(),
            })?;
            let exit = wait(pid, &request, &mut node)?;
            if let Some(mut container) = container
                && let Err(error) = container.delete(true)
            {
                tracing::warn!(%error, "container left something behind");
            }
            report(&Report::Exited(exit))
        }
        Err(error) => {
            // What was created before it failed must not keep its id.
            if let Action::Create(_) = request.action
                && let Ok(mut container) = Container::load(Path::new(STATE_ROOT).join(&request.id))
                && let Err(error) = container.delete(true)
            {
                tracing::warn!(%error, "container left something behind");
            }
            report(&Report::Failed {
                message: format!("{error:#}"),
            })
        }
    }
}

fn report(report: &Report) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line)?;
    Ok(out.flush()?)
}

fn start(request: &Request) -> anyhow::Result<(Pid, Option<Container>)> {
    let mut builder = ContainerBuilder::new(request.id.clone(), SyscallType::default())
        .with_root_path(STATE_ROOT)?
        .validate_id()?;
    match &request.stdio {
        Stdio::Files {
            stdin,
            stdout,
            stderr,
        } => {
            let output = |path| -> anyhow::Result<OwnedFd> {
                let file = open(OpenOptions::new().write(true), path)?;
                // Fails only for what is not ours to give away, such as /dev/null.
                if let Err(error) = rustix::fs::fchown(&file, Some(uid(request.uid)), None) {
                    tracing::debug!(%error, "owner of an output stays");
                }
                Ok(file.into())
            };
            builder = builder
                .with_stdin(open(OpenOptions::new().read(true), stdin)?)
                .with_stdout(output(stdout)?)
                .with_stderr(output(stderr)?);
        }
        Stdio::Terminal(socket) => builder = builder.with_console_socket(Some(socket)),
    }
    let (pid, container) = match &request.action {
        Action::Create(bundle) => {
            let mut container = builder
                .as_init(bundle)
                .with_systemd(false)
                .with_detach(true)
                .build()
                .map_err(chain)?;
            container.start().map_err(chain)?;
            let pid = container.pid().context("container has no process")?;
            (pid.as_raw(), Some(container))
        }
        Action::Join(process) => {
            let pid = builder
                .as_tenant()
                .with_detach(true)
                .with_process(Some(process))
                .build()
                .map_err(chain)?;
            (pid.as_raw(), None)
        }
    };
    let pid = Pid::from_raw(pid).context("container has no process")?;
    Ok((pid, container))
}

/// libcontainer's messages say little; their sources say more.
fn chain(error: libcontainer::error::LibcontainerError) -> anyhow::Error {
    anyhow::Error::new(error)
}

fn open(options: &OpenOptions, path: &Path) -> anyhow::Result<File> {
    options
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}

fn uid(raw: u32) -> rustix::fs::Uid {
    rustix::fs::Uid::from_raw(raw)
}

fn wait(pid: Pid, request: &Request, node: &mut Lines) -> anyhow::Result<Exit> {
    let process = pidfd_open(pid, PidfdFlags::empty()).context("cannot watch the process")?;
    let stdin = io::stdin();
    let mut listening = true;
    loop {
        while let Some(line) = node.next_line() {
            if let Ok(Command::Signal(number)) = serde_json::from_slice(&line)
                && let Some(signal) = Signal::from_named_raw(number)
                && let Err(error) = pidfd_send_signal(&process, signal)
            {
                tracing::debug!(%error, "no signal sent");
            }
        }
        let mut watched = vec![PollFd::new(&process, PollFlags::IN)];
        if listening {
            watched.push(PollFd::new(&stdin, PollFlags::IN));
        }
        match poll(&mut watched, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for the process"),
        }
        let (ended, told) = (
            !watched[0].revents().is_empty(),
            watched.get(1).is_some_and(|fd| !fd.revents().is_empty()),
        );
        if told && !ended {
            listening = node.fill()?;
        }
        if ended {
            break;
        }
    }
    let status = waitpid(Some(pid), WaitOptions::empty())
        .context("cannot wait for the process")?
        .map(|(_, status)| status)
        .context("the process ended without a status")?;
    let signal = status.terminating_signal();
    Ok(Exit {
        code: signal.map_or_else(|| status.exit_status().unwrap_or(0), |signal| 128 + signal),
        signal,
        out_of_memory: signal == Some(9) && was_out_of_memory(&request.id),
    })
}

fn was_out_of_memory(id: &str) -> bool {
    let path = format!("{CGROUP_ROOT}{CGROUP_PARENT}/{id}/memory.events");
    std::fs::read_to_string(path).is_ok_and(|text| {
        text.lines()
            .filter_map(|line| line.strip_prefix("oom_kill "))
            .any(|count| count != "0")
    })
}

/// Lines of standard input. A line that is too long ends the process.
#[derive(Default)]
struct Lines {
    buffer: Vec<u8>,
}

impl Lines {
    fn next_line(&mut self) -> Option<Vec<u8>> {
        let end = self.buffer.iter().position(|&byte| byte == b'\n')?;
        let mut line: Vec<u8> = self.buffer.drain(..=end).collect();
        line.pop();
        Some(line)
    }

    /// Reads once. False at the end of the input.
    fn fill(&mut self) -> anyhow::Result<bool> {
        let mut piece = [0; 4096];
        // Not by `Stdin`, which has a buffer of its own that poll does not see.
        let length = rustix::io::read(io::stdin(), &mut piece)?;
        self.buffer.extend_from_slice(&piece[..length]);
        if self.buffer.len() > MAX_LINE {
            bail!("the node sent a line of more than {MAX_LINE} bytes");
        }
        Ok(length > 0)
    }
}
