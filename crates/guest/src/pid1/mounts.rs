//! Mounts, control groups and the log pipe.

use crate::internal::LOG_PIPE;
use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Where containers' writable layers and ephemeral volumes live.
const SCRATCH: &str = "/run/scratch";
/// Serial by which the scratch disk is found.
const SCRATCH_SERIAL: &str = "scratch";

/// Makes the initramfs a mount with a parent, as `pivot_root` of a container demands.
///
/// The kernel's own root mount has none. A bind mount of it, moved on top of it, has.
pub(super) fn leave_initramfs() -> Result<()> {
    rustix::mount::mount_bind("/", "/root")?;
    rustix::process::chdir("/root")?;
    rustix::mount::mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    rustix::process::chdir("/")?;
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE)?;
    Ok(())
}

struct Mount {
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
    data: &'static std::ffi::CStr,
}

const HARDENED: MountFlags = MountFlags::NOSUID
    .union(MountFlags::NODEV)
    .union(MountFlags::NOEXEC);

/// In order: later targets lie in earlier mounts.
const MOUNTS: [Mount; 8] = [
    Mount {
        kind: "proc",
        target: "/proc",
        flags: HARDENED,
        data: c"",
    },
    Mount {
        kind: "sysfs",
        target: "/sys",
        flags: HARDENED,
        data: c"",
    },
    Mount {
        kind: "cgroup2",
        target: "/sys/fs/cgroup",
        flags: HARDENED,
        data: c"nsdelegate,memory_recursiveprot",
    },
    Mount {
        kind: "devtmpfs",
        target: "/dev",
        flags: MountFlags::NOSUID,
        data: c"mode=0755",
    },
    Mount {
        kind: "devpts",
        target: "/dev/pts",
        flags: MountFlags::NOSUID.union(MountFlags::NOEXEC),
        data: c"gid=5,mode=0620,ptmxmode=0666",
    },
    Mount {
        kind: "tmpfs",
        target: "/dev/shm",
        flags: HARDENED,
        data: c"mode=1777",
    },
    Mount {
        kind: "tmpfs",
        target: "/run",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        data: c"mode=0755",
    },
    Mount {
        kind: "tmpfs",
        target: "/tmp",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        data: c"mode=1777",
    },
];

/// Mounts the system's file systems.
pub(super) fn mount_all() -> Result<()> {
    for mount in MOUNTS {
        std::fs::create_dir_all(mount.target)?;
        rustix::mount::mount("none", mount.target, mount.kind, mount.flags, mount.data)
            .with_context(|| format!("mounting {}", mount.target))?;
    }
    for directory in ["/run/monopod", "/run/netns", "/run/ns", SCRATCH] {
        std::fs::create_dir_all(directory)?;
    }
    Ok(())
}

