//! Which pods are Monopod's, decided before they are stored.

use crate::wildcard;
use k8s_openapi::api::core::v1::Pod;
use monopod_api::labels;
use monopod_api::profile::{FargateProfileSpec, Selector};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Profiles by name. The first that matches in the order of the names is taken, as EKS does.
pub type Profiles = BTreeMap<String, FargateProfileSpec>;

/// What becomes of a pod that is about to be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// Not ours; stored as it is.
    Leave(Left),
    /// Ours, by this profile.
    Select {
        /// The profile's name.
        profile: String,
    },
}

/// Why a pod is left to other schedulers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// No selector of any profile matches.
    NoProfileMatches,
    /// The pod's label names a profile that does not exist.
    NamedIsMissing,
    /// No selector of the profile that the pod's label names matches.
    NamedDoesNotMatch,
    /// The annotation `eks.amazonaws.com/compute-type: ec2`.
    OptedOut,
    /// A `DaemonSet` owns it: one per node makes no sense on nodes of one pod.
    DaemonSet,
    /// It names its node or another scheduler itself.
    PlacedByHand,
}

/// Decides on a pod. `namespace` is the request's: the object may lack it.
pub fn decide(pod: &Pod, namespace: &str, profiles: &Profiles) -> Admission {
    if let Some(reason) = exempt(pod) {
        return Admission::Leave(reason);
    }
    // A pod that we changed is shown again if another webhook changed it after us. Its label is ours
    // then, not its author's wish.
    let again = || is_ours_already(pod).then(|| first(pod, namespace, profiles, None))?;
    if let Some(profile) = profile_of(pod, namespace, profiles).or_else(again) {
        return Admission::Select {
            profile: profile.to_owned(),
        };
    }
    Admission::Leave(match named(pod) {
        None => Left::NoProfileMatches,
        Some(name) if profiles.contains_key(name) => Left::NamedDoesNotMatch,
        Some(_) => Left::NamedIsMissing,
    })
}

/// What to tell who creates a pod that is left alone although its label says otherwise.
pub fn warning(pod: &Pod, left: Left) -> Option<String> {
    let name = named(pod)?;
    let why = match left {
        Left::NamedIsMissing => "does not exist",
        Left::NamedDoesNotMatch => "has no selector that matches the pod",
        Left::NoProfileMatches | Left::OptedOut | Left::DaemonSet | Left::PlacedByHand => {
            return None;
        }
    };
    Some(format!(
        "metadata.labels[{}]: Fargate profile {name} {why}; the pod is left to other schedulers",
        labels::FARGATE_PROFILE
    ))
}

/// The profile that selects a pod, by its selectors and its label alone.
pub fn profile_of<'a>(pod: &Pod, namespace: &str, profiles: &'a Profiles) -> Option<&'a str> {
    first(pod, namespace, profiles, named(pod))
}

/// The first profile by name, or only the one with this name.
fn first<'a>(
    pod: &Pod,
    namespace: &str,
    profiles: &'a Profiles,
    wanted: Option<&str>,
) -> Option<&'a str> {
    let none = BTreeMap::new();
    let pod_labels = pod.metadata.labels.as_ref().unwrap_or(&none);
    profiles
        .iter()
        .filter(|(name, _)| wanted.is_none_or(|wanted| wanted == *name))
        .find(|(_, profile)| {
            profile
                .selectors
                .iter()
                .any(|s| selects(s, namespace, pod_labels))
        })
        .map(|(name, _)| name.as_str())
}

/// The profile that the pod's label names.
fn named(pod: &Pod) -> Option<&str> {
    let labels = pod.metadata.labels.as_ref()?;
    labels.get(labels::FARGATE_PROFILE).map(String::as_str)
}

/// Whether [`patch`] was applied to the pod before.
fn is_ours_already(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    spec.is_some_and(|spec| {
        spec.scheduler_name.as_deref() == Some(labels::SCHEDULER_NAME)
            && spec.priority_class_name.as_deref() == Some(labels::PRIORITY_CLASS)
    })
}

/// Why one profile takes a pod or does not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Its selector with this number, from 0, matches; it is the first by name that does.
    Takes(usize),
    /// It would, but this one comes first.
    After(String),
    /// The pod's label names another profile.
    NotNamed,
    /// No selector matches; for each, what is amiss.
    Misses(Vec<String>),
}

