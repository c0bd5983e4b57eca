//! Everything that there is, and what each action does to it.

use super::api::{Api, KINDS, Only};
use super::control::{Control, Late};
use super::drain;
use super::guest::{State, Vm, is_ready, set_ready};
use super::ledger::Ledger;
use super::machine::{Machine, Process};
use super::schedule::{Action, Fate, Sabotage};
use crate::index::Index;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;
use monopod_api::environment::Environment;
use monopod_api::host::{Host, HostSpec, HostStatus};
use monopod_api::network::{
    NetworkInterface, SecurityGroup, SecurityGroupSpec, Subnet, SubnetSpec,
};
use monopod_api::profile::{FargateProfile, PodExecutionRole, PodExecutionRoleSpec};
use monopod_api::{KUBERNETES_VERSION, labels, names};
use serde_json::json;
use std::collections::BTreeMap;

/// Names that pods have: few, so that they are used again.
const PODS: u8 = 5;
/// From this one on, no two are to be in one zone: more than there are zones.
const FIRST_ALONE: u8 = 2;
/// The one that is to be in a zone with one of these.
const FOLLOWS: u8 = 1;
/// What these are labelled with.
const ALONE: &str = "alone";
/// Of the machines, one each, and of the subnets.
const ZONES: [&str; 2] = ["local-1a", "local-1b"];
/// How long a node may be silent, and then not Ready before its pod is deleted (upstream's defaults).
const SILENT: SignedDuration = SignedDuration::from_secs(50);
const TOLERATED: SignedDuration = SignedDuration::from_secs(300);
/// How long a node must be gone before what is bound to it is collected (`quarantineTime` of upstream's podgc).
const QUARANTINE: SignedDuration = SignedDuration::from_secs(40);
/// How long a leader acts after its last renewal (`ops::election`).
const HOLD: SignedDuration = SignedDuration::from_secs(7);
const RENEW: SignedDuration = SignedDuration::from_secs(10);
pub(super) const GRACE_SECONDS: i64 = 30;

pub(super) struct World {
    pub(super) api: Api,
    pub(super) controls: Vec<Control>,
    pub(super) machines: Vec<Machine>,
    pub(super) late: Vec<Late>,
    pub(super) ledger: Ledger,
    pub(super) sabotage: Sabotage,
    /// Which control process holds the lease.
    leader: usize,
    not_ready: BTreeMap<String, Timestamp>,
    /// Nodes that pods are bound to and that are not there, and since when that is seen.
    missing: BTreeMap<String, Timestamp>,
}

impl World {
    pub(super) fn new(sabotage: Sabotage) -> Self {
        let start = "2026-01-01T00:00:00Z".parse().expect("a time");
        let mut api = Api::new(start);
        let machines: Vec<Machine> = ["host-1", "host-2"].map(Machine::new).into();
        for (machine, zone) in machines.iter().zip(ZONES) {
            api.create(host(&machine.name, zone))
                .expect("the first of its name");
            api.create(lease(&machine.name))
                .expect("the first of its name");
        }
        api.create(PodExecutionRole::new(
            "default",
            PodExecutionRoleSpec::default(),
        ))
        .expect("the first");
        api.create(drain::profile()).expect("the first");
        let controls = (0..2)
            .map(|_| Control::new(&api, index(&api), SignedDuration::ZERO, sabotage))
            .collect();
        Self {
            api,
            controls,
            machines,
            late: Vec::new(),
            ledger: Ledger::default(),
            sabotage,
            leader: 0,
            not_ready: BTreeMap::new(),
            missing: BTreeMap::new(),
        }
    }

