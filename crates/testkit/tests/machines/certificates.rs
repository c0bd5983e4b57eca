//! Certificates that last for two minutes are renewed, and nobody notices.

use crate::{SECOND, START, pod_on, second};
use monopod_testkit::{Cluster, Frozen, Machine, SECOND_CONTROL, part, wait};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long everything lasts that the suite's cluster signs.
pub(crate) const LIFETIME: Duration = Duration::from_mins(2);
/// Another control acts within this time.
const COVERED: Duration = Duration::from_secs(15);
const WEBHOOK: &str = "0500-amazon-eks-fargate-mutation.amazonaws.com";

/// Authorities that the API server trusts as the webhook's.
fn trusted(cluster: &Cluster) -> Vec<String> {
    let kind = "mutatingwebhookconfiguration";
    let configuration = cluster.get("", kind, WEBHOOK).expect("the webhook");
    let webhooks = configuration["webhooks"].as_array().expect("a list");
    let bundles: Vec<&Value> = webhooks
        .iter()
        .map(|webhook| &webhook["clientConfig"]["caBundle"])
        .collect();
    assert!(bundles.iter().all(|bundle| *bundle == bundles[0]));
    let secret = cluster.get("kube-system", "secret", "monopod-webhook-authority");
    let secret = secret.expect("the secret");
    let data = secret["data"].as_object().expect("authorities");
    let mut names: Vec<String> = data.keys().cloned().collect();
    names.retain(|name| {
        std::path::Path::new(name)
            .extension()
            .is_some_and(|kind| kind == "crt")
    });
    assert!(
        !names.is_empty() && bundles[0].is_string(),
        "{configuration}"
    );
    names
}

/// What each pod is like while all certificates are replaced.
struct Running {
    name: &'static str,
    uid: Value,
    node: String,
}

impl Running {
    fn new(cluster: &Cluster, host: &str, name: &'static str) -> Self {
        let pod = pod_on(cluster, host, name);
        Self {
            name,
            uid: pod["metadata"]["uid"].clone(),
            node: pod["spec"]["nodeName"].as_str().expect("bound").to_owned(),
        }
    }

    fn check(&self, cluster: &Cluster) {
        let output = cluster.kubectl(&["exec", self.name, "--", "echo", "alive"]);
        assert_eq!(output, "alive\n");
        cluster.kubectl(&["logs", self.name]);
        let pod = cluster.get("default", "pod", self.name).expect("the pod");
        assert_eq!(pod["metadata"]["uid"], self.uid);
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
        let node = cluster.get("", "node", &self.node).expect("its node");
        let conditions = node["status"]["conditions"].as_array().expect("conditions");
        let ready = conditions.iter().find(|c| c["type"] == "Ready");
        assert_eq!(ready.expect("Ready")["status"], "True", "{node}");
    }
}

/// When a node was heard of.
fn heard_of(cluster: &Cluster, node: &str) -> Value {
    let lease = cluster.get("kube-node-lease", "lease", node);
    lease.expect("its lease")["spec"]["renewTime"].clone()
}

/// A host's own.
fn certificate(machine: &Machine) -> String {
    let path = machine.data().join("pki/host.crt");
    std::fs::read_to_string(path).expect("its certificate")
}

/// Waits until a host has a new certificate of its own.
pub(crate) fn renewed(machine: &Machine) {
    let before = certificate(machine);
    wait("another certificate", LIFETIME, || {
        let other = certificate(machine) != before;
        other.then_some(()).ok_or_else(|| "not yet".to_owned())
    });
}

/// The webhook is asked, and changes the pod: it fails closed.
fn admits(cluster: &Cluster) {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asked", "namespace": "default"},
        "spec": {"containers": [{"name": "main", "image": "monopod.local/busybox"}]},
    });
    let file = cluster.data().join("asked.json");
    std::fs::write(&file, pod.to_string()).expect("written");
    let path = file.display().to_string();
    let arguments = ["create", "--dry-run=server", "-o", "json", "-f", &path];
    let text = cluster.kubectl(&arguments);
    let created: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(created["spec"]["schedulerName"], "fargate-scheduler");
}

/// Two control processes, of which the one acts that does not serve; pods on both hosts, and one that has
/// finished. All certificates end meanwhile.
pub(crate) fn rotate(cluster: &Cluster) {
    let pods = [
        Running::new(cluster, "host-1", "steady-one"),
        Running::new(cluster, SECOND, "steady-two"),
    ];
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "over", "namespace": "default"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "monopod.local/busybox", "command": ["echo", "last words"]}],
        },
    }));
    let over = cluster.wait_phase("default", "over", "Succeeded", START);
    let over = over["spec"]["nodeName"].as_str().expect("it was bound");
    let nodes = [&pods[0].node, &pods[1].node, over];
    let other = cluster.second_control();
    let status = cluster.monopod(&["status", "-o", "json"]);
    let pid = part(&status, "control")["pid"].as_i64();
    let pid = pid.and_then(|pid| pid.try_into().ok()).expect("it runs");
    let frozen = Frozen::new(pid);
    wait("the second control acts", COVERED, || {
        let holder = cluster.acting_control();
        if holder == SECOND_CONTROL {
            Ok(())
        } else {
            Err(holder)
        }
    });
    drop(frozen);

    let own = || certificate(second().as_ref().expect("joined"));
    let (begin, first, certificate) = (Instant::now(), trusted(cluster), own());
    let mut leases = nodes.map(|node| heard_of(cluster, node));
    let mut seen = 0;
    loop {
        admits(cluster);
        for pod in &pods {
            pod.check(cluster);
        }
        assert_eq!(cluster.kubectl(&["logs", "over"]), "last words\n");
        let now = trusted(cluster);
        seen = seen.max(now.len());
        if begin.elapsed() < LIFETIME {
            leases = nodes.map(|node| heard_of(cluster, node));
        }
        let replaced = !now.iter().any(|name| first.contains(name));
        if replaced && begin.elapsed() > LIFETIME + LIFETIME / 4 {
            break;
        }
        assert!(
            begin.elapsed() < LIFETIME * 3,
            "the first authorities are still there: {first:?}, {now:?}\n{}",
            cluster.log("control")
        );
    }
    assert!(seen >= 2, "authorities that overlap");
    assert_ne!(own(), certificate, "the second host's own certificate");
    for (node, before) in nodes.into_iter().zip(leases) {
        assert_ne!(heard_of(cluster, node), before, "the lease of {node}");
    }
    drop(other);
    cluster.kubectl(&["delete", "pod", "over", "steady-one", "steady-two"]);
}
