use super::*;
use crate::admission::Profiles;
use crate::testing::{self, ADDRESS};
use monopod_api::environment::EnvironmentPhase;
use monopod_api::host::{HostSpec, HostStatus};
use monopod_api::network::{InterfacePhase, NetworkInterfaceStatus};
use monopod_api::profile::{FargateProfileSpec, Selector};
use proptest::prelude::*;
use serde_json::json;

mod limits;
mod placing;

/// Everything that there is, changed by the effects as the executor and the other parts would.
#[derive(Clone)]
struct Cluster {
    pod: Option<Pod>,
    environment: Option<Environment>,
    interface: Option<NetworkInterface>,
    node: Option<Node>,
    attempts: Option<Attempts>,
    /// Environments so far.
    made: u32,
    profiles: Profiles,
    roles: BTreeMap<String, PodExecutionRoleSpec>,
    network: Network,
    claims: Claims,
    candidates: Vec<Candidate>,
    now: Timestamp,
    events: Vec<String>,
}

impl Cluster {
    fn new() -> Self {
        let selector = Selector {
            namespace: "default".to_owned(),
            ..Default::default()
        };
        let profile = FargateProfileSpec {
            selectors: vec![selector],
            pod_execution_role: "default".to_owned(),
            ..Default::default()
        };
        let subnet = Subnet {
            id: "subnet-1".to_owned(),
            cidr: "10.0.1.0/24".parse().expect("valid"),
            zone: "local-1a".to_owned(),
        };
        let host = Candidate {
            name: "host-1".to_owned(),
            spec: HostSpec {
                region: "local-1".to_owned(),
                zone: "local-1a".to_owned(),
                address: None,
                memory_mib: 4096,
                cpu_millis: 4000,
                unschedulable: false,
            },
            status: HostStatus {
                ready: true,
                runtime_version: Some("v1.37.2".to_owned()),
                ..Default::default()
            },
            answers: true,
            used: Vec::new(),
        };
        Self {
            pod: Some(testing::pod("uid-1")),
            environment: None,
            interface: None,
            node: None,
            attempts: None,
            made: 0,
            profiles: Profiles::from([("fp-default".to_owned(), profile)]),
            roles: BTreeMap::from([("default".to_owned(), PodExecutionRoleSpec::default())]),
            network: Network {
                subnets: [("private-a".to_owned(), subnet)].into(),
                groups: [("default".to_owned(), "default".to_owned())].into(),
                ..Network::default()
            },
            claims: Claims::new(),
            candidates: vec![host],
            now: "2026-01-01T00:00:00Z".parse().expect("a time"),
            events: Vec::new(),
        }
    }

    fn decide(&self) -> Decision {
        let observed = Observed {
            pod: self.pod.as_ref(),
            environment: self.environment.as_ref(),
            interface: self.interface.as_ref(),
            node: self.node.as_ref(),
            attempts: self.attempts.as_ref(),
        };
        let world = World {
            profiles: &self.profiles,
            roles: &self.roles,
            network: &self.network,
            claims: &self.claims,
            candidates: &self.candidates,
            placed: &[],
            namespaces: &BTreeMap::new(),
            kubernetes_version: "v1.37.2",
        };
        decide(&observed, &world, 19, self.now)
    }

    /// Carries out the first `count` effects, as if control was killed after them.
    fn carry_out(&mut self, decision: Decision, count: usize) {
        for effect in decision.effects.into_iter().take(count) {
            self.apply(effect);
        }
    }

    fn step(&mut self) -> Decision {
        let decision = self.decide();
        self.carry_out(decision.clone(), usize::MAX);
        decision
    }

