//! What the pod's status says.

use super::container_spec;
use super::lifecycle::{Cause, Container, Exit, Image, Kind, PodState, State};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, HostIP, Pod, PodCondition, PodIP, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::collections::BTreeMap;

/// Scheme of our container ids.
const SCHEME: &str = "monopod://";

/// What a status is made from, apart from the state.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The pod as the API server has it.
    pub pod: &'a Pod,
    /// Images by the reference that the spec has.
    pub images: &'a BTreeMap<String, Image>,
    /// The pod's address, which is the node's as well.
    pub address: &'a str,
    /// Whether volumes and network are there.
    pub prepared: bool,
}

/// The part of the status that is the node's. Conditions keep their time unless they changed
/// against `previous`, which is what was last written.
pub fn status(
    view: &View<'_>,
    state: &PodState,
    previous: Option<&PodStatus>,
    now: Timestamp,
) -> PodStatus {
    let phase = phase(view.pod, state);
    let generation = view.pod.metadata.generation;
    let of = |regular: bool| {
        let mut list: Vec<_> = state
            .containers
            .iter()
            .filter(|c| (c.kind == Kind::Regular) == regular)
            .map(|c| container_status(view, c))
            .collect();
        if regular {
            list.sort_by(|a, b| a.name.cmp(&b.name));
        }
        list
    };
    let init = of(false);
    let deadline = state
        .termination
        .as_ref()
        .is_some_and(|t| t.cause == Cause::DeadlineExceeded);
    PodStatus {
        phase: Some(phase.to_owned()),
        reason: deadline.then(|| "DeadlineExceeded".to_owned()),
        message: deadline
            .then(|| "Pod was active on the node longer than the specified deadline".to_owned()),
        conditions: Some(conditions(view, state, phase, previous, now)),
        container_statuses: Some(of(true)),
        init_container_statuses: (!init.is_empty()).then_some(init),
        host_ip: Some(view.address.to_owned()),
        host_ips: Some(vec![HostIP {
            ip: view.address.to_owned(),
        }]),
        pod_ip: Some(view.address.to_owned()),
        pod_ips: Some(vec![PodIP {
            ip: view.address.to_owned(),
        }]),
        start_time: Some(Time(state.started_at)),
        observed_generation: generation,
        ..PodStatus::default()
    }
}

/// Whether somebody else changed a condition that the node wrote, as the node controller does to the
/// pods of a node that it has not heard of for a while. Nobody but the node changes it back.
pub fn is_overridden(written: &PodStatus, pod: &Pod) -> bool {
    let now = pod
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten());
    let now: BTreeMap<&str, &str> = now.map(|c| (c.type_.as_str(), c.status.as_str())).collect();
    let mut written = written.conditions.iter().flatten();
    written.any(|c| now.get(c.type_.as_str()) != Some(&c.status.as_str()))
}

/// The pod's phase. It is terminal only after the last container ended.
pub fn phase(pod: &Pod, state: &PodState) -> &'static str {
    let regular = || state.containers.iter().filter(|c| c.kind == Kind::Regular);
    if state.is_finished() {
        let deadline = state
            .termination
            .as_ref()
            .is_some_and(|t| t.cause == Cause::DeadlineExceeded);
        let succeeded = |c: &Container| match &c.state {
            State::Exited(exit) => exit.code == 0,
            State::Waiting { .. } | State::Creating | State::Running { .. } => false,
        };
        // Deleted before it ran, or while a container was being restarted, is a failure too.
        return if !deadline && regular().all(succeeded) {
            "Succeeded"
        } else {
            "Failed"
        };
    }
    let never_ran = |c: &Container| {
        c.last.is_none() && (matches!(c.state, State::Waiting { .. } | State::Creating) || posts(c))
    };
    if !state.is_initialized() || regular().any(never_ran) || pod.spec.is_none() {
        "Pending"
    } else {
        "Running"
    }
}

fn conditions(
    view: &View<'_>,
    state: &PodState,
    phase: &str,
    previous: Option<&PodStatus>,
    now: Timestamp,
) -> Vec<PodCondition> {
    let terminal = match phase {
        "Succeeded" => Some("PodCompleted"),
        "Failed" => Some("PodFailed"),
        _ => None,
    };
    let names = |filter: &dyn Fn(&Container) -> bool| -> String {
        state
            .containers
            .iter()
            .filter(|c| filter(c))
            .map(|c| c.name.as_str())
            .collect::<Vec<_>>()
            .join(" ")
    };
    let uninitialized = names(&|c| !c.is_initialized());
    let initialized = if phase == "Succeeded" {
        (true, Some("PodCompleted"), None)
    } else if uninitialized.is_empty() {
        (true, None, None)
    } else {
        (
            false,
            Some("ContainersNotInitialized"),
            Some(format!(
                "containers with incomplete status: [{uninitialized}]"
            )),
        )
    };
    let unready = names(&|c| c.kind != Kind::Init && !is_ready(c));
    let containers_ready = match terminal {
        Some(reason) => (false, Some(reason), None),
        None if unready.is_empty() => (true, None, None),
        None => (
            false,
            Some("ContainersNotReady"),
            Some(format!("containers with unready status: [{unready}]")),
        ),
    };
    let gates = missing_gates(view.pod);
    let ready = if containers_ready.0 && !gates.is_empty() {
        (false, Some("ReadinessGatesNotReady"), Some(gates))
    } else {
        containers_ready.clone()
    };
    let generation = view.pod.metadata.generation;
    [
        (
            "PodReadyToStartContainers",
            if view.prepared && terminal.is_none() {
                (true, None, None)
            } else {
                (
                    false,
                    Some("PodSandboxNotReady"),
                    Some("no pod sandbox exists".to_owned()),
                )
            },
        ),
        ("Initialized", initialized),
        ("Ready", ready),
        ("ContainersReady", containers_ready),
    ]
    .into_iter()
    .map(|(kind, (is, reason, message))| {
        let status = if is { "True" } else { "False" };
        let since = previous
            .and_then(|status| status.conditions.as_ref())
            .and_then(|list| list.iter().find(|c| c.type_ == kind && c.status == status))
            .and_then(|c| c.last_transition_time.clone());
        PodCondition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.map(str::to_owned),
            message,
            last_transition_time: Some(since.unwrap_or(Time(now))),
            last_probe_time: None,
            observed_generation: generation,
        }
    })
    .collect()
}

