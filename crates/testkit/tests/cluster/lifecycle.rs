use crate::byhand::in_vpc;
use crate::{START, event_messages, namespace, shell_pod};
use monopod_testkit::{Cluster, is_ready, kill, process, record_of, records, wait};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// What the issue promises after the end of the grace period.
pub(crate) const GONE: Duration = Duration::from_secs(10);

/// What is left of a pod's environment.
pub(crate) fn leftovers(cluster: &Cluster, environment: &Value) -> Vec<String> {
    monopod_testkit::leftovers(cluster, environment, &cluster.site())
}

pub(crate) fn gone(cluster: &Cluster, environment: &Value, limit: Duration) {
    wait("everything of the pod is gone", limit, || {
        let left = leftovers(cluster, environment);
        if left.is_empty() {
            Ok(())
        } else {
            Err(left.join(", "))
        }
    });
}

/// A part, as `monopod status` tells it.
fn part_status(cluster: &Cluster, name: &str) -> Value {
    monopod_testkit::part(&cluster.monopod(&["status", "-o", "json"]), name)
}

/// The process of a part, and how often it was started again.
pub(crate) fn part(cluster: &Cluster, name: &str) -> (i32, u64) {
    let part = part_status(cluster, name);
    let pid = part["pid"]
        .as_i64()
        .and_then(|p| i32::try_from(p).ok())
        .expect("a process id");
    (pid, part["restarts"].as_u64().unwrap_or(0))
}

/// Waits until a part was started again and is ready; a host first finds out what runs its VMs.
pub(crate) fn restarted(cluster: &Cluster, name: &str, before: u64) {
    wait(
        &format!("{name} runs again"),
        Duration::from_mins(1),
        || {
            let (_, restarts) = part(cluster, name);
            if restarts > before && part_status(cluster, name)["ready"] == true {
                Ok(())
            } else {
                Err(format!("{restarts} restarts"))
            }
        },
    );
}

pub(crate) fn deletion(cluster: &Cluster) {
    namespace(cluster, "grace");
    // Ignores SIGTERM for three seconds, then ends by itself within its minute.
    let mut pod = shell_pod(
        "grace",
        "slow",
        "trap 'sleep 3; echo bye; exit 0' TERM; echo trapped; while true; do sleep 0.2; done",
    );
    pod["spec"]["terminationGracePeriodSeconds"] = 60.into();
    cluster.apply(&pod);
    let pod = cluster.wait_ready("grace", "slow", START);
    // Before that a first process ignores the signal.
    wait("it listens", START, || {
        let said = crate::logs::read(cluster, "grace", &["slow"]);
        (said == "trapped\n").then_some(()).ok_or(said)
    });
    let environment = cluster.environment_of(&pod).expect("an environment");
    let start = Instant::now();
    cluster.kubectl(&["delete", "pod", "-n", "grace", "slow"]);
    let took = start.elapsed();
    assert!(
        took >= Duration::from_secs(3),
        "SIGTERM was not honoured: {took:?}"
    );
    assert!(
        took < Duration::from_secs(40),
        "its own end was not noticed: {took:?}"
    );
    gone(cluster, &environment, GONE);
    // One that never listens is killed at the end of its grace period.
    let mut pod = shell_pod(
        "grace",
        "deaf",
        "trap '' TERM; while true; do sleep 0.2; done",
    );
    pod["spec"]["terminationGracePeriodSeconds"] = 2.into();
    cluster.apply(&pod);
    let pod = cluster.wait_ready("grace", "deaf", START);
    let environment = cluster.environment_of(&pod).expect("an environment");
    let start = Instant::now();
    cluster.kubectl(&["delete", "pod", "-n", "grace", "deaf"]);
    assert!(
        (2..25).contains(&start.elapsed().as_secs()),
        "{:?}",
        start.elapsed()
    );
    gone(cluster, &environment, GONE);
    cluster.kubectl(&["delete", "namespace", "grace", "--wait=false"]);
}

pub(crate) fn deleted_while_booting(cluster: &Cluster) {
    namespace(cluster, "early");
    cluster.apply(&slow_pod("early", "brief", "1500Mi"));
    let environment = wait("its VM boots", Duration::from_secs(20), || {
        let pod = cluster.get("early", "pod", "brief").unwrap_or_default();
        let environment = cluster.environment_of(&pod).ok_or("no environment")?;
        if environment["status"]["phase"] == "Booting" {
            Ok(environment)
        } else {
            Err(environment["status"].to_string())
        }
    });
    cluster.kubectl(&["delete", "pod", "-n", "early", "brief"]);
    gone(cluster, &environment, GONE);
    cluster.kubectl(&["delete", "namespace", "early", "--wait=false"]);
}

