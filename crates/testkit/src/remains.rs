//! What an environment leaves behind, which must be nothing.

use crate::cluster::{Cluster, Output, run};
use serde_json::Value;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;

/// Where a host keeps what it has.
#[derive(Debug, Clone)]
pub struct Site {
    /// Its data directory.
    pub data: PathBuf,
    /// Prefix of its network namespace.
    pub name: String,
    /// The network namespace that is its machine; none if that is this one.
    pub namespace: Option<String>,
    /// On its loopback: where its host exports figures.
    pub port: u16,
}

impl Site {
    /// Runs a program in the VPC's namespace.
    pub fn in_vpc(&self, arguments: &[&str]) -> Output {
        inside(Some(&format!("{}-vpc", self.name)), arguments)
    }

    /// Runs a program in the machine's own network.
    pub fn on_machine(&self, arguments: &[&str]) -> Output {
        inside(self.namespace.as_deref(), arguments)
    }
}

/// Runs a program in a network namespace, or in this one.
fn inside(namespace: Option<&str>, arguments: &[&str]) -> Output {
    let namespace = namespace.map(|name| format!("--net=/run/netns/{name}"));
    run(Command::new("nsenter").args(namespace).args(arguments), "")
}

/// The tap of a pod with this address, in the VPC's namespace.
pub fn tap(address: Ipv4Addr) -> String {
    format!("eni{:08x}", u32::from(address))
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
    let address: Ipv4Addr = environment["spec"]["address"]
        .as_str()
        .and_then(|a| a.parse().ok())
        .expect("an address");
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
    let local = host.in_vpc(&["ip", "address", "show", "dev", "lo"]).out;
    if local.contains(&format!(" {address}/32")) {
        left.push(format!("address {address} on the host"));
    }
    let tap = tap(address);
    if host.in_vpc(&["ip", "link", "show", &tap]).success {
        left.push(tap);
    }
    left
}
