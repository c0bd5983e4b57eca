//! Two control processes: both serve, one acts.

use crate::identity::ask_webhook;
use crate::lifecycle::part;
use crate::{START, namespace, shell_pod};
use monopod_testkit::{Cluster, Frozen, SECOND_CONTROL, kill, wait};
use serde_json::json;
use std::time::Duration;

/// What is promised: the loss of the one that acts is covered within this time.
const COVERED: Duration = Duration::from_secs(15);

/// Waits until another than this one acts.
fn takes_over(cluster: &Cluster, from: &str) -> String {
    wait("another control acts", COVERED, || {
        let now = cluster.acting_control();
        if now.is_empty() || now == from {
            Err(now)
        } else {
            Ok(now)
        }
    })
}

/// At the one port that they share, each of the two answers for admission.
fn each_admits(cluster: &Cluster) {
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "operation": "CREATE", "namespace": "turns", "dryRun": true,
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "userInfo": {}, "object": shell_pod("turns", "asked", "true"),
        },
    });
    wait("both control processes answer", START, || {
        let answers = ask_webhook(cluster, 2, Some("apiserver-webhook"), &review);
        let admits =
            |answer: &String| answer.contains(r#""allowed":true"#) && answer.contains("patch");
        if answers.len() == 2 && answers.iter().all(admits) {
            Ok(())
        } else {
            Err(format!("{answers:?}"))
        }
    });
}

/// One that is frozen and thaws, and one that is killed: each time the other acts within 15 seconds,
/// and no pod gets a second environment.
pub(crate) fn takes_turns(cluster: &Cluster) {
    namespace(cluster, "turns");
    let first = cluster.acting_control();
    assert!(!first.is_empty(), "nobody acts");
    let second = cluster.second_control();
    each_admits(cluster);
    let (pid, restarts) = part(cluster, "control");
    let frozen = Frozen::new(pid);
    assert_eq!(takes_over(cluster, &first), SECOND_CONTROL);
    drop(frozen);
    // Both serve the webhook again; the second acts.
    cluster.apply(&shell_pod("turns", "by-the-second", "sleep 100000"));
    let pod = cluster.wait_ready("turns", "by-the-second", START);
    let uid = pod["metadata"]["uid"].clone();
    assert_eq!(cluster.acting_control(), SECOND_CONTROL);
    assert_eq!(
        part(cluster, "control"),
        (pid, restarts),
        "the first thawed, and lives"
    );
    kill(i32::try_from(second.0.id()).expect("a process id"));
    // Admission does not miss it: whoever the API server asked until now, the first answers at once.
    cluster.apply(&shell_pod("turns", "by-the-first", "sleep 100000"));
    assert_eq!(takes_over(cluster, SECOND_CONTROL), first);
    cluster.wait_ready("turns", "by-the-first", START);
    let kept = cluster
        .get("turns", "pod", "by-the-second")
        .unwrap_or_default();
    assert_eq!(kept["metadata"]["uid"], uid);
    assert_eq!(kept["status"]["phase"], "Running");
    drop(second);
    cluster.kubectl(&["delete", "namespace", "turns", "--wait=false"]);
}
