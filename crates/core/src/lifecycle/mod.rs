//! The life of a pod's environment, as control sees it.
//!
//! ```text
//!            request                 nominate            bind
//!  pod ────────────────▶ environment ────────▶ node Ready ────▶ runs ──▶ pod deleted
//!   ▲   interface first,      │ failed or too late                │            │
//!   │   then environment      ▼                                   │ VM lost    ▼
//!   └──── back-off ◀── release (host ends the VM, then ◀──────────┼──────── release
//!                      node, lease, requests, interface)          ▼
//!                                                          pod Failed, EnvironmentLost
//! ```
//!
//! [`decide`] looks only at what is, never at what happened: any event, twice or late, leads to
//! the same effects, and a restarted control goes on where the last one stopped. The order inside
//! one answer matters: what locks (the interface's name) is created before what uses it.

mod interface;
mod place;
mod release;
mod statuses;

#[cfg(test)]
mod tests;

pub use interface::{COOLING, InterfaceEffect, decide_interface};
pub use place::{Network, Subnet};
pub use statuses::lost_status;

use crate::admission::Profiles;
use crate::placement::Candidate;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use monopod_api::environment::{Environment, EnvironmentPhase, PodReference};
use monopod_api::network::NetworkInterface;
use monopod_api::profile::PodExecutionRoleSpec;
use monopod_api::{labels, messages, names};
use std::collections::BTreeMap;

/// How long a VM may take from its request to its Ready node.
pub const PROVISIONING_LIMIT: SignedDuration = SignedDuration::from_secs(180);
/// How long after the end of its grace period a node may take to end its pod.
pub const TERMINATION_MARGIN: SignedDuration = SignedDuration::from_secs(5);
/// How long the pod's own final status may take to arrive after its VM has ended.
pub const FINAL_STATUS_MARGIN: SignedDuration = SignedDuration::from_secs(10);

/// What there is of one pod. Everything may be missing, but not everything at once.
#[derive(Debug, Clone, Copy, Default)]
pub struct Observed<'a> {
    /// The pod with this uid.
    pub pod: Option<&'a Pod>,
    /// Its environment.
    pub environment: Option<&'a Environment>,
    /// An interface that was made for it.
    pub interface: Option<&'a NetworkInterface>,
    /// The node that the environment names.
    pub node: Option<&'a Node>,
    /// What control remembers of failed attempts.
    pub attempts: Attempts,
}

/// Failed attempts to provision for a pod; forgotten when control restarts, which only retries sooner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attempts {
    /// How many failed.
    pub failures: u32,
    /// When the last one did.
    pub last: Option<Timestamp>,
}

/// What a new environment is chosen from.
#[derive(Debug, Clone, Copy)]
pub struct World<'a> {
    /// The profiles in use.
    pub profiles: &'a Profiles,
    /// The roles by name.
    pub roles: &'a BTreeMap<String, PodExecutionRoleSpec>,
    /// Subnets and groups.
    pub network: &'a Network,
    /// The hosts.
    pub candidates: &'a [Candidate],
    /// The control plane's version.
    pub kubernetes_version: &'a str,
}

/// What to do, in this order. Each is idempotent; if one fails, the rest waits for the next decision.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Takes an address. Fails if it is taken.
    CreateInterface(Box<NetworkInterface>),
    /// Asks a host for a VM.
    CreateEnvironment(Box<Environment>),
    /// Sets or clears the pod's `status.nominatedNodeName`.
    Nominate {
        /// The node, or none to clear it.
        node: Option<String>,
    },
    /// Sets annotations of the pod.
    Annotate(Vec<(&'static str, String)>),
    /// Binds the pod to its node and says so in an event.
    Bind {
        /// The node's name.
        node: String,
    },
    /// Says on the pod why it waits: the condition `PodScheduled` and an event.
    Explain {
        /// The condition's reason.
        reason: &'static str,
        /// For people.
        message: String,
    },
    /// Counts a failed attempt.
    RememberFailure,
    /// Asks for the environment's end.
    DeleteEnvironment,
    /// Writes the pod's end, since its VM cannot any more.
    FailPod {
        /// For people.
        message: String,
    },
    /// Deletes the pod at once, since no node is there to end it.
    DeletePod,
    /// Deletes the node, its lease and its certificate requests.
    DeleteNode,
    /// Starts the time after which the interface's address may be used again.
    CoolInterface,
    /// Gives up control's finalizer, with which the environment vanishes.
    ReleaseEnvironment,
}

/// What to do now, and when to look again without an event.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// In this order.
    pub effects: Vec<Effect>,
    /// Latest time of the next look.
    pub wake: Option<Timestamp>,
}

impl Decision {
    fn idle() -> Self {
        Self::default()
    }

    fn now(effects: impl Into<Vec<Effect>>) -> Self {
        Self {
            effects: effects.into(),
            wake: None,
        }
    }

    fn at(wake: Timestamp) -> Self {
        Self {
            effects: Vec::new(),
            wake: Some(wake),
        }
    }
}

