//! The life of profiles and of the roles that they name, and what a profile opens.

use crate::{START, event_messages, namespace, shell_pod};
use monopod_testkit::{Cluster, wait};
use serde_json::{Value, json};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(20);

fn profile(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "monopod.dev/v1alpha1", "kind": "FargateProfile", "metadata": {"name": name}, "spec": spec})
}

/// Waits until a condition of a profile says so.
#[track_caller]
fn wait_condition(cluster: &Cluster, name: &str, kind: &str, status: &str, words: &str) {
    wait("the profile says so", SOON, || {
        let profile = cluster.get("", "fargateprofile", name).unwrap_or_default();
        let conditions = profile["status"]["conditions"].as_array().cloned();
        let said = conditions.iter().flatten().any(|c| {
            c["type"] == kind
                && c["status"] == status
                && c["message"].as_str().is_some_and(|m| m.contains(words))
        });
        said.then_some(()).ok_or_else(|| profile.to_string())
    });
}

/// Waits until the pod's condition says why it waits.
#[track_caller]
fn wait_told(cluster: &Cluster, namespace: &str, pod: &str, message: &str) {
    wait("the pod says why it waits", SOON, || {
        let pod = cluster.get(namespace, "pod", pod).unwrap_or_default();
        let conditions = pod["status"]["conditions"].as_array().cloned();
        let said = |c: &Value| c["type"] == "PodScheduled" && c["message"] == message;
        let said = conditions.iter().flatten().any(said);
        said.then_some(()).ok_or_else(|| pod["status"].to_string())
    });
}

/// A role that is missing or does not trust its profile blocks new pods, and they start once it does.
pub(crate) fn roles(cluster: &Cluster) {
    namespace(cluster, "trust");
    let role = |profiles: &[&str]| json!({"apiVersion": "monopod.dev/v1alpha1", "kind": "PodExecutionRole", "metadata": {"name": "late"}, "spec": {"profiles": profiles}});
    let spec = json!({"podExecutionRole": "late", "selectors": [{"namespace": "trust"}]});
    cluster.apply(&profile("fp-trust", &spec));
    let blocked =
        "Misconfigured Fargate Profile: fargate profile fp-trust blocked for new launches due to: ";
    let missing = "Pod execution role is not found in auth config or does not have all required permissions for launching fargate pods.";
    wait_condition(cluster, "fp-trust", "Ready", "False", missing);
    cluster.apply(&shell_pod("trust", "waits", "true"));
    wait_told(cluster, "trust", "waits", &format!("{blocked}{missing}"));
    cluster.apply(&role(&["other-*"]));
    let untrusting = "Failed to assume PodExecutionRole; Please make sure the role exists and trusts the eks-fargate-pods.amazonaws.com service principal";
    wait_told(cluster, "trust", "waits", &format!("{blocked}{untrusting}"));
    cluster.apply(&role(&["fp-tr*"]));
    cluster.wait_phase("trust", "waits", "Succeeded", START);
    wait_condition(cluster, "fp-trust", "Ready", "True", "");
    cluster.kubectl(&["delete", "namespace", "trust", "--wait=false"]);
    cluster.kubectl(&["delete", "fargateprofile", "fp-trust"]);
    cluster.kubectl(&["delete", "podexecutionrole", "late"]);
}

/// The API server asks only about the profiles' namespaces, and says what is wrong with a label.
pub(crate) fn webhook(cluster: &Cluster) {
    namespace(cluster, "asked");
    let configuration = cluster
        .get(
            "",
            "mutatingwebhookconfiguration",
            "0500-amazon-eks-fargate-mutation.amazonaws.com",
        )
        .expect("bootstrapped");
    let webhooks = configuration["webhooks"].as_array().expect("a list");
    for (webhook, policy) in webhooks.iter().zip(["Fail", "Ignore"]) {
        assert_eq!(webhook["failurePolicy"], policy);
        assert_eq!(webhook["reinvocationPolicy"], "IfNeeded");
        let condition = webhook["matchConditions"][0]["expression"].as_str();
        let condition = condition.unwrap_or_default();
        assert!(condition.contains("'asked'"), "{condition}");
        assert!(!condition.contains("'elsewhere'"), "{condition}");
    }
    cluster.apply(
        &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "elsewhere"}}),
    );
    wait("the namespace has its service account", SOON, || {
        let account = cluster.get("elsewhere", "serviceaccount", "default");
        account.map(drop).ok_or_else(String::new)
    });
    for (label, why) in [
        ("fp-nowhere", "Fargate profile fp-nowhere does not exist"),
        (
            "fp-asked",
            "Fargate profile fp-asked has no selector that matches the pod",
        ),
    ] {
        let mut pod = shell_pod("elsewhere", label, "true");
        pod["metadata"]["labels"] = json!({"eks.amazonaws.com/fargate-profile": label});
        let output = cluster.try_apply(&pod);
        assert!(output.success && output.err.contains(why), "{}", output.err);
        let stored = cluster.get("elsewhere", "pod", label).expect("stored");
        assert_eq!(stored["spec"]["schedulerName"], "default-scheduler");
    }
    // Pods of a DaemonSet are not changed. Nothing is stored: its owner does not exist.
    let mut daemon = shell_pod("asked", "daemon", "true");
    daemon["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "none",
        "uid": "00000000-0000-0000-0000-000000000000", "controller": true}]);
    let arguments = ["create", "--dry-run=server", "-o", "json", "-f", "-"];
    let output = cluster.kubectl_as("admin", &arguments, &daemon.to_string());
    let stored: Value = serde_json::from_str(&output.out).expect("a pod");
    assert_eq!(stored["spec"]["schedulerName"], "default-scheduler");
    assert_eq!(stored["spec"]["priority"], 0);
    cluster.kubectl(&["delete", "namespace", "asked", "elsewhere", "--wait=false"]);
    cluster.kubectl(&["delete", "fargateprofile", "fp-asked"]);
}

