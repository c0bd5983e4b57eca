//! Taking in what happened.

use super::{Container, Event, Kind, Observation, PodState, State, reason};
use crate::pod::container_spec;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;

/// Takes in what happened. Returns the events that tell it.
///
/// An observation of a container that the pod does not have, or that does not fit to where the
/// container stands, changes nothing.
pub fn observe(
    state: &mut PodState,
    pod: &Pod,
    observation: Observation,
    now: Timestamp,
) -> Vec<Event> {
    let terminating = state.termination.is_some();
    match observation {
        Observation::Started { container, id } => {
            if let Some(c) = state.container_mut(&container)
                && c.state == State::Creating
            {
                c.posting = has_post_start(pod, &container);
                if !c.posting {
                    runs(c, pod);
                }
                c.state = State::Running {
                    id,
                    since: now,
                    stopping: None,
                };
            }
        }
        Observation::CannotStart {
            container,
            reason,
            message,
        } => {
            if let Some(c) = state.container_mut(&container)
                && c.state == State::Creating
            {
                let event = Event {
                    warning: true,
                    reason: "Failed",
                    message: format!("Error: {message}"),
                    container: Some(container),
                };
                c.attempt_failed = true;
                c.state = State::Waiting {
                    reason,
                    message: Some(message),
                    until: Some(now + super::RETRY),
                };
                return vec![event];
            }
        }
        Observation::Exited { container, exit } => {
            if let Some(c) = state.container_mut(&container)
                && c.is_active()
            {
                return exited(c, pod, exit, terminating, now);
            }
        }
        Observation::PostStarted { container } => {
            if let Some(c) = state.container_mut(&container)
                && std::mem::take(&mut c.posting)
            {
                runs(c, pod);
            }
        }
        Observation::Signalled { container } => {
            if let Some(c) = state.container_mut(&container)
                && let State::Running {
                    stopping: Some(stopping),
                    ..
                } = &mut c.state
            {
                stopping.signalled.get_or_insert(now);
            }
        }
        Observation::StartupSucceeded { container } => {
            if let Some(c) = state.container_mut(&container)
                && matches!(c.state, State::Running { .. })
            {
                c.started = true;
                c.ever_started = true;
            }
        }
        Observation::Ready { container, ready } => {
            if let Some(c) = state.container_mut(&container)
                && matches!(c.state, State::Running { .. })
            {
                c.ready = ready;
            }
        }
        Observation::Unhealthy { container, why } => {
            if let Some(c) = state.container_mut(&container)
                && matches!(c.state, State::Running { stopping: None, .. })
            {
                c.unhealthy = Some(why);
                c.posting = false;
            }
        }
    }
    Vec::new()
}

/// Whether a container has a postStart hook.
pub(super) fn has_post_start(pod: &Pod, container: &str) -> bool {
    container_spec(pod, container)
        .and_then(|spec| spec.lifecycle.as_ref())
        .is_some_and(|lifecycle| lifecycle.post_start.is_some())
}

/// The container is said to run: probes begin, or there are none and it is ready.
fn runs(c: &mut Container, pod: &Pod) {
    let spec = container_spec(pod, &c.name);
    c.started = spec.is_none_or(|spec| spec.startup_probe.is_none());
    c.ever_started |= c.started;
    c.ready = spec.is_none_or(|spec| spec.readiness_probe.is_none());
}

fn exited(
    c: &mut Container,
    pod: &Pod,
    exit: super::Exit,
    terminating: bool,
    now: Timestamp,
) -> Vec<Event> {
    c.ready = false;
    c.started = false;
    c.unhealthy = None;
    c.posting = false;
    if terminating || !is_restarted(c.kind, pod, exit.code) {
        c.state = State::Exited(exit);
        return Vec::new();
    }
    let (wait, backoff) = c.backoff.after_exit(exit.started_at, exit.finished_at);
    let until = exit.finished_at + wait;
    c.backoff = backoff;
    c.last = Some(exit);
    let meta = &pod.metadata;
    let whom = format!(
        "{} in pod {}_{}({})",
        c.name,
        meta.name.as_deref().unwrap_or_default(),
        meta.namespace.as_deref().unwrap_or_default(),
        meta.uid.as_deref().unwrap_or_default(),
    );
    c.state = State::Waiting {
        reason: reason::CRASH_LOOP,
        message: Some(format!(
            "back-off {} restarting failed container={}",
            spelled(wait),
            whom.replacen(" in pod ", " pod=", 1)
        )),
        until: Some(until),
    };
    if until <= now {
        return Vec::new();
    }
    vec![Event {
        warning: true,
        reason: "BackOff",
        message: format!("Back-off restarting failed container {whom}"),
        container: Some(c.name.clone()),
    }]
}

/// As Go prints durations: `10s`, `2m40s`, `5m0s`.
fn spelled(wait: SignedDuration) -> String {
    let seconds = wait.as_secs();
    if seconds < 60 {
        format!("{seconds}s")
    } else {
        format!("{}m{}s", seconds / 60, seconds % 60)
    }
}

fn is_restarted(kind: Kind, pod: &Pod, exit_code: i32) -> bool {
    let policy = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.restart_policy.as_deref())
        .unwrap_or("Always");
    match kind {
        Kind::Sidecar => true,
        Kind::Init => policy != "Never" && exit_code != 0,
        Kind::Regular => policy == "Always" || (policy == "OnFailure" && exit_code != 0),
    }
}
