//! Which pods run on Monopod, and what the platform may do for them.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Selects the pods that get a node of their own, and says where these nodes live.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monopod.dev",
    version = "v1alpha1",
    derive = "PartialEq",
    kind = "FargateProfile",
    plural = "fargateprofiles",
    shortname = "fp",
    status = "FargateProfileStatus",
    printcolumn(name = "Status", type_ = "string", json_path = ".status.status"),
    printcolumn(name = "Namespaces", type_ = "string", json_path = ".spec.selectors[*].namespace"),
    printcolumn(name = "Role", type_ = "string", json_path = ".spec.podExecutionRole", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = kube::core::Rule::new("!self.metadata.name.startsWith('eks-')")
        .message("metadata.name: the prefix eks- is reserved; choose another name"),
    validation = kube::core::Rule::new("size(self.metadata.name) <= 63")
        .message("metadata.name: at most 63 characters, since pods carry it as a label")
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = kube::core::Rule::new("self == oldSelf")
    .message("spec: a Fargate profile cannot be changed; create another one and delete this one"))]
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
    /// `ACTIVE` once every webhook replica selects pods by this profile.
    #[serde(default)]
    pub status: ProfileState,
    /// EC2-style id, derived from the object's uid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

/// The states of a profile, as the EKS API names them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ProfileState {
    /// Not yet known to every webhook replica.
    #[default]
    Creating,
    /// In use.
    Active,
    /// Its pods are being deleted.
    Deleting,
}

/// What the platform may do for a pod; never reachable from its containers.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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
