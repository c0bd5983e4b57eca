//! What a guest is to run.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// The pod that a guest is for, and the cluster that it is in. Holds no secret.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Task {
    /// Name of the environment.
    pub environment: String,
    /// The one pod that the node admits.
    pub pod: PodIdentity,
    /// The node's name.
    pub node: String,
    /// The node's host name, without the prefix `fargate-`.
    pub hostname: String,
    /// Region and zone, for the node's labels.
    pub region: String,
    /// Availability zone.
    pub zone: String,
    /// The machine's host, for the node's label; hosts before this version do not say it.
    #[serde(default)]
    pub host: String,
    /// `spec.providerID` of the node.
    pub provider_id: String,
    /// URL of the API server; its host is an IP address.
    pub api_server: String,
    /// Address of the cluster's DNS service.
    pub cluster_dns: Ipv4Addr,
    /// Domain of the cluster, such as `cluster.local`.
    pub cluster_domain: String,
    /// Version of the control plane, such as `v1.37.2`.
    pub kubernetes_version: String,
    /// Thousandths of a vCPU that the node has.
    pub cpu_millis: u32,
    /// MiB of memory that the node has.
    pub memory_mib: u32,
    /// Bytes of the scratch disk.
    pub scratch_bytes: u64,
    /// The network interface.
    pub interface: Interface,
}

/// The pod's network interface, which the guest sees as its first virtio-net device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Interface {
    /// The pod's address.
    pub address: Ipv4Addr,
    /// Hardware address, which the guest sets.
    pub mac: String,
    /// The router's address, on the other end of the point-to-point link.
    pub gateway: Ipv4Addr,
    /// The router's hardware address.
    pub gateway_mac: String,
    /// Largest packet in bytes.
    pub mtu: u32,
}

/// One incarnation of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodIdentity {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's uid.
    pub uid: String,
}

/// What an image says about how to run it (the `config` object of an OCI image configuration).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerImageConfig {
    /// Entry point.
    pub entrypoint: Vec<String>,
    /// Its arguments, or the whole command.
    pub cmd: Vec<String>,
    /// Variables as `NAME=value`.
    pub env: Vec<String>,
    /// Working directory.
    pub working_dir: String,
    /// `user`, `uid`, `user:group` or `uid:gid`.
    pub user: String,
    /// Signal that ends it, such as `SIGQUIT`.
    pub stop_signal: String,
    /// Paths that the image declares as volumes.
    pub volumes: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
}
