//! The processes that pid1 starts, and the ends of all processes.

use super::{Event, namespaces, placement};
use crate::internal::LOG_PIPE;
use anyhow::{Context, Result};
use rustix::process::{Pid, WaitOptions, WaitStatus};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::mpsc;

/// A part that pid1 starts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Child {
    /// The link to the host.
    Platform,
    /// The reduced kubelet.
    Node,
    /// The API server of a rehearsal.
    StandIn,
}

/// The end of a process.
#[derive(Debug)]
pub(super) struct Exit {
    /// Which process.
    pub(super) pid: Pid,
    /// How, in words.
    pub(super) how: String,
    /// Whether that was well.
    pub(super) well: bool,
}

/// Starts a part in its namespace and control group.
pub(super) fn start(child: Child, stdin: OwnedFd) -> Result<Pid> {
    let name = match child {
        Child::Platform => "platform",
        Child::Node => "node",
        Child::StandIn => "stand-in",
    };
    let (namespace, group) = placement(child);
    let logs = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(LOG_PIPE)?;
    // Links to /init; told apart from the kernel's own start of it by the name.
    let mut command = Command::new(format!("/sbin/monopod-{name}"));
    std::os::unix::process::CommandExt::arg0(&mut command, "monopod-guest");
    command
        .arg(name)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::from(stdin))
        .stdout(logs.try_clone()?)
        .stderr(logs);
    let process = namespaces::inside(namespace, || Ok(command.spawn()?))
        .with_context(|| format!("starting {name}"))?;
    std::fs::write(format!("{group}/cgroup.procs"), process.id().to_string())?;
    // Reaped by `reap`, like every other process.
    i32::try_from(process.id())
        .ok()
        .and_then(Pid::from_raw)
        .context("the kernel gave an impossible pid")
}

/// Standard input of a process that reads none.
pub(super) fn nothing() -> Result<OwnedFd> {
    Ok(std::fs::File::open("/dev/null")?.into())
}

/// Collects every process that ends, in a thread of its own.
pub(super) fn reap(events: mpsc::Sender<Event>) {
    std::thread::spawn(move || {
        // Ends by ECHILD, when not even `platform` is left.
        while let Ok(ended) = rustix::process::wait(WaitOptions::empty()) {
            let Some((pid, status)) = ended else { continue };
            let (how, well) = (describe(status), status.exit_status() == Some(0));
            if events.send(Event::Exit(Exit { pid, how, well })).is_err() {
                return;
            }
        }
    });
}

fn describe(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".into(),
    }
}