/// A refused pod is looked at again when its claim changes, and no node is made that it does not want.
pub(crate) fn refusals(cluster: &Cluster) {
    namespace(cluster, "refused");
    let mut pod = shell_pod("refused", "stores", "true");
    pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]);
    cluster.apply(&pod);
    let because = |why: &str| {
        format!(
            "Pod not supported on Fargate: volumes not supported: v not supported because: {why}"
        )
    };
    let wait_told = |why: &str| wait_told(cluster, "refused", "stores", &because(why));
    wait_told("persistentvolumeclaim \"data\" not found");
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", "namespace": "refused"},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": "pv-refused", "resources": {"requests": {"storage": "1Gi"}}}});
    cluster.apply(&claim);
    wait_told("PVC data not bound");
    cluster.apply(&json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-refused"},
        "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
            "claimRef": {"namespace": "refused", "name": "data"}, "csi": {"driver": "ebs.csi.aws.com", "volumeHandle": "vol-1"}}}));
    wait_told("PVC data bound to invalid PV pv-refused with CSI Driver: ebs.csi.aws.com");

    let mut picky = shell_pod("refused", "picky", "true");
    picky["spec"]["nodeSelector"] = json!({"disktype": "ssd"});
    cluster.apply(&picky);
    wait("the requirement is named", SOON, || {
        let messages = event_messages(cluster, "refused", "picky", "FailedScheduling");
        let said = messages
            .iter()
            .any(|m| m.contains("spec.nodeSelector disktype=ssd"));
        said.then_some(()).ok_or_else(|| format!("{messages:?}"))
    });
    cluster.kubectl(&["delete", "namespace", "refused", "--wait=false"]);
    cluster.kubectl(&["delete", "fargateprofile", "fp-refused"]);
    cluster.kubectl(&["delete", "pv", "pv-refused", "--wait=false"]);
}

/// Capabilities that a profile opens work in the VM, an exact size is given, a change is followed by new
/// pods only, and the deletion drains within budgets until its deadline.
pub(crate) fn life(cluster: &Cluster) {
    namespace(cluster, "life");
    let mut mounts = shell_pod(
        "life",
        "mounts",
        "mkdir /m && mount -t tmpfs none /m && ip link set lo down && echo done; cat /sys/fs/cgroup/cpu.max; sleep 1000",
    );
    let container = &mut mounts["spec"]["containers"][0];
    container["securityContext"] = json!({"allowPrivilegeEscalation": true, "capabilities": {"add": ["NET_ADMIN", "SYS_ADMIN"]}});
    // More CPU than the VM has: it starts all the same.
    container["resources"] =
        json!({"limits": {"cpu": "3"}, "requests": {"cpu": "300m", "memory": "300Mi"}});
    mounts["metadata"]["labels"] = json!({"app": "life"});
    cluster.apply(&mounts);
    wait_told(
        cluster,
        "life",
        "mounts",
        "Pod not supported on Fargate: invalid SecurityContext fields: AllowPrivilegeEscalation,Capabilities added: NET_ADMIN, SYS_ADMIN",
    );
    let spec = json!({"podExecutionRole": "default", "selectors": [{"namespace": "life"}], "sizing": "Exact", "drainTimeoutSeconds": 12,
        "allow": {"addedCapabilities": ["NET_ADMIN", "SYS_ADMIN"], "privilegeEscalation": true}});
    cluster.apply(&profile("fp-life", &spec));
    let pod = cluster.wait_ready("life", "mounts", START);
    assert_eq!(
        pod["metadata"]["annotations"]["CapacityProvisioned"],
        "0.3vCPU 0.625GB"
    );
    wait("the pod did what it may", SOON, || {
        let log = cluster.kubectl(&["logs", "-n", "life", "mounts"]);
        let did = log.starts_with("done\n30000 100000");
        did.then_some(()).ok_or(log)
    });
    cluster.apply(&json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "all", "namespace": "life"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "life"}}}}));
    wait("the budget knows its pod", SOON, || {
        let budget = cluster.get("life", "pdb", "all").unwrap_or_default();
        let knows = budget["status"]["currentHealthy"] == 1;
        knows.then_some(()).ok_or_else(|| budget.to_string())
    });
    cluster.kubectl(&["delete", "fargateprofile", "fp-life", "--wait=false"]);
    wait_condition(cluster, "fp-life", "Ready", "False", "1 pods left");
    let pod = cluster.get("life", "pod", "mounts").expect("held");
    assert!(pod["metadata"]["deletionTimestamp"].is_null(), "{pod}");
    wait("its pod and then the profile are gone", START, || {
        let profile = cluster.get("", "fargateprofile", "fp-life");
        profile.map_or(Ok(()), |profile| Err(profile.to_string()))
    });
    assert!(cluster.get("life", "pod", "mounts").is_none());
    let events = cluster.list("default", "events");
    for reason in ["ProfileChanged", "Draining"] {
        let told = events
            .iter()
            .any(|e| e["involvedObject"]["name"] == "fp-life" && e["reason"] == reason);
        assert!(told, "{reason}");
    }
    cluster.kubectl(&["delete", "namespace", "life", "--wait=false"]);
}
