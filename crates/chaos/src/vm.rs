//! The pods of a scene, and what a machine has of their VMs.

use crate::fault::{Fault, Phase};
use monopod_testkit::{Site, process, record_of, records};
use serde_json::{Value, json};

/// What a machine has written down of a VM.
pub(crate) struct Stored {
    /// Its name on the machine, by which VMs are in the order of their start.
    id: String,
    /// Its process, once there is one.
    pub(crate) pid: Option<i32>,
}

fn stored(record: &Value) -> Option<Stored> {
    Some(Stored {
        id: record["id"].as_str()?.to_owned(),
        pid: process(record),
    })
}

/// The VM of an environment.
pub(crate) fn of(site: &Site, environment: &Value) -> Option<Stored> {
    stored(&record_of(environment, site).ok()?)
}

/// The newest VM of a machine that was started after another one, whether or not an environment has it yet.
pub(crate) fn started_after(site: &Site, another: Option<&str>) -> Option<Stored> {
    let all = records(site).into_iter().filter_map(|vm| stored(&vm));
    let newer = all.filter(|vm| Some(vm.id.as_str()) > another);
    newer.max_by(|one, other| one.id.cmp(&other.id))
}

/// A pod that has something in its log, and ends some seconds after it is told to.
pub(crate) fn pod(name: &str) -> Value {
    with_work(name, "sleep 0.2")
}

fn with_work(name: &str, work: &str) -> Value {
    let script =
        format!("trap 'sleep 2; exit 0' TERM; echo begun; n=0; while true; do {work}; done");
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "terminationGracePeriodSeconds": 10,
            "containers": [{"name": "main", "image": "monopod.local/busybox", "command": ["sh", "-c", script]}],
        },
    })
}

/// The pod that a fault meets; what makes it meet it differs.
pub(crate) fn target(name: &str, fault: Fault, phase: Phase, number: u32) -> Value {
    let mut pod = match fault {
        // Needs room all the time: twenty files in turns.
        Fault::DiskFull => with_work(
            name,
            "dd if=/dev/zero of=/tmp/$((n % 20)) bs=1M count=4 conv=fsync 2>/dev/null; n=$((n + 1)); sleep 0.5",
        ),
        _other => pod(name),
    };
    if fault == Fault::VmFrozen {
        // Not for the five minutes that are the default.
        let tolerated = ["not-ready", "unreachable"].map(|why| {
            json!({"key": format!("node.kubernetes.io/{why}"), "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10})
        });
        pod["spec"]["tolerations"] = json!(tolerated);
    }
    if matches!(fault, Fault::VmFrozen | Fault::HostCutOff) && phase == Phase::Booting {
        // Of a size that no VM was made for yet, or it would have booted before.
        let memory = format!("{}Mi", 1500 + 1024 * (number % 4));
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"memory": memory}});
    }
    pod
}
