//! What the API server holds, as far as control needs it.

use crate::identity::{self, Unmarked};
use crate::reconcile::Key;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use monopod_api::environment::Environment;
use monopod_api::host::Host;
use monopod_api::names;
use monopod_api::network::{
    InterfacePhase, NetworkInterface, NetworkStatus, SecurityGroup, Subnet, Vpc,
};
use monopod_api::profile::{FargateProfile, PodExecutionRole, PodExecutionRoleSpec};
use monopod_core::admission::Profiles;
use monopod_core::contract::{self, Claims};
use monopod_core::irsa::AccountRole;
use monopod_core::lifecycle::{self, Attempts, Effect, Network, Subnet as SubnetView};
use monopod_core::placement::{self, Candidate, Heartbeat, Placed};
use monopod_core::profiles::selecting;
use monopod_core::selector::Labels;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The index, shared. Sections that hold it are short and never wait.
#[derive(Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<Index>>);

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Index> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Objects by name; pods by uid.
#[derive(Default)]
pub(crate) struct Index {
    pub(crate) pods: BTreeMap<String, Pod>,
    pub(crate) environments: BTreeMap<String, Environment>,
    /// Uids of those of which control has removed all, and whose end it waits for.
    pub(crate) cleared: BTreeSet<String>,
    pub(crate) interfaces: BTreeMap<String, NetworkInterface>,
    /// Until when certificates may be good that nodes at these addresses had.
    pub(crate) recent: BTreeMap<Ipv4Addr, Timestamp>,
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) profiles: BTreeMap<String, FargateProfile>,
    /// How many profiles there may be; none is no limit.
    pub(crate) max_profiles: Option<usize>,
    /// Those that select pods: made when profiles change, not for each pod.
    active: Arc<Profiles>,
    /// Whether all profiles were read once.
    are_profiles_known: bool,
    pub(crate) roles: BTreeMap<String, PodExecutionRole>,
    pub(crate) subnets: BTreeMap<String, Subnet>,
    pub(crate) groups: BTreeMap<String, SecurityGroup>,
    pub(crate) vpcs: BTreeMap<String, Vpc>,
    pub(crate) hosts: BTreeMap<String, Host>,
    /// The hosts' leases, by the hosts' names.
    pub(crate) heartbeats: BTreeMap<String, Heartbeat>,
    /// All service accounts by namespace and name, with the IAM role of those that name one.
    pub(crate) accounts: BTreeMap<(String, String), Option<AccountRole>>,
    /// Labels of all namespaces.
    pub(crate) namespaces: BTreeMap<String, Labels>,
    pub(crate) volumes: BTreeMap<String, PersistentVolume>,
    /// By namespace and name.
    pub(crate) volume_claims: BTreeMap<(String, String), PersistentVolumeClaim>,
    /// What the claims stand for: made when they or the volumes change.
    claims: Arc<Claims>,
    pub(crate) attempts: BTreeMap<String, Attempts>,
}

/// What a new environment is chosen from, taken from the index at one moment.
pub(crate) struct Snapshot<'a> {
    pub(crate) profiles: Arc<Profiles>,
    pub(crate) roles: BTreeMap<String, PodExecutionRoleSpec>,
    pub(crate) network: Network,
    pub(crate) claims: Arc<Claims>,
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) placed: Vec<Placed<'a>>,
}

impl Index {
    /// Profiles that select pods now; none while not all were read.
    pub(crate) fn active_profiles(&self) -> Option<Arc<Profiles>> {
        self.are_profiles_known.then(|| Arc::clone(&self.active))
    }

    /// Whether a profile is being drained.
    pub(crate) fn is_draining(&self) -> bool {
        let mut profiles = self.profiles.values();
        profiles.any(|profile| profile.metadata.deletion_timestamp.is_some())
    }

    /// To be called once all profiles were read.
    pub(crate) fn profiles_are_known(&mut self) {
        self.are_profiles_known = true;
    }

    pub(crate) fn profile_limit(&self) -> usize {
        self.max_profiles.unwrap_or(usize::MAX)
    }

