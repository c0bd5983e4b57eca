use super::*;
use crate::admission;
use crate::lifecycle::Subnet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use monopod_api::profile::{FargateProfileSpec, Selector};
use proptest::prelude::*;
use serde_json::json;

const MAX_PROFILES: usize = 10;

/// All profiles of a cluster, changed by the effects as the executor would.
struct Cluster {
    profiles: BTreeMap<String, FargateProfile>,
    roles: BTreeMap<String, PodExecutionRoleSpec>,
    network: Network,
    pods: BTreeMap<String, Vec<ProfilePod>>,
    served: Option<String>,
    now: Timestamp,
    events: Vec<String>,
    evicted: usize,
    deleted: usize,
}

fn spec(namespace: &str) -> FargateProfileSpec {
    FargateProfileSpec {
        selectors: vec![Selector {
            namespace: namespace.to_owned(),
            ..Selector::default()
        }],
        pod_execution_role: "default".to_owned(),
        ..FargateProfileSpec::default()
    }
}

impl Cluster {
    fn new() -> Self {
        let subnet = Subnet {
            id: "subnet-1".to_owned(),
            cidr: "10.0.1.0/24".parse().expect("valid"),
            zone: "z".to_owned(),
        };
        Self {
            profiles: BTreeMap::new(),
            roles: [("default".to_owned(), PodExecutionRoleSpec::default())].into(),
            network: Network {
                subnets: [("a".to_owned(), subnet)].into(),
                groups: [("default".to_owned(), "default".to_owned())].into(),
                ..Network::default()
            },
            pods: BTreeMap::new(),
            served: None,
            now: "2026-01-01T00:00:00Z".parse().expect("a time"),
            events: Vec::new(),
            evicted: 0,
            deleted: 0,
        }
    }

    fn create(&mut self, name: &str, namespace: &str) {
        let mut profile = FargateProfile::new(name, spec(namespace));
        profile.metadata.uid = Some(format!("uid-{name}"));
        profile.metadata.generation = Some(1);
        profile.metadata.creation_timestamp = Some(Time(self.now));
        self.profiles.insert(name.to_owned(), profile);
        self.now += SignedDuration::from_secs(1);
    }

    fn delete(&mut self, name: &str) {
        self.profile(name).metadata.deletion_timestamp = Some(Time(self.now));
        self.now += SignedDuration::from_secs(1);
    }

    fn profile(&mut self, name: &str) -> &mut FargateProfile {
        self.profiles.get_mut(name).expect("there")
    }

    fn add_pods(&mut self, profile: &str, count: usize) {
        let pod = |n| ProfilePod {
            pod: PodReference {
                name: format!("p{n}"),
                ..PodReference::default()
            },
            is_deleted: false,
        };
        let pods = (0..count).map(pod).collect();
        self.pods.insert(profile.to_owned(), pods);
    }

    fn decide(&self) -> Decision {
        let observed = Observed {
            profiles: &self.profiles,
            limit: MAX_PROFILES,
            roles: &self.roles,
            network: &self.network,
            pods: &self.pods,
            served: self.served.as_deref(),
        };
        decide(&observed, self.now)
    }

    fn step(&mut self) -> Decision {
        let decision = self.decide();
        for effect in decision.effects.clone() {
            match effect {
                Effect::Serve(condition) => self.served = Some(condition),
                Effect::Hold(name) => {
                    self.profile(&name).metadata.finalizers =
                        Some(vec![PROFILE_FINALIZER.to_owned()]);
                }
                Effect::Report(name, status) => self.profile(&name).status = Some(*status),
                Effect::Tell(name, told) => {
                    self.events
                        .push(format!("{name} {}: {}", told.reason, told.message));
                }
                Effect::Evict(_) => self.evicted += 1,
                Effect::Delete(_) => self.deleted += 1,
                Effect::LetGo(name) => {
                    assert!(self.pods.get(&name).is_none_or(Vec::is_empty));
                    self.profiles.remove(&name);
                }
            }
        }
        decision
    }

    /// Until nothing is left to do.
    fn settle(&mut self) {
        for _ in 0..100 {
            if self.step().effects.is_empty() {
                return;
            }
        }
        panic!("never settles: {:?}", self.decide());
    }

    fn state(&self, name: &str) -> ProfileState {
        state(&self.profiles[name])
    }

    fn ready(&self, name: &str) -> (String, String) {
        let status = self.profiles[name].status.clone().expect("reported");
        let ready = status.conditions.into_iter().find(|c| c.type_ == "Ready");
        ready.map(|c| (c.status, c.message)).expect("a condition")
    }
}