    /// Does one thing, and checks the invariants.
    pub(super) fn act(&mut self, action: Action) {
        match action {
            Action::Time(milliseconds) => {
                self.pass(SignedDuration::from_millis(milliseconds.into()));
            }
            Action::Control(which, choice, fate) => {
                self.control(which.into(), choice.into(), fate);
            }
            Action::Machine(which, choice, fate) => {
                self.machine(which.into(), choice.into(), fate);
            }
            Action::Everybody(times) => {
                for _ in 0..times {
                    if !self.everybody() {
                        break;
                    }
                }
            }
            Action::Upstream => self.upstream(),
            Action::CreatePod(n) => {
                drop(self.api.create(pod(n % PODS)));
            }
            Action::DeletePod(n) => self.delete_pod(n),
            Action::ControlCrashes(n) => {
                let at = usize::from(n) % self.controls.len();
                let skew = self.controls[at].skew;
                self.controls[at] = Control::new(&self.api, index(&self.api), skew, self.sabotage);
            }
            Action::LeaderChanges => {
                self.controls[self.leader].stops();
                self.leader = 1 - self.leader;
                self.controls[self.leader].begins(&self.api);
            }
            Action::WatchBreaks(n, kind) => {
                let at = usize::from(n) % (self.controls.len() + self.machines.len());
                if let Some(control) = self.controls.get_mut(at) {
                    control.broken(KINDS[usize::from(kind) % KINDS.len()]);
                } else if let Some(process) = &mut self.machines[at % 2].process {
                    process.broken();
                }
            }
            Action::ApiAway(seconds) => {
                self.api.away_until = self.api.now + SignedDuration::from_secs(seconds.into());
            }
            Action::RoleGone => drop(
                self.api
                    .delete::<PodExecutionRole>("default", &Only::default()),
            ),
            Action::RoleBack => self.role_back(),
            Action::DeleteProfile => drain::begins(&mut self.api),
            Action::ProfileBack => drop(self.api.create(drain::profile())),
            Action::DeleteEnvironment(n) => self.delete_environment(n),
            Action::TakeFinalizersOff(n) => self.take_finalizers_off(n),
            Action::DeleteInterface(n) => self.delete_interface(n),
            Action::DeleteNode(n) => self.delete_node(n),
            Action::ClockSkew(n, seconds) => {
                let skew = SignedDuration::from_secs((seconds / 4).into());
                let at = usize::from(n) % (self.controls.len() + self.machines.len());
                match self.controls.get_mut(at) {
                    Some(control) => control.skew = skew,
                    None => self.machines[at % 2].skew = skew,
                }
            }
            Action::FinishPod(n) | Action::VmDies(n) | Action::VmStuck(n) => self.vm(action, n),
            Action::HostCrashes(n)
            | Action::MachineLost(n)
            | Action::MachineBack(n)
            | Action::CutOff(n)
            | Action::Healed(n)
            | Action::DeleteHost(n)
            | Action::DeleteLease(n)
            | Action::Cordon(n) => self.fault(action, usize::from(n) % self.machines.len()),
        }
        self.ledger.check(&self.api, &self.machines);
    }

    pub(super) fn pass(&mut self, time: SignedDuration) {
        let was_away = self.api.answers().is_err();
        self.api.now += time;
        if time > HOLD {
            // Whoever did nothing for so long has lost the lease, and begins again.
            self.controls[self.leader].stops();
            self.controls[self.leader].begins(&self.api);
        }
        if was_away {
            // The node controller saw no lease either, and begins to wait anew.
            let now = self.api.now;
            self.api
                .leases
                .values_mut()
                .for_each(|renewed| *renewed = now);
        } else {
            let reaching = self.machines.iter().filter(|m| !m.cut_off && !m.down);
            for vm in reaching.flat_map(|m| &m.vms).filter(|vm| vm.is_node()) {
                if let Some(renewed) = self.api.leases.get_mut(&vm.node) {
                    *renewed = self.api.now;
                }
            }
            self.renew_hosts();
        }
        let due = |late: &mut Late| late.due <= self.api.now;
        let arriving: Vec<Late> = self.late.extract_if(.., due).collect();
        for late in arriving {
            if self.api.answers().is_ok() {
                late.arrive(&mut self.api);
                self.ledger.check(&self.api, &self.machines);
            }
        }
    }

