//! What came of a fault.

use super::{PATIENCE, Scene, TARGET, until, until_none, within};
use crate::fault::{Fault, Phase};
use monopod_testkit::is_ready;
use serde_json::Value;
use std::fmt;
use std::time::Duration;

/// How long a pod may be there whose end was asked for, once the fault is over. Also if its VM does not end it: then
/// its host is told to end the VM after the grace period of 10 s and control's margin of 5 s, and may take the rest of
/// a minute on a busy machine.
const RETIRED: Duration = Duration::from_mins(1);
/// The same of a machine that was cut off: its watch may be silent for as long again.
const HEALED: Duration = Duration::from_mins(3);

/// What came of one try.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// What happened to pods that should not have.
    pub(crate) lost: Vec<String>,
    /// What stayed.
    pub(crate) left: Vec<String>,
    /// How long after the pod's end nothing was left, or, if something stayed, how long that was waited for. What it
    /// takes to look at the others first is in it.
    pub(crate) cleaned: Duration,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<&str> = self
            .lost
            .iter()
            .chain(&self.left)
            .map(String::as_str)
            .collect();
        f.write_str(if all.is_empty() { "ok" } else { "NOT OK: " })?;
        write!(
            f,
            "{}, cleaned after {} s",
            all.join("; "),
            self.cleaned.as_secs()
        )
    }
}

impl Scene {
    /// Whether the pod stays whose end was asked for.
    pub(super) fn stays(&self, fault: Fault, phase: Phase) -> Option<String> {
        let limit = match (fault, phase) {
            (Fault::HostCutOff, Phase::Ending) => HEALED,
            (_, Phase::Ending) => RETIRED,
            // Kubernetes finds out that its node is silent, and evicts it.
            _ => PATIENCE,
        };
        let mut untold = None;
        let gone = within(limit, "the pod is gone", || {
            let get = ["get", "pod", TARGET, "--ignore-not-found", "-o", "json"];
            let answer = self.cluster.try_kubectl(&get);
            let pod: Value = serde_json::from_str(&answer.out).unwrap_or_default();
            let has_ended =
                pod["status"]["phase"] == "Failed" || pod["status"]["phase"] == "Succeeded";
            if has_ended && pod["metadata"]["deletionTimestamp"].is_null() {
                untold = Some(format!("it ended before anybody asked: {}", pod["status"]));
            }
            (answer.success && answer.out.is_empty()).then_some(())
        });
        untold.or_else(|| gone.err().map(|error| error.to_string()))
    }

    /// What is wrong with the pod that the fault met, once the cluster is whole.
    pub(super) fn judge(&self, fault: Fault, phase: Phase, created: &Value) -> Option<String> {
        let uid = &created["metadata"]["uid"];
        let reached = until("the pod is as it should be", || {
            let pod = self.pod(TARGET)?;
            let has_failed = pod["status"]["phase"] == "Failed";
            // Killed before or after the pod was bound, as it happened, unless it ran.
            let as_it_should = match (fault, phase) {
                (Fault::Vm, Phase::Running) => has_failed,
                (Fault::Vm, _) => has_failed || is_ready(&pod),
                _ => is_ready(&pod),
            };
            as_it_should.then_some(pod)
        });
        let pod = match reached {
            Ok(pod) => pod,
            Err(error) => {
                let now = self.pod(TARGET).unwrap_or_default();
                return Some(format!("{error}: {}", now["status"]));
            }
        };
        if pod["metadata"]["uid"] != *uid {
            return Some("it is another pod".to_owned());
        }
        if fault == Fault::Vm && pod["status"]["phase"] == "Failed" {
            let reason = pod["status"]["reason"].as_str().unwrap_or_default();
            return (reason != "EnvironmentLost").then(|| format!("failed with {reason:?}"));
        }
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        (phase == Phase::Running && fault != Fault::Vm && *restarts != 0)
            .then(|| format!("restarted {restarts} times"))
    }

    /// Pods that should not have noticed anything, and did.
    pub(super) fn noticed(&self) -> Vec<String> {
        let changed = |before: &Value| {
            let name = before["metadata"]["name"].as_str()?;
            // Its node may be told NotReady while it cannot be reached, and is Ready again.
            let ready = until("it is Ready", || self.pod(name).filter(is_ready));
            let Ok(after) = ready else {
                return Some(format!("{name} is not Ready any more"));
            };
            // Before the next fault: the time to an eviction goes on as long as it has a taint.
            if until("its node is whole", || self.has_whole_node(&after)).is_err() {
                return Some(format!("{name} is on a node with a taint"));
            }
            let same = after["metadata"]["uid"] == before["metadata"]["uid"];
            let restarts = &after["status"]["containerStatuses"][0]["restartCount"];
            (!same || *restarts != 0).then(|| format!("{name} was replaced or restarted"))
        };
        self.bystanders.iter().filter_map(changed).collect()
    }

    fn has_whole_node(&self, pod: &Value) -> Option<()> {
        let node = self
            .cluster
            .get("", "node", pod["spec"]["nodeName"].as_str()?)?;
        let mut taints = node["spec"]["taints"].as_array().into_iter().flatten();
        let has_trouble = taints.any(|taint| {
            let key = taint["key"].as_str().unwrap_or_default();
            key.starts_with("node.kubernetes.io/")
        });
        (!has_trouble).then_some(())
    }
    /// What stays of all pods but the bystanders.
    pub(super) fn left(&self) -> Vec<String> {
        until_none("nothing is left", || {
            let now = self.inventory()?.left();
            Some(now.difference(&self.before).cloned().collect())
        })
    }
}
