//! The pod as its node sees it: what a reduced kubelet decides.
//!
//! Nothing here acts. The node process observes (API server, images, container exits, probes),
//! asks these functions, and performs the effects that they return.
//!
//! * [`admission`]: which pod the node runs, and what it cannot run
//! * [`lifecycle`]: which container starts, stops or is killed now
//! * [`status`]: what the pod's status says
//! * [`environment`], [`command`], [`files`], [`identity`]: what a container sees
//! * [`log`]: lines of log files and questions to them
//! * [`probe`]: when a probe has decided
//! * [`node`]: the `Node` object
//! * [`resources`]: what containers and the pod may use

pub mod admission;
pub mod command;
pub mod environment;
pub mod fields;
pub mod files;
pub mod identity;
pub mod lifecycle;
pub mod log;
pub mod node;
pub mod probe;
pub mod resources;
pub mod status;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

/// Whether all containers of a pod are in one PID namespace. It is as much of the VM's as a pod gets: the
/// node's own processes are in none of a pod's.
pub fn shares_processes(pod: &Pod) -> bool {
    let asks = |spec: &PodSpec| [spec.share_process_namespace, spec.host_pid].contains(&Some(true));
    pod.spec.as_ref().is_some_and(asks)
}

/// A container or init container of the spec by name.
pub fn container_spec<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    let spec = pod.spec.as_ref()?;
    spec.init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
        .find(|container| container.name == name)
}