    fn apply(&mut self, effect: Effect) {
        let stamp =
            |now: Timestamp| serde_json::from_value(json!(now.to_string())).expect("a time");
        match effect {
            Effect::CreateInterface(mut new) => {
                let cooling = |i: &NetworkInterface| {
                    i.status
                        .as_ref()
                        .is_some_and(|s| s.phase == InterfacePhase::Cooling)
                };
                assert!(
                    self.interface.as_ref().is_none_or(cooling),
                    "a second interface"
                );
                new.metadata.creation_timestamp = stamp(self.now);
                self.network
                    .taken
                    .insert(new.spec.address.parse().expect("an address"));
                self.interface = Some(*new);
            }
            Effect::CreateEnvironment(mut new) => {
                assert!(self.environment.is_none(), "a second environment");
                assert!(
                    self.interface.is_some(),
                    "an environment before its interface"
                );
                new.metadata.creation_timestamp = stamp(self.now);
                self.made += 1;
                new.metadata.uid = Some(format!("environment-{}", self.made));
                self.environment = Some(*new);
            }
            Effect::Nominate { node } => {
                if let Some(status) = self.pod.as_mut().and_then(|p| p.status.as_mut()) {
                    status.nominated_node_name = node;
                }
            }
            Effect::Annotate(pairs) => {
                let pod = self.pod.as_mut().expect("a pod to annotate");
                let all = pod.metadata.annotations.get_or_insert_default();
                all.extend(pairs.into_iter().map(|(k, v)| (k.to_owned(), v)));
            }
            Effect::Bind { node } => {
                assert!(self.node.is_some(), "bound before the node exists");
                let spec = self
                    .pod
                    .as_mut()
                    .and_then(|p| p.spec.as_mut())
                    .expect("a pod to bind");
                assert_eq!(spec.node_name, None, "bound twice");
                spec.node_name = Some(node);
            }
            Effect::Explain { cause, message } => {
                let reason = cause.reason();
                self.events.push(format!("{reason}: {message}"));
                if let Some(status) = self.pod.as_mut().and_then(|p| p.status.as_mut()) {
                    status.conditions = serde_json::from_value(json!([
                        {"type": "PodScheduled", "status": "False", "reason": reason, "message": message, "lastProbeTime": self.now.to_string()}
                    ]))
                    .expect("conditions");
                }
            }
            Effect::RememberFailure(attempts) => self.attempts = Some(attempts),
            Effect::DeleteEnvironment => {
                if let Some(environment) = &mut self.environment {
                    environment.metadata.deletion_timestamp = stamp(self.now);
                }
            }
            Effect::FailPod { message } => {
                self.events.push(message);
                if let Some(status) = self.pod.as_mut().and_then(|p| p.status.as_mut()) {
                    status.phase = Some("Failed".to_owned());
                }
            }
            Effect::DeletePod => self.pod = None,
            Effect::DeleteNode => self.node = None,
            Effect::CoolInterface => {
                if let Some(interface) = &mut self.interface {
                    interface.status = Some(NetworkInterfaceStatus {
                        phase: InterfacePhase::Cooling,
                        cooling_until: stamp(self.now + COOLING),
                        ..Default::default()
                    });
                }
            }
            Effect::ReleaseEnvironment => {
                let held = self.environment.take().expect("an environment to release");
                let finalizers = held.metadata.finalizers.unwrap_or_default();
                assert_eq!(
                    finalizers,
                    [labels::CONTROL_FINALIZER],
                    "released before its host let go"
                );
            }
        }
    }

    /// What the host does when it sees its environment.
    fn host(&mut self, phase: EnvironmentPhase) {
        let Some(environment) = self.environment.take() else {
            return;
        };
        if environment.metadata.deletion_timestamp.is_some() {
            let mut environment = environment;
            if let Some(finalizers) = &mut environment.metadata.finalizers {
                finalizers.retain(|f| f != labels::HOST_FINALIZER);
            }
            self.node = None;
            self.environment = Some(environment);
            return;
        }
        if phase == EnvironmentPhase::Registered {
            self.node = Some(testing::ready_node(&environment));
        }
        self.environment = Some(testing::in_phase(environment, phase, &self.now.to_string()));
    }
}

#[test]
fn a_pod_is_requested_nominated_bound_and_released() {
    let mut cluster = Cluster::new();
    cluster.step();
    let environment = cluster.environment.clone().expect("requested");
    assert_eq!(environment.spec.address, ADDRESS.to_string());
    assert_eq!(
        environment.spec.node,
        "fargate-ip-10-0-1-23.local-1.compute.internal"
    );
    let pod = cluster.pod.clone().expect("still there");
    assert_eq!(
        pod.status.expect("status").nominated_node_name,
        Some(environment.spec.node)
    );
    let annotations = pod.metadata.annotations.expect("annotated");
    assert_eq!(annotations[labels::CAPACITY_PROVISIONED], "0.25vCPU 0.5GB");

    cluster.host(EnvironmentPhase::Joining);
    assert_eq!(cluster.step().effects, []);
    cluster.host(EnvironmentPhase::Registered);
    cluster.step();
    assert!(cluster.pod.as_ref().and_then(node_of).is_some());

    cluster.pod = None;
    cluster.step();
    assert_eq!(cluster.step().effects, [], "waits for the host");
    cluster.host(EnvironmentPhase::Running);
    cluster.step();
    assert!(cluster.environment.is_none() && cluster.node.is_none());
    let interface = cluster.interface.expect("cooling");
    assert_eq!(
        decide_interface(&interface, false, cluster.now),
        InterfaceEffect::Keep(Some(cluster.now + COOLING))
    );
    assert_eq!(
        decide_interface(&interface, false, cluster.now + COOLING),
        InterfaceEffect::Delete
    );
}

