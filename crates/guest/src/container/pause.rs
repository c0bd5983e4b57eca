//! The first process of a PID namespace that all containers of a pod share.
//!
//! It holds the namespace and collects orphans, as upstream's pause container does. The containers see it,
//! so there is nothing about it to take over: an empty root, no network, no rights, and memory that
//! nobody else may read.
//!
//! ```text
//! node                 pause                    pause-first
//!  | ---- starts ------> |  new PID namespace      |
//!  |                     | ------ starts --------> |  gives up everything
//!  |                     | <----- a line --------- |
//!  | <- its number ----- |                         |  stays
//! ```

use super::{CGROUP_PARENT, CGROUP_ROOT};
use anyhow::{Context as _, Result};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::{CapabilitySet, CapabilitySets, Gid, Uid, UnshareFlags};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

/// Where the namespace is kept.
pub(crate) const SHARED_PIDS: &str = "/run/ns/pid";
/// A directory for an empty root.
const EMPTY: &str = "/run/monopod/empty";
/// What upstream's pause container has: of all of the pod's processes it ends last.
const OOM_SCORE: &str = "-998";
/// `nobody`.
const NOBODY: u32 = 65534;

/// Makes the namespace; it lasts as long as the pod.
pub(crate) fn share_pids() -> Result<()> {
    let line = start("pause", "its process's number")?.0;
    let number: u32 = line.trim().parse().context("pause told no number")?;
    std::fs::File::create(SHARED_PIDS)?;
    let namespace = format!("/proc/{number}/ns/pid");
    Ok(rustix::mount::mount_bind(namespace, SHARED_PIDS)?)
}

/// Starts a part of this program and waits for its first line.
fn start(part: &str, line_is: &str) -> Result<(String, std::process::Child)> {
    let mut child = Command::new("/proc/self/exe")
        .arg(part)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.stdout.take().context("no output")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    anyhow::ensure!(
        line.ends_with('\n'),
        "{part} ended before it told {line_is}"
    );
    Ok((line, child))
}

/// Makes the namespace and its first process, and waits for its end.
pub(crate) fn pause() -> Result<()> {
    let group = format!("{CGROUP_ROOT}{CGROUP_PARENT}/pause");
    std::fs::create_dir_all(&group)?;
    std::fs::write(Path::new(&group).join("cgroup.procs"), "0")?;
    std::fs::write("/proc/self/oom_score_adj", OOM_SCORE)?;
    std::fs::create_dir_all(EMPTY)?;
    unshare(UnshareFlags::NEWPID)?;
    let (_ready, mut first) = start("pause-first", "that it is ready")?;
    say(&first.id().to_string())?;
    first.wait()?;
    Ok(())
}

/// Gives up everything, says so, and stays.
pub(crate) fn pause_first() -> Result<()> {
    let null = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/null")?;
    unshare(
        UnshareFlags::NEWNS
            | UnshareFlags::NEWNET
            | UnshareFlags::NEWIPC
            | UnshareFlags::NEWUTS
            | UnshareFlags::NEWCGROUP,
    )?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("none", EMPTY, "tmpfs", flags, c"")?;
    rustix::process::chdir(EMPTY)?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    collect_orphans();
    for (_, capability) in CapabilitySet::all().iter_names() {
        rustix::thread::remove_capability_from_bounding_set(capability)?;
    }
    rustix::thread::set_thread_groups(&[])?;
    let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none)?;
    rustix::thread::set_no_new_privs(true)?;
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    say("ready")?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    loop {
        rustix::event::pause();
    }
}

fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

#[expect(
    unsafe_code,
    reason = "the only call for a new namespace is marked unsafe"
)]
fn unshare(flags: UnshareFlags) -> Result<()> {
    // SAFETY: the danger is in FILES, which does not come here.
    unsafe { rustix::thread::unshare_unsafe(flags) }?;
    Ok(())
}

/// Whoever ignores the ends of its children need not wait for them.
#[expect(unsafe_code, reason = "no crate in use wraps the system call signal")]
fn collect_orphans() {
    // SAFETY: no handler runs; the process has one thread.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}