    /// To be called after each change of the profiles.
    pub(crate) fn profiles_changed(&mut self) {
        self.active = Arc::new(selecting(&self.profiles, self.profile_limit()));
    }

    /// To be called after each change of claims or volumes.
    pub(crate) fn claims_changed(&mut self) {
        let read = |(key, claim): (&(String, String), _)| {
            (key.clone(), contract::claim(claim, &self.volumes))
        };
        self.claims = Arc::new(self.volume_claims.iter().map(read).collect());
    }

    /// The interface made for a pod that is not cooling, if there is one.
    pub(crate) fn interface_of(&self, environment: &str) -> Option<&NetworkInterface> {
        self.interfaces.values().find(|interface| {
            interface.spec.environment.name == environment
                && interface
                    .status
                    .as_ref()
                    .is_none_or(|s| s.phase == InterfacePhase::InUse)
        })
    }

    /// The environment that has this node.
    pub(crate) fn environment_of_node(&self, node: &str) -> Option<&Environment> {
        self.environments
            .values()
            .find(|environment| environment.spec.node == node)
    }

    /// Uids of pods that have no environment and no node.
    pub(crate) fn waiting(&self) -> Vec<String> {
        self.pods
            .iter()
            .filter(|(uid, pod)| {
                let bound = pod
                    .spec
                    .as_ref()
                    .is_some_and(|spec| spec.node_name.is_some());
                !bound && !self.environments.contains_key(&names::environment(uid))
            })
            .map(|(uid, _)| uid.clone())
            .collect()
    }

    /// All that there may be something to do about.
    pub(crate) fn everything(&self) -> Vec<Key> {
        let environments = self.environments.values();
        let uids = environments
            .map(|e| &e.spec.pod.uid)
            .chain(self.pods.keys());
        let uids: BTreeSet<&String> = uids.collect();
        let credentials = self.environments.keys().cloned().map(Key::Credentials);
        let unmarked = self.unmarked().into_iter().map(Key::Unmarked);
        uids.into_iter()
            .cloned()
            .map(Key::Pod)
            .chain(self.interfaces.keys().cloned().map(Key::Interface))
            .chain(credentials)
            .chain(unmarked)
            .chain(self.remains())
            .chain([Key::Profiles])
            .collect()
    }

    /// Nodes whose environment is not there.
    fn remains(&self) -> impl Iterator<Item = Key> {
        self.nodes.values().filter_map(|node| {
            let environment = lifecycle::environment_of(node)?;
            (!self.has_node(environment, &node.name_any())).then(|| Key::Remains {
                environment: environment.to_owned(),
                node: node.name_any(),
            })
        })
    }

    /// Whether this environment is there and has this node: an earlier one of its name may have had another.
    pub(crate) fn has_node(&self, environment: &str, node: &str) -> bool {
        let environment = self.environments.get(environment);
        environment.is_some_and(|environment| environment.spec.node == node)
    }

    /// Objects without their id or state.
    fn unmarked(&self) -> Vec<Unmarked> {
        let mut all = Vec::new();
        let lacks = |status: &Option<NetworkStatus>| status.as_ref().is_none_or(|s| s.id.is_none());
        for (name, vpc) in &self.vpcs {
            all.extend(lacks(&vpc.status).then(|| Unmarked::Vpc(name.clone())));
        }
        for (name, subnet) in &self.subnets {
            all.extend(lacks(&subnet.status).then(|| Unmarked::Subnet(name.clone())));
        }
        for (name, group) in &self.groups {
            all.extend(lacks(&group.status).then(|| Unmarked::Group(name.clone())));
        }
        for (name, interface) in &self.interfaces {
            let marked = interface.status.as_ref().is_some_and(|s| s.id.is_some());
            all.extend((!marked).then(|| Unmarked::Interface(name.clone())));
        }
        all
    }