    /// Each host process that is there renews its lease in time, by its own clock, and then has its Host.
    fn renew_hosts(&mut self) {
        for (machine, zone) in self.machines.iter().zip(ZONES) {
            if machine.process.is_none() || machine.reaches(&self.api).is_err() {
                continue;
            }
            let now = self.api.now + machine.skew;
            let name = &machine.name;
            let renewed = self.api.get::<Lease>(name).and_then(|l| l.spec.clone());
            let renewed = renewed.and_then(|s| s.renew_time).map(|t| t.0);
            if renewed.is_some_and(|at| now.duration_since(at).abs() < RENEW) {
                continue;
            }
            // What is there is not made anew.
            drop(self.api.create(lease(name)));
            let renew = |lease: &mut Lease| {
                lease.spec.get_or_insert_default().renew_time = Some(MicroTime(now));
            };
            drop(self.api.update::<Lease>(name, &Only::default(), renew));
            drop(self.api.create(host(name, zone)));
        }
    }

    fn control(&mut self, which: usize, choice: usize, fate: Fate) -> bool {
        let at = which % self.controls.len();
        let mut options = self.controls[at].options(&self.api, at == self.leader);
        if options.is_empty() {
            return false;
        }
        let option = options.swap_remove(choice % options.len());
        self.controls[at].act(&mut self.api, option, fate, &mut self.late);
        true
    }

    fn machine(&mut self, which: usize, choice: usize, fate: Fate) -> bool {
        let at = which % self.machines.len();
        let mut options = self.machines[at].options(&self.api);
        if options.is_empty() {
            return false;
        }
        let option = options.swap_remove(choice % options.len());
        self.machines[at].act(&mut self.api, option, fate, self.sabotage, &mut self.ledger);
        true
    }

    /// What there is to do, for people.
    pub(super) fn busy(&self) -> String {
        let controls = self.controls.iter().enumerate();
        let controls =
            controls.map(|(at, c)| format!("{:?}", c.options(&self.api, at == self.leader)));
        let machines = self
            .machines
            .iter()
            .map(|m| format!("{:?}", m.options(&self.api)));
        controls.chain(machines).collect::<Vec<_>>().join("; ")
    }

    /// When somebody has something to do by itself.
    pub(super) fn wakes(&self) -> impl Iterator<Item = Timestamp> {
        let boots = self
            .machines
            .iter()
            .flat_map(|m| &m.vms)
            .filter_map(Vm::wakes);
        let late = self.late.iter().map(|late| late.due);
        self.controls[self.leader]
            .wakes()
            .into_iter()
            .chain(late)
            .chain(boots)
    }

    /// Each process does one thing. False if nobody had any to do.
    pub(super) fn everybody(&mut self) -> bool {
        let mut busy = false;
        for at in 0..self.controls.len() {
            if self.control(at, 0, Fate::Done) {
                self.ledger.check(&self.api, &self.machines);
                busy = true;
            }
        }
        for at in 0..self.machines.len() {
            if self.machine(at, 0, Fate::Done) {
                self.ledger.check(&self.api, &self.machines);
                busy = true;
            }
        }
        busy
    }

    /// The node controller, taint eviction, and the garbage collectors.
    pub(super) fn upstream(&mut self) {
        if self.api.answers().is_err() {
            return;
        }
        let now = self.api.now;
        let mut evicted = Vec::new();
        let nodes: Vec<Node> = self.api.list::<Node>().cloned().collect();
        self.not_ready
            .retain(|name, _| nodes.iter().any(|n| n.name_any() == *name && !is_ready(n)));
        for node in &nodes {
            let name = node.name_any();
            let renewed = self.api.leases.get(&name).copied();
            if renewed.is_some_and(|at| at + SILENT < now) && is_ready(node) {
                drop(
                    self.api
                        .update::<Node>(&name, &Only::default(), |n| set_ready(n, "Unknown")),
                );
            }
            if !is_ready(node)
                && now > *self.not_ready.entry(name.clone()).or_insert(now) + TOLERATED
            {
                evicted.push(name);
            }
        }
        // They belong to their nodes.
        let mut leases = std::mem::take(&mut self.api.leases);
        leases.retain(|node, _| self.api.get::<Node>(node).is_some());
        self.api.leases = leases;
        let exists = |name: &str| nodes.iter().any(|n| n.name_any() == name);
        self.missing.retain(|name, _| !exists(name));
        let pods: Vec<Pod> = self.api.list::<Pod>().cloned().collect();
        for pod in pods {
            let Some(node) = pod.spec.as_ref().and_then(|s| s.node_name.clone()) else {
                continue;
            };
            let uid = pod.metadata.uid.clone().unwrap_or_default();
            let only = Only::uid(Some(&uid));
            if !exists(&node) {
                if now >= *self.missing.entry(node).or_insert(now) + QUARANTINE {
                    drop(self.api.delete_pod(&pod.name_any(), &only, 0));
                }
            } else if evicted.contains(&node) && pod.metadata.deletion_timestamp.is_none() {
                self.ledger.delete(&uid);
                drop(self.api.delete_pod(&pod.name_any(), &only, GRACE_SECONDS));
            }
        }
    }

