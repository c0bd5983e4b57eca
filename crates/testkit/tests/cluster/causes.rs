//! A pod that cannot have a VM says why, and starts by itself once it can.

use crate::{START, namespace, shell_pod};
use monopod_testkit::{Cluster, wait};
use serde_json::{Value, json};
use std::time::Duration;

const NAMESPACE: &str = "causes";
/// With 11 addresses for pods.
const SUBNET: &str = "small";

/// The pod is told this, by its condition and by the one event, and still has nothing.
fn waits_for(cluster: &Cluster, pod: &str, why: &str) {
    wait(&format!("{pod} waits"), Duration::from_secs(20), || {
        let about = cluster.get(NAMESPACE, "pod", pod).ok_or("it is gone")?;
        let conditions = about["status"]["conditions"].to_string();
        let events = cluster.list(NAMESPACE, "events").into_iter();
        let told: Vec<Value> = events
            .filter(|e| e["involvedObject"]["name"] == pod && e["reason"] == "FailedScheduling")
            .map(|event| event["message"].clone())
            .collect();
        let is_told = told.len() == 1 && told[0].as_str().is_some_and(|text| text.contains(why));
        if conditions.contains(why) && is_told {
            Ok(())
        } else {
            Err(format!("{conditions} {told:?}"))
        }
    });
    let told = cluster.monopod(&["explain", pod, "-n", NAMESPACE]).out;
    assert!(told.contains(why), "{told}");
}

fn interface(cidr: &str, number: u8) -> Value {
    let address = cidr.replace(".0/28", &format!(".{number}"));
    json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "NetworkInterface",
        "metadata": {"name": format!("eni-{}", address.replace('.', "-"))},
        "spec": {
            "address": address, "mac": "", "subnet": SUBNET, "securityGroups": [], "host": "nowhere",
            "environment": {"name": "env-of-nobody"},
        },
    })
}

pub(crate) fn go(cluster: &Cluster) {
    namespace(cluster, NAMESPACE);
    let profile = format!("fp-{NAMESPACE}");
    let subnets = format!(r#"{{"spec":{{"subnets":["{SUBNET}"]}}}}"#);
    cluster.kubectl(&[
        "patch",
        "fargateprofile",
        &profile,
        "--type=merge",
        "-p",
        &subnets,
    ]);

    let to_host = |word| {
        let output = cluster.monopod(&["host", word, "host-1"]);
        assert!(output.success, "{}{}", output.out, output.err);
    };
    to_host("cordon");
    cluster.apply(&shell_pod(NAMESPACE, "first", "sleep 100000"));
    waits_for(cluster, "first", "subnet small does not exist");
    let vpc = cluster.get("", "vpc", "default").expect("the VPC");
    let cidr = vpc["spec"]["cidr"].as_str().expect("its addresses");
    let cidr = cidr.replace(".0.0/16", ".32.0/28");
    let host = cluster.get("", "host", "host-1").expect("the host");
    let zone = &host["spec"]["zone"];
    cluster.apply(&json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "Subnet", "metadata": {"name": SUBNET},
        "spec": {"cidr": cidr, "zone": zone},
    }));
    // Now for another reason, which is told in the place of the first.
    waits_for(cluster, "first", "1 cordoned");
    to_host("uncordon");
    cluster.wait_ready(NAMESPACE, "first", START);

    // Nobody's interfaces are removed after a minute.
    let taken = cluster.list("", "networkinterfaces");
    let free = (4..15)
        .map(|number| interface(&cidr, number))
        .filter(|new| {
            taken
                .iter()
                .all(|old| old["spec"]["address"] != new["spec"]["address"])
        });
    let list = json!({"apiVersion": "v1", "kind": "List", "items": free.collect::<Vec<_>>()});
    assert_eq!(list["items"].as_array().map(Vec::len), Some(10));
    cluster.apply(&list);
    cluster.apply(&shell_pod(NAMESPACE, "second", "sleep 100000"));
    waits_for(cluster, "second", "no free IP address in subnet small");
    cluster.kubectl(&["delete", "pod", "-n", NAMESPACE, "first"]);
    cluster.wait_ready(NAMESPACE, "second", START);

    to_host("cordon");
    cluster.apply(&shell_pod(NAMESPACE, "third", "sleep 100000"));
    waits_for(
        cluster,
        "third",
        "Fargate capacity is unavailable at this time",
    );
    waits_for(cluster, "third", "1 cordoned");
    to_host("uncordon");
    cluster.kubectl(&["delete", "pod", "-n", NAMESPACE, "second"]);
    cluster.wait_ready(NAMESPACE, "third", START);

    cluster.kubectl(&["delete", "namespace", NAMESPACE, "--timeout=2m"]);
    cluster.kubectl(&["delete", "fargateprofile", &profile]);
    for item in list["items"].as_array().expect("a list") {
        let name = item["metadata"]["name"].as_str().expect("a name");
        cluster.kubectl(&["delete", "networkinterface", name, "--ignore-not-found"]);
    }
    cluster.kubectl(&["delete", "subnet", SUBNET]);
}
