//! How a machine leaves a cluster, and comes back.

use crate::{SECOND, START, certificates, second};
use monopod_testkit::{Cluster, Machine, is_vm, leftovers, process, record_of, wait};
use serde_json::{Value, json};
use std::time::Duration;

/// What an eviction, a back-off and a start on the other machine take.
const MOVED: Duration = Duration::from_mins(3);

fn monopod(cluster: &Cluster, arguments: &[&str]) -> String {
    let output = cluster.monopod(arguments);
    assert!(
        output.success,
        "{arguments:?}: {}{}",
        output.out, output.err
    );
    output.out
}

fn refused(cluster: &Cluster, arguments: &[&str], why: &str) {
    let output = cluster.monopod(arguments);
    assert!(
        !output.success && output.err.contains(why),
        "{arguments:?}: {}{}",
        output.out,
        output.err
    );
}

/// A Deployment whose pods are on the second machine, of which one may be missing.
fn deployment(cluster: &Cluster, name: &str, replicas: u8) {
    monopod(cluster, &["host", "cordon", "host-1"]);
    monopod(cluster, &["host", "uncordon", SECOND]);
    let labels = json!({"app": name});
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "main", "image": "monopod.local/busybox", "command": ["sleep", "100000"]}],
            }},
        },
    }));
    cluster.apply(&json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name, "namespace": "default"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }));
    available(cluster, name, SECOND, replicas);
    monopod(cluster, &["host", "uncordon", "host-1"]);
}

/// Waits until so many pods of a Deployment are Ready on a machine, and on no other.
fn available(cluster: &Cluster, name: &str, host: &str, replicas: u8) {
    wait("its pods are there", MOVED, || {
        let pods = cluster.list("default", "pods").into_iter().filter(|pod| {
            pod["metadata"]["labels"]["app"] == name && pod["status"]["phase"] != "Failed"
        });
        let hosts: Vec<(Value, bool)> = pods
            .map(|pod| {
                let environment = cluster.environment_of(&pod).unwrap_or_default();
                let ready = pod["status"]["containerStatuses"][0]["ready"] == true;
                (environment["spec"]["host"].clone(), ready)
            })
            .collect();
        if hosts.len() == usize::from(replicas)
            && hosts.iter().all(|(on, ready)| on == host && *ready)
        {
            Ok(())
        } else {
            Err(format!("{hosts:?}"))
        }
    });
}

fn takes_vms(cluster: &Cluster) {
    wait("the host takes VMs", START, || {
        let host = cluster.get("", "host", SECOND).ok_or("no Host")?;
        let lease = cluster.get("monopod-host-host-2", "lease", SECOND);
        if host["status"]["ready"] == true && lease.is_some() {
            Ok(())
        } else {
            Err(host["status"].to_string())
        }
    });
}

fn is_out(cluster: &Cluster) {
    wait("nothing of the host is left", START, || {
        let namespace = cluster
            .get("", "namespace", "monopod-host-host-2")
            .is_some();
        let host = cluster.get("", "host", SECOND).is_some();
        if namespace || host {
            Err(format!("namespace {namespace}, host {host}"))
        } else {
            Ok(())
        }
    });
}

pub(crate) fn drained(cluster: &Cluster) {
    deployment(cluster, "moves", 2);
    // One that nobody would make anew, of the checks before.
    refused(
        cluster,
        &["host", "drain", SECOND],
        "no controller makes default/two anew",
    );
    cluster.kubectl(&["delete", "pod", "two"]);
    refused(cluster, &["host", "remove", SECOND], "drain it first");
    // One that nobody uses in time.
    cluster.token(SECOND);
    let said = monopod(cluster, &["host", "drain", SECOND, "--timeout", "180"]);
    assert!(
        said.contains("default/moves") && said.contains("evicted"),
        "{said}"
    );
    available(cluster, "moves", "host-1", 2);
    monopod(cluster, &["host", "remove", SECOND]);
    is_out(cluster);
    let guard = second();
    let machine = guard.as_ref().expect("joined");
    wait("its host process says so", START, || {
        let log = machine.data().join("logs/host.log");
        let log = std::fs::read_to_string(log).map_err(|error| error.to_string())?;
        let told = log.contains("not one of the cluster any more");
        told.then_some(()).ok_or_else(|| "not yet".to_owned())
    });
    assert!(
        cluster.get("", "host", SECOND).is_none(),
        "it does not come back by itself"
    );
    let tokens = cluster.list("kube-system", "secrets").into_iter();
    let mut tokens = tokens.filter(|s| s["metadata"]["annotations"]["monopod.dev/host"] == SECOND);
    assert_eq!(tokens.next(), None, "nor by a token from before");
    let back = machine.join(&cluster.token(SECOND));
    assert!(back.success, "{}{}", back.out, back.err);
    takes_vms(cluster);
    cluster.kubectl(&["delete", "deployment,pdb", "moves"]);
}

