use super::*;
use crate::testing;
use serde_json::{Value, json};

fn changed(change: &Value) -> Pod {
    let mut pod = serde_json::to_value(testing::pod("uid-1")).expect("plain data");
    json_patch::merge(&mut pod, change);
    serde_json::from_value(pod).expect("a pod")
}

/// Each state has words of its own, with the name of what to look at.
#[test]
fn each_state_is_told() {
    let now: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
    let booting = testing::in_phase(
        testing::environment("uid-1"),
        EnvironmentPhase::Booting,
        "2026-01-01T00:00:00Z",
    );
    let mut leaving = booting.clone();
    leaving.metadata.deletion_timestamp =
        changed(&json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))
            .metadata
            .deletion_timestamp;
    let node = testing::ready_node(&booting);
    let waiting = json!({"conditions": [{"type": "PodScheduled", "status": "False", "message": "no room",
        "lastTransitionTime": "2025-12-31T23:00:00Z"}]});
    let cases = vec![
        (
            changed(&json!({"spec": {"schedulerName": "default-scheduler"}})),
            None,
            "default-scheduler",
        ),
        (
            changed(&json!({"status": {"phase": "Failed", "reason": "EnvironmentLost"}})),
            None,
            "EnvironmentLost",
        ),
        (
            changed(&json!({"metadata": {"deletionTimestamp": "2025-12-31T23:59:00Z"}})),
            Some(&booting),
            "forget host-1",
        ),
        (
            changed(&json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:30Z"}})),
            Some(&booting),
            "until then",
        ),
        (
            changed(&json!({"spec": {"nodeName": "n"}, "status": {"phase": "Running"}})),
            Some(&booting),
            "Nothing is in its way",
        ),
        (
            changed(
                &json!({"spec": {"nodeName": "n"}, "status": {"containerStatuses": [{"name": "c", "image": "i", "imageID": "",
                "ready": false, "restartCount": 0, "state": {"waiting": {"reason": "ErrImagePull", "message": "denied"}}}]}}),
            ),
            Some(&booting),
            "Container c ErrImagePull: denied",
        ),
        (
            changed(&json!({})),
            Some(&booting),
            "host host-1 is Booting since 2026-01-01T00:00:00Z",
        ),
        (
            changed(&json!({"status": &waiting})),
            Some(&booting),
            "Before: no room",
        ),
        (changed(&json!({})), Some(&leaving), "taken back"),
        (
            changed(&json!({"spec": {"schedulingGates": [{"name": "g"}]}})),
            None,
            "Gates: g",
        ),
        (
            changed(&json!({ "status": waiting })),
            None,
            "waits since 2025-12-31T23:00:00Z",
        ),
    ];
    for (pod, environment, words) in cases {
        let told = serde_json::to_string(&explain(&pod, environment, Some(&node), &[], now))
            .expect("text");
        assert!(told.contains(words), "{words}: {told}");
    }
}
/// A missing volume is told by an event only; one of another pod of the name, or of a pod that is well, is not.
#[test]
fn the_last_warning_of_a_pod_that_is_not_ready_is_told() {
    let now: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
    let event = |uid: &str, host: &str, kind: &str, minute: u32, message: &str| -> Event {
        serde_json::from_value(json!({"metadata": {}, "involvedObject": {"uid": uid}, "source": {"host": host}, "type": kind,
            "reason": "FailedMount", "message": message, "lastTimestamp": format!("2026-01-01T00:{minute:02}:00Z")}))
        .expect("an event")
    };
    let events = [
        event("uid-1", "n", "Warning", 1, "older"),
        event("uid-1", "n", "Warning", 2, "no configmap c"),
        event("uid-1", "n", "Normal", 3, "pulled"),
        event(
            "uid-1",
            "",
            "Warning",
            4,
            "the scheduler's, before it was bound",
        ),
        event("uid-2", "n", "Warning", 5, "another pod's"),
    ];
    let told = |ready: &str| {
        let pod = changed(
            &json!({"spec": {"nodeName": "n"}, "status": {"phase": "Pending",
            "conditions": [{"type": "Ready", "status": ready}]}}),
        );
        let node = testing::ready_node(&testing::environment("uid-1"));
        explain(&pod, None, Some(&node), &events, now).because
    };
    assert_eq!(
        told("False"),
        ["Its last warning is FailedMount: no configmap c"]
    );
    assert_eq!(told("True"), [""; 0]);
}

