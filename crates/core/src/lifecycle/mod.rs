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

mod causes;
mod interface;
mod launch;
mod place;
mod provisioning;
mod release;
mod statuses;

#[cfg(test)]
mod tests;

pub use causes::{Cause, Failure};
pub use interface::{COOLING, InterfaceEffect, decide_interface};
pub use launch::{Launch, launch, trusts};
pub use place::{Network, Subnet};
pub use statuses::lost_status;

use crate::admission::Profiles;
use crate::contract::Claims;
use crate::placement::{Candidate, Placed};
use crate::selector::Labels;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use monopod_api::environment::Environment;
use monopod_api::network::NetworkInterface;
use monopod_api::profile::PodExecutionRoleSpec;
use monopod_api::{labels, names};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// How long a VM may take from its request to its Ready node.
pub const PROVISIONING_LIMIT: SignedDuration = SignedDuration::from_secs(180);
/// How long an environment may lack its interface, which was created before it.
const INTERFACE_LIMIT: SignedDuration = SignedDuration::from_secs(20);
/// How long after the end of its grace period a node may take to end its pod, and clients to take
/// what it said last.
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
    /// What control remembers of failed attempts, if there were any.
    pub attempts: Option<&'a Attempts>,
}

/// Failed attempts to provision for a pod; forgotten when control restarts, which only retries sooner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempts {
    /// How many failed.
    pub failures: u32,
    /// When the next one is made.
    pub next: Timestamp,
    /// The host of the last one; another is preferred.
    pub host: String,
    /// The address of the last one; in the same zone another subnet is preferred.
    pub address: Option<Ipv4Addr>,
    /// Why it failed.
    pub failure: Failure,
    /// Uid of the environment that failed last: it counts once, however often it is given up.
    pub environment: Option<String>,
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
    /// What persistent volume claims stand for.
    pub claims: &'a Claims,
    /// The hosts.
    pub candidates: &'a [Candidate],
    /// The pods that have an environment.
    pub placed: &'a [Placed<'a>],
    /// Labels of all namespaces.
    pub namespaces: &'a BTreeMap<String, Labels>,
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
        /// Why, in short.
        cause: Cause,
        /// For people.
        message: String,
    },
    /// Keeps what is known of failed attempts, this one with them.
    RememberFailure(Attempts),
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
            return release::released(observed, environment, world, now);
        }
        return match observed.pod {
            None => Decision::now([Effect::DeleteEnvironment]),
            Some(pod) => with_environment(observed, pod, environment, seed, now),
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
    match node_of(pod) {
        Some(node) if names::is_fargate_node(node) => release::lost(
            pod,
            "the environment of this pod no longer exists; its controller, if it has one, makes a new pod",
        ),
        Some(_) => Decision::idle(),
        None if is_terminal(pod) => Decision::idle(),
        None => place::place(observed, pod, world, seed, now),
    }
}

fn with_environment(
    observed: &Observed<'_>,
    pod: &Pod,
    environment: &Environment,
    seed: u64,
    now: Timestamp,
) -> Decision {
    let status = environment.status.clone().unwrap_or_default();
    match node_of(pod) {
        None if is_terminal(pod) || pod.metadata.deletion_timestamp.is_some() => {
            Decision::now([Effect::DeleteEnvironment])
        }
        None => provisioning::decide(observed, pod, environment, seed, now),
        Some(node) if node != environment.spec.node => Decision::now([Effect::DeleteEnvironment]),
        Some(_) if status.phase.is_terminal() => release::ended(pod, environment, now),
        Some(_) => release::terminating(pod, now),
    }
}

/// Whether an environment must stay after all: its end was decided from a pod as it was `seen`, and
/// this is the pod of that name as it is now. Nothing is destroyed because a watch is behind.
pub fn stays(environment: &Environment, seen: Option<&Pod>, current: Option<&Pod>) -> bool {
    let uid = &environment.spec.pod.uid;
    let same = current.filter(|pod| pod.metadata.uid.as_ref() == Some(uid));
    same.is_some_and(|pod| {
        let runs_there = node_of(pod) == Some(&environment.spec.node)
            && pod.metadata.deletion_timestamp.is_none();
        seen.is_none() || runs_there
    })
}

/// Whether a pod may be bound to an environment's node: this is the environment of that name as it is now. Its deletion
/// may have been asked for without an answer, or by who acted before.
pub fn is_there(environment: &Environment, current: Option<&Environment>) -> bool {
    let same = current.filter(|current| current.metadata.uid == environment.metadata.uid);
    same.is_some_and(|current| current.metadata.deletion_timestamp.is_none())
}

/// Whether a node is the one that the environment made, and Ready.
fn is_ready_for(node: &Node, environment: &Environment) -> bool {
    let ours =
        environment_of(node).is_some_and(|name| environment.metadata.name.as_deref() == Some(name));
    let ready = node
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten())
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    ours && ready && node.metadata.deletion_timestamp.is_none()
}

/// The name of the environment that made a node, as the node says; none if it is not one of ours.
pub fn environment_of(node: &Node) -> Option<&str> {
    let provider = node.spec.as_ref()?.provider_id.as_deref()?;
    let name = provider.strip_prefix("monopod:///")?.rsplit('/').next();
    name.filter(|name| names::is_environment(name))
}

/// The node that a pod is bound to.
pub fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec
        .as_ref()?
        .node_name
        .as_deref()
        .filter(|name| !name.is_empty())
}

/// Whether a pod is over.
pub fn is_terminal(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Whether a pod is Monopod's to schedule at all.
pub fn is_ours(pod: &Pod) -> bool {
    pod.spec.as_ref().and_then(|s| s.scheduler_name.as_deref()) == Some(labels::SCHEDULER_NAME)
}
