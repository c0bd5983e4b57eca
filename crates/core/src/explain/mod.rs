//! Where a pod is on its way, in plain words: for `monopod explain`.

mod node;

#[cfg(test)]
mod tests;

use crate::lifecycle;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Event, Node, Pod, PodCondition};
use monopod_api::environment::{Environment, EnvironmentPhase, ImagePhase};
use monopod_api::messages;
use serde::Serialize;

/// What is, why, and what comes next or is to be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// Where the pod is.
    pub state: String,
    /// What was tried, and what is in the way.
    pub because: Vec<String>,
    /// What comes next by itself, or what to do.
    pub next: String,
}

/// Explains a pod by what there is of it. `node` is what the pod is bound to, and `events` may be others' as well.
pub fn explain(
    pod: &Pod,
    environment: Option<&Environment>,
    node: Option<&Node>,
    events: &[Event],
    now: Timestamp,
) -> Explanation {
    let status = pod.status.clone().unwrap_or_default();
    let phase = status.phase.as_deref().unwrap_or("Pending");
    let bound_to = pod.spec.as_ref().and_then(|s| s.node_name.as_deref());
    if !lifecycle::is_ours(pod) {
        let scheduler = pod.spec.as_ref().and_then(|s| s.scheduler_name.as_deref());
        return Explanation {
            state: format!("It is no Fargate pod: {} schedules it.", scheduler.unwrap_or("nobody")),
            because: Vec::new(),
            next: "`monopod profile match -f POD.yaml` says which profile would take it, and why not; then delete it and create it again.".to_owned(),
        };
    }
    if matches!(phase, "Succeeded" | "Failed") {
        let reason = [status.reason, status.message].into_iter().flatten();
        return Explanation {
            state: format!("It has ended: {phase}."),
            because: reason.collect(),
            next: "`kubectl logs` shows what it wrote until it is deleted. Its controller, if it has one, replaces it.".to_owned(),
        };
    }
    if let Some(end) = &pod.metadata.deletion_timestamp {
        return deleted(end.0, environment, now);
    }
    match (bound_to, environment) {
        (Some(name), _) => bound(pod, name, node, environment, events, now),
        (None, Some(environment)) => on_its_way(pod, environment, now),
        (None, None) => waits(pod, now),
    }
}

fn deleted(end: Timestamp, environment: Option<&Environment>, now: Timestamp) -> Explanation {
    let host = environment.map(|e| e.spec.host.as_str());
    let next = match host {
        _ if now < end => "Its containers have until then to end by themselves.".to_owned(),
        Some(host) => format!(
            "Host {host} has to end its VM. If that machine is gone for good: `monopod host forget {host}`."
        ),
        None => "It vanishes at once.".to_owned(),
    };
    Explanation {
        state: format!("It is being deleted; its grace period ends at {end:.0}."),
        because: Vec::new(),
        next,
    }
}

