//! What VMs are held to, and what is said about how they are run.

use crate::lifecycle::{record, vm_process};
use crate::{START, namespace, shell_pod};
use monopod_testkit::{Cluster, cpu_time, wait};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) fn limits(cluster: &Cluster) {
    let hosts = cluster.list("", "host");
    let status = &hosts[0]["status"];
    told(cluster, status);
    namespace(cluster, "limits");
    cluster.apply(&shell_pod("limits", "busy", "while :; do :; done"));
    let pod = cluster.wait_ready("limits", "busy", START);
    let environment = cluster.environment_of(&pod).expect("an environment");
    // A quarter of a CPU, from when it is Running.
    let process = vm_process(cluster, &environment);
    let most = 0.25 * 1.1;
    wait("its share is limited", Duration::from_secs(30), || {
        let share = share(process, Duration::from_secs(3));
        (share < most)
            .then_some(())
            .ok_or_else(|| share.to_string())
    });
    let share = share(process, Duration::from_secs(10));
    assert!(share < most, "{share}");
    let record = record(cluster, &environment);
    let groups: Vec<&str> = record["groups"]
        .as_array()
        .expect("its groups")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert!(!groups.is_empty(), "{record}");
    cluster.kubectl(&["delete", "namespace", "limits", "--wait=false"]);
    wait("its groups are gone", START, || {
        let left: Vec<_> = groups
            .iter()
            .filter(|group| Path::new(group).exists())
            .collect();
        left.is_empty()
            .then_some(())
            .ok_or_else(|| format!("{left:?}"))
    });
}

/// A pod with limits of its own, and a runtime class with overhead; another class is refused.
pub(crate) fn of_the_pod(cluster: &Cluster) {
    namespace(cluster, "pod-level");
    let class = |name: &str, handler: &str| {
        json!({
            "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": handler,
            "overhead": {"podFixed": {"cpu": "50m", "memory": "32Mi"}},
        })
    };
    cluster.apply(&class("plain", "runc"));
    cluster.apply(&class("sandbox", "runsc"));
    let look = "cd /sys/fs/cgroup && cat cpu.max memory.max && exec sleep 100000";
    let mut pod = shell_pod("pod-level", "own", look);
    pod["spec"]["runtimeClassName"] = json!("plain");
    pod["spec"]["resources"] = json!({"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "200m", "memory": "96Mi"}});
    // One read into much memory: what an emulated CPU can do in time with a fifth of a core.
    let eater =
        "sleep 5; dd if=/dev/zero of=/dev/null bs=300M count=1; echo survived; sleep 100000";
    let second =
        json!({"name": "eats", "image": "monopod.local/busybox", "command": ["sh", "-c", eater]});
    pod["spec"]["containers"]
        .as_array_mut()
        .expect("containers")
        .push(second);
    cluster.apply(&pod);
    // Neither container has a limit; the one that eats more than the pod may is ended, and it alone.
    let pod = wait("what eats too much is ended", START, || {
        let pod = cluster.get("pod-level", "pod", "own").ok_or("no pod")?;
        let statuses = pod["status"]["containerStatuses"].as_array().cloned();
        let statuses = statuses.unwrap_or_default();
        let of = |name: &str| statuses.iter().find(|s| s["name"] == name).cloned();
        let (Some(eats), Some(main)) = (of("eats"), of("main")) else {
            return Err(pod["status"].to_string());
        };
        if eats["state"]["terminated"]["reason"] == "OOMKilled" {
            assert!(main["state"]["running"].is_object(), "{main}");
            Ok(pod)
        } else {
            Err(pod["status"].to_string())
        }
    });
    assert_eq!(pod["spec"]["overhead"]["cpu"], "50m");
    assert_eq!(pod["status"]["qosClass"], "Burstable");
    let logs = cluster.kubectl(&["logs", "-n", "pod-level", "own", "-c", "main"]);
    assert_eq!(logs, format!("20000 100000\n{}\n", 96 << 20));
    let mut refused = shell_pod("pod-level", "sandboxed", "true");
    refused["spec"]["runtimeClassName"] = json!("sandbox");
    cluster.apply(&refused);
    let failed = cluster.wait_phase("pod-level", "sandboxed", "Failed", START);
    assert_eq!(failed["status"]["reason"], "UnsupportedPodSpec");
    let message = failed["status"]["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("spec.runtimeClassName") && message.contains("serves runc alone"),
        "{message}"
    );
    cluster.kubectl(&["delete", "runtimeclass", "plain", "sandbox"]);
    cluster.kubectl(&["delete", "namespace", "pod-level", "--wait=false"]);
}

/// The Host and `monopod status` say the same.
fn told(cluster: &Cluster, status: &Value) {
    let accelerator = status["accelerator"].as_str().unwrap_or_default();
    let reason = status["acceleratorReason"].as_str().unwrap_or_default();
    if accelerator == "kvm" {
        assert_eq!(reason, "");
    } else {
        assert_eq!(accelerator, "tcg");
        let named = reason.contains("KVM") || reason.contains("/dev/kvm");
        assert!(named, "{reason}");
    }
    assert_eq!(
        status["vmLimits"],
        json!(["cpu", "memory", "threads"]),
        "{status}"
    );
    let json: Value =
        serde_json::from_str(&cluster.monopod(&["status", "-o", "json"]).out).expect("JSON");
    let host = &json["hosts"][0];
    for field in ["accelerator", "acceleratorReason", "vmLimits"] {
        assert_eq!(host[field], status[field], "{field}");
    }
    let text = cluster.monopod(&["status"]).out;
    assert!(
        text.contains("cpu,memory,threads") && text.contains(reason),
        "{text}"
    );
    let wide = cluster.kubectl(&["get", "hosts", "-o", "wide"]);
    assert!(
        wide.contains(reason) && wide.contains("VM-LIMITS"),
        "{wide}"
    );
    let explained = cluster.kubectl(&["explain", "hosts.status"]);
    for words in ["does not boot", "Why not KVM", "control groups limit"] {
        let explained = explained.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(explained.contains(words), "{explained}");
    }
}

/// CPU time that a process takes in some time, in CPUs.
fn share(process: i32, time: Duration) -> f64 {
    let used = || cpu_time(process).expect("it runs").as_secs_f64();
    let (start, before) = (Instant::now(), used());
    std::thread::sleep(time);
    (used() - before) / start.elapsed().as_secs_f64()
}
