//! What an environment leaves behind, which must be nothing.

use crate::cluster::{Cluster, Output};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// Where a host keeps what it has.
#[derive(Debug, Clone)]
pub struct Site {
    /// Its data directory.
    pub data: PathBuf,
    /// Prefix of its network namespace.
    pub name: String,
}

/// A part in what `monopod status -o json` printed; null if there is none.
pub fn part(status: &Output, name: &str) -> Value {
    let status: Value = serde_json::from_str(&status.out).unwrap_or_default();
    let parts = status["parts"].as_array().cloned().unwrap_or_default();
    let part = parts.into_iter().find(|part| part["name"] == name);
    part.unwrap_or_default()
}

/// Everything that must vanish with a pod but its VM's process; says what is left.
///
/// # Panics
/// If it is no environment.
pub fn leftovers(cluster: &Cluster, environment: &Value, host: &Site) -> Vec<String> {
    let name = environment["metadata"]["name"].as_str().expect("a name");
    let node = environment["spec"]["node"].as_str().expect("a node");
    let address: std::net::Ipv4Addr = environment["spec"]["address"]
        .as_str()
        .and_then(|a| a.parse().ok())
        .expect("an address");
    let tap = format!("eni{:08x}", u32::from(address));
    let mut left = Vec::new();
    if cluster.get("", "environment", name).is_some() {
        left.push("environment".to_owned());
    }
    if cluster.get("", "node", node).is_some() {
        left.push("node".to_owned());
    }
    if cluster.get("kube-node-lease", "lease", node).is_some() {
        left.push("lease".to_owned());
    }
    let requests = cluster.kubectl(&[
        "get",
        "csr",
        "-l",
        &format!("monopod.dev/environment={name}"),
        "-o",
        "name",
    ]);
    if !requests.trim().is_empty() {
        left.push(requests);
    }
    if cluster
        .get(
            "",
            "networkinterface",
            environment["spec"]["networkInterface"]
                .as_str()
                .expect("set"),
        )
        .is_some()
    {
        left.push("network interface".to_owned());
    }
    if host.data.join("host/vms").join(name).exists() {
        left.push("VM directory".to_owned());
    }
    if host.data.join("host/credentials").join(name).exists() {
        left.push("credentials".to_owned());
    }
    if host.data.join("host/logs").join(name).exists() {
        left.push("archive of logs".to_owned());
    }
    let local = Command::new("ip")
        .args([
            "-n",
            &format!("{}-vpc", host.name),
            "address",
            "show",
            "dev",
            "lo",
        ])
        .output()
        .expect("ip runs");
    if String::from_utf8_lossy(&local.stdout).contains(&format!(" {address}/32")) {
        left.push(format!("address {address} on the host"));
    }
    let links = Command::new("ip")
        .args(["-n", &format!("{}-vpc", host.name), "link", "show", &tap])
        .output()
        .expect("ip runs");
    if links.status.success() {
        left.push(tap);
    }
    left
}
