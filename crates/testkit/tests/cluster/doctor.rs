use crate::{START, namespace, shell_pod};
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

/// A pod that was there before its profile waits for ever, as on EKS; one whose volume is missing starts by itself.
pub(crate) fn waiting(cluster: &Cluster) {
    cluster.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "late"}}));
    let mut pod = shell_pod("late", "early", "sleep 100000");
    pod["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "settings"}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    cluster.apply(&pod);
    assert_eq!(
        about(&findings(cluster), "pod late/early"),
        [Value::Null; 0]
    );
    namespace(cluster, "late");
    let found = about(&findings(cluster), "pod late/early");
    assert!(
        found.len() == 1 && found[0]["problem"].to_string().contains("fp-late"),
        "{found:?}"
    );
    cluster.kubectl(&["delete", "pod", "-n", "late", "early", "--wait=false"]);

    pod["metadata"]["name"] = json!("now");
    cluster.apply(&pod);
    wait("explain tells what is missing", START, || {
        let told = cluster.monopod(&["explain", "now", "-n", "late"]).out;
        let is_told = told.contains("FailedMount") && told.contains("\"settings\"");
        if is_told { Ok(()) } else { Err(told) }
    });
    cluster.kubectl(&["create", "configmap", "-n", "late", "settings"]);
    cluster.wait_ready("late", "now", START);
    let told = cluster.monopod(&["explain", "now", "-n", "late"]).out;
    assert!(told.contains("Nothing is in its way"), "{told}");
    cluster.kubectl(&["delete", "namespace", "late", "--wait=false"]);
    cluster.kubectl(&["delete", "fargateprofile", "fp-late"]);
}