/// What Kubernetes says of the node ends in the pod's eviction, however well its containers are.
#[test]
fn what_is_wrong_with_the_node_is_told() {
    let now: Timestamp = "2026-01-01T00:01:00Z".parse().expect("a time");
    let environment = testing::environment("uid-1");
    let tolerations = json!([{"key": "unreachable", "operator": "Exists", "tolerationSeconds": 300}, {"key": "ever", "operator": "Exists"}]);
    let pod = changed(
        &json!({"spec": {"nodeName": "n", "tolerations": tolerations}, "status": {"phase": "Running"}}),
    );
    let told = |change: &Value| {
        let mut node = json!(testing::ready_node(&environment));
        json_patch::merge(&mut node, change);
        let node: Node = serde_json::from_value(node).expect("a node");
        let Explanation { because, next, .. } =
            explain(&pod, Some(&environment), Some(&node), &[], now);
        (because, next)
    };
    let at = |key: &str, effect: &str, time: &str| json!({"key": key, "effect": effect, "timeAdded": time});
    let tainted = |key: &str, effect: &str| json!({"spec": {"taints": [at(key, effect, "2026-01-01T00:00:50Z")]}});
    let well = (Vec::new(), "Nothing is in its way.".to_owned());
    assert_eq!(told(&json!({})), well);
    assert_eq!(told(&tainted("ever", "NoExecute")), well);
    assert_eq!(told(&tainted("other", "NoSchedule")), well);

    let mut silent = tainted("unreachable", "NoExecute");
    silent["status"] = json!({"conditions": [{"type": "Ready", "status": "Unknown", "message": "stopped posting", "lastTransitionTime": "2026-01-01T00:00:45Z"}]});
    let (because, next) = told(&silent);
    assert_eq!(
        because,
        [
            "Its node is silent since 2026-01-01T00:00:45Z: stopped posting",
            "Its node is tainted with unreachable: the pod is evicted at about 2026-01-01T00:05:50Z, unless that ends before."
        ]
    );
    assert!(next.contains("host host-1"), "{next}");

    let (because, next) = told(&tainted("other", "NoExecute"));
    assert!(because[0].ends_with("is evicted now."), "{because:?}");
    assert!(next.contains("kubectl describe node n"), "{next}");

    // Each taint counts from its own time; one without a time, or whose end is past, from none.
    let taints = json!([
        at("ever", "NoExecute", "2025-12-31T00:00:00Z"), {"key": "unreachable", "effect": "NoExecute"},
        at("unreachable", "NoExecute", "2025-12-31T00:00:00Z"), at("unreachable", "NoExecute", "9999-12-30T22:00:00Z"),
    ]);
    let (because, _) = told(&json!({"spec": {"taints": taints}}));
    let when: Vec<&str> = because
        .iter()
        .filter_map(|line| Some(line.split_once("the pod is ")?.1))
        .collect();
    let after = "evicted 300 s after it was, unless that ends before.";
    assert_eq!(when, [after, "evicted now.", after], "{because:?}");

    let (because, _) = told(&json!({"status": {"conditions": null}}));
    assert_eq!(because, ["Its node has not said that it is ready."]);
    let gone = explain(&pod, Some(&environment), None, &[], now).because;
    assert!(
        gone[0].contains("deletes a pod that is on no node"),
        "{gone:?}"
    );
}