/// Somebody has the certificate of a host that is out: it lasts for a while, and gets them no other.
fn stays_out(cluster: &Cluster, machine: &Machine) {
    let kubeconfig = machine.data().join("kubeconfig/host");
    let user = kubeconfig.display().to_string();
    let listed = cluster.kubectl_as(&user, &["get", "hosts"], "");
    assert!(listed.success, "it lasts: {}", listed.err);
    for namespace in ["monopod-host-host-2", "monopod-host-host-1", "default"] {
        let host = json!({
            "apiVersion": "monopod.dev/v1alpha1", "kind": "Host",
            "metadata": {"name": SECOND, "annotations": {"monopod.dev/host-namespace": namespace}},
            "spec": {"region": "local-1", "zone": "local-1a", "memoryMib": 1, "cpuMillis": 1},
        });
        let made = cluster.kubectl_as(&user, &["create", "-f", "-"], &host.to_string());
        assert!(
            !made.success && made.err.contains("the cluster has no such host any more"),
            "{}{}",
            made.out,
            made.err
        );
    }
    // Not even with a Host of its name, whoever made it.
    cluster.apply(&json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "Host", "metadata": {"name": SECOND},
        "spec": {"region": "local-1", "zone": "local-1a", "memoryMib": 1, "cpuMillis": 1},
    }));
    let itself = ("monopod:hosts", "monopod:host:host-2");
    let signer = "kubernetes.io/kube-apiserver-client";
    let asked = cluster.request_certificate(&user, "renewed-by-nobody", signer, itself);
    assert!(asked.success, "it may ask: {}", asked.err);
    cluster.wait_denied("renewed-by-nobody");
    cluster.kubectl(&["delete", "host", SECOND]);
}

pub(crate) fn forgotten(cluster: &Cluster) {
    deployment(cluster, "survives", 1);
    let pods = cluster.list("default", "pods");
    let pod = pods
        .iter()
        .find(|pod| pod["metadata"]["labels"]["app"] == "survives");
    let environment = cluster
        .environment_of(pod.expect("a pod"))
        .expect("its environment");
    refused(
        cluster,
        &["host", "forget", SECOND],
        "repeat this with --yes",
    );
    refused(
        cluster,
        &["host", "forget", SECOND, "--yes"],
        "renews its lease",
    );
    let guard = second();
    let machine = guard.as_ref().expect("joined");
    let vm = record_of(&environment, &machine.site()).expect("its VM");
    let vm = process(&vm).expect("its process");
    // So that its certificate lasts longer than what follows.
    certificates::renewed(machine);
    machine.plug(false);
    let said = monopod(cluster, &["host", "forget", SECOND, "--yes"]);
    assert!(said.contains("given up"), "{said}");
    stays_out(cluster, machine);
    available(cluster, "survives", "host-1", 1);
    is_out(cluster);
    assert!(is_vm(vm), "nobody could tell its host");

    // Back, it learns that its pods are others' now.
    machine.plug(true);
    wait("nothing is left of what it had", START, || {
        let left = leftovers(cluster, &environment, &machine.site());
        left.is_empty().then_some(()).ok_or_else(|| left.join(", "))
    });
    assert!(!is_vm(vm), "VM process {vm}");
    is_out(cluster);
    // With a certificate that may have ended meanwhile.
    let off = machine.monopod(&["down"]);
    assert!(off.success, "{}{}", off.out, off.err);
    let up = machine.join(&cluster.token(SECOND));
    assert!(up.success, "{}{}", up.out, up.err);
    takes_vms(cluster);
    cluster.kubectl(&["delete", "deployment,pdb", "survives"]);
}
