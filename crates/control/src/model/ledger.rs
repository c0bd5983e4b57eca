//! What happened to each pod by whose doing, and which of the invariants that broke.

use super::api::Api;
use super::guest::{State, Vm, is_ready};
use super::machine::Machine;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use monopod_api::environment::Environment;
use monopod_core::lifecycle;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Pods that a fault or a person aimed at: their VM was killed, their objects deleted, their host lost.
    aimed_at: BTreeSet<String>,
    /// Pods that a person or the node controller deleted.
    deleted: BTreeSet<String>,
    /// Pods as they were seen after the step before: name and whether they were over.
    pods: BTreeMap<String, (String, bool)>,
    /// Environments that a person let go while their VMs may live, and their nodes: what is promised for those no more.
    let_go: BTreeSet<(String, String)>,
    bound: BTreeSet<String>,
    /// Uids of nodes that were Ready once.
    were_ready: BTreeSet<String>,
    /// The first broken invariant.
    pub(super) broken: Option<String>,
    pub(super) ran: BTreeSet<String>,
}

impl Ledger {
    pub(super) fn aim_at(&mut self, pod_uid: &str) {
        self.aimed_at.insert(pod_uid.to_owned());
    }

    pub(super) fn delete(&mut self, pod_uid: &str) {
        self.deleted.insert(pod_uid.to_owned());
    }

    pub(super) fn let_go(&mut self, environment: &str, node: &str) {
        self.let_go
            .insert((environment.to_owned(), node.to_owned()));
    }

    /// Whether an environment of this name was let go.
    pub(super) fn was_let_go(&self, environment: &str) -> bool {
        self.let_go.iter().any(|(name, _)| name == environment)
    }

    fn is_let_go(&self, vm: &Vm) -> bool {
        let of_vm = (vm.environment.clone(), vm.node.clone());
        self.let_go.contains(&of_vm)
    }

    pub(super) fn breaks(&mut self, invariant: u8, what: &str) {
        self.broken
            .get_or_insert_with(|| format!("invariant {invariant}: {what}"));
    }

    pub(super) fn finished(&mut self, pod_uid: &str) {
        self.aim_at(pod_uid);
    }

    /// A guest runs a pod.
    pub(super) fn runs(&mut self, pod: &Pod, vm: &Vm) {
        if pod.metadata.uid.as_ref() != Some(&vm.pod.uid) {
            self.breaks(4, &format!("{} runs {}", vm.environment, pod.name_any()));
        }
        self.ran.insert(vm.pod.uid.clone());
    }

    /// A host ended a living VM.
    pub(super) fn ended_by_host(&mut self, api: &Api, vm: &Vm) {
        let pod = api
            .list::<Pod>()
            .find(|p| p.metadata.uid.as_ref() == Some(&vm.pod.uid));
        let Some(pod) = pod else {
            return;
        };
        let bound = pod.spec.as_ref().is_some_and(|s| s.node_name.is_some());
        let wanted = pod.metadata.deletion_timestamp.is_none() && !is_over(pod);
        if bound && wanted && !self.aimed_at.contains(&vm.pod.uid) {
            self.breaks(
                6,
                &format!("the living VM of the bound pod {} was ended", vm.pod.uid),
            );
        }
    }

    /// To be called after every step.
    pub(super) fn check(&mut self, api: &Api, machines: &[Machine]) {
        let mut uids = BTreeSet::new();
        let mut addresses = BTreeMap::new();
        for vm in machines
            .iter()
            .flat_map(|m| &m.vms)
            .filter(|vm| vm.is_alive())
        {
            if self.is_let_go(vm) {
                // Who has its address meanwhile is at its mercy.
                let bound_there = |pod: &&Pod| {
                    let spec = pod.spec.as_ref();
                    spec.is_some_and(|s| s.node_name.as_ref() == Some(&vm.node))
                };
                let there = api.list::<Pod>().filter(bound_there);
                self.aimed_at.extend(there.filter_map(ResourceExt::uid));
                continue;
            }
            if !uids.insert(&vm.pod.uid) {
                self.breaks(1, &format!("the pod {} has two living VMs", vm.pod.uid));
            }
            if let Some(other) = addresses.insert(&vm.address, &vm.environment) {
                let text = format!("{} and {} both have {}", other, vm.environment, vm.address);
                self.breaks(2, &text);
            }
            // The API server gives a node what the pods bound to it name, be they over.
            let has_certificate = matches!(vm.state, State::Registered | State::Running);
            let another = |pod: &&Pod| {
                let named = lifecycle::node_of(pod) == Some(&vm.node);
                named && pod.metadata.uid.as_ref() != Some(&vm.pod.uid)
            };
            if has_certificate && let Some(pod) = api.list::<Pod>().find(another) {
                let text = format!("{} reads what {} names", vm.environment, pod.name_any());
                self.breaks(7, &text);
            }
        }
        self.deleted.extend(api.drained.pods.iter().cloned());
        if let Some(uid) = &api.drained.too_early {
            self.breaks(
                8,
                &format!("the budget of the pod {uid} was broken before the announced deadline"),
            );
        }
        self.check_bindings(api);
        self.check_pods(api, machines);
    }

    fn check_bindings(&mut self, api: &Api) {
        let ready = api.list::<Node>().filter(|node| is_ready(node));
        self.were_ready.extend(ready.filter_map(ResourceExt::uid));
        for pod in api.list::<Pod>() {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            let Some(node) = pod.spec.as_ref().and_then(|s| s.node_name.as_ref()) else {
                continue;
            };
            if !self.bound.insert(uid.clone()) {
                continue;
            }
            let environment = api.list::<Environment>().find(|e| e.spec.pod.uid == uid);
            let made_for_it = environment.is_some_and(|e| e.spec.node == *node);
            let object = api.get::<Node>(node);
            let provider = object.and_then(|n| n.spec.as_ref()?.provider_id.as_ref());
            let its_own = provider.is_none_or(|p| p.ends_with(&format!("env-{uid}")));
            // A node may vanish or fall silent while the binding is on its way.
            let never_was = object.is_none() && !self.aimed_at.contains(&uid);
            let was_ready = |n: &Node| n.uid().is_some_and(|uid| self.were_ready.contains(&uid));
            let never_ready = object.is_some_and(|n| !was_ready(n));
            if !made_for_it || !its_own || never_was || never_ready {
                self.breaks(
                    3,
                    &format!(
                        "the pod {uid} was bound to {node}, which is not the Ready node made for it"
                    ),
                );
            }
        }
    }

    fn check_pods(&mut self, api: &Api, machines: &[Machine]) {
        let mut now = BTreeMap::new();
        for pod in api.list::<Pod>() {
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            now.insert(uid, (pod.name_any(), is_over(pod)));
        }
        for (uid, (name, was_over)) in std::mem::replace(&mut self.pods, now.clone()) {
            if was_over || self.aimed_at.contains(&uid) {
                continue;
            }
            let over = now.get(&uid).is_none_or(|(_, over)| *over);
            if over && !self.deleted.contains(&uid) {
                self.breaks(6, &format!("the pod {uid} ({name}) ended by nobody's will"));
            }
            let runs = |vm: &Vm| vm.pod.uid == uid && matches!(vm.state, State::Running);
            if !now.contains_key(&uid) && machines.iter().flat_map(|m| &m.vms).any(runs) {
                self.breaks(
                    5,
                    &format!("the pod {uid} ({name}) vanished before its VM ended"),
                );
            }
        }
    }
}

pub(super) fn is_over(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}