    pub(crate) fn snapshot(&self, now: Timestamp) -> Snapshot<'_> {
        let mut groups = BTreeMap::new();
        for (name, group) in &self.groups {
            groups.insert(name.clone(), name.clone());
            groups.insert(identity::id("sg", group), name.clone());
        }
        let subnets = self
            .subnets
            .iter()
            .filter_map(|(name, subnet)| {
                let view = SubnetView {
                    id: identity::id("subnet", subnet),
                    cidr: subnet.spec.cidr.parse().ok()?,
                    zone: subnet.spec.zone.clone(),
                };
                Some((name.clone(), view))
            })
            .collect();
        let taken = self
            .interfaces
            .values()
            .map(|interface| &interface.spec.address)
            // Also if somebody took the finalizer off an interface: its VM is still there.
            .chain(self.environments.values().map(|e| &e.spec.address))
            .filter_map(|address| address.parse().ok())
            // A node of this name would be given the secrets of the pod that is bound to it, even if it is over.
            .chain(self.pods.values().filter_map(address_bound))
            .collect();
        let recent = self.recent.iter().filter(|(_, until)| now < **until);
        let recent = recent.map(|(address, _)| *address).collect();
        Snapshot {
            profiles: Arc::clone(&self.active),
            roles: self
                .roles
                .iter()
                .map(|(name, role)| (name.clone(), role.spec.clone()))
                .collect(),
            network: Network {
                subnets,
                groups,
                taken,
                recent,
            },
            claims: Arc::clone(&self.claims),
            candidates: self
                .hosts
                .values()
                .map(|host| self.candidate(host, now))
                .collect(),
            placed: self.placed().collect(),
        }
    }

    /// Pods that have an environment and are not over, reserved ones as well.
    fn placed(&self) -> impl Iterator<Item = Placed<'_>> {
        self.environments.values().filter_map(|environment| {
            let pod = self.pods.get(&environment.spec.pod.uid)?;
            (has_vm(environment) && !lifecycle::is_terminal(pod)).then_some(Placed {
                pod,
                host: &environment.spec.host,
                node: &environment.spec.node,
            })
        })
    }

    /// Uids of waiting pods of which others may decide where they can be.
    pub(crate) fn constrained(&self) -> Vec<String> {
        let mut waiting = self.waiting();
        waiting.retain(|uid| self.pods.get(uid).is_some_and(placement::is_constrained));
        waiting
    }

    fn candidate(&self, host: &Host, now: Timestamp) -> Candidate {
        let name = host.name_any();
        let used = self
            .environments
            .values()
            .filter(|environment| environment.spec.host == name && has_vm(environment))
            .map(|e| e.spec.size)
            .collect();
        Candidate {
            spec: host.spec.clone(),
            status: host.status.clone().unwrap_or_default(),
            answers: self.heartbeats.get(&name).is_some_and(|h| h.answers(now)),
            used,
            name,
        }
    }

    /// Reserves what is about to be created, so that no other pod is given the same.
    pub(crate) fn assume(&mut self, effects: &[Effect]) {
        for effect in effects {
            if let Effect::CreateInterface(new) = effect {
                self.interfaces.insert(new.name_any(), (**new).clone());
            }
            if let Effect::CreateEnvironment(new) = effect {
                self.environments.insert(new.name_any(), (**new).clone());
            }
        }
    }

    /// Gives up reservations that did not become objects: those that have no uid. Returns the environment
    /// if it was one.
    pub(crate) fn forget_assumed(&mut self, environment: &str) -> Option<Environment> {
        self.interfaces.retain(|_, interface| {
            interface.metadata.uid.is_some() || interface.spec.environment.name != environment
        });
        let found = self.environments.get(environment)?;
        if found.metadata.uid.is_some() {
            return None;
        }
        self.environments.remove(environment)
    }
}

/// The address of the node that a pod is bound to.
fn address_bound(pod: &Pod) -> Option<Ipv4Addr> {
    lifecycle::node_of(pod).and_then(names::node_address)
}

/// Whether an environment holds memory, as its VM may be there.
fn has_vm(environment: &Environment) -> bool {
    let status = environment.status.as_ref();
    status.is_none_or(|status| !status.phase.is_terminal())
}