#[test]
fn a_node_of_another_environment_is_not_bound_to() {
    let mut cluster = Cluster::new();
    cluster.step();
    cluster.host(EnvironmentPhase::Registered);
    let spec = cluster
        .node
        .as_mut()
        .and_then(|n| n.spec.as_mut())
        .expect("a node");
    spec.provider_id = Some("monopod:///local-1a/env-other".to_owned());
    assert_eq!(cluster.step().effects, []);
}

#[test]
fn a_failed_attempt_is_undone_explained_and_tried_again_later() {
    let mut cluster = Cluster::new();
    cluster.step();
    cluster.host(EnvironmentPhase::Failed);
    cluster.step();
    assert!(
        cluster.events[0].contains("Pod provisioning timed out (will retry) for pod: default/web")
    );
    cluster.host(EnvironmentPhase::Failed);
    cluster.step();
    assert!(cluster.environment.is_none());
    cluster.interface = None;
    let next = cluster.attempts.as_ref().map(|attempts| attempts.next);
    assert_eq!(cluster.decide().wake, next);
    assert!(next.is_some_and(|next| next <= cluster.now + SignedDuration::from_secs(2)));
    assert_eq!(cluster.decide().effects, []);
    cluster.now += SignedDuration::from_secs(2);
    cluster.step();
    assert!(cluster.environment.is_some());
}

#[test]
fn a_vm_that_dies_under_its_pod_fails_it_once() {
    let mut cluster = Cluster::new();
    cluster.step();
    cluster.host(EnvironmentPhase::Registered);
    cluster.step();
    cluster.host(EnvironmentPhase::Failed);
    cluster.now += FINAL_STATUS_MARGIN;
    cluster.step();
    assert_eq!(cluster.pod.as_ref().map(is_terminal), Some(true));
    assert_eq!(cluster.step().effects, []);
    assert!(
        cluster.environment.is_some(),
        "the address stays with the pod until it is deleted"
    );
}