/// Decides for one pod uid. `seed` chooses among equally good addresses.
pub fn decide(observed: &Observed<'_>, world: &World<'_>, seed: u64, now: Timestamp) -> Decision {
    if let Some(environment) = observed.environment {
        if environment.metadata.deletion_timestamp.is_some() {
            return release::released(observed, environment);
        }
        return match observed.pod {
            None => Decision::now([Effect::DeleteEnvironment]),
            Some(pod) => with_environment(observed, pod, environment, now),
        };
    }
    match observed.pod {
        None => Decision::idle(),
        Some(pod) => without_environment(observed, pod, world, seed, now),
    }
}

fn without_environment(
    observed: &Observed<'_>,
    pod: &Pod,
    world: &World<'_>,
    seed: u64,
    now: Timestamp,
) -> Decision {
    match (node_of(pod), is_terminal(pod)) {
        (Some(node), false) if names::is_fargate_node(node) => release::lost(
            pod,
            "the environment of this pod no longer exists; its controller, if it has one, makes a new pod",
        ),
        (Some(_), _) | (None, true) => Decision::idle(),
        (None, false) => place::place(observed, pod, world, seed, now),
    }
}

fn with_environment(
    observed: &Observed<'_>,
    pod: &Pod,
    environment: &Environment,
    now: Timestamp,
) -> Decision {
    let status = environment.status.clone().unwrap_or_default();
    match node_of(pod) {
        None if is_terminal(pod) => Decision::now([Effect::DeleteEnvironment]),
        None => provisioning(observed, pod, environment, now),
        Some(node) if node != environment.spec.node => Decision::now([Effect::DeleteEnvironment]),
        Some(_) if status.phase.is_terminal() => release::ended(pod, environment, now),
        Some(_) => release::terminating(pod, now),
    }
}

/// The pod waits for its node.
fn provisioning(
    observed: &Observed<'_>,
    pod: &Pod,
    environment: &Environment,
    now: Timestamp,
) -> Decision {
    let status = environment.status.clone().unwrap_or_default();
    let PodReference {
        namespace, name, ..
    } = &environment.spec.pod;
    if status.phase.is_terminal() {
        let reason = status
            .reason
            .unwrap_or_else(|| format!("{:?}", status.phase));
        let detail = status
            .message
            .unwrap_or_else(|| "the VM ended before the pod was bound".to_owned());
        return give_up(format!(
            "{}: {reason}: {detail}",
            messages::provisioning_timed_out(namespace, name)
        ));
    }
    let deadline = environment
        .metadata
        .creation_timestamp
        .as_ref()
        .map(|t| t.0 + PROVISIONING_LIMIT);
    if deadline.is_some_and(|deadline| deadline <= now) {
        return give_up(format!(
            "{}: the node was not ready after {PROVISIONING_LIMIT:#} (phase {:?})",
            messages::provisioning_timed_out(namespace, name),
            status.phase
        ));
    }
    if status.phase >= EnvironmentPhase::Registered
        && observed
            .node
            .is_some_and(|node| is_ready_for(node, environment))
    {
        return Decision::now([Effect::Bind {
            node: environment.spec.node.clone(),
        }]);
    }
    let mut effects = Vec::new();
    let size = environment.spec.size.to_string();
    let annotations = pod.metadata.annotations.as_ref();
    if annotations.and_then(|all| all.get(labels::CAPACITY_PROVISIONED)) != Some(&size) {
        effects.push(Effect::Annotate(vec![(labels::CAPACITY_PROVISIONED, size)]));
    }
    let nominated = pod
        .status
        .as_ref()
        .and_then(|s| s.nominated_node_name.as_ref());
    if nominated != Some(&environment.spec.node) {
        effects.push(Effect::Nominate {
            node: Some(environment.spec.node.clone()),
        });
    }
    Decision {
        effects,
        wake: deadline,
    }
}

/// Undoes an attempt; the pod is placed anew once the environment is gone.
fn give_up(message: String) -> Decision {
    Decision::now([
        Effect::RememberFailure,
        Effect::Explain {
            reason: "Unschedulable",
            message,
        },
        Effect::Nominate { node: None },
        Effect::DeleteEnvironment,
    ])
}

/// Whether a node is the one that the environment made, and Ready.
fn is_ready_for(node: &Node, environment: &Environment) -> bool {
    let Some(name) = &environment.metadata.name else {
        return false;
    };
    let provider = node
        .spec
        .as_ref()
        .and_then(|s| s.provider_id.as_deref())
        .unwrap_or_default();
    let ready = node
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten())
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let ours = provider.starts_with("monopod:///") && provider.rsplit('/').next() == Some(name);
    ours && ready && node.metadata.deletion_timestamp.is_none()
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec
        .as_ref()?
        .node_name
        .as_deref()
        .filter(|name| !name.is_empty())
}

fn is_terminal(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether a pod is Monopod's to schedule at all.
pub fn is_ours(pod: &Pod) -> bool {
    pod.spec.as_ref().and_then(|s| s.scheduler_name.as_deref()) == Some(labels::SCHEDULER_NAME)
}
