//! Whether pods come to a profile at all.

use super::{Cluster, Finding};
use crate::admission::{Profiles, exempt, profile_of};
use k8s_openapi::api::core::v1::Pod;
use monopod_api::labels::FARGATE_PROFILE;
use monopod_api::profile::{FargateProfile, ProfileState};

/// What keeps profiles from launching pods, and pods from their profile.
pub(super) fn findings(cluster: &Cluster) -> Vec<Finding> {
    let Some(profiles) = &cluster.profiles else {
        return Vec::new();
    };
    let active: Profiles = profiles
        .iter()
        .filter(|profile| is_active(profile))
        .filter_map(|profile| Some((profile.metadata.name.clone()?, profile.spec.clone())))
        .collect();
    let mut findings = Vec::new();
    if active.is_empty() {
        findings.push(Finding::new(
            "this cluster",
            "no Fargate profile is ACTIVE, so that no pod gets a node of its own",
            "see `monopod kubectl get fargateprofiles`, and apply one",
        ));
    }
    findings.extend(profiles.iter().flat_map(conditions));
    findings.extend(
        cluster
            .waiting
            .iter()
            .filter_map(|pod| overlooked(pod, &active)),
    );
    findings
}

fn is_active(profile: &FargateProfile) -> bool {
    let state = profile.status.as_ref().map(|status| status.status);
    profile.metadata.deletion_timestamp.is_none() && state == Some(ProfileState::Active)
}

/// What a profile says of itself.
fn conditions(profile: &FargateProfile) -> Vec<Finding> {
    let name = profile.metadata.name.as_deref().unwrap_or_default();
    let wrong = |(kind, status): (&str, &str)| {
        let remedy = match kind {
            "Ready" => "make what it names, or change the profile: its pods start by themselves",
            _shadowed => "narrow the selectors of the other, or delete this one",
        };
        let conditions = profile.status.iter().flat_map(|s| &s.conditions);
        conditions
            .filter(|condition| condition.type_ == kind && condition.status == status)
            .map(|condition| {
                Finding::new(format!("profile {name}"), condition.message.clone(), remedy)
            })
            .next()
    };
    [("Ready", "False"), ("Shadowed", "True")]
        .into_iter()
        .filter_map(wrong)
        .collect()
}

/// A pod that a profile would take, was it created now.
fn overlooked(pod: &Pod, active: &Profiles) -> Option<Finding> {
    let labels = pod.metadata.labels.as_ref();
    let is_taken = labels.is_some_and(|labels| labels.contains_key(FARGATE_PROFILE));
    let is_going = pod.metadata.deletion_timestamp.is_some();
    if is_taken || is_going || exempt(pod).is_some() {
        return None;
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    let profile = profile_of(pod, namespace, active)?;
    Some(Finding::new(
        format!(
            "pod {namespace}/{}",
            pod.metadata.name.as_deref().unwrap_or_default()
        ),
        format!(
            "it has no node; the profile {profile} would take it, but was not there when the pod was created"
        ),
        "delete it and create it again, or let its controller do so: `monopod kubectl rollout restart`",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use serde_json::{Value, json};

    fn profile(status: &Value) -> FargateProfile {
        serde_json::from_value(json!({
            "apiVersion": "monopod.dev/v1alpha1", "kind": "FargateProfile", "metadata": {"name": "front"},
            "spec": {"podExecutionRole": "default", "selectors": [{"namespace": "default"}]},
            "status": status,
        }))
        .expect("a profile")
    }

    fn pod(change: &Value) -> Pod {
        let mut pod = serde_json::to_value(testing::pod("uid-1")).expect("plain data");
        pod["metadata"]["labels"] = json!({});
        pod["spec"]["schedulerName"] = json!("default-scheduler");
        json_patch::merge(&mut pod, change);
        serde_json::from_value(pod).expect("a pod")
    }

    fn subjects(profiles: Vec<FargateProfile>, waiting: Vec<Pod>) -> Vec<String> {
        let cluster = Cluster {
            profiles: Some(profiles),
            waiting,
            ..Cluster::default()
        };
        let findings = findings(&cluster).into_iter();
        findings.map(|finding| finding.subject).collect()
    }

    #[test]
    fn a_profile_that_launches_nothing_is_found_with_its_own_words() {
        let active = json!({"status": "ACTIVE"});
        assert_eq!(subjects(vec![profile(&active)], vec![]), [""; 0]);
        assert_eq!(subjects(vec![], vec![]), ["this cluster"]);
        let creating = json!({"status": "CREATING"});
        assert_eq!(subjects(vec![profile(&creating)], vec![]), ["this cluster"]);
        for (kind, status, is_found) in [
            ("Ready", "False", true),
            ("Ready", "True", false),
            ("Shadowed", "True", true),
            ("Shadowed", "False", false),
        ] {
            let condition = json!({"type": kind, "status": status, "reason": "R", "message": "no role",
                "lastTransitionTime": "2026-01-01T00:00:00Z"});
            let profile = profile(&json!({"status": "ACTIVE", "conditions": [condition]}));
            let found = subjects(vec![profile], vec![]);
            assert_eq!(found == ["profile front"], is_found, "{kind} {status}");
        }
        assert_eq!(
            findings(&Cluster::default()),
            [],
            "a machine that joined does not know them"
        );
    }

    #[test]
    fn only_a_pod_that_would_be_taken_is_overlooked() {
        let active = vec![profile(&json!({"status": "ACTIVE"}))];
        let found = subjects(active.clone(), vec![pod(&json!({}))]);
        assert_eq!(found, ["pod default/web"]);
        for change in [
            json!({"metadata": {"namespace": "other"}}),
            json!({"metadata": {"labels": {FARGATE_PROFILE: "front"}}}),
            json!({"metadata": {"annotations": {"eks.amazonaws.com/compute-type": "ec2"}}}),
            json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
            json!({"spec": {"schedulerName": "mine"}}),
        ] {
            let found = subjects(active.clone(), vec![pod(&change)]);
            assert_eq!(found, [""; 0], "{change}");
        }
    }
}
