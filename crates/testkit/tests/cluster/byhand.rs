//! What an operator deletes by hand under a running pod: it comes back, or the pod ends with a reason.

use crate::lifecycle::{GONE, gone, kill_vm, part, restarted, vm_process};
use crate::logs::environment_in;
use crate::{START, namespace, shell_pod};
use monopod_testkit::{Cluster, is_ready, is_vm, kill, tap, wait};
use serde_json::{Value, json};
use std::time::Duration;

/// What is looked at every 5 or 10 seconds is made again within this time.
const AGAIN: Duration = Duration::from_secs(45);
/// An interface without its environment goes a minute after it was made, and cools.
const UNUSED: Duration = Duration::from_secs(75);

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .expect(pointer)
}

/// Runs a program in the VPC's namespace.
pub(crate) fn in_vpc(cluster: &Cluster, arguments: &[&str]) -> String {
    cluster.site().in_vpc(arguments).out
}

/// Deletes an object, and waits until another has its name.
fn comes_back(cluster: &Cluster, namespace: &str, kind: &str, name: &str) -> Value {
    let before = cluster.get(namespace, kind, name).expect(name);
    let scope = [
        "-n",
        if namespace.is_empty() {
            "default"
        } else {
            namespace
        },
    ];
    cluster.kubectl(&[&["delete", kind, name, "--wait=false"], &scope[..]].concat());
    wait(&format!("{kind} {name} is there again"), AGAIN, || {
        let now = cluster.get(namespace, kind, name).ok_or("it is gone")?;
        if now["metadata"]["uid"] == before["metadata"]["uid"] {
            return Err("it is not deleted yet".to_owned());
        }
        Ok(now)
    })
}

/// Says what Kubernetes says of a node that was silent, and evicts its pod for; it says that it is not so.
fn ready_again(cluster: &Cluster, node: &str) {
    let unknown = r#"{"status":{"conditions":[{"type":"Ready","status":"Unknown"}]}}"#;
    cluster.kubectl(&["patch", "node", node, "--subresource=status", "-p", unknown]);
    wait("the node says that it is ready", AGAIN, || {
        let now = cluster.get("", "node", node).ok_or("it is gone")?;
        is_ready(&now).then_some(()).ok_or_else(|| now.to_string())
    });
}

/// What an operator may put on a node.
const TAINT: &str = "monopod.test/by-hand";

fn explained(cluster: &Cluster, pod: &Value) -> String {
    let (namespace, name) = (
        text(pod, "/metadata/namespace"),
        text(pod, "/metadata/name"),
    );
    cluster.monopod(&["explain", name, "-n", namespace]).out
}

/// The pod runs as if nothing had been.
fn unharmed(cluster: &Cluster, before: &Value) {
    let (namespace, name) = (
        text(before, "/metadata/namespace"),
        text(before, "/metadata/name"),
    );
    let after = cluster.wait_ready(namespace, name, START);
    assert_eq!(after["metadata"]["uid"], before["metadata"]["uid"]);
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
    let answer = cluster.kubectl(&["exec", "-n", namespace, name, "--", "echo", "alive"]);
    assert_eq!(answer, "alive\n");
}

pub(crate) fn repaired(cluster: &Cluster) {
    namespace(cluster, "repaired");
    let mut steady = shell_pod("repaired", "steady", "sleep 100000");
    steady["spec"]["tolerations"] = json!([{"key": TAINT, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10_000}]);
    cluster.apply(&steady);
    let pod = cluster.wait_ready("repaired", "steady", START);
    let environment = cluster.environment_of(&pod).expect("an environment");
    let node = text(&environment, "/spec/node");
    let interface = text(&environment, "/spec/networkInterface");

    // The node's, the host's and control's proof that they are there; the node itself; the host itself.
    comes_back(cluster, "kube-node-lease", "lease", node);
    comes_back(cluster, "monopod-host-host-1", "lease", "host-1");
    comes_back(cluster, "kube-system", "lease", "monopod-control");
    let again = comes_back(cluster, "", "node", node);
    assert!(text(&again, "/spec/providerID").ends_with(text(&environment, "/metadata/name")));
    comes_back(cluster, "", "host", "host-1");
    unharmed(cluster, &pod);

    ready_again(cluster, node);
    cluster.kubectl(&["taint", "node", node, &format!("{TAINT}=:NoExecute")]);
    let told = explained(cluster, &pod);
    assert!(
        told.contains("the pod is evicted 10000 s after it was"),
        "{told}"
    );
    cluster.kubectl(&["taint", "node", node, &format!("{TAINT}-")]);
    // What Kubernetes put there for its silence goes some seconds later.
    wait("nothing is in its way", AGAIN, || {
        let told = explained(cluster, &pod);
        told.contains("Nothing is in its way")
            .then_some(())
            .ok_or(told)
    });
    unharmed(cluster, &pod);

    // An address in use stays taken.
    cluster.kubectl(&["delete", "networkinterface", interface, "--wait=false"]);
    // Rules that are gone would let everything through.
    let rules = ["nft", "list", "chain", "inet", "monopod", "entering"];
    let judges = |cluster: &Cluster| in_vpc(cluster, &rules).contains("REJECT-in");
    assert!(judges(cluster), "the rules are there");
    in_vpc(cluster, &["nft", "delete", "table", "inet", "monopod"]);
    wait("the rules are there again", AGAIN, || {
        judges(cluster)
            .then_some(())
            .ok_or_else(|| in_vpc(cluster, &["nft", "list", "tables"]))
    });
    unharmed(cluster, &pod);
    assert!(cluster.get("", "networkinterface", interface).is_some());

    cluster.kubectl(&["delete", "pod", "-n", "repaired", "steady"]);
    gone(cluster, &environment, GONE);
    cluster.kubectl(&["delete", "namespace", "repaired", "--wait=false"]);
}

