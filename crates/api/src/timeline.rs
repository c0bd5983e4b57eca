//! The steps of a pod's start, as its host keeps them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A step of a pod's start and when it was done, by the host's clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepTime {
    /// The step.
    pub step: Step,
    /// When it began: when it was begun, or else when the last step that it needs was done.
    pub began: MicroTime,
    /// When it was done.
    pub done: MicroTime,
    /// What it was about, where there may be several; an image's reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub detail: Option<String>,
}

/// Steps of a pod's start. Those of the host overlap with each other, those of the guest follow one another.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Control decided on the pod, made its objects, and the host saw them.
    Request,
    /// The VM was taken from the pool or started, and its guest waits to be told who it is.
    Vm,
    /// The VM's tap was plugged into the VPC as the pod's interface.
    Tap,
    /// An image was found or pulled, and attached to the VM.
    Image,
    /// The node's certificates were issued.
    Certificates,
    /// The guest was told who it is, and has its clock and its seed.
    Go,
    /// The guest's interface is up.
    Network,
    /// The guest's scratch disk is mounted.
    Disk,
    /// The node has its credentials.
    Credentials,
    /// The node is registered.
    Registered,
    /// Control bound the pod, and the node admitted it.
    PodAdmitted,
    /// The first container was started.
    ContainerStarted,
    /// The API server has the status that says so: whoever watches sees the pod Running.
    Running,
}

impl Step {
    /// All of them, in the order in which they mostly come.
    pub const ALL: [Self; 13] = [
        Self::Request,
        Self::Vm,
        Self::Tap,
        Self::Image,
        Self::Certificates,
        Self::Go,
        Self::Network,
        Self::Disk,
        Self::Credentials,
        Self::Registered,
        Self::PodAdmitted,
        Self::ContainerStarted,
        Self::Running,
    ];

    /// Its name, as in the status, in messages between guest and host, and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Vm => "vm",
            Self::Tap => "tap",
            Self::Image => "image",
            Self::Certificates => "certificates",
            Self::Go => "go",
            Self::Network => "network",
            Self::Disk => "disk",
            Self::Credentials => "credentials",
            Self::Registered => "registered",
            Self::PodAdmitted => "pod-admitted",
            Self::ContainerStarted => "container-started",
            Self::Running => "running",
        }
    }

    /// The steps that a guest tells of, by their names; no other is believed.
    pub fn of_guest(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .filter(|step| *step >= Self::Go)
            .find(|step| step.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_one_name_everywhere() {
        for step in Step::ALL {
            let stored = serde_json::to_value(step).expect("a step is JSON");
            assert_eq!(stored, step.name());
        }
    }

    #[test]
    fn a_guest_tells_only_of_its_own_steps() {
        assert_eq!(Step::of_guest("go"), Some(Step::Go));
        assert_eq!(Step::of_guest("running"), Some(Step::Running));
        assert_eq!(Step::of_guest("certificates"), None);
        assert_eq!(Step::of_guest("../go"), None);
    }
}
