//! Control groups of VMs: how much memory, how many threads and, once a pod runs, how much of the
//! CPUs each may take.
//!
//! Version 1 and 2 differ in names of files only: what a group can limit is told by the files that
//! are in it. A VM's groups are beneath those of the host process, or, where version 2 forbids
//! that, beneath the nearest group above that allows it; limits set on these hold for VMs too. The
//! paths are recorded before a group is made, so that it is found and removed wherever it is.

mod group;
mod hierarchy;
#[cfg(test)]
mod tests;

pub(super) use group::{Bounds, Group};

use super::Limits;
use hierarchy::{CONTROLLERS, Hierarchy};
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The group in which the groups of all VMs are.
const PARENT: &str = "monopod";

/// Where groups of VMs can be made.
#[derive(Debug)]
pub(super) struct Cgroups {
    parents: Vec<PathBuf>,
    limits: Limits,
}

impl Cgroups {
    /// Finds out what can be limited here, by trying it.
    pub(super) fn find() -> Self {
        let read = |name: &str| std::fs::read_to_string(Path::new("/proc/self").join(name));
        match (read("mountinfo"), read("cgroup")) {
            (Ok(mountinfo), Ok(cgroup)) => Self::within(hierarchy::find(&mountinfo, &cgroup)),
            (Err(error), _) | (_, Err(error)) => Self {
                parents: Vec::new(),
                limits: Limits {
                    set: Vec::new(),
                    reason: Some(format!("control groups cannot be found: {error}")),
                },
            },
        }
    }

    fn within(hierarchies: Vec<Hierarchy>) -> Self {
        let mut cgroups = Self {
            parents: Vec::new(),
            limits: Limits::default(),
        };
        let mut problems = Vec::new();
        for hierarchy in hierarchies {
            match offer(&hierarchy) {
                Ok((parent, can)) if !can.is_empty() => {
                    cgroups.limits.set.extend(can);
                    cgroups.parents.push(parent);
                }
                // Beside version 1 there may be a version 2 that limits nothing.
                Ok(_) => {}
                Err(error) => problems.push(format!("{}: {error}", hierarchy.own.display())),
            }
        }
        cgroups.limits.set.sort_unstable();
        cgroups.limits.explain(&problems.join("; "));
        cgroups
    }

    /// What can be limited.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The groups of a VM, to be recorded before they are made.
    pub(super) fn group(&self, name: &str) -> Group {
        Group::new(self.parents.iter().map(|parent| parent.join(name)))
    }
}

impl Group {
    /// The groups of this VM that its process is in. Those of a process that has ended are not told.
    pub(super) fn of_process(pid: i32, vm: &str) -> Result<Self> {
        let mountinfo = std::fs::read_to_string("/proc/self/mountinfo")?;
        let cgroup = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let all = hierarchy::find(&mountinfo, &cgroup).into_iter();
        let own = all.map(|hierarchy| hierarchy.own);
        Ok(Self::new(own.filter(|group| group.ends_with(vm))))
    }
}

/// Tells trials apart that are made at the same time.
static TRIALS: AtomicU32 = AtomicU32::new(0);

/// The group in which a hierarchy takes groups of VMs, and what these can limit.
fn offer(hierarchy: &Hierarchy) -> Result<(PathBuf, Vec<&'static str>)> {
    let parent = if hierarchy.unified {
        unified_parent(hierarchy)?
    } else {
        hierarchy.own.join(PARENT)
    };
    let number = TRIALS.fetch_add(1, Ordering::Relaxed);
    let name = format!("trial-{}-{number}", std::process::id());
    let trial = Group::new([parent.join(name)]);
    trial.make()?;
    let can = trial.can();
    trial.remove_now()?;
    Ok((parent, can))
}

/// In version 2 a group's processes and its groups' limits exclude each other, but at the top; and a
/// group can limit only what all above it let it. The nearest that lets most is taken.
fn unified_parent(hierarchy: &Hierarchy) -> Result<PathBuf> {
    let above = hierarchy.own.ancestors();
    let above = above.take_while(|group| group.starts_with(&hierarchy.top));
    let mut offers: Vec<(&Path, Vec<&str>)> = Vec::new();
    for group in above {
        offers.push((group, named(group, "cgroup.controllers")?));
    }
    // Stable: of those that offer the same the nearest stays first.
    offers.sort_by_key(|(_, offered)| std::cmp::Reverse(offered.len()));
    let mut refused = Error::new(ErrorKind::NotFound, "no controllers are offered here");
    for (group, _) in offers.iter().filter(|(_, offered)| !offered.is_empty()) {
        let parent = group.join(PARENT);
        let made = enable(group).and_then(|()| make_parent(&parent));
        match made.and_then(|()| usable(&parent)) {
            Ok(()) => return Ok(parent),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

/// Those of our controllers that a file of a group names.
fn named(group: &Path, file: &str) -> Result<Vec<&'static str>> {
    let text = std::fs::read_to_string(group.join(file))?;
    let has = |name: &&str| text.split_whitespace().any(|word| word == *name);
    Ok(CONTROLLERS.into_iter().filter(has).collect())
}

/// Lets the groups in a group limit what the group itself may limit.
fn enable(group: &Path) -> Result<()> {
    let enabled = named(group, "cgroup.subtree_control")?;
    let missing = named(group, "cgroup.controllers")?;
    let missing = missing.iter().filter(|name| !enabled.contains(name));
    let words: Vec<String> = missing.map(|name| format!("+{name}")).collect();
    if words.is_empty() {
        return Ok(());
    }
    // All or none.
    std::fs::write(group.join("cgroup.subtree_control"), words.join(" "))
}

/// Where a group has processes and limits nothing but CPU time and threads, groups in it can be
/// made, but take no processes.
fn usable(parent: &Path) -> Result<()> {
    let kind = std::fs::read_to_string(parent.join("cgroup.type"))?;
    if kind.trim() == "domain" {
        return Ok(());
    }
    remove_parent(parent);
    let kind = format!("groups would be of the type {}", kind.trim());
    Err(Error::other(kind))
}

/// Makes the group in which groups of VMs are. It goes with the last of them.
fn make_parent(parent: &Path) -> Result<()> {
    match std::fs::create_dir(parent) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    // Version 1 has no such file.
    if parent.join("cgroup.subtree_control").exists() {
        enable(parent)?;
    }
    Ok(())
}

/// Removes it, if nobody uses it.
fn remove_parent(parent: &Path) {
    if parent.ends_with(PARENT)
        && let Err(error) = std::fs::remove_dir(parent)
    {
        tracing::trace!(group = %parent.display(), %error, "other VMs have groups here");
    }
}
