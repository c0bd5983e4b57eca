//! The end of the VM.

use super::{Event, mounts};
use anyhow::{Context, Result, ensure};
use monopod_wire::Ended;
use rustix::process::Pid;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long `platform` may take to tell the host why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Control groups of the node and everything of the pod.
const WORKLOAD: [&str; 2] = ["pod", "system/node"];
/// How long processes that were killed may take to be gone.
const DEATH: Duration = Duration::from_secs(20);

/// Kills the node and everything of the pod.
pub(super) fn kill_workload() {
    for group in WORKLOAD {
        if let Err(error) = std::fs::write(format!("/sys/fs/cgroup/{group}/cgroup.kill"), "1") {
            tracing::warn!(group, %error, "the group's processes cannot be killed");
        }
    }
}

/// Waits until what was killed is gone, and removes its control groups.
pub(super) fn await_death() -> Result<()> {
    let deadline = Instant::now() + DEATH;
    for group in WORKLOAD.map(|group| Path::new("/sys/fs/cgroup").join(group)) {
        let populated = || std::fs::read_to_string(group.join("cgroup.events"));
        while !populated()?.contains("populated 0") {
            ensure!(Instant::now() < deadline, "processes outlive their death");
            std::thread::sleep(Duration::from_millis(5));
        }
        for entry in std::fs::read_dir(&group)? {
            let path = entry?.path();
            if path.is_dir() {
                std::fs::remove_dir(&path)
                    .with_context(|| format!("removing {}", path.display()))?;
            }
        }
    }
    Ok(())
}

/// Waits a short time for a process to end.
pub(super) fn await_exit(pid: Pid, events: &mpsc::Receiver<Event>) {
    let deadline = Instant::now() + LAST_WORDS;
    while let Ok(event) = events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        if matches!(event, Event::Exit(exit) if exit.pid == pid) {
            return;
        }
    }
}

/// Flushes the disk and ends the VM. QEMU is told not to start it again.
pub(super) fn power_off(ended: &Ended) -> ! {
    if let Err(error) = mounts::unmount_scratch() {
        mounts::console(&format!("pid1: scratch disk: {error:#}"));
    }
    rustix::fs::sync();
    mounts::console(&format!("pid1: powering off: {ended:?}"));
    loop {
        // With `reboot=t` a restart needs no firmware.
        if let Err(error) = rustix::system::reboot(rustix::system::RebootCommand::Restart) {
            mounts::console(&format!("pid1: cannot power off: {error}"));
        }
        std::thread::park_timeout(Duration::from_secs(1));
    }
}
