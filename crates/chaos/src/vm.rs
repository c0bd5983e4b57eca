//! The pods of a scene, and what a machine has of their VMs.

use crate::fault::Fault;
use monopod_testkit::{Site, command_line, process, record_of, records};
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

/// The VM that boots for an environment of a size that no VM had before, once it has a process: the newest that was
/// started after another one.
pub(crate) fn boots(site: &Site, environment: &Value, another: Option<&str>) -> Option<Stored> {
    let memory = environment["spec"]["size"]["memoryMib"].as_u64()?;
    let all = records(site).into_iter().filter_map(|vm| stored(&vm));
    let newer = all.filter(|vm| Some(vm.id.as_str()) > another);
    let of_size = newer.filter(|vm| {
        let has = |word: &str| vm.pid.is_some_and(|pid| has_argument(pid, word));
        has(&format!("id=memory,size={memory}M")) && !has("-incoming")
    });
    of_size.max_by(|one, other| one.id.cmp(&other.id))
}

fn has_argument(pid: i32, word: &str) -> bool {
    command_line(pid)
        .split('\0')
        .any(|argument| argument.contains(word))
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

/// vCPUs and GiB of memory of pods, of which no VM is made before one is asked for: after that, VMs are copies of it,
/// which do not boot.
pub(crate) const SIZES: [(u32, u32); 12] = [
    (1, 2),
    (1, 3),
    (1, 4),
    (1, 5),
    (1, 6),
    (1, 7),
    (1, 8),
    (2, 4),
    (2, 5),
    (2, 6),
    (2, 7),
    (2, 8),
];

/// The pod that a fault meets; what makes it meet it differs.
pub(crate) fn target(name: &str, fault: Fault, new_size: Option<(u32, u32)>) -> Value {
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
    if let Some(cpu_and_memory) = new_size {
        let (cpu, gib) = cpu_and_memory;
        // Beside what the size has for Kubernetes' own.
        let memory = format!("{}Mi", gib * 1024 - 300);
        let requests = json!({"cpu": cpu, "memory": memory});
        pod["spec"]["containers"][0]["resources"] = json!({"requests": requests});
    }
    pod
}
