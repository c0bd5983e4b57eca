//! A simulated VM and the guest in it: boots, registers its node, runs its one pod, and ends.

use super::api::{Api, Only};
use super::ledger::Ledger;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use monopod_api::environment::{Environment, EnvironmentPhase, PodReference};
use monopod_core::pod::admission;
use monopod_wire::{Ended, PodIdentity};
use serde_json::json;

/// Between the longest start of a VM from the pool and the shortest cold boot.
const BOOT: SignedDuration = SignedDuration::from_millis(1500);

#[derive(Debug, Clone)]
pub(super) struct Vm {
    pub(super) environment: String,
    pub(super) pod: PodReference,
    pub(super) node: String,
    pub(super) address: String,
    pub(super) state: State,
    /// Does nothing any more: never says READY, or is a silent node.
    pub(super) stuck: bool,
    /// Its pod's containers end by themselves.
    pub(super) finishing: bool,
}

#[derive(Debug, Clone)]
pub(super) enum State {
    Booting(Timestamp),
    Ready,
    Registered,
    Running,
    Exited(Option<Ended>),
}

impl Vm {
    pub(super) fn new(environment: &Environment, now: Timestamp) -> Self {
        let spec = &environment.spec;
        Self {
            environment: environment.metadata.name.clone().unwrap_or_default(),
            pod: spec.pod.clone(),
            node: spec.node.clone(),
            address: spec.address.clone(),
            state: State::Booting(now + BOOT),
            stuck: false,
            finishing: false,
        }
    }

    pub(super) fn is_alive(&self) -> bool {
        !matches!(self.state, State::Exited(_))
    }

    /// Whether it renews its node's lease.
    pub(super) fn is_node(&self) -> bool {
        !self.stuck && matches!(self.state, State::Registered | State::Running)
    }

    /// When it is ready.
    pub(super) fn wakes(&self) -> Option<Timestamp> {
        match self.state {
            State::Booting(until) if !self.stuck => Some(until),
            _ => None,
        }
    }

    pub(super) fn phase(&self) -> EnvironmentPhase {
        match self.state {
            State::Booting(_) | State::Exited(_) => EnvironmentPhase::Booting,
            State::Ready => EnvironmentPhase::Joining,
            State::Registered => EnvironmentPhase::Registered,
            State::Running => EnvironmentPhase::Running,
        }
    }

    /// `told`: an owner is there, from which it has its task.
    pub(super) fn has_work(&self, api: &Api, reaches: bool, told: bool) -> bool {
        match self.state {
            _ if self.stuck => false,
            State::Booting(until) => until <= api.now,
            State::Ready => reaches && told,
            State::Registered => reaches && (self.bound(api).is_some() || !self.is_ready(api)),
            State::Running => {
                let pod = self.own(api);
                let ends = pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some());
                reaches && (ends || self.finishing || !self.is_ready(api))
            }
            State::Exited(_) => false,
        }
    }

    fn own<'a>(&self, api: &'a Api) -> Option<&'a Pod> {
        api.get::<Pod>(&self.pod.name)
            .filter(|pod| pod.metadata.uid.as_ref() == Some(&self.pod.uid))
    }

    /// A pod that is bound to this node, whichever it is.
    fn bound<'a>(&self, api: &'a Api) -> Option<&'a Pod> {
        let here = |pod: &&Pod| {
            let spec = pod.spec.as_ref();
            spec.is_some_and(|s| s.node_name.as_ref() == Some(&self.node))
        };
        let ended = |pod: &&Pod| {
            let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
            matches!(phase, Some("Succeeded" | "Failed"))
        };
        api.list::<Pod>().filter(here).find(|pod| !ended(pod))
    }

    /// Whether its node object is there and Ready, or is gone for good: it is made once.
    fn is_ready(&self, api: &Api) -> bool {
        api.get::<Node>(&self.node).is_none_or(is_ready)
    }

    pub(super) fn act(&mut self, api: &mut Api, reaches: bool, ledger: &mut Ledger) {
        match self.state {
            State::Booting(_) => self.state = State::Ready,
            State::Ready | State::Registered | State::Running if !reaches => {}
            State::Ready => self.register(api),
            State::Registered | State::Running if !self.is_ready(api) => {
                // Its lease and status again, as a kubelet whose node was found silent.
                api.leases.insert(self.node.clone(), api.now);
                drop(api.update::<Node>(&self.node, &Only::default(), |node| {
                    set_ready(node, "True");
                }));
            }
            State::Registered => self.admit(api, ledger),
            State::Running => self.end(api, ledger),
            State::Exited(_) => {}
        }
    }

    fn register(&mut self, api: &mut Api) {
        let provider = format!("monopod:///local-1a/{}", self.environment);
        let mut node: Node = serde_json::from_value(json!({
            "metadata": {"name": self.node}, "spec": {"providerID": provider},
        }))
        .expect("a node");
        set_ready(&mut node, "True");
        self.state = match api.create(node) {
            Ok(_) => State::Registered,
            Err(_exists) => {
                let found = api.get::<Node>(&self.node);
                let found = found.and_then(|n| n.spec.as_ref()?.provider_id.clone());
                if found.as_ref() == Some(&provider) {
                    State::Registered
                } else {
                    let message = "a node of this name exists".to_owned();
                    State::Exited(Some(Ended::Failed { message }))
                }
            }
        };
        if self.is_node() {
            api.leases.insert(self.node.clone(), api.now);
            api.requests.insert(self.environment.clone());
        }
    }

    fn admit(&mut self, api: &mut Api, ledger: &mut Ledger) {
        let Some(pod) = self.bound(api).cloned() else {
            return;
        };
        let own = PodIdentity {
            namespace: self.pod.namespace.clone(),
            name: self.pod.name.clone(),
            uid: self.pod.uid.clone(),
        };
        let name = pod.metadata.name.clone().unwrap_or_default();
        let only = Only::uid(pod.metadata.uid.as_ref());
        let (phase, admitted) = match admission::admit(&own, &pod) {
            Ok(()) => ("Running", true),
            Err(_refusal) => ("Failed", false),
        };
        let written = api.update::<Pod>(&name, &only, |pod| {
            pod.status.get_or_insert_default().phase = Some(phase.to_owned());
        });
        if written.is_ok() && admitted {
            self.state = State::Running;
            ledger.runs(&pod, self);
        }
    }

    fn end(&mut self, api: &mut Api, ledger: &mut Ledger) {
        let only = Only::uid(Some(&self.pod.uid));
        match self
            .own(api)
            .map(|pod| pod.metadata.deletion_timestamp.is_some())
        {
            None => self.state = State::Exited(Some(Ended::PodFinished)),
            Some(true) => {
                if api.delete_pod(&self.pod.name, &only, 0).is_ok() {
                    self.state = State::Exited(Some(Ended::PodFinished));
                }
            }
            Some(false) if self.finishing => {
                let succeeded = api.update::<Pod>(&self.pod.name, &only, |pod| {
                    pod.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
                });
                if succeeded.is_ok() {
                    ledger.finished(&self.pod.uid);
                    self.state = State::Exited(Some(Ended::PodFinished));
                }
            }
            Some(false) => {}
        }
    }
}

pub(super) fn is_ready(node: &Node) -> bool {
    let conditions = node
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|c| c.type_ == "Ready" && c.status == "True")
}

pub(super) fn set_ready(node: &mut Node, value: &str) {
    node.status =
        serde_json::from_value(json!({"conditions": [{"type": "Ready", "status": value}]}))
            .expect("a status");
}
