//! Event reasons and messages that users of EKS Fargate know, word for word.

/// Reason of the event on a pod that cannot be placed, and why it waits.
pub const FAILED_SCHEDULING: &str = "FailedScheduling";
/// Reason of the event on a pod that was bound.
pub const SCHEDULED: &str = "Scheduled";
/// Reason of the event on a pod that a node refused.
pub const UNSUPPORTED_POD_SPEC: &str = "UnsupportedPodSpec";
/// Reason of the condition `PodScheduled` of a pod outside the contract.
pub const POD_UNSUPPORTED: &str = "POD_UNSUPPORTED_ON_FARGATE";
/// Reason of the condition `PodScheduled` of a pod that is larger than any size.
pub const POD_TOO_LARGE: &str = "POD_CPU_MEM_EXCEEDS_MAX_FARGATE_SIZE";
/// Message that goes with [`POD_TOO_LARGE`].
pub const POD_TOO_LARGE_MESSAGE: &str =
    "Your pod's cpu/memory requirements exceed the max Fargate configuration";
/// Message while no host has room.
pub const NO_CAPACITY: &str = "Fargate capacity is unavailable at this time. \
     Please try again later or in a different availability zone.";
/// Reason of a pod whose VM died under it.
pub const ENVIRONMENT_LOST: &str = "EnvironmentLost";

/// Reason of the event on a pod whose secrets for registries are not all there.
pub const NO_PULL_SECRET: &str = "FailedToRetrieveImagePullSecret";

/// The message that goes with [`NO_PULL_SECRET`], in the kubelet's words.
pub fn no_pull_secret(names: &[String]) -> String {
    format!(
        "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
        names.join(", ")
    )
}

/// The message for a pod outside the contract; `parts` name what is not supported.
pub fn pod_not_supported(parts: &[String]) -> String {
    format!("Pod not supported on Fargate: {}", parts.join(", "))
}

/// The message for a pod that requires of its node what none of the profile's zones has.
pub fn node_unmet(requirements: &[String]) -> String {
    format!(
        "node(s) didn't match Pod's node affinity/selector: no Fargate node in the zones of the profile's subnets meets {}; remove it, or let no profile select the pod",
        requirements.join(", ")
    )
}

/// Why a profile is blocked whose role does not exist.
pub const ROLE_IS_MISSING: &str = "Pod execution role is not found in auth config or does not have \
     all required permissions for launching fargate pods.";
/// Why a profile is blocked whose role does not let it use the role.
pub const ROLE_DOES_NOT_TRUST: &str = "Failed to assume PodExecutionRole; Please make sure the role \
     exists and trusts the eks-fargate-pods.amazonaws.com service principal";

/// The message of a profile that waits for another one's creation.
pub fn cannot_create_profile(profile: &str, other: &str) -> String {
    format!(
        "Cannot create Fargate Profile {profile} because this cluster currently has Fargate profile {other} in status CREATING"
    )
}

/// The message of a profile that waits for another one's deletion.
pub fn cannot_delete_profile(profile: &str, other: &str) -> String {
    format!(
        "Cannot Delete Fargate Profile {profile} because this cluster currently has Fargate profile {other} in status DELETING"
    )
}

/// The message for pods of a profile that cannot launch any.
pub fn profile_blocked(profile: &str, why: &str) -> String {
    format!(
        "Misconfigured Fargate Profile: fargate profile {profile} blocked for new launches due to: {why}"
    )
}

/// The message of the event after the binding.
pub fn assigned(namespace: &str, name: &str, node: &str) -> String {
    format!("Successfully assigned {namespace}/{name} to {node}")
}

/// The message while provisioning took too long and is tried again.
pub fn provisioning_timed_out(namespace: &str, name: &str) -> String {
    format!("Pod provisioning timed out (will retry) for pod: {namespace}/{name}")
}
