//! Limits of the control group that all of the pod's containers are in.

use super::{CGROUP_PARENT, CGROUP_ROOT};
use monopod_core::pod::resources::Limits;
use std::path::Path;

/// Sets what the pod itself asks for. Memory that the node needs is kept from it whatever it says.
pub(crate) fn limit(limits: Limits) -> std::io::Result<()> {
    let group = format!("{CGROUP_ROOT}{CGROUP_PARENT}");
    let group = Path::new(&group);
    let write = |file: &str, value: String| std::fs::write(group.join(file), value);
    if let Some(quota) = limits.quota() {
        write("cpu.max", format!("{quota} {}", Limits::period()))?;
    }
    if let Some(weight) = limits.weight() {
        write("cpu.weight", weight.to_string())?;
    }
    if let Some(bytes) = limits.memory_bytes {
        let most = std::fs::read_to_string(group.join("memory.max"))?;
        let bytes = most
            .trim()
            .parse()
            .map_or(bytes, |most: u64| bytes.min(most));
        write("memory.max", bytes.to_string())?;
    }
    Ok(())
}
