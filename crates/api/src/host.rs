//! A machine that runs VMs.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A machine that runs VMs. Its `monopod host` process creates it and writes its status.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monopod.dev",
    version = "v1alpha1",
    derive = "PartialEq",
    kind = "Host",
    plural = "hosts",
    status = "HostStatus",
    printcolumn(name = "Ready", type_ = "boolean", json_path = ".status.ready"),
    printcolumn(
        name = "Cordoned",
        type_ = "boolean",
        json_path = ".spec.unschedulable"
    ),
    printcolumn(name = "Address", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "Zone", type_ = "string", json_path = ".spec.zone"),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.message",
        priority = 1
    ),
    printcolumn(name = "MiB", type_ = "integer", json_path = ".spec.memoryMib"),
    printcolumn(name = "vCPU-m", type_ = "integer", json_path = ".spec.cpuMillis"),
    printcolumn(
        name = "Accelerator",
        type_ = "string",
        json_path = ".status.accelerator"
    ),
    printcolumn(
        name = "Accelerator-Reason",
        type_ = "string",
        json_path = ".status.acceleratorReason",
        priority = 1
    ),
    printcolumn(
        name = "VM-Limits",
        type_ = "string",
        json_path = ".status.vmLimits",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HostSpec {
    /// Region, part of the names of nodes.
    #[schemars(length(min = 1, max = 63))]
    pub region: String,
    /// Availability zone.
    #[schemars(length(min = 1, max = 63))]
    pub zone: String,
    /// IPv4 address of the machine, at which other hosts of the VPC reach it; none if it stands alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 15))]
    pub address: Option<String>,
    /// Memory for VMs in MiB. Each VM counts with its full size and [`VM_OVERHEAD_MIB`].
    pub memory_mib: u32,
    /// Thousandths of a CPU for VMs; may exceed the machine's, as idle pods share.
    pub cpu_millis: u32,
    /// Takes no new VMs (`monopod host cordon`). Those that it has go on.
    #[serde(default)]
    pub unschedulable: bool,
}

/// Memory in MiB that a VM costs on top of its size: QEMU's own (`vm-disks.md`, section 7).
pub const VM_OVERHEAD_MIB: u32 = 100;

/// What the host process observed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HostStatus {
    /// Whether it takes VMs, as long as it renews its lease, which is in the namespace of this host.
    #[serde(default)]
    pub ready: bool,
    /// Why it does not, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// How VMs are run: `kvm`, or `tcg` (emulation) where a VM under KVM does not boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<String>,
    /// Why not KVM, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator_reason: Option<String>,
    /// What of each VM's process control groups limit on this machine: `cpu`, `memory`, `threads`.
    #[serde(default)]
    pub vm_limits: Vec<String>,
    /// Why some of these are not limited, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm_limits_reason: Option<String>,
    /// References of the images in its cache.
    #[serde(default)]
    pub images: Vec<String>,
    /// The version of Kubernetes that its guests' runtime is built for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime_version: Option<String>,
}
