//! What the API server holds, as far as control needs it.

use crate::identity::{self, Unmarked};
use crate::reconcile::Key;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use monopod_api::environment::Environment;
use monopod_api::host::Host;
use monopod_api::names;
use monopod_api::network::{
    InterfacePhase, NetworkInterface, NetworkStatus, SecurityGroup, Subnet, Vpc,
};
use monopod_api::profile::{FargateProfile, PodExecutionRole, PodExecutionRoleSpec, ProfileState};
use monopod_core::admission::Profiles;
use monopod_core::lifecycle::{Attempts, Effect, Network, Subnet as SubnetView};
use monopod_core::placement::{Candidate, Heartbeat};
use std::collections::{BTreeMap, BTreeSet};
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
    pub(crate) interfaces: BTreeMap<String, NetworkInterface>,
    pub(crate) nodes: BTreeMap<String, Node>,
    pub(crate) profiles: BTreeMap<String, FargateProfile>,
    /// What [`Index::active_profiles`] gives: made when profiles change, not for each pod.
    active: Arc<Profiles>,
    pub(crate) roles: BTreeMap<String, PodExecutionRole>,
    pub(crate) subnets: BTreeMap<String, Subnet>,
    pub(crate) groups: BTreeMap<String, SecurityGroup>,
    pub(crate) vpcs: BTreeMap<String, Vpc>,
    pub(crate) hosts: BTreeMap<String, Host>,
    /// The hosts' leases, by the hosts' names.
    pub(crate) heartbeats: BTreeMap<String, Heartbeat>,
    pub(crate) attempts: BTreeMap<String, Attempts>,
}

/// What a new environment is chosen from, taken from the index at one moment.
pub(crate) struct Snapshot {
    pub(crate) profiles: Arc<Profiles>,
    pub(crate) roles: BTreeMap<String, PodExecutionRoleSpec>,
    pub(crate) network: Network,
    pub(crate) candidates: Vec<Candidate>,
}

impl Index {
    /// Profiles that select pods now; those being deleted select no more.
    pub(crate) fn active_profiles(&self) -> Arc<Profiles> {
        Arc::clone(&self.active)
    }

    /// To be called after each change of the profiles.
    pub(crate) fn profiles_changed(&mut self) {
        let active = self
            .profiles
            .iter()
            .filter(|(_, profile)| profile.metadata.deletion_timestamp.is_none())
            .map(|(name, profile)| (name.clone(), profile.spec.clone()));
        self.active = Arc::new(active.collect());
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
            .collect()
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
        for (name, profile) in &self.profiles {
            let active = profile
                .status
                .as_ref()
                .is_some_and(|s| s.status == ProfileState::Active);
            all.extend((!active).then(|| Unmarked::Profile(name.clone())));
        }
        all
    }

    pub(crate) fn snapshot(&self, now: Timestamp) -> Snapshot {
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
            .collect();
        Snapshot {
            profiles: self.active_profiles(),
            roles: self
                .roles
                .iter()
                .map(|(name, role)| (name.clone(), role.spec.clone()))
                .collect(),
            network: Network {
                subnets,
                groups,
                taken,
            },
            candidates: self
                .hosts
                .values()
                .map(|host| self.candidate(host, now))
                .collect(),
        }
    }

    fn candidate(&self, host: &Host, now: Timestamp) -> Candidate {
        let name = host.name_any();
        let holds_memory = |environment: &&Environment| {
            let terminal = environment
                .status
                .as_ref()
                .is_some_and(|s| s.phase.is_terminal());
            environment.spec.host == name && !terminal
        };
        let used = self
            .environments
            .values()
            .filter(holds_memory)
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

    /// Gives up reservations that did not become objects: those that have no uid.
    pub(crate) fn forget_assumed(&mut self, environment: &str) {
        if self
            .environments
            .get(environment)
            .is_some_and(|e| e.metadata.uid.is_none())
        {
            self.environments.remove(environment);
        }
        self.interfaces.retain(|_, interface| {
            interface.metadata.uid.is_some() || interface.spec.environment.name != environment
        });
    }
}