/// Text about readiness gates that are not True; empty if all are.
fn missing_gates(pod: &Pod) -> String {
    let given = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    pod.spec
        .iter()
        .flat_map(|spec| spec.readiness_gates.iter().flatten())
        .filter_map(|gate| {
            let name = &gate.condition_type;
            let condition = given
                .into_iter()
                .flatten()
                .find(|condition| condition.type_ == *name);
            match condition {
                None => Some(format!(
                    "corresponding condition of pod readiness gate \"{name}\" does not exist."
                )),
                Some(condition) if condition.status != "True" => Some(format!(
                    "the status of pod readiness gate \"{name}\" is not \"True\", but {}",
                    condition.status
                )),
                Some(_) => None,
            }
        })
        .collect::<Vec<_>>()
        .join(", ")
}

/// Whether the postStart hook of a container that is to go on runs: it is said to be created still.
fn posts(c: &Container) -> bool {
    c.posting && matches!(c.state, State::Running { stopping: None, .. })
}

fn is_ready(c: &Container) -> bool {
    match &c.state {
        State::Running { stopping, .. } => c.ready && c.started && stopping.is_none(),
        State::Exited(exit) => c.kind == Kind::Init && exit.code == 0,
        State::Waiting { .. } | State::Creating => false,
    }
}

fn container_status(view: &View<'_>, c: &Container) -> ContainerStatus {
    let spec = container_spec(view.pod, &c.name);
    let image = spec.and_then(|spec| spec.image.clone()).unwrap_or_default();
    let image_id = match view.images.get(&image) {
        Some(Image::Present { id, .. }) => id.clone(),
        Some(Image::Pulling { .. } | Image::Failed { .. }) | None => String::new(),
    };
    let current_id = match &c.state {
        State::Running { .. } if posts(c) => c.last.as_ref().map(|exit| &exit.id),
        State::Running { id, .. } => Some(id),
        State::Exited(exit) => Some(&exit.id),
        State::Waiting { .. } | State::Creating => c.last.as_ref().map(|exit| &exit.id),
    };
    ContainerStatus {
        name: c.name.clone(),
        container_id: current_id
            .filter(|id| !id.is_empty())
            .map(|id| format!("{SCHEME}{id}")),
        image_id,
        image,
        ready: is_ready(c),
        started: Some(matches!(c.state, State::Running { .. }) && c.started),
        restart_count: i32::try_from(c.restarts).unwrap_or(i32::MAX),
        state: Some(if posts(c) {
            state_of(&State::Creating)
        } else {
            state_of(&c.state)
        }),
        last_state: c.last.as_ref().map(|exit| ContainerState {
            terminated: Some(terminated(exit)),
            ..ContainerState::default()
        }),
        resources: spec.and_then(|spec| spec.resources.clone()),
        allocated_resources: spec.and_then(|spec| spec.resources.as_ref()?.requests.clone()),
        ..ContainerStatus::default()
    }
}

fn state_of(state: &State) -> ContainerState {
    match state {
        State::Waiting {
            reason, message, ..
        } => waiting(reason, message.as_ref()),
        State::Creating => waiting(super::lifecycle::reason::CONTAINER_CREATING, None),
        State::Running { since, .. } => ContainerState {
            running: Some(ContainerStateRunning {
                started_at: Some(Time(*since)),
            }),
            ..ContainerState::default()
        },
        State::Exited(exit) => ContainerState {
            terminated: Some(terminated(exit)),
            ..ContainerState::default()
        },
    }
}

fn waiting(reason: &str, message: Option<&String>) -> ContainerState {
    ContainerState {
        waiting: Some(ContainerStateWaiting {
            reason: Some(reason.to_owned()),
            message: message.cloned(),
        }),
        ..ContainerState::default()
    }
}

fn terminated(exit: &Exit) -> ContainerStateTerminated {
    ContainerStateTerminated {
        container_id: (!exit.id.is_empty()).then(|| format!("{SCHEME}{}", exit.id)),
        exit_code: exit.code,
        signal: exit.signal,
        reason: Some(exit.reason.clone()),
        message: exit.message.clone(),
        started_at: exit.started_at.map(Time),
        finished_at: Some(Time(exit.finished_at)),
    }
}
