//! Removes every trace of an ordinary node: processes, mounts, control groups, its bridge, its
//! directory, and what it set in the kernel. Also those of a run that was killed.

use crate::process;
use anyhow::{Context, Result, ensure};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Begins the name of the directory that all its files are in.
pub(super) const PREFIX: &str = "monopod-peer-";
/// The bridge of its pods.
pub(super) const BRIDGE: &str = "peerbr0";
/// The kubelet's control group, in each hierarchy.
const GROUP: &str = "kubepods";
/// Settings of the kernel that kubelet and CNI change, under `/proc/sys`.
const SETTINGS: [&str; 7] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "net/ipv4/ip_forward",
];
/// Where their old values are kept, in the node's directory.
const KEPT: &str = "settings.json";
/// How long killed processes may take to end, and control groups to be empty.
const LIMIT: Duration = Duration::from_secs(10);

/// Keeps the settings as they are, for [`remove`].
pub(super) fn keep_settings(directory: &Path) -> Result<()> {
    let values: BTreeMap<&str, String> = SETTINGS
        .into_iter()
        .filter_map(|name| {
            let value = fs::read_to_string(Path::new("/proc/sys").join(name)).ok()?;
            Some((name, value.trim().to_owned()))
        })
        .collect();
    fs::write(directory.join(KEPT), serde_json::to_vec(&values)?)?;
    Ok(())
}

/// Removes what runs that were killed left behind. Nobody else may have a node meanwhile.
pub(super) fn sweep() -> Result<()> {
    for entry in fs::read_dir(std::env::temp_dir())? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            eprintln!(
                "removing what an earlier run left: {}",
                entry.path().display()
            );
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Whether there are control groups of a kubelet that is not ours.
pub(super) fn foreign_kubelet() -> bool {
    !groups().is_empty()
}

/// Whether the node has a control group for the pod of this uid, which it removes last.
pub(crate) fn has_group(uid: &str) -> bool {
    let name = format!("pod{uid}");
    groups().iter().any(|group| {
        // By quality of service; a guaranteed pod's is not in one.
        let classes = ["", "besteffort", "burstable"];
        classes
            .iter()
            .any(|class| group.join(class).join(&name).exists())
    })
}

/// Removes the node whose files are in this directory.
pub(super) fn remove(directory: &Path) -> Result<()> {
    kill_all(directory)?;
    unmount_all(directory)?;
    for group in groups() {
        remove_group(&group)?;
    }
    remove_bridge()?;
    remove_strays(directory)?;
    restore_settings(directory)?;
    fs::remove_dir_all(directory).with_context(|| format!("cannot remove {}", directory.display()))
}

/// Ends daemons, shims and containers, until there are none.
fn kill_all(directory: &Path) -> Result<()> {
    let named = directory.display().to_string();
    let own = std::process::id();
    let deadline = Instant::now() + LIMIT;
    loop {
        let mut found: Vec<i32> = process::all()?
            .into_iter()
            .filter(|p| p.command.contains(&named) && u32::try_from(p.pid) != Ok(own))
            .map(|p| p.pid)
            .collect();
        for group in groups() {
            members(&group, &mut found);
        }
        if found.is_empty() {
            return Ok(());
        }
        for pid in &found {
            // It may have ended meanwhile.
            let _ended = Pid::from_raw(*pid)
                .is_some_and(|pid| rustix::process::kill_process(pid, Signal::KILL).is_err());
        }
        ensure!(Instant::now() < deadline, "processes do not end: {found:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn members(group: &Path, found: &mut Vec<i32>) {
    let processes = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    found.extend(
        processes
            .lines()
            .filter_map(|line| line.parse::<i32>().ok()),
    );
    for child in children(group) {
        members(&child, found);
    }
}

fn children(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect()
}

/// The kubelet's groups, one in each hierarchy.
fn groups() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let mut groups: Vec<PathBuf> = children(root)
        .into_iter()
        .map(|hierarchy| hierarchy.join(GROUP))
        .collect();
    groups.push(root.join(GROUP));
    groups.retain(|group| group.is_dir());
    groups
}

/// A group can only be removed when it is empty, which takes a moment after its processes ended.
fn remove_group(group: &Path) -> Result<()> {
    for child in children(group) {
        remove_group(&child)?;
    }
    let deadline = Instant::now() + LIMIT;
    loop {
        match fs::remove_dir(group) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            other => {
                return other.with_context(|| format!("cannot remove {}", group.display()));
            }
        }
    }
}

/// The last mounted goes first.
fn unmount_all(directory: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let below: Vec<&str> = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|path| Path::new(path).starts_with(directory))
        .collect();
    for path in below.into_iter().rev() {
        rustix::mount::unmount(path, UnmountFlags::DETACH)
            .with_context(|| format!("cannot unmount {path}"))?;
    }
    Ok(())
}

/// The devices of its pods go with their namespaces.
fn remove_bridge() -> Result<()> {
    if !Path::new("/sys/class/net").join(BRIDGE).exists() {
        return Ok(());
    }
    let status = Command::new("ip")
        .args(["link", "delete", BRIDGE])
        .status()?;
    ensure!(status.success(), "cannot delete the bridge {BRIDGE}");
    Ok(())
}

/// What kubelet and containerd keep in places that no setting moves; only what is theirs is removed.
fn remove_strays(directory: &Path) -> Result<()> {
    let dead = |path: &Path| {
        UnixStream::connect(path).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused)
    };
    let leads_here = |path: &Path| fs::read_link(path).is_ok_and(|to| to.starts_with(directory));
    let named = directory.display().to_string();
    let mentions = |path: &Path| fs::read_to_string(path).is_ok_and(|text| text.contains(&named));
    remove_those("/run/containerd/s", dead)?;
    remove_those("/var/lib/kubelet/device-plugins", dead)?;
    remove_those("/var/log/containers", leads_here)?;
    remove_those("/var/lib/cni/results", mentions)
}

/// Removes those files of a directory, and then it and its parent if nothing else is in them.
fn remove_those(directory: &str, is_ours: impl Fn(&Path) -> bool) -> Result<()> {
    let directory = Path::new(directory);
    for entry in fs::read_dir(directory).into_iter().flatten() {
        let path = entry?.path();
        if is_ours(&path) {
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    for emptied in directory.ancestors().take(2) {
        let _kept = fs::remove_dir(emptied).is_err();
    }
    Ok(())
}

fn restore_settings(directory: &Path) -> Result<()> {
    let Ok(text) = fs::read(directory.join(KEPT)) else {
        return Ok(());
    };
    let values: BTreeMap<String, String> = serde_json::from_slice(&text)?;
    for (name, value) in values {
        let path = Path::new("/proc/sys").join(name);
        let now = fs::read_to_string(&path).unwrap_or_default();
        if now.trim() != value {
            fs::write(&path, value).with_context(|| format!("cannot set {}", path.display()))?;
        }
    }
    Ok(())
}
