use crate::{event_messages, namespace, shell_pod};
use monopod_testkit::{Cluster, wait};
use serde_json::json;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(10);

pub(crate) fn matching(cluster: &Cluster) {
    cluster.apply(
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-blue"}}),
    );
    cluster.apply(&json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "FargateProfile", "metadata": {"name": "fp-wild"},
        "spec": {"podExecutionRole": "default", "selectors": [{"namespace": "team-*", "labels": {"tier": "fro?t"}}]},
    }));
    wait("the namespace has its service account", SOON, || {
        cluster
            .get("team-blue", "serviceaccount", "default")
            .map(drop)
            .ok_or_else(String::new)
    });
    let mut selected = shell_pod("team-blue", "selected", "true");
    selected["metadata"]["labels"] = json!({"tier": "front"});
    // Nothing needs to run here: a gate keeps it from being placed.
    selected["spec"]["schedulingGates"] = json!([{"name": "example.com/wait"}]);
    wait("the webhook knows the profile", SOON, || {
        cluster.kubectl(&[
            "delete",
            "pod",
            "-n",
            "team-blue",
            "selected",
            "--ignore-not-found",
            "--now",
        ]);
        cluster.apply(&selected);
        let pod = cluster.get("team-blue", "pod", "selected").ok_or("gone")?;
        if pod["spec"]["schedulerName"] == "fargate-scheduler" {
            Ok(())
        } else {
            Err(pod["spec"].to_string())
        }
    });
    let pod = cluster.get("team-blue", "pod", "selected").expect("stored");
    assert_eq!(
        pod["metadata"]["labels"]["eks.amazonaws.com/fargate-profile"],
        "fp-wild"
    );
    assert_eq!(pod["spec"]["priorityClassName"], "system-node-critical");
    assert_eq!(pod["spec"]["priority"], 2_000_001_000);

    cluster.apply(&shell_pod("team-blue", "left", "true"));
    let left = cluster.get("team-blue", "pod", "left").expect("stored");
    assert_eq!(left["spec"]["schedulerName"], "default-scheduler");
    assert_eq!(left["spec"]["priority"], 0);
    // The default scheduler sees it, has no node for it, and says so.
    wait(
        "the default scheduler looks at it",
        Duration::from_secs(30),
        || {
            let messages = event_messages(cluster, "team-blue", "left", "FailedScheduling");
            if messages.iter().any(|m| m.contains("nodes")) {
                Ok(())
            } else {
                Err(format!("{messages:?}"))
            }
        },
    );
    cluster.kubectl(&["delete", "namespace", "team-blue", "--wait=false"]);
    cluster.kubectl(&["delete", "fargateprofile", "fp-wild"]);
}

pub(crate) fn contract(cluster: &Cluster) {
    namespace(cluster, "contract");
    let mut pod = shell_pod("contract", "greedy", "true");
    pod["spec"]["hostNetwork"] = json!(true);
    pod["spec"]["containers"][0]["securityContext"] = json!({"privileged": true});
    pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": 80}]);
    cluster.apply(&pod);
    let expected = "Pod not supported on Fargate: fields not supported: HostNetwork, invalid SecurityContext fields: Privileged, port contains HostIP or HostPort";
    wait("the reason is on the pod", SOON, || {
        let pod = cluster.get("contract", "pod", "greedy").unwrap_or_default();
        let conditions = pod["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let said = conditions.iter().any(|c| {
            c["type"] == "PodScheduled"
                && c["reason"] == "POD_UNSUPPORTED_ON_FARGATE"
                && c["message"] == expected
        });
        if said {
            Ok(())
        } else {
            Err(pod["status"].to_string())
        }
    });
    assert_eq!(
        event_messages(cluster, "contract", "greedy", "FailedScheduling"),
        [expected]
    );
    let mut huge = shell_pod("contract", "huge", "true");
    huge["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "17"}});
    cluster.apply(&huge);
    wait("the size is refused", SOON, || {
        let messages = event_messages(cluster, "contract", "huge", "FailedScheduling");
        let expected = "Your pod's cpu/memory requirements exceed the max Fargate configuration";
        if messages == [expected] {
            Ok(())
        } else {
            Err(format!("{messages:?}"))
        }
    });
    let environments = cluster.list("", "environments");
    assert!(
        environments
            .iter()
            .all(|e| e["spec"]["pod"]["namespace"] != "contract"),
        "nothing is started for them"
    );
    cluster.kubectl(&["delete", "namespace", "contract", "--wait=false"]);
}