/// Makes the log pipe this process's output, and so its children's.
///
/// Opened for both directions and without waiting: a line is lost rather than that this process
/// stops because nobody reads.
pub(super) fn redirect_output() -> Result<()> {
    rustix::fs::mknodat(
        rustix::fs::CWD,
        LOG_PIPE,
        rustix::fs::FileType::Fifo,
        Mode::RUSR | Mode::WUSR,
        0,
    )?;
    let pipe = rustix::fs::open(
        LOG_PIPE,
        OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    rustix::stdio::dup2_stdout(&pipe)?;
    rustix::stdio::dup2_stderr(&pipe)?;
    Ok(())
}

/// Enables the controllers that pods need, keeps room for the system, and puts this process into
/// `system/pid1`.
pub(super) fn cgroups() -> Result<()> {
    const CONTROLLERS: &str = "+cpu +cpuset +io +memory +pids";
    let root = Path::new("/sys/fs/cgroup");
    for group in ["system/pid1", "system/platform", "system/node", "pod"] {
        std::fs::create_dir_all(root.join(group))?;
    }
    std::fs::write(root.join("system/pid1/cgroup.procs"), "1")?;
    for group in ["", "pod"] {
        std::fs::write(root.join(group).join("cgroup.subtree_control"), CONTROLLERS)
            .with_context(|| format!("enabling controllers in /{group}"))?;
    }
    let memory = std::fs::read_to_string("/proc/meminfo")?;
    let pod = pod_memory(&memory).context("the kernel does not say how much memory there is")?;
    for (limit, value) in [
        // A pod that wants more loses a process of its own, never the node.
        ("pod/memory.max", pod),
        ("pod/pids.max", POD_PROCESSES),
        // The node answers probes and logs however busy the pod is.
        ("system/cpu.weight", SYSTEM_WEIGHT),
    ] {
        std::fs::write(root.join(limit), value.to_string())
            .with_context(|| format!("setting {limit}"))?;
    }
    Ok(())
}

/// Memory that pods leave to the node, the platform and the kernel. Well below the 256 MiB that
/// are added to every pod's requests for it.
const SYSTEM_MEMORY: u64 = 96 << 20;
/// Half of what the kernel allows by default.
const POD_PROCESSES: u64 = 16384;
/// Ten times a pod's.
const SYSTEM_WEIGHT: u64 = 1000;

/// What a pod may use, from `/proc/meminfo`.
fn pod_memory(meminfo: &str) -> Option<u64> {
    let total = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix(" kB")?.parse().ok()?;
    Some((kib * 1024).saturating_sub(SYSTEM_MEMORY))
}

/// Removes files that were needed only to boot: modules and the like. They take memory.
pub(super) fn forget_boot_files() -> Result<()> {
    std::fs::remove_dir_all("/lib").context("removing /lib")
}

/// Mounts the scratch disk.
pub(super) fn scratch() -> Result<()> {
    let device = disk(SCRATCH_SERIAL)?;
    let flags = MountFlags::NODEV.union(MountFlags::NOATIME);
    rustix::mount::mount(&device, SCRATCH, "ext4", flags, c"discard")
        .with_context(|| format!("mounting {}", device.display()))
}

/// Where something is mounted, in order.
pub(super) fn all() -> Result<Vec<PathBuf>> {
    let text = std::fs::read_to_string("/proc/self/mountinfo")?;
    let target = |line: &str| line.split(' ').nth(4).map(PathBuf::from);
    Ok(text.lines().filter_map(target).collect())
}

/// Detaches everything that was mounted since.
pub(super) fn unmount_later(before: &[PathBuf]) -> Result<()> {
    let later = all()?.into_iter().filter(|target| !before.contains(target));
    for target in later.collect::<Vec<_>>().iter().rev() {
        rustix::mount::unmount(target, rustix::mount::UnmountFlags::DETACH)
            .with_context(|| format!("unmounting {}", target.display()))?;
    }
    Ok(())
}

/// Detaches the scratch disk, after which its file on the host is consistent.
pub(super) fn unmount_scratch() -> Result<()> {
    Ok(rustix::mount::unmount(
        SCRATCH,
        rustix::mount::UnmountFlags::DETACH,
    )?)
}

fn disk(serial: &str) -> Result<PathBuf> {
    for entry in std::fs::read_dir("/sys/block")? {
        let entry = entry?;
        // Not every block device has a serial.
        let found = std::fs::read_to_string(entry.path().join("serial")).unwrap_or_default();
        if found.trim() == serial {
            return Ok(Path::new("/dev").join(entry.file_name()));
        }
    }
    anyhow::bail!("no disk has the serial {serial}")
}

/// Says something where it can be seen when nothing else works.
pub(super) fn console(line: &str) {
    if let Ok(mut console) = std::fs::OpenOptions::new().write(true).open("/dev/console")
        && let Err(error) = writeln!(console, "{line}")
    {
        tracing::warn!(%error, "the console cannot be written to");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_leaves_room_for_the_system() {
        let meminfo = "MemTotal:         481234 kB\nMemFree:  1 kB\n";
        assert_eq!(pod_memory(meminfo), Some(481_234 * 1024 - SYSTEM_MEMORY));
        assert_eq!(pod_memory("MemTotal: 10 kB"), Some(0));
        assert_eq!(pod_memory("MemFree: 10 kB"), None);
    }
}