#[test]
fn reasons_to_wait_are_said_once_and_end_by_themselves() {
    type Break = fn(&mut Cluster);
    let cases: &[(&str, Break, Break)] = &[
        (
            "Fargate capacity is unavailable at this time.",
            |c| c.candidates[0].status.ready = false,
            |c| c.candidates[0].status.ready = true,
        ),
        (
            "0/1 hosts are available: 1 guest runtime built for another Kubernetes version",
            |c| c.candidates[0].status.runtime_version = Some("v1.36.0".to_owned()),
            |c| c.candidates[0].status.runtime_version = Some("v1.37.9".to_owned()),
        ),
        (
            "Pod execution role is not found",
            |c| c.roles.clear(),
            |c| {
                c.roles
                    .insert("default".to_owned(), PodExecutionRoleSpec::default());
            },
        ),
        (
            "Failed to assume PodExecutionRole",
            |c| c.roles.get_mut("default").expect("there").profiles = vec!["fp-other".to_owned()],
            |c| c.roles.get_mut("default").expect("there").profiles = vec!["fp-*".to_owned()],
        ),
        (
            "no Fargate node in the zones of the profile's subnets meets spec.nodeSelector topology.kubernetes.io/zone=local-1b",
            |c| {
                let spec = c.pod.as_mut().and_then(|p| p.spec.as_mut()).expect("there");
                let zone = (
                    "topology.kubernetes.io/zone".to_owned(),
                    "local-1b".to_owned(),
                );
                spec.node_selector = Some([zone].into());
            },
            |c| {
                c.candidates[0].spec.zone = "local-1b".to_owned();
                c.network.subnets.get_mut("private-a").expect("there").zone = "local-1b".to_owned();
            },
        ),
        (
            "security group default does not exist",
            |c| c.network.groups.clear(),
            |c| {
                c.network
                    .groups
                    .insert("default".to_owned(), "default".to_owned());
            },
        ),
        (
            "no free IP address in subnet private-a (10.0.1.0/24)",
            |c| {
                c.network.taken = (0..=255).map(|n| Ipv4Addr::new(10, 0, 1, n)).collect();
            },
            |c| c.network.taken.clear(),
        ),
        (
            "none of its selectors matches the pod",
            |c| {
                c.profiles.get_mut("fp-default").expect("there").selectors[0].namespace =
                    "other".to_owned();
            },
            |c| {
                c.profiles.get_mut("fp-default").expect("there").selectors[0].namespace =
                    "def*".to_owned();
            },
        ),
    ];
    for (message, damage, repair) in cases {
        let mut cluster = Cluster::new();
        damage(&mut cluster);
        cluster.step();
        cluster.step();
        assert_eq!(cluster.events.len(), 1, "{message}: {:?}", cluster.events);
        assert!(
            cluster.events[0].contains(message),
            "{message}: {:?}",
            cluster.events
        );
        // Events do not stay for ever, and it waits still.
        cluster.now = cluster.step().wake.expect("a time to say it again");
        cluster.step();
        assert_eq!(cluster.events.len(), 2, "{message}: {:?}", cluster.events);
        assert_eq!(cluster.events[0], cluster.events[1]);
        repair(&mut cluster);
        cluster.step();
        assert!(
            cluster.environment.is_some(),
            "{message}: not placed after the repair"
        );
    }
}

#[test]
fn what_the_runtime_cannot_do_is_refused_before_a_vm_starts() {
    let mut cluster = Cluster::new();
    let spec = cluster
        .pod
        .as_mut()
        .and_then(|p| p.spec.as_mut())
        .expect("there");
    spec.host_users = Some(false);
    cluster.step();
    assert!(cluster.environment.is_none());
    assert_eq!(
        cluster.events,
        [
            "POD_UNSUPPORTED_ON_FARGATE: Pod not supported on Fargate: fields not supported by this version of the runtime: spec.hostUsers"
        ]
    );
}

