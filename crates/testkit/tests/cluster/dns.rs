//! The cluster's DNS, as programs that use the C library see it.

use crate::{START, namespace, python, python_pod};
use monopod_testkit::{Cluster, wait};
use serde_json::json;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

const NAMESPACE: &str = "names";

/// Prints the addresses of a name, sorted, or the resolver's error.
fn resolve(cluster: &Cluster, pod: &str, name: &str) -> String {
    let program = format!(
        "import socket\ntry: print(' '.join(sorted({{a[4][0] for a in socket.getaddrinfo('{name}', 80, socket.AF_INET)}})))\nexcept OSError as e: print('!', e)\n"
    );
    python(cluster, NAMESPACE, pod, &program).trim().to_owned()
}

#[track_caller]
fn eventually(cluster: &Cluster, pod: &str, name: &str, expected: &str) {
    wait(
        &format!("{name} is {expected}"),
        Duration::from_mins(1),
        || {
            let found = resolve(cluster, pod, name);
            if found == expected {
                Ok(())
            } else {
                Err(found)
            }
        },
    );
}

fn coredns(cluster: &Cluster) {
    cluster.rollout("kube-system", "deployment/coredns", Duration::from_mins(3));
}

pub(crate) fn names(cluster: &Cluster) {
    cluster.load_test_image("python");
    namespace(cluster, NAMESPACE);
    let service = |name: &str, spec: serde_json::Value| {
        cluster.apply(&json!({"apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}));
    };
    service(
        "named",
        json!({"selector": {"app": "client"}, "ports": [{"port": 80}]}),
    );
    service(
        "headless",
        json!({"clusterIP": "None", "selector": {"app": "client"}, "ports": [{"port": 80}]}),
    );
    service(
        "elsewhere",
        json!({"type": "ExternalName", "externalName": "named.names.svc.cluster.local"}),
    );
    for name in ["one", "two"] {
        let mut pod = python_pod(NAMESPACE, name);
        pod["metadata"]["labels"] = json!({"app": "client"});
        pod["spec"]["hostname"] = json!(name);
        pod["spec"]["subdomain"] = json!("headless");
        cluster.apply(&pod);
    }
    let ip = |name: &str| {
        let pod = cluster.wait_ready(NAMESPACE, name, START);
        pod["status"]["podIP"]
            .as_str()
            .expect("an address")
            .to_owned()
    };
    let (one, two) = (ip("one"), ip("two"));
    coredns(cluster);
    let pods = cluster.list("kube-system", "pods");
    let nodes: BTreeSet<&str> = pods
        .iter()
        .filter(|pod| pod["metadata"]["labels"]["k8s-app"] == "kube-dns")
        .filter_map(|pod| pod["spec"]["nodeName"].as_str())
        .collect();
    assert!(
        nodes.len() >= 2 && nodes.iter().all(|node| node.starts_with("fargate-ip-")),
        "CoreDNS runs in VMs: {nodes:?}"
    );
    let api = cluster.service_address("default", "kubernetes");
    for name in [
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local.",
    ] {
        eventually(cluster, "one", name, &api);
    }
    let named = cluster.service_address(NAMESPACE, "named");
    for name in [
        "named",
        "named.names",
        "named.names.svc.cluster.local",
        "elsewhere",
    ] {
        eventually(cluster, "one", name, &named);
    }
    let mut both = [one.as_str(), two.as_str()];
    both.sort_unstable();
    eventually(cluster, "one", "headless", &both.join(" "));
    // A pod of a headless service has a name, for itself and for the others.
    eventually(cluster, "one", "two.headless", &two);
    eventually(cluster, "two", "one.headless.names.svc.cluster.local", &one);
    let started = Instant::now();
    let outside = resolve(cluster, "one", "www.example.org");
    assert!(outside.starts_with('!'), "there is no way out: {outside}");
    let missing = resolve(cluster, "one", "missing.names.svc.cluster.local");
    assert!(missing.contains("not known"), "{missing}");
    assert!(
        started.elapsed() < Duration::from_secs(15),
        "refusals come at once, not by a time-out: {:?}",
        started.elapsed()
    );
}

pub(crate) fn policies(cluster: &Cluster) {
    let mut own = python_pod(NAMESPACE, "own");
    own["spec"]["dnsPolicy"] = json!("None");
    own["spec"]["dnsConfig"] = json!({"nameservers": ["10.96.0.10"], "searches": ["names.svc.cluster.local"],
        "options": [{"name": "ndots", "value": "1"}]});
    cluster.apply(&own);
    cluster.wait_ready(NAMESPACE, "own", START);
    let text = cluster.kubectl(&[
        "exec",
        "-n",
        NAMESPACE,
        "own",
        "--",
        "cat",
        "/etc/resolv.conf",
    ]);
    assert_eq!(
        text,
        "search names.svc.cluster.local\nnameserver 10.96.0.10\noptions ndots:1\n"
    );
    let named = cluster.service_address(NAMESPACE, "named");
    eventually(cluster, "own", "named", &named);
    let text = cluster.kubectl(&[
        "exec",
        "-n",
        NAMESPACE,
        "one",
        "--",
        "cat",
        "/etc/resolv.conf",
    ]);
    assert_eq!(
        text,
        "search names.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n"
    );
}

/// One pod of the DNS is deleted, then the VM of another is killed; names resolve all the while.
pub(crate) fn heals(cluster: &Cluster) {
    let api = cluster.service_address("default", "kubernetes");
    let servers = || -> Vec<serde_json::Value> {
        cluster
            .list("kube-system", "pods")
            .into_iter()
            .filter(|pod| {
                pod["metadata"]["labels"]["k8s-app"] == "kube-dns"
                    && pod["status"]["phase"] == "Running"
                    && pod["metadata"]["deletionTimestamp"].is_null()
            })
            .collect()
    };
    let before = servers();
    let name = |pod: &serde_json::Value| {
        pod["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    cluster.kubectl(&[
        "delete",
        "pod",
        "-n",
        "kube-system",
        &name(&before[0]),
        "--wait=false",
    ]);
    eventually(cluster, "one", "kubernetes.default", &api);
    coredns(cluster);
    let environment = cluster.environment_of(&before[1]).expect("an environment");
    crate::lifecycle::kill_vm(cluster, &environment);
    eventually(cluster, "one", "kubernetes.default", &api);
    wait("two new pods serve", Duration::from_mins(2), || {
        let now = servers();
        let old = now.iter().any(|pod| {
            before
                .iter()
                .any(|gone| gone["metadata"]["uid"] == pod["metadata"]["uid"])
        });
        if now.len() == 2 && !old {
            Ok(())
        } else {
            Err(format!("{:?}", now.iter().map(name).collect::<Vec<_>>()))
        }
    });
    coredns(cluster);
    eventually(cluster, "one", "kubernetes.default", &api);
    cluster.kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"]);
}
