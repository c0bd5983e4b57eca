//! Where pods go: the hosts are in zones of their own.

use super::{SECOND, START};
use monopod_testkit::{Cluster, wait};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const ZONE: &str = "topology.kubernetes.io/zone";

/// Pods by the host that their node names, of those that have the label.
fn hosts(cluster: &Cluster, app: &str) -> BTreeMap<String, usize> {
    let mut hosts = BTreeMap::new();
    for pod in cluster.list("default", "pods") {
        if pod["metadata"]["labels"]["app"] != app {
            continue;
        }
        let node = pod["spec"]["nodeName"].as_str().expect("it runs");
        let node = cluster.get("", "node", node).expect("its node");
        let host = node["metadata"]["labels"]["topology.monopod.dev/host"]
            .as_str()
            .expect("the label")
            .to_owned();
        let environment = cluster.environment_of(&pod).expect("its environment");
        assert_eq!(environment["spec"]["host"], host);
        *hosts.entry(host).or_default() += 1;
    }
    hosts
}

fn spec(app: &str, more: &Value) -> Value {
    let mut pod = json!({
        "metadata": {"labels": {"app": app}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": "monopod.local/busybox", "command": ["sleep", "10000"]}],
        },
    });
    if let (Some(spec), Some(more)) = (pod["spec"].as_object_mut(), more.as_object()) {
        spec.extend(more.clone());
    }
    pod
}

pub(crate) fn spreads(cluster: &Cluster) {
    for host in ["host-1", SECOND] {
        let open = r#"{"spec": {"unschedulable": false}}"#;
        cluster.kubectl(&["patch", "host", host, "--type=merge", "-p", open]);
    }
    let selector = json!({"matchLabels": {"app": "even"}});
    let even = json!({"topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": selector},
    ]});
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "even", "namespace": "default"},
        "spec": {"replicas": 4, "selector": selector, "template": spec("even", &even)},
    }));
    cluster.rollout("default", "deployment/even", 2 * START);
    let expected = [("host-1".to_owned(), 2), (SECOND.to_owned(), 2)];
    assert_eq!(hosts(cluster, "even"), BTreeMap::from(expected));
    cluster.kubectl(&["delete", "deployment", "even"]);

    let alone = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": "alone"}}},
    ]}}});
    let start = |name: &str| {
        let mut pod = spec("alone", &alone);
        pod["apiVersion"] = json!("v1");
        pod["kind"] = json!("Pod");
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["namespace"] = json!("default");
        cluster.apply(&pod);
    };
    for name in ["alone-1", "alone-2"] {
        start(name);
        cluster.wait_ready("default", name, START);
    }
    assert_eq!(hosts(cluster, "alone").len(), 2);
    start("alone-3");
    let refused = "0/2 hosts are available: 2 node(s) didn't match pod anti-affinity rules";
    wait("the third is refused", START, || {
        let pod = cluster.get("default", "pod", "alone-3").ok_or("no pod")?;
        let conditions = pod["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let found = conditions.find(|c| c["type"] == "PodScheduled");
        match found {
            Some(condition) if condition["message"] == refused => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    let freed = cluster.wait_ready("default", "alone-1", START);
    let freed = cluster.environment_of(&freed).expect("its environment");
    cluster.kubectl(&["delete", "pod", "alone-1"]);
    let third = cluster.wait_ready("default", "alone-3", START);
    let third = cluster.environment_of(&third).expect("its environment");
    assert_eq!(third["spec"]["host"], freed["spec"]["host"]);
    cluster.kubectl(&["delete", "pod", "alone-2", "alone-3"]);
}
