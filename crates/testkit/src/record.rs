//! What a host has written down of its VMs.

use crate::remains::Site;
use serde_json::Value;
use std::io::{Error, Result};
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

/// The process of a recorded VM, once there is one.
pub fn process(record: &Value) -> Option<i32> {
    record["process"]["pid"].as_i64()?.try_into().ok()
}

/// Whether a process is there and is a VM's, by its command line.
pub fn is_vm(process: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/cmdline"))
        .is_ok_and(|arguments| arguments.contains("guest=vm-"))
}