/// Judges every profile, by name, as [`decide`] does for a pod that is not exempt.
pub fn judge(pod: &Pod, namespace: &str, profiles: &Profiles) -> BTreeMap<String, Verdict> {
    let none = BTreeMap::new();
    let pod_labels = pod.metadata.labels.as_ref().unwrap_or(&none);
    let named = named(pod);
    let taken = profile_of(pod, namespace, profiles);
    let verdict = |name: &String, profile: &FargateProfileSpec| {
        let matching = profile
            .selectors
            .iter()
            .position(|s| selects(s, namespace, pod_labels));
        match (matching, taken) {
            (None, _) => Verdict::Misses(
                profile
                    .selectors
                    .iter()
                    .map(|s| amiss(s, namespace, pod_labels))
                    .collect(),
            ),
            (Some(_), _) if named.is_some_and(|named| named != name) => Verdict::NotNamed,
            (Some(_), Some(first)) if first != name => Verdict::After(first.to_owned()),
            (Some(number), _) => Verdict::Takes(number),
        }
    };
    profiles
        .iter()
        .map(|(name, profile)| (name.clone(), verdict(name, profile)))
        .collect()
}

/// What keeps a selector from matching.
fn amiss(selector: &Selector, namespace: &str, pod_labels: &BTreeMap<String, String>) -> String {
    if !wildcard::matches(&selector.namespace, namespace) {
        return format!("namespace {namespace} is not {}", selector.namespace);
    }
    let missing: Vec<String> = lacking(selector, pod_labels)
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    format!("no label {}", missing.join(", "))
}

fn selects(selector: &Selector, namespace: &str, pod_labels: &BTreeMap<String, String>) -> bool {
    wildcard::matches(&selector.namespace, namespace)
        && lacking(selector, pod_labels).next().is_none()
}

/// The selector's labels that the pod has not.
fn lacking<'a>(
    selector: &'a Selector,
    pod_labels: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    selector.labels.iter().filter(|(key, value)| {
        !pod_labels
            .iter()
            .any(|(k, v)| wildcard::matches(key, k) && wildcard::matches(value, v))
    })
}

/// Why a pod is never ours, whatever the profiles say.
pub fn exempt(pod: &Pod) -> Option<Left> {
    let annotation = |key: &str| {
        pod.metadata
            .annotations
            .as_ref()
            .and_then(|all| all.get(key))
    };
    if annotation(labels::COMPUTE_TYPE).is_some_and(|value| value == "ec2") {
        return Some(Left::OptedOut);
    }
    if is_of_daemon_set(pod) {
        return Some(Left::DaemonSet);
    }
    let spec = pod.spec.as_ref()?;
    let scheduler = spec.scheduler_name.as_deref().unwrap_or_default();
    let by_hand = spec
        .node_name
        .as_deref()
        .is_some_and(|name| !name.is_empty())
        || !["", "default-scheduler", labels::SCHEDULER_NAME].contains(&scheduler);
    by_hand.then_some(Left::PlacedByHand)
}

/// Whether a `DaemonSet` controls the pod.
pub fn is_of_daemon_set(pod: &Pod) -> bool {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners
        .iter()
        .any(|owner| owner.kind == "DaemonSet" && owner.controller == Some(true))
}

