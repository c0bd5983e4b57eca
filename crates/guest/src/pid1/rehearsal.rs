//! A pod's start for practice, and how it is undone.
//!
//! Everything is as in a start, but for the API server, which is a process of this VM. When that has
//! seen the pod run, it ends, and all that the start made is taken back: processes, control groups,
//! mounts, addresses. Then there is a new node, and the guest is as ready as it was before.

use super::children::{self, Child, Exit};
use super::{become_guest, end, mounts, network};
use crate::internal::{self, Notice};
use anyhow::{Context, Result, ensure};
use monopod_wire::Interface;
use rustix::process::Pid;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// What the node and its containers make in memory, and make anew.
const LEFT: [&str; 5] = [
    "/run/images",
    "/run/monopod/containers",
    "/run/monopod/consoles",
    "/run/monopod/exec",
    "/run/monopod/shm",
];

/// A rehearsal that was begun.
#[derive(Debug)]
pub(super) struct Rehearsal {
    stand_in: Pid,
    interface: Interface,
    mounts: Vec<PathBuf>,
}

impl Rehearsal {
    /// Becomes a guest for practice.
    pub(super) fn begin(plan: &monopod_wire::Rehearsal, platform: &UnixStream) -> Result<Self> {
        let mounts = mounts::all()?;
        let (ours, theirs) = UnixStream::pair()?;
        let stand_in = children::start(Child::StandIn, theirs.into())?;
        internal::send(&ours, plan)?;
        become_guest(&plan.go, platform)?;
        Ok(Self {
            stand_in,
            interface: plan.go.task.interface.clone(),
            mounts,
        })
    }

    /// Whether the end of this process is the rehearsal's.
    pub(super) fn is_over(&self, exit: &Exit) -> bool {
        exit.pid == self.stand_in
    }

    /// Takes everything back, and asks `platform` to forget it too.
    pub(super) fn end(self, exit: &Exit, platform: &UnixStream) -> Result<()> {
        ensure!(exit.well, "the stand-in {}", exit.how);
        end::kill_workload();
        end::await_death()?;
        mounts::unmount_later(&self.mounts)?;
        network::unassign(&self.interface).context("taking back the interface")?;
        for directory in LEFT {
            match std::fs::remove_dir_all(directory) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("removing {directory}"));
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(internal::send(platform, &Notice::Forget)?)
    }
}
