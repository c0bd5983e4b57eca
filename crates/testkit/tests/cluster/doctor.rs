use monopod_testkit::{Cluster, wait};
use serde_json::{Value, json};
use std::time::Duration;

fn findings(cluster: &Cluster) -> Vec<Value> {
    let output = cluster.monopod(&["doctor", "-o", "json"]);
    serde_json::from_str(&output.out).expect("a list of findings")
}

fn about(findings: &[Value], subject: &str) -> Vec<Value> {
    let about = |finding: &&Value| finding["subject"] == subject;
    findings.iter().filter(about).cloned().collect()
}

/// A `DaemonSet` that tolerates everything is found, and is fine as soon as it leaves our nodes out.
pub(crate) fn doctor(cluster: &Cluster) {
    let set = |affinity: &Value| {
        json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "agent", "namespace": "kube-public"},
            "spec": {
                "selector": {"matchLabels": {"app": "agent"}},
                "template": {"metadata": {"labels": {"app": "agent"}}, "spec": {
                    "tolerations": [{"operator": "Exists"}], "affinity": affinity,
                    "containers": [{"name": "main", "image": "monopod.local/busybox"}],
                }},
            },
        })
    };
    cluster.apply(&set(&json!({})));
    let found = findings(cluster);
    let remedy = about(&found, "DaemonSet kube-public/agent");
    assert!(
        remedy.len() == 1 && remedy[0]["remedy"].to_string().contains("NotIn"),
        "{found:?}"
    );
    // How full its disk is, is no matter of the test.
    let lacks = |finding: &&Value| finding["remedy"].to_string().contains("install");
    let machine = about(&found, "this machine");
    assert_eq!(machine.iter().find(lacks), None, "the tests run here");
    cluster.apply(&set(&json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [
            {"key": "eks.amazonaws.com/compute-type", "operator": "NotIn", "values": ["fargate"]},
        ]}],
    }}})));
    assert_eq!(
        about(&findings(cluster), "DaemonSet kube-public/agent"),
        [Value::Null; 0]
    );
    cluster.kubectl(&["delete", "daemonset", "-n", "kube-public", "agent"]);
    // What is being started or ended now may be among what is found; it passes.
    wait("nothing is left over", Duration::from_secs(30), || {
        let found = findings(cluster);
        let remedies = found.iter().map(|finding| finding["remedy"].to_string());
        let left: Vec<String> = remedies
            .filter(|remedy| remedy.contains("if it stays"))
            .collect();
        if left.is_empty() {
            Ok(())
        } else {
            Err(left.join("; "))
        }
    });
}