/// The JSON patch (RFC 6902) that makes a pod ours.
///
/// Class, value and preemption policy are set together, because the priority plugin of the API
/// server has run before any webhook and refuses a value that is not the class's.
pub fn patch(pod: &Pod, profile: &str) -> Vec<Value> {
    let mut operations = Vec::new();
    if pod.metadata.labels.is_none() {
        operations.push(json!({"op": "add", "path": "/metadata/labels", "value": {}}));
    }
    let label = labels::FARGATE_PROFILE.replace('/', "~1");
    for (path, value) in [
        (format!("/metadata/labels/{label}"), json!(profile)),
        (
            "/spec/schedulerName".to_owned(),
            json!(labels::SCHEDULER_NAME),
        ),
        (
            "/spec/priorityClassName".to_owned(),
            json!(labels::PRIORITY_CLASS),
        ),
        ("/spec/priority".to_owned(), json!(labels::PRIORITY)),
        (
            "/spec/preemptionPolicy".to_owned(),
            json!("PreemptLowerPriority"),
        ),
    ] {
        operations.push(json!({"op": "add", "path": path, "value": value}));
    }
    operations
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pod(value: Value) -> Pod {
        serde_json::from_value(value).expect("a pod")
    }

    /// A profile's name, and the namespace and labels of its one selector.
    type One<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)]);

    fn profiles(selectors: &[One<'_>]) -> Profiles {
        selectors
            .iter()
            .map(|(name, namespace, wanted)| {
                let selector = Selector {
                    namespace: (*namespace).to_owned(),
                    labels: wanted
                        .iter()
                        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                        .collect(),
                };
                let spec = FargateProfileSpec {
                    selectors: vec![selector],
                    ..Default::default()
                };
                ((*name).to_owned(), spec)
            })
            .collect()
    }

    fn selected(profile: &str) -> Admission {
        Admission::Select {
            profile: profile.to_owned(),
        }
    }

    #[test]
    fn the_first_profile_by_name_wins() {
        let all = profiles(&[
            ("b", "default", &[]),
            ("a", "def*", &[]),
            ("c", "other", &[]),
        ]);
        assert_eq!(
            decide(&pod(json!({"spec": {"containers": []}})), "default", &all),
            selected("a")
        );
    }

    #[test]
    fn a_label_chooses_among_matching_profiles_only() {
        let all = profiles(&[
            ("a", "default", &[]),
            ("b", "default", &[]),
            ("c", "other", &[]),
        ]);
        let naming = |profile: &str| {
            pod(
                json!({"metadata": {"labels": {labels::FARGATE_PROFILE: profile}}, "spec": {"containers": []}}),
            )
        };
        assert_eq!(decide(&naming("b"), "default", &all), selected("b"));
        for (name, left, why) in [
            (
                "c",
                Left::NamedDoesNotMatch,
                "c has no selector that matches",
            ),
            ("missing", Left::NamedIsMissing, "missing does not exist"),
        ] {
            assert_eq!(
                decide(&naming(name), "default", &all),
                Admission::Leave(left)
            );
            let warning = warning(&naming(name), left).expect("a warning");
            assert!(warning.contains(why), "{warning}");
        }
    }

    /// All that a user of EKS Fargate sees changed on a pod, and nothing else.
    #[test]
    fn the_whole_pod_is_as_users_know_it() {
        let stored = json!({
            "metadata": {"name": "web-1", "namespace": "default", "labels": {"app": "web"}, "annotations": {"a": "b"}},
            "spec": {
                "containers": [{"name": "web", "image": "nginx", "resources": {"requests": {"cpu": "250m"}}}],
                "schedulerName": "default-scheduler", "priority": 0, "preemptionPolicy": "PreemptLowerPriority",
                "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}],
            },
        });
        let mut value = stored.clone();
        let before = pod(stored);
        let operations = Value::Array(patch(&before, "fp-default"));
        let operations: json_patch::Patch = serde_json::from_value(operations).expect("a patch");
        json_patch::patch(&mut value, &operations).expect("applies");
        assert_eq!(
            value,
            json!({
                "metadata": {
                    "name": "web-1", "namespace": "default", "annotations": {"a": "b"},
                    "labels": {"app": "web", "eks.amazonaws.com/fargate-profile": "fp-default"},
                },
                "spec": {
                    "containers": [{"name": "web", "image": "nginx", "resources": {"requests": {"cpu": "250m"}}}],
                    "schedulerName": "fargate-scheduler", "priorityClassName": "system-node-critical", "priority": 2_000_001_000,
                    "preemptionPolicy": "PreemptLowerPriority",
                    "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}],
                },
            })
        );
    }

    #[test]
    fn a_pod_that_another_webhook_changed_is_decided_anew() {
        let all = profiles(&[("a", "*", &[("app", "web")]), ("b", "*", &[])]);
        let labelled = |app: &str, profile: &str, scheduler: &str| {
            pod(
                json!({"metadata": {"labels": {"app": app, labels::FARGATE_PROFILE: profile}},
                "spec": {"containers": [], "schedulerName": scheduler, "priorityClassName": labels::PRIORITY_CLASS}}),
            )
        };
        let ours = |app: &str| labelled(app, "a", labels::SCHEDULER_NAME);
        assert_eq!(decide(&ours("web"), "n", &all), selected("a"));
        assert_eq!(decide(&ours("other"), "n", &all), selected("b"));
        let by_hand = labelled("other", "a", "default-scheduler");
        assert_eq!(
            decide(&by_hand, "n", &all),
            Admission::Leave(Left::NamedDoesNotMatch)
        );
    }

    #[test]
    fn all_labels_of_one_selector_must_match() {
        let all = profiles(&[("a", "*", &[("app", "web-?"), ("tier*", "*")])]);
        let labelled =
            |value: Value| pod(json!({"metadata": {"labels": value}, "spec": {"containers": []}}));
        assert_eq!(
            decide(&labelled(json!({"app": "web-1", "tier-x": ""})), "n", &all),
            selected("a")
        );
        assert_eq!(
            decide(&labelled(json!({"app": "web-1"})), "n", &all),
            Admission::Leave(Left::NoProfileMatches)
        );
    }

    #[test]
    fn exempt_pods_are_left_alone() {
        let all = profiles(&[("a", "*", &[])]);
        for (value, reason) in [
            (
                json!({"metadata": {"annotations": {labels::COMPUTE_TYPE: "ec2"}}}),
                Left::OptedOut,
            ),
            (
                json!({"metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": true}]}}),
                Left::DaemonSet,
            ),
            (
                json!({"spec": {"containers": [], "nodeName": "n"}}),
                Left::PlacedByHand,
            ),
            (
                json!({"spec": {"containers": [], "schedulerName": "mine"}}),
                Left::PlacedByHand,
            ),
        ] {
            assert_eq!(
                decide(&pod(value), "default", &all),
                Admission::Leave(reason)
            );
        }
    }

    #[test]
    fn each_profile_is_judged_with_its_reason() {
        let all = profiles(&[
            ("a", "other", &[]),
            ("b", "default", &[("app", "web")]),
            ("c", "default", &[]),
            ("d", "*", &[]),
        ]);
        let judged = judge(&pod(json!({"spec": {"containers": []}})), "default", &all);
        let expected = [
            (
                "a",
                Verdict::Misses(vec!["namespace default is not other".to_owned()]),
            ),
            ("b", Verdict::Misses(vec!["no label app=web".to_owned()])),
            ("c", Verdict::Takes(0)),
            ("d", Verdict::After("c".to_owned())),
        ];
        assert_eq!(
            judged,
            expected
                .map(|(name, verdict)| (name.to_owned(), verdict))
                .into()
        );
        let named = pod(
            json!({"metadata": {"labels": {labels::FARGATE_PROFILE: "d"}}, "spec": {"containers": []}}),
        );
        let judged = judge(&named, "default", &all);
        assert_eq!(judged["c"], Verdict::NotNamed);
        assert_eq!(judged["d"], Verdict::Takes(0));
    }

    proptest! {
        /// What is judged is what is decided.
        #[test]
        fn the_one_that_takes_the_pod_is_the_one_that_selects_it(names in prop::collection::btree_map("[a-c]{1,2}", ("[a-b*?]{1,2}", prop::option::of("[xy*]{1,2}")), 0..6), namespace in "[ab]{1,2}", label in prop::option::of("[xy]{1,2}")) {
            let all: Profiles = names.into_iter().map(|(name, (namespace, value))| {
                let labels = value.map(|value| ("k".to_owned(), value)).into_iter().collect();
                (name, FargateProfileSpec { selectors: vec![Selector { namespace, labels }], ..Default::default() })
            }).collect();
            let pod = pod(json!({"metadata": {"labels": label.map(|value| json!({"k": value}))}, "spec": {"containers": []}}));
            let judged = judge(&pod, &namespace, &all);
            let takes: Vec<&str> = judged.iter().filter(|(_, v)| matches!(v, Verdict::Takes(_))).map(|(name, _)| name.as_str()).collect();
            let chosen = profile_of(&pod, &namespace, &all);
            prop_assert_eq!(takes, chosen.into_iter().collect::<Vec<_>>());
        }

        /// Whatever the pod has, the patch applies and leaves all else as it was.
        #[test]
        fn the_patch_changes_only_its_own_fields(existing in prop::option::of(prop::collection::btree_map("[a-z./]{1,8}", "[a-z]{0,4}", 0..3)), image in "[a-z]{1,9}") {
            let before = pod(json!({"metadata": {"name": "p", "labels": existing}, "spec": {"containers": [{"name": "c", "image": image}]}}));
            let mut value = serde_json::to_value(&before).expect("serialises");
            let operations: json_patch::Patch = serde_json::from_value(Value::Array(patch(&before, "fp"))).expect("a patch");
            json_patch::patch(&mut value, &operations).expect("applies");
            let after: Pod = serde_json::from_value(value).expect("still a pod");
            let spec = after.spec.clone().expect("spec");
            prop_assert_eq!(spec.scheduler_name.as_deref(), Some(labels::SCHEDULER_NAME));
            prop_assert_eq!(spec.priority, Some(labels::PRIORITY));
            let mut kept = after.metadata.labels.clone().unwrap_or_default();
            prop_assert_eq!(kept.remove(labels::FARGATE_PROFILE), Some("fp".to_owned()));
            prop_assert_eq!(kept, before.metadata.labels.clone().unwrap_or_default());
            prop_assert_eq!(spec.containers, before.spec.expect("spec").containers);
            // Once more changes nothing.
            let mut value = serde_json::to_value(&after).expect("serialises");
            let operations: json_patch::Patch = serde_json::from_value(Value::Array(patch(&after, "fp"))).expect("a patch");
            json_patch::patch(&mut value, &operations).expect("applies");
            prop_assert_eq!(&value, &serde_json::to_value(&after).expect("serialises"));
            let all = profiles(&[("fo", "other", &[]), ("fp", "*", &[]), ("fq", "*", &[])]);
            prop_assert_eq!(decide(&after, "n", &all), selected("fp"));
        }
    }
}
