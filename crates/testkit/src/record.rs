//! What a host has written down of its VMs.

use crate::process::{all, command_line};
use crate::remains::Site;
use serde_json::Value;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::{Error, ErrorKind, Result};
use std::path::Path;

/// The record in a VM's directory.
///
/// # Errors
/// If there is none, or it is not JSON.
pub fn record(directory: &Path) -> Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(
        directory.join("record.json"),
    )?)?)
}

/// The record of an environment's VM.
///
/// # Errors
/// As of [`record`], or if it is no environment.
pub fn record_of(environment: &Value, host: &Site) -> Result<Value> {
    let name = environment["metadata"]["name"].as_str();
    let name = name.ok_or_else(|| Error::other("it is no environment"))?;
    record(&host.data.join("host/vms").join(name))
}

/// The records of all VMs of a host, of environments and of none.
///
/// # Panics
/// As [`records_in`].
pub fn records(host: &Site) -> Vec<Value> {
    // In the order in which a VM moves: none is missed on its way.
    ["spare", "vms"].map(|kind| records_in(host, kind)).concat()
}

/// The records of VMs that are an environment's (`vms`), or nobody's (`spare`).
///
/// # Panics
/// If one cannot be read.
pub fn records_in(host: &Site, kind: &str) -> Vec<Value> {
    let entries = std::fs::read_dir(host.data.join("host").join(kind));
    entries
        .into_iter()
        .flatten()
        .filter_map(|entry| match record(&entry.ok()?.path()) {
            // One that begins or ends has none, and there may be files beside them.
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                None
            }
            record => Some(record.expect("a record")),
        })
        .collect()
}

/// The names of all VMs that a host has written down, which it does before anything else of a VM is there.
///
/// # Panics
/// As [`records_in`].
pub fn recorded(host: &Site) -> BTreeSet<String> {
    let records = records(host).into_iter();
    records
        .filter_map(|record| Some(record["id"].as_str()?.to_owned()))
        .collect()
}

/// The process of a recorded VM, once there is one.
pub fn process(record: &Value) -> Option<i32> {
    record["process"]["pid"].as_i64()?.try_into().ok()
}

/// Whether a process is there and is a VM's, by its command line.
pub fn is_vm(process: i32) -> bool {
    vm(process).is_some()
}

/// The names of all VMs that have a process on this machine, recorded or not.
pub fn running() -> BTreeSet<String> {
    all().filter_map(vm).collect()
}

/// The names of all VMs that have a control group on this machine.
pub fn grouped() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    find_groups(Path::new("/sys/fs/cgroup"), &mut found);
    found
}

fn find_groups(directory: &Path, found: &mut BTreeSet<String>) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        // No link leads out of the hierarchies, or round in them.
        if !path.is_dir() || path.is_symlink() {
            continue;
        }
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        if directory.ends_with("monopod") && name.starts_with("vm-") {
            found.insert(name.to_owned());
        } else {
            find_groups(&path, found);
        }
    }
}

/// The VM whose process it is.
fn vm(process: i32) -> Option<String> {
    let arguments = command_line(process);
    let mut names = arguments
        .split('\0')
        .filter_map(|word| word.strip_prefix("guest="));
    let name = names.find(|name| name.starts_with("vm-"))?;
    Some(name.to_owned())
}
