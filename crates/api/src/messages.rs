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

/// The message of the event after the binding.
pub fn assigned(namespace: &str, name: &str, node: &str) -> String {
    format!("Successfully assigned {namespace}/{name} to {node}")
}

/// The message while provisioning took too long and is tried again.
pub fn provisioning_timed_out(namespace: &str, name: &str) -> String {
    format!("Pod provisioning timed out (will retry) for pod: {namespace}/{name}")
}