    fn delete_pod(&mut self, n: u8) {
        let pods: Vec<&Pod> = self.api.list::<Pod>().collect();
        let Some(pod) = pods.get(usize::from(n) % pods.len().max(1)) else {
            return;
        };
        let (name, uid) = (pod.name_any(), pod.uid());
        if self.api.answers().is_ok() {
            self.ledger.delete(uid.as_deref().unwrap_or_default());
            drop(
                self.api
                    .delete_pod(&name, &Only::uid(uid.as_ref()), GRACE_SECONDS),
            );
        }
    }

    fn delete_environment(&mut self, n: u8) {
        let all: Vec<&Environment> = self.api.list::<Environment>().collect();
        let Some(one) = all.get(usize::from(n) % all.len().max(1)) else {
            return;
        };
        let (name, pod) = (one.name_any(), one.spec.pod.uid.clone());
        self.ledger.aim_at(&pod);
        drop(self.api.delete::<Environment>(&name, &Only::default()));
    }

    fn take_finalizers_off(&mut self, n: u8) {
        let all: Vec<&Environment> = self.api.list::<Environment>().collect();
        let Some(one) = all.get(usize::from(n) % all.len().max(1)) else {
            return;
        };
        let (name, spec) = (one.name_any(), one.spec.clone());
        self.ledger.aim_at(&spec.pod.uid);
        self.ledger.let_go(&name, &spec.node);
        let none = |environment: &mut Environment| environment.metadata.finalizers = None;
        drop(self.api.update(&name, &Only::default(), none));
        drop(self.api.delete::<Environment>(&name, &Only::default()));
    }

    fn delete_interface(&mut self, n: u8) {
        let all: Vec<&NetworkInterface> = self.api.list::<NetworkInterface>().collect();
        let Some(one) = all.get(usize::from(n) % all.len().max(1)) else {
            return;
        };
        let name = one.name_any();
        let pod = one
            .spec
            .environment
            .name
            .strip_prefix("env-")
            .unwrap_or_default()
            .to_owned();
        self.ledger.aim_at(&pod);
        drop(self.api.delete::<NetworkInterface>(&name, &Only::default()));
    }

    fn delete_node(&mut self, n: u8) {
        let all: Vec<&Node> = self.api.list::<Node>().collect();
        let Some(one) = all.get(usize::from(n) % all.len().max(1)) else {
            return;
        };
        let name = one.name_any();
        let of = self.api.list::<Environment>().find(|e| e.spec.node == name);
        if let Some(environment) = of {
            self.ledger.aim_at(&environment.spec.pod.uid.clone());
        }
        drop(self.api.delete::<Node>(&name, &Only::default()));
    }

    fn vm(&mut self, action: Action, n: u8) {
        let mut all: Vec<_> = self.machines.iter_mut().flat_map(|m| &mut m.vms).collect();
        let count = all.len().max(1);
        let Some(vm) = all
            .get_mut(usize::from(n) % count)
            .filter(|vm| vm.is_alive())
        else {
            return;
        };
        match action {
            Action::FinishPod(_) => vm.finishing = true,
            Action::VmStuck(_) => vm.stuck = true,
            _dies => {
                vm.state = State::Exited(None);
                self.ledger.aim_at(&vm.pod.uid.clone());
            }
        }
    }