/// Nobody need select it: a pod of a `DaemonSet` that names the scheduler itself is told at once.
#[test]
fn a_pod_of_a_daemon_set_is_refused_whatever_the_profiles() {
    let mut cluster = Cluster::new();
    cluster.profiles.clear();
    let pod = cluster.pod.as_mut().expect("there");
    pod.metadata.owner_references = serde_json::from_value(json!([
        {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": true}
    ]))
    .expect("an owner");
    cluster.step();
    assert_eq!(
        cluster.events,
        ["POD_UNSUPPORTED_ON_FARGATE: Pod not supported on Fargate: DaemonSet not supported"]
    );
}

#[test]
fn a_node_that_does_not_end_its_pod_is_overruled() {
    let mut cluster = Cluster::new();
    cluster.step();
    cluster.host(EnvironmentPhase::Registered);
    cluster.step();
    let end = cluster.now + SignedDuration::from_secs(30);
    let pod = cluster.pod.as_mut().expect("there");
    pod.metadata.deletion_timestamp =
        serde_json::from_value(json!(end.to_string())).expect("a time");
    assert_eq!(cluster.decide(), Decision::at(end + TERMINATION_MARGIN));
    cluster.now = end + TERMINATION_MARGIN;
    cluster.step();
    assert!(cluster.pod.is_some(), "its VM may still run");
    cluster.host(EnvironmentPhase::Running);
    cluster.step();
    assert!(cluster.pod.is_none());
}

/// What may happen between two decisions.
#[derive(Debug, Clone, Copy)]
enum Happening {
    Host(EnvironmentPhase),
    PodDeleted,
    PodDeletionAsked,
    Seconds(i64),
    ControlKilledAfter(usize),
    EffectRefusedAfter(usize),
    InterfaceSwept,
}

fn happening() -> impl Strategy<Value = Happening> {
    use EnvironmentPhase::{Booting, Failed, Finished, Joining, Registered, Running};
    prop_oneof![
        8 => prop::sample::select(vec![Booting, Joining, Registered, Running]).prop_map(Happening::Host),
        1 => prop::sample::select(vec![Failed, Finished]).prop_map(Happening::Host),
        1 => Just(Happening::PodDeleted),
        1 => Just(Happening::PodDeletionAsked),
        2 => (1i64..200).prop_map(Happening::Seconds),
        4 => (0usize..4).prop_map(Happening::ControlKilledAfter),
        4 => (0usize..4).prop_map(Happening::EffectRefusedAfter),
        2 => Just(Happening::InterfaceSwept),
    ]
}

proptest! {
    /// Under any order of events and crashes between any two effects there is never a second
    /// environment or interface or binding, nothing is released under a living VM (asserted where
    /// effects are applied), an attempt that fails counts once, and in the end a deleted pod leaves nothing behind.
    #[test]
    fn no_schedule_breaks_the_invariants(schedule in prop::collection::vec(happening(), 0..40)) {
        let mut cluster = Cluster::new();
        let mut schedule = schedule.into_iter().peekable();
        while let Some(event) = schedule.next() {
            match event {
                Happening::Host(phase) => cluster.host(phase),
                Happening::PodDeleted => {
                    // The API server deletes unbound pods at once; a bound one only its node does.
                    if cluster.pod.as_ref().is_some_and(|p| node_of(p).is_none() || is_terminal(p)) {
                        cluster.pod = None;
                    }
                }
                Happening::PodDeletionAsked => {
                    // An unbound one stays as well, if somebody has a finalizer on it.
                    let end = cluster.now + SignedDuration::from_secs(30);
                    if let Some(pod) = cluster.pod.as_mut() {
                        pod.metadata.deletion_timestamp = serde_json::from_value(json!(end.to_string())).expect("a time");
                    }
                }
                Happening::Seconds(seconds) => cluster.now += SignedDuration::from_secs(seconds),
                Happening::ControlKilledAfter(_) | Happening::EffectRefusedAfter(_) => {}
                Happening::InterfaceSwept => {
                    if let Some(interface) = cluster.interface.clone() {
                        match decide_interface(&interface, cluster.environment.is_some(), cluster.now) {
                            InterfaceEffect::Delete => {
                                prop_assert!(cluster.environment.is_none(), "an address freed under its environment");
                                cluster.network.taken.clear();
                                cluster.interface = None;
                            }
                            InterfaceEffect::Cool => cluster.apply(Effect::CoolInterface),
                            InterfaceEffect::Keep(_) => {}
                        }
                    }
                }
            }
            // An end that comes next, in the midst of what this event leads to.
            let is_whole = !matches!(schedule.peek(), Some(Happening::ControlKilledAfter(_) | Happening::EffectRefusedAfter(_)));
            match schedule.peek() {
                Some(&Happening::ControlKilledAfter(count)) => {
                    cluster.carry_out(cluster.decide(), count);
                    cluster.attempts = None;
                }
                Some(&Happening::EffectRefusedAfter(count)) => cluster.carry_out(cluster.decide(), count),
                _whole => {
                    cluster.step();
                }
            }
            let failures = cluster.attempts.as_ref().map_or(0, |attempts| attempts.failures);
            let going = cluster.pod.as_ref().is_some_and(|p| p.metadata.deletion_timestamp.is_some() && node_of(p).is_none());
            let kept = cluster.environment.as_ref().is_some_and(|e| e.metadata.deletion_timestamp.is_none());
            prop_assert!(!(going && kept && is_whole), "a pod that is deleted is provisioned");
            prop_assert!(failures <= cluster.made, "{failures} failures of {} attempts", cluster.made);
        }
        cluster.pod = None;
        for _ in 0..6 {
            cluster.step();
            cluster.host(EnvironmentPhase::Finished);
        }
        prop_assert!(cluster.environment.is_none() && cluster.node.is_none());
        for _ in 0..3 {
            if let Some(interface) = cluster.interface.clone() {
                match decide_interface(&interface, false, cluster.now) {
                    InterfaceEffect::Keep(until) => cluster.now = until.expect("an end"),
                    InterfaceEffect::Cool => cluster.apply(Effect::CoolInterface),
                    InterfaceEffect::Delete => cluster.interface = None,
                }
            }
        }
        prop_assert!(cluster.interface.is_none());
    }
}