#[test]
fn a_profile_is_active_once_the_webhook_is_asked_about_its_pods() {
    let mut cluster = Cluster::new();
    cluster.create("a", "team-*");
    cluster.step();
    assert_eq!(cluster.state("a"), ProfileState::Creating);
    // Nobody was told, as by a control that died before.
    cluster.served = None;
    let decision = cluster.decide();
    assert!(
        matches!(&decision.effects[0], Effect::Serve(condition) if condition.contains("team-"))
    );
    cluster.settle();
    assert_eq!(cluster.state("a"), ProfileState::Active);
    assert_eq!(cluster.ready("a").0, "True");
    assert_eq!(cluster.events, ["a ProfileReady: new pods are launched"]);
    let id = cluster.profiles["a"].status.clone().and_then(|s| s.id);
    assert!(id.is_some_and(|id| id.starts_with("fp-")));
}

#[test]
fn one_profile_is_created_at_a_time() {
    let mut cluster = Cluster::new();
    cluster.create("b", "b");
    cluster.create("a", "a");
    assert_eq!(
        selecting(&cluster.profiles, MAX_PROFILES)
            .keys()
            .collect::<Vec<_>>(),
        ["b"]
    );
    cluster.step();
    cluster.step();
    assert_eq!(
        cluster.ready("a").1,
        "Cannot create Fargate Profile a because this cluster currently has Fargate profile b in status CREATING"
    );
    cluster.settle();
    assert_eq!(
        (cluster.state("a"), cluster.state("b")),
        (ProfileState::Active, ProfileState::Active)
    );
}

#[test]
fn profiles_beyond_the_limit_wait_for_the_deletion_of_another() {
    let mut cluster = Cluster::new();
    for n in 0..=MAX_PROFILES {
        cluster.create(&format!("p{n:02}"), "default");
    }
    cluster.settle();
    assert_eq!(cluster.state("p10"), ProfileState::CreateFailed);
    assert!(
        cluster
            .ready("p10")
            .1
            .contains("at most 10 Fargate profiles")
    );
    assert_eq!(
        selecting(&cluster.profiles, MAX_PROFILES).len(),
        MAX_PROFILES
    );
    cluster.delete("p03");
    cluster.settle();
    assert!(!cluster.profiles.contains_key("p03"));
    assert_eq!(cluster.state("p10"), ProfileState::Active);
}

#[test]
fn a_misconfigured_profile_heals_by_itself() {
    let mut cluster = Cluster::new();
    cluster.create("a", "default");
    cluster.settle();
    let role = cluster.roles.remove("default").expect("there");
    cluster.settle();
    let (ready, message) = cluster.ready("a");
    assert_eq!(ready, "False");
    assert_eq!(
        message,
        "Misconfigured Fargate Profile: fargate profile a blocked for new launches due to: Pod execution role is not found in auth config or does not have all required permissions for launching fargate pods."
    );
    assert!(cluster.events[1].starts_with("a ProfileMisconfigured"));
    cluster.roles.insert("default".to_owned(), role);
    cluster.settle();
    assert_eq!(cluster.ready("a").0, "True");
}

#[test]
fn a_change_is_said_once() {
    let mut cluster = Cluster::new();
    cluster.create("a", "default");
    cluster.settle();
    let profile = cluster.profile("a");
    profile.metadata.generation = Some(2);
    profile.spec.selectors[0].namespace = "team-?".to_owned();
    profile.spec.selectors[0].labels = [("tier".to_owned(), "web".to_owned())].into();
    cluster.settle();
    let expected = "a ProfileChanged: selects team-?{tier=web} now; pods that have an environment keep it, new ones follow";
    assert_eq!(cluster.events[1..], [expected]);
    assert!(cluster.served.expect("served").contains("'^team-.$'"));
}

#[test]
fn a_deleted_profile_is_drained_and_at_its_deadline_emptied() {
    let mut cluster = Cluster::new();
    cluster.create("a", "default");
    cluster.create("b", "b");
    cluster.settle();
    cluster.add_pods("a", 2);
    cluster.profile("a").spec.drain_timeout_seconds = 60;
    cluster.delete("a");
    cluster.delete("b");
    let start = cluster.now;
    let decision = cluster.step();
    assert_eq!((cluster.evicted, cluster.deleted), (2, 0));
    assert_eq!(decision.wake, Some(start + EVICTION_RETRY));
    assert!(selecting(&cluster.profiles, MAX_PROFILES).is_empty());
    assert_eq!(cluster.state("a"), ProfileState::Deleting);
    assert!(cluster.ready("a").1.starts_with("2 pods left"));
    assert_eq!(
        cluster.ready("b").1,
        "Cannot Delete Fargate Profile b because this cluster currently has Fargate profile a in status DELETING"
    );
    // One goes, one is held by its budget.
    cluster.pods.get_mut("a").expect("there").truncate(1);
    cluster.now += SignedDuration::from_secs(30);
    cluster.step();
    assert_eq!((cluster.evicted, cluster.deleted), (3, 0));
    cluster.now = start + SignedDuration::from_secs(60);
    cluster.step();
    assert_eq!((cluster.evicted, cluster.deleted), (3, 1));
    cluster.pods.get_mut("a").expect("there")[0].is_deleted = true;
    cluster.step();
    assert_eq!(cluster.deleted, 1, "not asked for twice");
    cluster.pods.clear();
    cluster.settle();
    assert!(cluster.profiles.is_empty());
}