pub(crate) fn refusals(cluster: &Cluster) {
    let object = |kind: &str, name: &str, spec: serde_json::Value| json!({"apiVersion": "monopod.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec});
    let subnet = cluster
        .get("", "subnet", "private-a")
        .expect("a default subnet");
    let cidr = subnet["spec"]["cidr"].as_str().expect("a range");
    let part_of_subnet = cidr.replace("/20", "/28");
    assert_ne!(part_of_subnet, cidr);
    let rule = |rule: serde_json::Value| object("SecurityGroup", "bad", json!({"ingress": [rule]}));
    for (manifest, message) in [
        (
            object(
                "FargateProfile",
                "eks-x",
                json!({"podExecutionRole": "default", "selectors": [{"namespace": "a"}]}),
            ),
            "metadata.name: the prefix eks- is reserved",
        ),
        (
            object(
                "FargateProfile",
                "none",
                json!({"podExecutionRole": "default", "selectors": []}),
            ),
            "spec.selectors",
        ),
        (
            object(
                "FargateProfile",
                "bad",
                json!({"podExecutionRole": "default", "selectors": [{"namespace": "a"}], "allow": {"addedCapabilities": ["CAP_SYS_PTRACE"]}}),
            ),
            "addedCapabilities: names without CAP_",
        ),
        (
            object("Vpc", "second", json!({"cidr": "10.9.0.0/16"})),
            "a cluster has one VPC, named default",
        ),
        (
            object("Subnet", "bad", json!({"cidr": "10.9.0.0/33", "zone": "z"})),
            "cidr: an IPv4 range",
        ),
        (
            object(
                "Subnet",
                "bad",
                json!({"cidr": "192.168.0.0/24", "zone": "z"}),
            ),
            "spec.cidr: 192.168.0.0/24 is not in the VPC's range, 10.",
        ),
        (
            object(
                "Subnet",
                "bad",
                json!({"cidr": part_of_subnet, "zone": "z"}),
            ),
            "of the subnet private-a",
        ),
        (
            rule(json!({"protocol": "tcp", "fromPort": 80, "cidrs": ["10.0.0.0/8"]})),
            "fromPort and toPort: give both or neither",
        ),
        (
            rule(json!({"protocol": "icmp", "fromPort": 1, "toPort": 1, "cidrs": ["10.0.0.0/8"]})),
            "ports exist only with the protocols tcp and udp",
        ),
        (
            rule(json!({"protocol": "tcp"})),
            "cidrs or groups: name at least one peer",
        ),
        (
            rule(json!({"protocol": "tcp", "cidrs": ["everyone"]})),
            "cidrs: IPv4 ranges",
        ),
        (
            rule(json!({"protocol": "sctp", "cidrs": ["10.0.0.0/8"]})),
            "protocol",
        ),
        (
            rule(json!({"protocol": "tcp", "cidrs": ["10.0.0.0/8"], "prefixListIds": ["pl-1"]})),
            "prefixListIds",
        ),
    ] {
        let output = cluster.try_apply(&manifest);
        assert!(!output.success, "accepted: {manifest}");
        assert!(
            output.err.contains(message),
            "{manifest}\nexpected {message}\ngot {}",
            output.err
        );
    }
    let explained = cluster.kubectl(&["explain", "environments.spec.size"]);
    assert!(
        explained.contains("cpuMillis") && explained.contains("Memory in MiB"),
        "{explained}"
    );
}
