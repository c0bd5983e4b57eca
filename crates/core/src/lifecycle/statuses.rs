//! The status of a pod whose environment is lost: nobody else can say how its containers ended.

use super::is_terminal;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateTerminated, ContainerStatus, Pod, PodCondition, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use monopod_api::messages;

/// As the kubelet reports a container that was there and is not: ended by `SIGKILL`.
const LOST: i32 = 137;

/// The part of the status to write; none if the pod has ended by itself.
///
/// Containers that were started are terminated. Those that never were stay as they are, not ready.
pub fn lost_status(pod: &Pod, message: &str, now: Timestamp) -> Option<PodStatus> {
    if is_terminal(pod) {
        return None;
    }
    let status = pod.status.clone().unwrap_or_default();
    let initialized = status
        .conditions
        .iter()
        .flatten()
        .any(|c| c.type_ == "Initialized" && c.status == "True");
    let end = |list: Option<Vec<ContainerStatus>>, all: bool| {
        list.map(|list| {
            list.into_iter()
                .map(|status| ended(status, all, message, now))
                .collect()
        })
    };
    let condition = |kind: &str, value: &str| PodCondition {
        type_: kind.to_owned(),
        status: value.to_owned(),
        reason: Some(messages::ENVIRONMENT_LOST.to_owned()),
        message: Some(message.to_owned()),
        last_transition_time: Some(Time(now)),
        observed_generation: pod.metadata.generation,
        ..PodCondition::default()
    };
    Some(PodStatus {
        phase: Some("Failed".to_owned()),
        reason: Some(messages::ENVIRONMENT_LOST.to_owned()),
        message: Some(message.to_owned()),
        conditions: Some(vec![
            condition("DisruptionTarget", "True"),
            condition("Ready", "False"),
            condition("ContainersReady", "False"),
        ]),
        init_container_statuses: end(status.init_container_statuses, false),
        container_statuses: end(status.container_statuses, initialized),
        ephemeral_container_statuses: end(status.ephemeral_container_statuses, false),
        ..PodStatus::default()
    })
}

/// A container's end. `all`: also of one that only waits, as its turn had come.
fn ended(mut status: ContainerStatus, all: bool, message: &str, now: Timestamp) -> ContainerStatus {
    let state = status.state.take().unwrap_or_default();
    status.ready = false;
    status.started = Some(false);
    if state.terminated.is_some() || !(all || status.container_id.is_some()) {
        status.state = Some(state);
        return status;
    }
    status.state = Some(ContainerState {
        terminated: Some(ContainerStateTerminated {
            container_id: status.container_id.clone(),
            exit_code: LOST,
            reason: Some(messages::ENVIRONMENT_LOST.to_owned()),
            message: Some(message.to_owned()),
            started_at: state.running.and_then(|running| running.started_at),
            finished_at: Some(Time(now)),
            signal: None,
        }),
        ..ContainerState::default()
    });
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn pod(status: &Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status})).unwrap()
    }

    fn any_state() -> impl Strategy<Value = Value> {
        prop::sample::select(vec![
            json!({"waiting": {"reason": "CrashLoopBackOff"}}),
            json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}}),
            json!({"terminated": {"exitCode": 3, "reason": "Error"}}),
        ])
    }

    proptest! {
        /// In the end nothing is ready or running, whatever a node wrote before.
        #[test]
        fn nothing_is_ready_or_running(
            states in prop::collection::vec((any_state(), any::<bool>(), any::<bool>()), 0..4),
            initialized: bool,
            phase in prop::sample::select(vec!["Pending", "Running", "Succeeded", "Failed"]),
        ) {
            let list: Vec<Value> = states.iter().enumerate().map(|(n, (state, id, ready))| {
                let mut status = json!({"name": format!("c{n}"), "state": state, "ready": ready, "started": ready,
                    "image": "i", "imageID": "", "restartCount": 2, "lastState": {"terminated": {"exitCode": 5}}});
                if *id || state.get("running").is_some() {
                    status["containerID"] = json!("monopod://x");
                }
                status
            }).collect();
            let initialized = if initialized { "True" } else { "False" };
            let pod = pod(&json!({"phase": phase, "containerStatuses": list, "initContainerStatuses": list,
                "conditions": [{"type": "Initialized", "status": initialized}]}));
            let lost = lost_status(&pod, "the VM died", Timestamp::UNIX_EPOCH);
            if matches!(phase, "Succeeded" | "Failed") {
                prop_assert_eq!(lost, None);
                return Ok(());
            }
            let lost = lost.expect("a status");
            prop_assert_eq!(lost.phase.as_deref(), Some("Failed"));
            let before = pod.status.expect("given");
            for (before, after) in [(before.container_statuses, lost.container_statuses), (before.init_container_statuses, lost.init_container_statuses)] {
                let (before, after) = (before.unwrap_or_default(), after.unwrap_or_default());
                prop_assert_eq!(before.len(), after.len());
                for (before, after) in before.into_iter().zip(after) {
                    prop_assert!(!after.ready && after.started == Some(false));
                    prop_assert_eq!((&before.last_state, before.restart_count), (&after.last_state, after.restart_count));
                    let (old, new) = (before.state.expect("given"), after.state.expect("a state"));
                    prop_assert!(new.running.is_none());
                    if old.terminated.is_some() {
                        prop_assert_eq!(old, new);
                    } else if old.running.is_some() {
                        let end = new.terminated.expect("it was running");
                        prop_assert_eq!(end.exit_code, 137);
                        prop_assert_eq!(end.started_at, old.running.and_then(|r| r.started_at));
                    }
                }
            }
        }
    }

    #[test]
    fn a_container_that_never_was_started_is_not_said_to_have_ended() {
        let waiting = json!({"name": "c", "state": {"waiting": {"reason": "PodInitializing"}}, "ready": false,
            "image": "i", "imageID": "", "restartCount": 0});
        let lost = |initialized: &str| {
            let pod = pod(
                &json!({"phase": "Pending", "containerStatuses": [waiting], "initContainerStatuses": [waiting],
                "conditions": [{"type": "Initialized", "status": initialized}]}),
            );
            let status = lost_status(&pod, "gone", Timestamp::UNIX_EPOCH).unwrap();
            let ended = |list: Option<Vec<ContainerStatus>>| {
                list.unwrap()[0]
                    .state
                    .clone()
                    .unwrap()
                    .terminated
                    .map(|t| t.reason.unwrap())
            };
            (
                ended(status.container_statuses),
                ended(status.init_container_statuses),
            )
        };
        assert_eq!(lost("False"), (None, None));
        assert_eq!(lost("True"), (Some("EnvironmentLost".to_owned()), None));
    }
}