/// The node of a pod that finished is its host's to keep.
pub(crate) fn finished(cluster: &Cluster) {
    namespace(cluster, "finished");
    cluster.apply(&shell_pod("finished", "done", "true"));
    let pod = cluster.wait_phase("finished", "done", "Succeeded", START);
    let environment = environment_in(cluster, &pod, "Finished");
    let node = text(&environment, "/spec/node");
    comes_back(cluster, "kube-node-lease", "lease", node);
    ready_again(cluster, node);
    let after = cluster.get("finished", "pod", "done").expect("the pod");
    assert_eq!(after["metadata"]["uid"], pod["metadata"]["uid"]);
    cluster.kubectl(&["delete", "pod", "-n", "finished", "done"]);
    gone(cluster, &environment, GONE);
    cluster.kubectl(&["delete", "namespace", "finished", "--wait=false"]);
}

/// A pod of which something was deleted that cannot be made again; it leaves nothing within `limit`.
fn ends(
    cluster: &Cluster,
    (name, why): (&str, &str),
    limit: Duration,
    delete: impl FnOnce(&Value),
) {
    cluster.apply(&shell_pod("retired", name, "sleep 100000"));
    let pod = cluster.wait_ready("retired", name, START);
    let environment = cluster.environment_of(&pod).expect("an environment");
    let vm = vm_process(cluster, &environment);
    assert!(is_vm(vm), "process {vm} is the pod's VM");
    delete(&environment);
    let failed = cluster.wait_phase("retired", name, "Failed", AGAIN);
    assert_eq!(failed["status"]["reason"], "EnvironmentLost");
    let message = text(&failed, "/status/message");
    assert!(message.contains(why), "{message}");
    cluster.kubectl(&["delete", "pod", "-n", "retired", name]);
    gone(cluster, &environment, limit);
    assert!(!is_vm(vm), "VM process {vm}");
}

pub(crate) fn retired(cluster: &Cluster) {
    namespace(cluster, "retired");
    let name = |environment: &Value| text(environment, "/metadata/name").to_owned();
    ends(
        cluster,
        ("environment", "environment of this pod was deleted"),
        GONE,
        |environment| {
            cluster.kubectl(&["delete", "environment", &name(environment), "--wait=false"]);
        },
    );
    // Nobody is left to say that its node may go.
    ends(
        cluster,
        ("finalizers", "environment of this pod no longer exists"),
        UNUSED,
        |environment| {
            let let_go = ["--type=merge", "-p", r#"{"metadata":{"finalizers":null}}"#];
            let name = name(environment);
            cluster.kubectl(&[&["patch", "environment", &name], &let_go[..]].concat());
            cluster.kubectl(&["delete", "environment", &name]);
        },
    );
    ends(cluster, ("vm", "the VM died"), GONE, |environment| {
        kill_vm(cluster, environment);
    });
    ends(
        cluster,
        ("tap", "tap of the VM's network interface"),
        GONE,
        |environment| {
            let address = text(environment, "/spec/address").parse().expect("IPv4");
            in_vpc(cluster, &["ip", "link", "delete", &tap(address)]);
        },
    );
    // The host process that runs needs nothing of the VM's directory; the next one does.
    ends(
        cluster,
        ("directory", "the VM was gone"),
        GONE,
        |environment| {
            let vm = cluster.data().join("host/vms").join(name(environment));
            std::fs::remove_dir_all(vm).expect("removed");
            let (pid, restarts) = part(cluster, "host");
            kill(pid);
            restarted(cluster, "host", restarts);
        },
    );
    cluster.kubectl(&["delete", "namespace", "retired", "--wait=false"]);
}