pub(crate) fn control_killed(cluster: &Cluster) {
    namespace(cluster, "killed");
    let (pid, restarts) = part(cluster, "control");
    cluster.apply(&slow_pod("killed", "orphan", "2700Mi"));
    wait(
        "it is nominated and not bound",
        Duration::from_secs(20),
        || {
            let pod = cluster.get("killed", "pod", "orphan").unwrap_or_default();
            let bound = pod["spec"]["nodeName"].is_string();
            assert!(!bound, "the VM was faster than the test");
            if pod["status"]["nominatedNodeName"].is_string() {
                Ok(())
            } else {
                Err(pod["status"].to_string())
            }
        },
    );
    kill(pid);
    restarted(cluster, "control", restarts);
    let pod = cluster.wait_ready("killed", "orphan", START);
    let uid = pod["metadata"]["uid"].as_str().expect("a uid");
    let environments: Vec<Value> = cluster
        .list("", "environments")
        .into_iter()
        .filter(|e| e["spec"]["pod"]["uid"] == uid)
        .collect();
    assert_eq!(environments.len(), 1, "one environment");
    let nodes: Vec<Value> = cluster
        .list("", "nodes")
        .into_iter()
        .filter(|n| {
            n["spec"]["providerID"]
                .as_str()
                .is_some_and(|p| p.ends_with(uid))
        })
        .collect();
    assert_eq!(nodes.len(), 1, "one node");
    let id = record(cluster, &environments[0])["id"].clone();
    let vms = records(&cluster.site()).into_iter();
    let vms = vms.filter(|vm| vm["id"] == id);
    assert_eq!(vms.count(), 1, "one VM");
    cluster.kubectl(&["delete", "namespace", "killed", "--wait=false"]);
}

/// A pod of a size that no VM was made for yet, so that its start takes seconds.
pub(crate) fn slow_pod(namespace: &str, name: &str, memory: &str) -> Value {
    let mut pod = shell_pod(namespace, name, "sleep 1000");
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"memory": memory}});
    pod
}

/// What the host knows of an environment's VM.
pub(crate) fn record(cluster: &Cluster, environment: &Value) -> Value {
    record_of(environment, &cluster.site()).expect("a record")
}

/// The process of an environment's VM.
pub(crate) fn vm_process(cluster: &Cluster, environment: &Value) -> i32 {
    process(&record(cluster, environment)).expect("a process id")
}

/// Ends the VM of an environment without a word.
pub(crate) fn kill_vm(cluster: &Cluster, environment: &Value) {
    kill(vm_process(cluster, environment));
}

pub(crate) fn vm_dies(cluster: &Cluster) {
    namespace(cluster, "dies");
    let mut victim = shell_pod("dies", "victim", "echo last words; sleep 1000");
    victim["metadata"]["labels"] = json!({"app": "victim"});
    cluster.apply(&victim);
    victim["spec"]["restartPolicy"] = json!("Always");
    let pod = cluster.wait_ready("dies", "victim", START);
    let environment = cluster.environment_of(&pod).expect("an environment");
    let name = environment["metadata"]["name"].as_str().expect("a name");
    let archive = cluster.data().join("host/logs").join(name).join("0.0.0");
    wait("its log is archived", Duration::from_secs(20), || {
        let text = std::fs::read_to_string(&archive).map_err(|error| error.to_string())?;
        text.contains("last words").then_some(()).ok_or(text)
    });
    // It takes the pod for its own.
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "keeper", "namespace": "dies"},
        "spec": {
            "replicas": 1, "selector": {"matchLabels": {"app": "victim"}},
            "template": {"metadata": {"labels": {"app": "victim"}}, "spec": victim["spec"]},
        },
    }));
    wait("a controller has the pod", Duration::from_secs(20), || {
        let pod = cluster.get("dies", "pod", "victim").ok_or("it is gone")?;
        let owner = pod["metadata"]["ownerReferences"].to_string();
        owner.contains("keeper").then_some(()).ok_or(owner)
    });
    kill_vm(cluster, &environment);
    let failed = cluster.wait_phase("dies", "victim", "Failed", Duration::from_secs(30));
    assert_eq!(failed["status"]["reason"], "EnvironmentLost");
    let conditions = failed["status"]["conditions"]
        .as_array()
        .expect("conditions");
    assert!(
        conditions
            .iter()
            .any(|c| c["type"] == "DisruptionTarget" && c["status"] == "True")
    );
    assert!(!event_messages(cluster, "dies", "victim", "EnvironmentLost").is_empty());
    let container = &failed["status"]["containerStatuses"][0];
    assert_eq!(container["ready"], false);
    assert_eq!(container["state"]["terminated"]["exitCode"], 137);
    assert_eq!(
        container["state"]["terminated"]["reason"],
        "EnvironmentLost"
    );
    assert_eq!(
        crate::logs::read(cluster, "dies", &["victim"]),
        "last words\n"
    );
    wait("its controller has replaced it", START, || {
        let pods = cluster.list("dies", "pods");
        let replaced = pods
            .iter()
            .any(|pod| is_ready(pod) && pod["metadata"]["name"] != "victim");
        replaced
            .then_some(())
            .ok_or_else(|| json!(pods).to_string())
    });
    cluster.kubectl(&["delete", "pod", "-n", "dies", "victim"]);
    gone(cluster, &environment, GONE);
    cluster.kubectl(&["delete", "namespace", "dies", "--wait=false"]);
}

