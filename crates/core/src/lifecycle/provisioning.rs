//! A pod whose environment is on its way to a Ready node, or takes too long.

use super::{
    Attempts, Cause, Decision, Effect, Failure, INTERFACE_LIMIT, Observed, PROVISIONING_LIMIT,
    is_ready_for,
};
use crate::backoff::Backoff;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use monopod_api::environment::{Environment, EnvironmentPhase, PodReference};
use monopod_api::network::InterfacePhase;
use monopod_api::{labels, messages};

/// How long a phase may take before the attempt is given up, and what it waits for meanwhile.
fn limit(phase: EnvironmentPhase) -> Option<(SignedDuration, Failure, &'static str)> {
    let (seconds, failure, what) = match phase {
        // A host process takes seconds to restart.
        EnvironmentPhase::Requested => (60, Failure::HostIdle, "the host has not begun"),
        // An emulated first VM of its shape, on a machine that is busy with others.
        EnvironmentPhase::Booting => (150, Failure::VmNotReady, "the VM is not ready"),
        EnvironmentPhase::Joining => (
            150,
            Failure::NodeNotRegistered,
            "the node is not registered",
        ),
        EnvironmentPhase::Registered => (60, Failure::NodeNotReady, "the node is not Ready"),
        EnvironmentPhase::Running | EnvironmentPhase::Finished | EnvironmentPhase::Failed => {
            return None;
        }
    };
    Some((SignedDuration::from_secs(seconds), failure, what))
}

/// When the attempt is given up if nothing happens, and why.
fn deadline(
    observed: &Observed<'_>,
    environment: &Environment,
) -> Option<(Timestamp, Failure, String)> {
    let created = environment.metadata.creation_timestamp.as_ref()?.0;
    let status = environment.status.as_ref();
    let phase = status.map_or(EnvironmentPhase::Requested, |s| s.phase);
    // The host's clock may be wrong: a phase begins no sooner than the environment.
    let entered = status.and_then(|s| s.phases.last());
    let since = entered.map_or(created, |entered| entered.time.0.max(created));
    let host = &environment.spec.host;
    let whole = (
        created + PROVISIONING_LIMIT,
        Failure::TooSlow,
        format!(
            "the node was not ready after {PROVISIONING_LIMIT:#} on host {host} (phase {phase:?})"
        ),
    );
    let step = limit(phase).map(|(limit, failure, what)| {
        let text = format!("{what} after {limit:#} on host {host} (phase {phase:?})");
        (since + limit, failure, text)
    });
    let interface = (!has_address(observed, environment)).then(|| {
        let name = &environment.spec.network_interface;
        let text = format!("the network interface {name} is not there any more");
        (created + INTERFACE_LIMIT, Failure::InterfaceGone, text)
    });
    [Some(whole), step, interface]
        .into_iter()
        .flatten()
        .min_by_key(|(at, ..)| *at)
}

/// Whether the environment's address is its own.
fn has_address(observed: &Observed<'_>, environment: &Environment) -> bool {
    observed.interface.is_some_and(|interface| {
        let phase = interface
            .status
            .as_ref()
            .map_or(InterfacePhase::InUse, |s| s.phase);
        phase == InterfacePhase::InUse
            && interface.metadata.name.as_ref() == Some(&environment.spec.network_interface)
    })
}

/// Binds the pod to its Ready node, however late it is; undoes an attempt that failed or takes too long.
pub(super) fn decide(
    observed: &Observed<'_>,
    pod: &Pod,
    environment: &Environment,
    seed: u64,
    now: Timestamp,
) -> Decision {
    let status = environment.status.clone().unwrap_or_default();
    if status.phase.is_terminal() {
        let reason = status
            .reason
            .unwrap_or_else(|| format!("{:?}", status.phase));
        let detail = status
            .message
            .unwrap_or_else(|| "the VM ended before the pod was bound".to_owned());
        let why = format!("{reason} on host {}: {detail}", environment.spec.host);
        return give_up(observed, environment, (Failure::VmEnded, &why), seed, now);
    }
    let ready = observed
        .node
        .is_some_and(|node| is_ready_for(node, environment));
    if status.phase >= EnvironmentPhase::Registered && ready && has_address(observed, environment) {
        return Decision::now([Effect::Bind {
            node: environment.spec.node.clone(),
        }]);
    }
    match deadline(observed, environment) {
        Some((at, failure, why)) if at <= now => {
            give_up(observed, environment, (failure, &why), seed, now)
        }
        due => Decision {
            effects: announce(pod, environment),
            wake: due.map(|(at, ..)| at),
        },
    }
}

/// Undoes an attempt; the pod is placed anew once the environment is gone and the back-off over.
fn give_up(
    observed: &Observed<'_>,
    environment: &Environment,
    (failure, why): (Failure, &str),
    seed: u64,
    now: Timestamp,
) -> Decision {
    let PodReference {
        namespace, name, ..
    } = &environment.spec.pod;
    let undo = [Effect::Nominate { node: None }, Effect::DeleteEnvironment];
    let uid = &environment.metadata.uid;
    // What follows may have failed before; the attempt is the same one.
    if observed.attempts.is_some_and(|a| a.environment == *uid) {
        return Decision::now(undo);
    }
    let failures = observed
        .attempts
        .map_or(0, |a| a.failures)
        .saturating_add(1);
    let next = now + Backoff::PROVISIONING.jittered(failures, seed);
    let tell = Effect::Explain {
        cause: Cause::Provisioning,
        message: format!(
            "{}: {why}; try {} is made at {next:.0}",
            messages::provisioning_timed_out(namespace, name),
            failures.saturating_add(1),
        ),
    };
    let remember = Effect::RememberFailure(Attempts {
        failures,
        next,
        host: environment.spec.host.clone(),
        address: environment.spec.address.parse().ok(),
        failure,
        environment: uid.clone(),
    });
    // Remembered once it is told: what fails before that is told again.
    Decision::now([tell, remember].into_iter().chain(undo).collect::<Vec<_>>())
}

/// Shows on the pod where it will run, and how large it is there.
fn announce(pod: &Pod, environment: &Environment) -> Vec<Effect> {
    let mut effects = Vec::new();
    let size = environment.spec.size.to_string();
    let annotations = pod.metadata.annotations.as_ref();
    if annotations.and_then(|all| all.get(labels::CAPACITY_PROVISIONED)) != Some(&size) {
        effects.push(Effect::Annotate(vec![(labels::CAPACITY_PROVISIONED, size)]));
    }
    let nominated = pod
        .status
        .as_ref()
        .and_then(|s| s.nominated_node_name.as_ref());
    if nominated != Some(&environment.spec.node) {
        effects.push(Effect::Nominate {
            node: Some(environment.spec.node.clone()),
        });
    }
    effects
}
