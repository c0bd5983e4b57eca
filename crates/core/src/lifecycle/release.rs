//! The end of an environment: released, lost, or not ending by itself.

use super::{
    Cause, Decision, Effect, FINAL_STATUS_MARGIN, Observed, TERMINATION_MARGIN, World, is_terminal,
    place,
};
use crate::placement::LEASE;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use monopod_api::environment::{Environment, PodReference};
use monopod_api::{labels, messages};

/// The environment is being deleted. The host goes first: nothing is freed under a living VM.
pub(super) fn released(
    observed: &Observed<'_>,
    environment: &Environment,
    world: &World<'_>,
    now: Timestamp,
) -> Decision {
    let holds = |finalizer: &str| {
        environment
            .metadata
            .finalizers
            .iter()
            .flatten()
            .any(|f| f == finalizer)
    };
    if holds(labels::HOST_FINALIZER) {
        return waits_for_host(observed, environment, world, now);
    }
    if !holds(labels::CONTROL_FINALIZER) {
        return Decision::idle();
    }
    let mut effects = vec![Effect::DeleteNode];
    if observed.interface.is_some() {
        effects.push(Effect::CoolInterface);
    }
    effects.push(Effect::ReleaseEnvironment);
    if let Some(pod) = observed
        .pod
        .filter(|pod| super::node_of(pod) == Some(&environment.spec.node))
    {
        effects.extend(lost(pod, "the environment of this pod was deleted").effects);
    }
    Decision::now(effects)
}

/// A pod whose attempt was given up waits for a host that may still run its VM.
fn waits_for_host(
    observed: &Observed<'_>,
    environment: &Environment,
    world: &World<'_>,
    now: Timestamp,
) -> Decision {
    let host = &environment.spec.host;
    let silent = world
        .candidates
        .iter()
        .all(|candidate| candidate.name != *host || !candidate.answers);
    let waits = |pod: &&Pod| super::node_of(pod).is_none() && !is_terminal(pod);
    match observed.pod.filter(waits) {
        Some(pod) if silent => {
            let PodReference {
                namespace, name, ..
            } = &environment.spec.pod;
            let message = format!(
                "{}: host {host} does not answer, and may still run the pod's VM; the next try is made once the host is back, or forgotten with `monopod host forget {host}`",
                messages::provisioning_timed_out(namespace, name),
            );
            place::explain(pod, Cause::Host, message, now)
        }
        // Whether it falls silent shows by then.
        Some(_) => Decision::at(now + LEASE),
        None => Decision::idle(),
    }
}

/// The pod's VM is gone for good.
pub(super) fn lost(pod: &Pod, message: &str) -> Decision {
    if pod.metadata.deletion_timestamp.is_some() {
        return Decision::now([Effect::DeletePod]);
    }
    if is_terminal(pod) {
        return Decision::idle();
    }
    Decision::now([Effect::FailPod {
        message: message.to_owned(),
    }])
}

/// The host says that the VM of a bound pod has ended.
pub(super) fn ended(pod: &Pod, environment: &Environment, now: Timestamp) -> Decision {
    let status = environment.status.clone().unwrap_or_default();
    let since = status.phases.last().map(|last| last.time.0);
    let settled = since.is_none_or(|since| since + FINAL_STATUS_MARGIN <= now);
    if is_terminal(pod) || settled || status.reason.is_some() {
        let message = status
            .message
            .unwrap_or_else(|| "the VM ended without the pod's final status".to_owned());
        return lost(pod, &message);
    }
    since.map_or_else(Decision::idle, |since| {
        Decision::at(since + FINAL_STATUS_MARGIN)
    })
}

/// The pod runs. If it is being deleted, its node has until the end of its grace period.
pub(super) fn terminating(pod: &Pod, now: Timestamp) -> Decision {
    // The API server sets the deletion timestamp to the end of the grace period.
    let Some(end) = pod.metadata.deletion_timestamp.as_ref().map(|t| t.0) else {
        return Decision::idle();
    };
    let deadline = end + TERMINATION_MARGIN;
    if deadline <= now {
        // The pod follows when its VM has ended: until then it may be running.
        return Decision::now([Effect::DeleteEnvironment]);
    }
    Decision::at(deadline)
}
