//! Which pods run on Monopod, and what the platform may do for them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Selects the pods that get a node of their own, and says where these nodes live.
///
/// It can be changed, unlike on EKS: pods that have their environment keep it, new ones follow.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monopod.dev",
    version = "v1alpha1",
    derive = "PartialEq",
    kind = "FargateProfile",
    plural = "fargateprofiles",
    shortname = "fp",
    status = "FargateProfileStatus",
    printcolumn(name = "Status", type_ = "string", json_path = ".status.status"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Namespaces", type_ = "string", json_path = ".spec.selectors[*].namespace"),
    printcolumn(name = "Role", type_ = "string", json_path = ".spec.podExecutionRole", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = kube::core::Rule::new("!self.metadata.name.startsWith('eks-')")
        .message("metadata.name: the prefix eks- is reserved; choose another name"),
    validation = kube::core::Rule::new("size(self.metadata.name) <= 63")
        .message("metadata.name: at most 63 characters, since pods carry it as a label")
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FargateProfileSpec {
    /// A pod is selected if any one of these matches it. One to five.
    #[schemars(length(min = 1, max = 5))]
    pub selectors: Vec<Selector>,
    /// Names or ids of the subnets in which interfaces are made. Empty: all subnets of the VPC.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub subnets: Vec<String>,
    /// Names or ids of the security groups of the interfaces. Empty: the group `default`.
    #[serde(default)]
    #[schemars(length(max = 5))]
    pub security_groups: Vec<String>,
    /// Name of the `PodExecutionRole` with which the platform acts for these pods.
    #[schemars(length(min = 1, max = 63))]
    pub pod_execution_role: String,
    /// How a pod's size follows from what it asks for.
    #[serde(default)]
    pub sizing: Sizing,
    /// What these pods may do that EKS Fargate refuses, since it stays inside their VM. Nothing by default.
    #[serde(default)]
    pub allow: Allowances,
    /// After the deletion of the profile its pods are evicted, as their disruption budgets permit. Pods
    /// that are left after so many seconds are deleted all the same.
    #[serde(default = "drain_timeout")]
    #[schemars(range(min = 0, max = 604_800))]
    pub drain_timeout_seconds: u32,
}

/// Half of what a client of EKS waits for a profile's deletion.
fn drain_timeout() -> u32 {
    900
}

impl Default for FargateProfileSpec {
    fn default() -> Self {
        Self {
            selectors: Vec::new(),
            subnets: Vec::new(),
            security_groups: Vec::new(),
            pod_execution_role: String::new(),
            sizing: Sizing::default(),
            allow: Allowances::default(),
            drain_timeout_seconds: drain_timeout(),
        }
    }
}

/// How a pod's size follows from what it asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Sizing {
    /// The next larger size of EKS Fargate's table.
    #[default]
    Table,
    /// What it asks for, with the runtime's 256 MiB, in steps of 128 MiB. Never less than the table's
    /// smallest size or more than its largest.
    Exact,
}

/// What a pod may do inside its VM beyond EKS Fargate's contract.
///
/// Each makes the guest's kernel and the platform's processes in it easier to attack from the pod; the
/// VM's walls, which keep it from other pods and the host, stay as they are.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Allowances {
    /// Capabilities that containers may add beside containerd's default ones, without the prefix `CAP_`;
    /// `SYS_PTRACE` lets them trace each other's processes. `ALL` stands for every one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 41), inner(length(min = 1, max = 63)))]
    #[x_kube(validation = kube::core::Rule::new("self.all(name, name.matches('^[A-Z_]+$') && !name.startsWith('CAP_'))")
        .message("addedCapabilities: names without CAP_, such as SYS_PTRACE, or ALL"))]
    pub added_capabilities: Vec<String>,
    /// Whether containers may say `allowPrivilegeEscalation: true`, that is name what they do by default.
    #[serde(default)]
    pub privilege_escalation: bool,
    /// Whether containers may be `privileged`: every capability, and all of the guest kernel's files, to write.
    /// Devices of the VM stay closed. Such a pod may take over its guest, and with it its node's identity.
    #[serde(default)]
    pub privileged: bool,
    /// Whether pods may say `hostNetwork`, `hostPID` and `hostIPC`. The host is the VM as its pod sees it: the
    /// interface that the pod has anyway, one PID namespace for its containers, and the pod's own IPC. The
    /// platform's processes and networks are in none of them.
    #[serde(default)]
    pub host_namespaces: bool,
}

/// Matches pods of some namespaces that have all the given labels.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Selector {
    /// The pod's namespace. `*` stands for any number of characters and `?` for exactly one.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Labels that the pod must have, all of them. `*` and `?` work in keys and values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[x_kube(validation = kube::core::Rule::new("size(self) <= 5")
        .message("labels: at most five pairs in a selector"))]
    pub labels: BTreeMap<String, String>,
}

/// Whether pods are selected already.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FargateProfileStatus {
    /// `ACTIVE` once the API server asks the webhook about the pods of its namespaces.
    #[serde(default)]
    pub status: ProfileState,
    /// The `metadata.generation` that the rest of the status is about.
    #[serde(default)]
    pub observed_generation: i64,
    /// `Ready` says whether pods can be launched, `Shadowed` whether other profiles take all its pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    pub conditions: Vec<Condition>,
    /// EC2-style id, derived from the object's uid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

/// The states of a profile, as the EKS API names them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ProfileState {
    /// Selects no pods yet. One profile is created at a time.
    #[default]
    Creating,
    /// In use.
    Active,
    /// Selects no pods any more; its pods are being evicted. One profile is deleted at a time.
    Deleting,
    /// Selects no pods, since there are too many profiles.
    CreateFailed,
}

/// What the platform may do for a pod; never reachable from its containers.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monopod.dev",
    version = "v1alpha1",
    derive = "PartialEq",
    kind = "PodExecutionRole",
    plural = "podexecutionroles",
    shortname = "per",
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodExecutionRoleSpec {
    /// Says what the role is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Secrets of the type `kubernetes.io/dockerconfigjson` with which images are pulled, before the
    /// pod's own `imagePullSecrets`. Only the platform reads them; pods of the profile cannot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub image_pull_secrets: Vec<SecretReference>,
    /// Names of the profiles that may use the role, as `*` and `?` allow; by default every one.
    #[serde(default = "every_profile")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63)))]
    pub profiles: Vec<String>,
}

fn every_profile() -> Vec<String> {
    vec!["*".to_owned()]
}

impl Default for PodExecutionRoleSpec {
    fn default() -> Self {
        Self {
            description: None,
            image_pull_secrets: Vec::new(),
            profiles: every_profile(),
        }
    }
}

/// Names a secret in any namespace.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretReference {
    /// The secret's namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// The secret's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}