    fn fault(&mut self, action: Action, at: usize) {
        let machine = &mut self.machines[at];
        match action {
            Action::HostCrashes(_) => {
                machine.process = (!machine.down).then(Process::default);
            }
            Action::MachineLost(_) => {
                machine.down = true;
                machine.process = None;
                for vm in machine.vms.iter_mut().filter(|vm| vm.is_alive()) {
                    vm.state = State::Exited(None);
                    self.ledger.aim_at(&vm.pod.uid);
                }
            }
            Action::MachineBack(_) if machine.down => {
                machine.down = false;
                machine.process = Some(Process::default());
            }
            Action::CutOff(_) => machine.cut_off = true,
            Action::Healed(_) => machine.cut_off = false,
            Action::DeleteHost(_) => {
                drop(self.api.delete::<Host>(&machine.name, &Only::default()));
            }
            Action::DeleteLease(_) => {
                drop(self.api.delete::<Lease>(&machine.name, &Only::default()));
            }
            Action::Cordon(_) => {
                drop(
                    self.api
                        .update::<Host>(&machine.name, &Only::default(), |host| {
                            host.spec.unschedulable = !host.spec.unschedulable;
                        }),
                );
            }
            _back_already => {}
        }
    }

    pub(super) fn role_back(&mut self) {
        drop(self.api.create(PodExecutionRole::new(
            "default",
            PodExecutionRoleSpec::default(),
        )));
    }
}

fn host(name: &str, zone: &str) -> Host {
    let spec = HostSpec {
        region: "local-1".to_owned(),
        zone: zone.to_owned(),
        address: None,
        memory_mib: 3 * 612,
        cpu_millis: 4000,
        unschedulable: false,
    };
    let mut host = Host::new(name, spec);
    host.status = Some(HostStatus {
        ready: true,
        runtime_version: Some(KUBERNETES_VERSION.to_owned()),
        ..HostStatus::default()
    });
    host
}

fn lease(host: &str) -> Lease {
    serde_json::from_value(json!({
        "metadata": {"name": host, "namespace": names::host_namespace(host), "labels": {labels::HOST: host}},
    }))
    .expect("a lease")
}

/// What does not change while the model runs: one group, a small subnet in each zone. And the profile, as it is.
fn index(api: &Api) -> Index {
    let mut index = Index::default();
    let named = |name: &str| name.to_owned();
    for profile in api.list::<FargateProfile>() {
        index.profiles.insert(profile.name_any(), profile.clone());
    }
    index.profiles_changed();
    let group = SecurityGroup::new("default", SecurityGroupSpec::default());
    index.groups.insert(named("default"), group);
    for (n, zone) in ZONES.into_iter().enumerate() {
        let subnet = SubnetSpec {
            cidr: format!("10.0.{n}.0/29"),
            zone: zone.to_owned(),
        };
        index
            .subnets
            .insert(zone.to_owned(), Subnet::new(zone, subnet));
    }
    index
}

fn pod(n: u8) -> Pod {
    let mut pod = json!({
        "metadata": {"name": format!("pod-{n}"), "namespace": "default", "labels": {labels::FARGATE_PROFILE: drain::PROFILE}},
        "spec": {"schedulerName": labels::SCHEDULER_NAME, "containers": [{"name": "c", "image": "nginx"}]},
        "status": {"phase": "Pending"},
    });
    let near_alone = json!({"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": {"matchLabels": {ALONE: "yes"}}},
    ]});
    if n >= FIRST_ALONE {
        pod["metadata"]["labels"][ALONE] = json!("yes");
        pod["spec"]["affinity"] = json!({"podAntiAffinity": near_alone});
    } else if n == FOLLOWS {
        pod["spec"]["affinity"] = json!({"podAffinity": near_alone});
    }
    serde_json::from_value(pod).expect("a pod")
}

/// Whether a pod is to be in a zone with one of these.
pub(super) fn follows(pod: &Pod) -> bool {
    pod.name_any() == format!("pod-{FOLLOWS}")
}

/// Whether a pod is one of those of which no two are to be in one zone.
pub(super) fn is_alone(pod: &Pod) -> bool {
    pod.labels().contains_key(ALONE)
}