#[test]
fn a_profile_that_can_take_no_pod_is_warned_about() {
    let mut cluster = Cluster::new();
    cluster.create("b", "team-a");
    cluster.settle();
    cluster.create("a", "team-*");
    cluster.settle();
    let warning = "b ProfileShadowed: every pod that it selects is taken by the Fargate profile a";
    let mut events = cluster.events.iter();
    assert!(
        events.any(|e| e.starts_with(warning)),
        "{:?}",
        cluster.events
    );
    cluster.delete("a");
    cluster.settle();
    let conditions = &cluster.profiles["b"]
        .status
        .as_ref()
        .expect("reported")
        .conditions;
    assert_eq!(conditions.len(), 1);
}

#[test]
fn the_condition_names_every_namespace_that_may_match() {
    let profiles = |namespaces: &[&str]| -> Profiles {
        let all = namespaces.iter().enumerate();
        all.map(|(n, namespace)| (n.to_string(), spec(namespace)))
            .collect()
    };
    let named = "has(object.metadata.labels) && 'eks.amazonaws.com/fargate-profile' in object.metadata.labels";
    assert_eq!(match_condition(&profiles(&[])), named);
    assert_eq!(
        match_condition(&profiles(&["b", "a", "b", "it's", "A", "a.b", "t-*?"])),
        format!(
            "{named} || request.namespace in ['a', 'b'] || request.namespace.matches('^t-.*.$')"
        )
    );
}

fn any_profiles() -> impl Strategy<Value = Profiles> {
    let labels = prop::collection::btree_map("[kl*]", "[xy?*]{1,2}", 0..3);
    let selector =
        ("[ab?*]{1,3}", labels).prop_map(|(namespace, labels)| Selector { namespace, labels });
    let selectors = prop::collection::vec(selector, 1..3);
    prop::collection::btree_map(
        "[a-e]",
        selectors.prop_map(|selectors| FargateProfileSpec {
            selectors,
            ..FargateProfileSpec::default()
        }),
        0..5,
    )
}

proptest! {
    /// A profile that is said to be shadowed is chosen for no pod that does not name it.
    #[test]
    fn a_shadowed_profile_takes_no_pod(profiles in any_profiles(), namespace in "[ab]{1,3}", labels in prop::collection::btree_map("[klm]", "[xy]{1,2}", 0..3)) {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"labels": labels}, "spec": {"containers": []}})).expect("a pod");
        let chosen = admission::profile_of(&pod, &namespace, &profiles);
        for (name, profile) in &profiles {
            if shadowed_by(name, profile, &profiles).is_some() {
                prop_assert_ne!(chosen, Some(name.as_str()));
            }
        }
        // Profiles that are not chosen have no say.
        let mut only = profiles.clone();
        only.retain(|name, _| chosen == Some(name.as_str()));
        prop_assert_eq!(admission::profile_of(&pod, &namespace, &only), chosen);
    }

    /// Whatever the order of creations and deletions, one profile at a time is in each transition, no
    /// pod is deleted before the deadline, and all comes to rest.
    #[test]
    fn every_history_comes_to_rest(happenings in prop::collection::vec((0u8..4, 0usize..14, 0i64..400), 0..40)) {
        let mut cluster = Cluster::new();
        for (kind, which, seconds) in happenings {
            let name = format!("p{which}");
            let known = cluster.profiles.get(&name).is_some_and(is_kept);
            match kind {
                0 if !cluster.profiles.contains_key(&name) => cluster.create(&name, "default"),
                1 if known => cluster.delete(&name),
                2 => cluster.add_pods(&name, which % 3),
                _ => cluster.now += SignedDuration::from_secs(seconds),
            }
            cluster.step();
            let limit = SignedDuration::from_secs(900);
            let overdue = cluster.profiles.values().any(|p| p.metadata.deletion_timestamp.as_ref().is_some_and(|t| t.0 + limit <= cluster.now));
            prop_assert!(overdue || cluster.deleted == 0);
            cluster.deleted = 0;
            prop_assert!(selecting(&cluster.profiles, MAX_PROFILES).len() <= MAX_PROFILES);
        }
        cluster.pods.clear();
        cluster.settle();
        for (name, profile) in &cluster.profiles {
            prop_assert!(is_kept(profile));
            prop_assert!(matches!(cluster.state(name), ProfileState::Active | ProfileState::CreateFailed));
        }
    }
}
