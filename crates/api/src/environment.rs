//! One pod's environment: where its VM lives, how large it is and how far it has come.

use crate::size::Size;
use crate::timeline::StepTime;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A pod's VM, from the request to the release. Its name follows from the pod's uid.
///
/// Control writes the spec, once. The host that it names writes the status.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monopod.dev",
    version = "v1alpha1",
    derive = "PartialEq",
    kind = "Environment",
    plural = "environments",
    shortname = "env",
    status = "EnvironmentStatus",
    selectable = ".spec.host",
    printcolumn(
        name = "Namespace",
        type_ = "string",
        json_path = ".spec.pod.namespace"
    ),
    printcolumn(name = "Pod", type_ = "string", json_path = ".spec.pod.name"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Host", type_ = "string", json_path = ".spec.host"),
    printcolumn(name = "IP", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "vCPU-m", type_ = "integer", json_path = ".spec.size.cpuMillis"),
    printcolumn(name = "MiB", type_ = "integer", json_path = ".spec.size.memoryMib"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.reason"),
    printcolumn(
        name = "Node",
        type_ = "string",
        json_path = ".spec.node",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = kube::core::Rule::new("self == oldSelf").message("spec: an environment cannot be changed"))]
pub struct EnvironmentSpec {
    /// The one pod that it is for.
    pub pod: PodReference,
    /// Name of the profile that selected the pod.
    #[schemars(length(max = 63))]
    pub profile: String,
    /// Name of the profile's `PodExecutionRole` at that time.
    #[schemars(length(max = 63))]
    pub pod_execution_role: String,
    /// The VM's size.
    pub size: Size,
    /// GiB of the scratch disk, which holds container layers and `emptyDir` volumes.
    pub scratch_gib: u32,
    /// Name of the host that runs the VM.
    #[schemars(length(max = 253))]
    pub host: String,
    /// Name of the node that the VM registers.
    #[schemars(length(max = 253))]
    pub node: String,
    /// Name of the network interface.
    #[schemars(length(max = 253))]
    pub network_interface: String,
    /// The interface's IPv4 address.
    #[schemars(length(max = 15))]
    pub address: String,
    /// The images that the pod names, each once.
    #[schemars(length(max = 64))]
    pub images: Vec<EnvironmentImage>,
    /// Whether control hands registry credentials for it to the host, which waits for them.
    #[serde(default)]
    pub pull_credentials: bool,
    /// Version of the control plane, which the node's must match in its minor version.
    #[schemars(length(max = 63))]
    pub kubernetes_version: String,
}

/// An image that the pod's containers name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnvironmentImage {
    /// The reference as the pod has it.
    #[schemars(length(max = 1024))]
    pub reference: String,
    /// When a registry is asked for it; the strictest that one of the containers has.
    pub pull_policy: PullPolicy,
}

/// When a registry is asked for an image, from the mildest to the strictest.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
pub enum PullPolicy {
    /// Only what the host has is used.
    Never,
    /// What the host has is used by pods that are known to reach it.
    #[default]
    IfNotPresent,
    /// The registry says what the reference means now.
    Always,
}

/// Names one incarnation of a pod.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodReference {
    /// The pod's namespace.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// The pod's name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The pod's uid.
    #[schemars(length(max = 63))]
    pub uid: String,
}

/// Names an environment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnvironmentReference {
    /// The environment's name.
    #[schemars(length(max = 253))]
    pub name: String,
}

/// What the host observed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EnvironmentStatus {
    /// How far the VM has come.
    #[serde(default)]
    pub phase: EnvironmentPhase,
    /// When each phase began, in order.
    #[serde(default)]
    pub phases: Vec<PhaseTime>,
    /// Why it failed, in one word; only in the phase `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why it failed, for people; only in the phase `Failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// How far each of its images has come.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub images: Vec<ImageStatus>,
    /// The steps of the start, each when it was done; `monopod trace` shows them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 96))]
    pub timeline: Vec<StepTime>,
}

/// How far an image has come on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageStatus {
    /// The reference as the pod has it.
    pub reference: String,
    /// Whether it can be used.
    #[serde(default)]
    pub state: ImagePhase,
    /// Bytes that were downloaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done_bytes: Option<u64>,
    /// Bytes that are to be downloaded, once they are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// Why it cannot be used, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Phases of an image on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ImagePhase {
    /// A registry is asked for it, or it is being downloaded.
    #[default]
    Pulling,
    /// Its file system is attached to the VM.
    Present,
    /// It cannot be used now; it is tried again.
    Failed,
}

/// When a phase began.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PhaseTime {
    /// The phase.
    pub phase: EnvironmentPhase,
    /// When it began.
    pub time: MicroTime,
}

/// Phases of an environment, in the order in which they come.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
pub enum EnvironmentPhase {
    /// Asked for; the host has not begun.
    #[default]
    Requested,
    /// The VM is taken from the pool, cloned or booted.
    Booting,
    /// The guest is ready and was told who it is.
    Joining,
    /// The guest registered its node.
    Registered,
    /// The pod's first container runs.
    Running,
    /// The pod finished; the VM is gone.
    Finished,
    /// The VM could not be started, or died.
    Failed,
}

impl EnvironmentPhase {
    /// Whether the VM has ended and will not come back.
    pub fn is_terminal(self) -> bool {
        match self {
            Self::Finished | Self::Failed => true,
            Self::Requested | Self::Booting | Self::Joining | Self::Registered | Self::Running => {
                false
            }
        }
    }
}