pub(crate) fn host_restarts(cluster: &Cluster) {
    namespace(cluster, "adopted");
    cluster.apply(&shell_pod("adopted", "steady", "sleep 1000"));
    let before = cluster.wait_ready("adopted", "steady", START);
    let (pid, restarts) = part(cluster, "host");
    kill(pid);
    restarted(cluster, "host", restarts);
    follows_services(cluster);
    let answered = cluster.kubectl(&["exec", "-n", "adopted", "steady", "--", "echo", "alive"]);
    assert_eq!(answered, "alive\n");
    let after = cluster.wait_ready("adopted", "steady", START);
    assert_eq!(before["metadata"]["uid"], after["metadata"]["uid"]);
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
    let environment = cluster.environment_of(&after).expect("an environment");
    assert_eq!(environment["status"]["phase"], "Running");
    cluster.kubectl(&["delete", "pod", "-n", "adopted", "steady"]);
    gone(cluster, &environment, GONE);
    cluster.kubectl(&["delete", "namespace", "adopted", "--wait=false"]);
}

/// kube-proxy, which was started again, knows a new service soon: by itself it would first wait for a
/// Node for half a minute.
fn follows_services(cluster: &Cluster) {
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "new", "namespace": "adopted"},
        "spec": {"ports": [{"port": 80}]},
    }));
    let address = cluster.service_address("adopted", "new");
    wait("the service has rules", Duration::from_secs(20), || {
        let rules = in_vpc(cluster, &["nft", "list", "table", "ip", "kube-proxy"]);
        rules
            .contains(&address)
            .then_some(())
            .ok_or_else(|| address.clone())
    });
}

/// Killed, the supervisor stops nothing in order: its parts get a signal each, and the API server takes its time.
pub(crate) fn supervisor_killed(cluster: &Cluster) {
    namespace(cluster, "unsupervised");
    cluster.apply(&shell_pod("unsupervised", "same", "sleep 1000"));
    let before = cluster.wait_ready("unsupervised", "same", START);
    let pid = std::fs::read_to_string(cluster.data().join("supervisor.pid"));
    kill(
        pid.expect("its process id")
            .trim()
            .parse()
            .expect("a number"),
    );
    let output = cluster.bring_up();
    assert!(output.success, "{}{}", output.out, output.err);
    let after = cluster.wait_ready("unsupervised", "same", START);
    assert_eq!(before["metadata"]["uid"], after["metadata"]["uid"]);
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
    cluster.kubectl(&["exec", "-n", "unsupervised", "same", "--", "true"]);
    cluster.kubectl(&["delete", "namespace", "unsupervised", "--wait=false"]);
}

pub(crate) fn up_again(cluster: &Cluster) {
    namespace(cluster, "again");
    cluster.apply(&shell_pod("again", "same", "sleep 1000"));
    let before = cluster.wait_ready("again", "same", START);
    let start = Instant::now();
    let output = cluster.bring_up();
    assert!(output.out.contains("is running already"), "{}", output.out);
    assert!(start.elapsed() < Duration::from_secs(20));
    let after = cluster.get("again", "pod", "same").expect("still there");
    assert_eq!(before["metadata"]["uid"], after["metadata"]["uid"]);
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
    let status = cluster.monopod(&["status"]);
    assert!(
        status.success && status.out.contains("again/same"),
        "{}",
        status.out
    );
    // Left running: `down` must end it too.
}
