//! Whether pods come to a profile at all.

use super::{Cluster, Finding};
use crate::admission::{Profiles, exempt, profile_of};
use crate::lifecycle;
use crate::profiles::{MISCONFIGURED, READY, TOO_MANY};
use k8s_openapi::api::core::v1::Pod;
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
    findings.extend(profiles.iter().filter_map(launches_nothing));
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

/// A profile that cannot launch pods until somebody does something about it.
fn launches_nothing(profile: &FargateProfile) -> Option<Finding> {
    let name = profile.metadata.name.as_deref().unwrap_or_default();
    let conditions = profile.status.iter().flat_map(|s| &s.conditions);
    let ready = conditions
        .filter(|condition| condition.type_ == READY && condition.status == "False")
        .find_map(|condition| {
            let remedy = match condition.reason.as_str() {
                MISCONFIGURED => {
                    "make what it names, or change the profile: its pods start by themselves"
                }
                TOO_MANY => "do what the message says: until then it selects no pods",
                // It is being created or deleted.
                _passes => return None,
            };
            Some((condition.message.clone(), remedy))
        });
    ready.map(|(message, remedy)| Finding::new(format!("profile {name}"), message, remedy))
}

/// A pod that a profile would take if it were created now.
fn overlooked(pod: &Pod, active: &Profiles) -> Option<Finding> {
    let is_going = pod.metadata.deletion_timestamp.is_some() || lifecycle::is_terminal(pod);
    if lifecycle::is_ours(pod) || is_going || exempt(pod).is_some() {
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
    use monopod_api::labels::{FARGATE_PROFILE, SCHEDULER_NAME};
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
        for (kind, status, reason, is_found) in [
            (READY, "False", MISCONFIGURED, true),
            (READY, "False", TOO_MANY, true),
            (READY, "False", "Draining", false),
            (READY, "True", "Launching", false),
            ("Shadowed", "True", "Shadowed", false),
        ] {
            let condition = json!({"type": kind, "status": status, "reason": reason, "message": "no role",
                "lastTransitionTime": "2026-01-01T00:00:00Z"});
            let profile = profile(&json!({"status": "ACTIVE", "conditions": [condition]}));
            let found = subjects(vec![profile], vec![]);
            assert_eq!(found == ["profile front"], is_found, "{kind} {reason}");
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
        let labelled = json!({"metadata": {"labels": {FARGATE_PROFILE: "front"}}});
        for change in [json!({}), labelled] {
            let found = subjects(active.clone(), vec![pod(&change)]);
            assert_eq!(found, ["pod default/web"], "{change}");
        }
        for change in [
            json!({"metadata": {"namespace": "other"}}),
            json!({"spec": {"schedulerName": SCHEDULER_NAME}}),
            json!({"status": {"phase": "Failed"}}),
            json!({"metadata": {"annotations": {"eks.amazonaws.com/compute-type": "ec2"}}}),
            json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
            json!({"spec": {"schedulerName": "mine"}}),
        ] {
            let found = subjects(active.clone(), vec![pod(&change)]);
            assert_eq!(found, [""; 0], "{change}");
        }
    }
}
