//! What processes cost, from `/proc`.

use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs::{read_dir, read_to_string};

/// A process that runs.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) parent: i32,
    /// The program's arguments, with spaces between them.
    pub(crate) command: String,
}

/// All processes of this machine; those that end meanwhile are left out.
pub(crate) fn all() -> Result<Vec<Process>> {
    let mut processes = Vec::new();
    for entry in read_dir("/proc").context("cannot read /proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let (Ok(stat), Ok(command)) = (
            read_to_string(format!("/proc/{pid}/stat")),
            std::fs::read(format!("/proc/{pid}/cmdline")),
        ) else {
            continue;
        };
        // The name in brackets may hold anything; the parent is the second field after it.
        let parent = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(1))
            .and_then(|parent| parent.parse().ok());
        if let Some(parent) = parent {
            processes.push(Process {
                pid,
                parent,
                command: String::from_utf8_lossy(&command).replace('\0', " "),
            });
        }
    }
    Ok(processes)
}

/// A process and all that descend from it.
pub(crate) fn family(processes: &[Process], root: i32) -> Vec<i32> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for process in processes {
        children
            .entry(process.parent)
            .or_default()
            .push(process.pid);
    }
    let mut family = vec![root];
    let mut at = 0;
    while let Some(pid) = family.get(at) {
        family.extend(children.get(pid).into_iter().flatten());
        at += 1;
    }
    family
}

/// Memory in MiB that a process shares with no other, which its end would give back.
pub(crate) fn unique_mib(pid: i32) -> Result<f64> {
    let text = read_to_string(format!("/proc/{pid}/smaps_rollup"))
        .with_context(|| format!("cannot read the memory of process {pid}"))?;
    let kib: f64 = text
        .lines()
        .filter(|line| line.starts_with("Private_"))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok())
        .sum();
    Ok(kib / 1024.0)
}

/// Open descriptors of a process.
pub(crate) fn descriptors(pid: i32) -> Result<usize> {
    Ok(read_dir(format!("/proc/{pid}/fd"))?.count())
}