fn bound(
    pod: &Pod,
    name: &str,
    node: Option<&Node>,
    environment: Option<&Environment>,
    events: &[Event],
    now: Timestamp,
) -> Explanation {
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.init_container_statuses.iter().flatten();
    let containers = containers.chain(status.container_statuses.iter().flatten());
    let host = environment.map(|e| e.spec.host.as_str());
    let mut because: Vec<String> = containers.filter_map(waiting).collect();
    because.extend(environment.iter().flat_map(|e| images(e)));
    if !is_ready(pod) {
        because.extend(last_warning(pod, name, events));
    }
    let mut next = Vec::new();
    if !because.is_empty() {
        next.push("What failed is tried again by itself; `kubectl describe pod` has its events, `kubectl logs --previous` the last words of a container that ended.".to_owned());
    }
    if let Some(trouble) = node::trouble(pod, name, node, host, now) {
        because.splice(0..0, trouble.because);
        next.insert(0, trouble.next);
    }
    if next.is_empty() {
        next.push("Nothing is in its way.".to_owned());
    }
    let phase = status.phase.as_deref().unwrap_or("Pending");
    Explanation {
        state: format!(
            "It is {phase} on node {name}, a VM on host {}.",
            host.unwrap_or("that is not known")
        ),
        because,
        next: next.join(" "),
    }
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// What its node said last of what failed: a volume that is not there, a probe.
fn last_warning(pod: &Pod, node: &str, events: &[Event]) -> Option<String> {
    let time = |event: &Event| {
        let last = event.last_timestamp.as_ref().map(|time| time.0);
        last.or_else(|| event.event_time.as_ref().map(|time| time.0))
    };
    let is_its = |event: &&Event| {
        event.type_.as_deref() == Some("Warning")
            && event.involved_object.uid == pod.metadata.uid
            && event.source.as_ref().and_then(|s| s.host.as_deref()) == Some(node)
    };
    let last = events
        .iter()
        .filter(is_its)
        .max_by_key(|event| time(event))?;
    Some(format!(
        "Its last warning is {}: {}",
        last.reason.as_deref().unwrap_or("without a reason"),
        last.message.as_deref().unwrap_or("it says no more")
    ))
}

/// What keeps a container from running.
fn waiting(status: &ContainerStatus) -> Option<String> {
    let waiting = status.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref().unwrap_or("waits");
    let message = waiting.message.iter().map(|m| format!(": {m}"));
    Some(format!(
        "Container {} {reason}{}",
        status.name,
        message.collect::<String>()
    ))
}

/// What is missing of the images.
fn images(environment: &Environment) -> Vec<String> {
    let images = environment.status.iter().flat_map(|s| &s.images);
    images
        .filter_map(|image| match image.state {
            ImagePhase::Present => None,
            ImagePhase::Failed => {
                let why = image.message.as_deref().unwrap_or("for an unknown reason");
                Some(format!("Image {} is not there: {why}", image.reference))
            }
            ImagePhase::Pulling => {
                let mebibytes = |bytes: Option<u64>| bytes.unwrap_or(0) >> 20;
                let (done, total) = (mebibytes(image.done_bytes), mebibytes(image.total_bytes));
                Some(format!(
                    "Image {}: {done} of {total} MiB are pulled",
                    image.reference
                ))
            }
        })
        .collect()
}

fn on_its_way(pod: &Pod, environment: &Environment, now: Timestamp) -> Explanation {
    let status = environment.status.clone().unwrap_or_default();
    let host = &environment.spec.host;
    let entered = status.phases.last().map(|last| last.time.0);
    let created = environment
        .metadata
        .creation_timestamp
        .as_ref()
        .map(|t| t.0);
    let since = entered.or(created).unwrap_or(now);
    if environment.metadata.deletion_timestamp.is_some() {
        return Explanation {
            state: format!("An attempt on host {host} is taken back."),
            because: status.message.into_iter().collect(),
            next: format!(
                "It is tried again once the host has ended the VM. If that machine is gone for good: `monopod host forget {host}`."
            ),
        };
    }
    let next = match status.phase {
        EnvironmentPhase::Requested => "The host takes a VM from its pool, or starts one.",
        EnvironmentPhase::Booting => "The guest says that it is ready, and is told who it is.",
        EnvironmentPhase::Joining => "The guest registers its node.",
        EnvironmentPhase::Registered | EnvironmentPhase::Running => "The pod is bound to its node.",
        EnvironmentPhase::Finished | EnvironmentPhase::Failed => {
            "The attempt is taken back, and made again."
        }
    };
    Explanation {
        state: format!(
            "Its VM on host {host} is {:?} since {since:.0}.",
            status.phase
        ),
        because: tried(pod)
            .into_iter()
            .chain(status.message)
            .chain(images(environment))
            .collect(),
        next: format!(
            "{next} What takes too long is taken back and tried again, on another host if there is one."
        ),
    }
}

/// Why it was said not to be scheduled.
fn told(pod: &Pod) -> Option<&PodCondition> {
    let status = pod.status.as_ref()?;
    let mut conditions = status.conditions.iter().flatten();
    conditions.find(|c| c.type_ == "PodScheduled" && c.status == "False")
}

/// How an attempt before this one ended.
fn tried(pod: &Pod) -> Option<String> {
    let message = told(pod)?.message.as_ref()?;
    Some(format!("Before: {message}"))
}

fn waits(pod: &Pod, now: Timestamp) -> Explanation {
    let gates = pod
        .spec
        .iter()
        .flat_map(|s| s.scheduling_gates.iter().flatten());
    let gates: Vec<&str> = gates.map(|gate| gate.name.as_str()).collect();
    if !gates.is_empty() {
        return Explanation {
            state: "It waits for its scheduling gates.".to_owned(),
            because: vec![format!("Gates: {}", gates.join(", "))],
            next: "Whoever set them has to remove them.".to_owned(),
        };
    }
    let told = told(pod);
    let since = told
        .and_then(|c| c.last_transition_time.as_ref())
        .map_or(now, |time| time.0);
    let next = match told.and_then(|c| c.reason.as_deref()) {
        Some(messages::POD_TOO_LARGE) => {
            "It is larger than the largest size: ask for less, and create it anew."
        }
        Some(messages::POD_UNSUPPORTED) => {
            "Change what it asks for, and create it anew. If it waits for a volume claim, or its profile may allow what it asks for, it starts by itself once that has changed."
        }
        _waits => {
            "It starts by itself as soon as what it waits for is there; nothing needs to be deleted."
        }
    };
    Explanation {
        state: format!("It has no VM, and waits since {since:.0}."),
        because: told.and_then(|c| c.message.clone()).into_iter().collect(),
        next: next.to_owned(),
    }
}
