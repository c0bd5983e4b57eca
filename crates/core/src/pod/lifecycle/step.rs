//! What to do now.

use super::observe::has_post_start;
use super::{
    Cause, Container, Desired, Effect, Event, Image, Kind, PodState, State, Stopping, Termination,
    Told, Unhealthy, pulling, reason,
};
use crate::pod::container_spec;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;

/// The API's default for `terminationGracePeriodSeconds`.
const DEFAULT_GRACE: i64 = 30;

/// What to do now, and when to ask again even if nothing happens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// What to do, in this order.
    pub effects: Vec<Effect>,
    /// When to call [`step`] again at the latest.
    pub wake: Option<Timestamp>,
}

impl Decision {
    fn wake_at(&mut self, time: Timestamp) {
        self.wake = Some(self.wake.map_or(time, |wake| wake.min(time)));
    }
}

/// Decides what to do now. Called again with the same arguments, it returns no effects.
pub fn step(state: &mut PodState, desired: &Desired<'_>, now: Timestamp) -> Decision {
    let mut decision = Decision::default();
    check_termination(state, desired.pod, now, &mut decision);
    if state.termination.is_none() {
        stop_unhealthy(state, desired.pod, now, &mut decision);
        if desired.prepared {
            start_what_may(state, desired, now, &mut decision);
        }
        if is_over(state) {
            state.termination = Some(Termination {
                cause: Cause::Completed,
                deadline: now + SignedDuration::from_secs(grace(desired.pod)),
                finished: false,
            });
        }
    }
    if state.termination.is_some() {
        terminate(state, now, &mut decision);
    }
    kill_overdue(state, now, &mut decision);
    decision
}

fn check_termination(state: &mut PodState, pod: &Pod, now: Timestamp, decision: &mut Decision) {
    let seconds = |value: i64| SignedDuration::from_secs(value.clamp(0, i64::from(i32::MAX)));
    if pod.metadata.deletion_timestamp.is_some() {
        let allowed = pod
            .metadata
            .deletion_grace_period_seconds
            .unwrap_or_else(|| grace(pod));
        let deadline = now + seconds(allowed);
        match &mut state.termination {
            Some(termination) => {
                termination.deadline = termination.deadline.min(deadline);
                if !termination.finished {
                    termination.cause = Cause::Deleted;
                }
            }
            None => {
                state.termination = Some(Termination {
                    cause: Cause::Deleted,
                    deadline,
                    finished: false,
                });
            }
        }
        return;
    }
    let limit = pod.spec.as_ref().and_then(|s| s.active_deadline_seconds);
    if let (Some(limit), None) = (limit, &state.termination) {
        let end = state.started_at + seconds(limit);
        if now < end {
            decision.wake_at(end);
            return;
        }
        state.termination = Some(Termination {
            cause: Cause::DeadlineExceeded,
            deadline: now + seconds(grace(pod)),
            finished: false,
        });
        decision.effects.push(Effect::Event(Event {
            warning: false,
            reason: "DeadlineExceeded",
            message: "Pod was active on the node longer than the specified deadline".to_owned(),
            container: None,
        }));
    }
}

/// Stops running containers whose probe or hook failed; they start again by the restart policy.
fn stop_unhealthy(state: &mut PodState, pod: &Pod, now: Timestamp, decision: &mut Decision) {
    for c in &mut state.containers {
        let Some(why) = c.unhealthy.take() else {
            continue;
        };
        let grace_seconds = container_spec(pod, &c.name)
            .and_then(|spec| match why {
                Unhealthy::Liveness => spec.liveness_probe.as_ref(),
                Unhealthy::Startup => spec.startup_probe.as_ref(),
                Unhealthy::PostStart => None,
            })
            .and_then(|probe| probe.termination_grace_period_seconds)
            .unwrap_or_else(|| grace(pod));
        let message = why.message(&c.name);
        stop(c, message, grace_seconds, false, now, decision);
    }
}

fn start_what_may(
    state: &mut PodState,
    desired: &Desired<'_>,
    now: Timestamp,
    decision: &mut Decision,
) {
    let mut earlier_initialized = true;
    // The kubelet starts one after the other, each with its hook; without one nobody sees that.
    let mut earlier_posts = false;
    let pulls = &mut state.pulls;
    for c in &mut state.containers {
        let turn = match c.kind {
            Kind::Init => earlier_initialized,
            Kind::Regular => earlier_initialized && !earlier_posts,
            // A sidecar is restarted whatever the later init containers do.
            Kind::Sidecar => earlier_initialized || c.ever_started,
        };
        if turn {
            start(c, pulls, desired, now, decision);
        }
        earlier_initialized &= c.is_initialized();
        earlier_posts |= c.kind == Kind::Regular
            && (c.posting || c.state == State::Creating && has_post_start(desired.pod, &c.name));
    }
}

fn start(
    c: &mut Container,
    pulls: &mut BTreeMap<String, Told>,
    desired: &Desired<'_>,
    now: Timestamp,
    decision: &mut Decision,
) {
    let State::Waiting {
        reason: why,
        message,
        until,
    } = &mut c.state
    else {
        return;
    };
    let image = container_spec(desired.pod, &c.name)
        .and_then(|spec| spec.image.as_deref())
        .unwrap_or_default();
    match desired.images.get(image) {
        None => creating(why, c.kind),
        Some(Image::Pulling { done, total }) => {
            creating(why, c.kind);
            let event = pulling::progress(pulls, &c.name, image, (*done, *total), now);
            decision.effects.extend(event.map(Effect::Event));
        }
        Some(Image::Failed {
            reason: failure,
            message: text,
        }) => image_failed(c, image, failure, text, now, decision),
        Some(Image::Present { pulled, .. }) => {
            let waits_for_image = *why == reason::ERR_IMAGE_PULL
                || *why == reason::IMAGE_BACK_OFF
                || *why == reason::NEVER_PULL
                || *why == reason::INVALID_IMAGE;
            if let Some(time) = *until
                && time > now
                && !waits_for_image
            {
                decision.wake_at(time);
                return;
            }
            *message = None;
            let events = pulling::present(pulls, &c.name, image, pulled.as_ref(), now);
            decision
                .effects
                .extend(events.into_iter().map(Effect::Event));
            if c.last.is_some() && !c.attempt_failed {
                c.restarts = c.restarts.saturating_add(1);
            }
            c.attempt_failed = false;
            decision.effects.push(Effect::Start {
                container: c.name.clone(),
                attempt: c.restarts,
            });
            c.state = State::Creating;
        }
    }
}

fn creating(why: &mut &'static str, kind: Kind) {
    if *why == reason::POD_INITIALIZING && kind == Kind::Regular {
        *why = reason::CONTAINER_CREATING;
    }
}

/// The kubelet alternates between the failure and the wait; here the wait follows the failure.
fn image_failed(
    c: &mut Container,
    image: &str,
    failure: &str,
    text: &str,
    now: Timestamp,
    decision: &mut Decision,
) {
    let State::Waiting {
        reason: why,
        message,
        until,
    } = &mut c.state
    else {
        return;
    };
    let mut event = |reason, message| {
        decision.effects.push(Effect::Event(Event {
            warning: true,
            reason,
            message,
            container: Some(c.name.clone()),
        }));
    };
    if failure == reason::INVALID_IMAGE {
        if *why != reason::INVALID_IMAGE {
            *why = reason::INVALID_IMAGE;
            *message = Some(format!(
                "Failed to apply default image tag \"{image}\": {text}"
            ));
            event(
                "InspectFailed",
                format!("Failed to apply default image tag \"{image}\": {text}"),
            );
            event("Failed", format!("Error: {}", reason::INVALID_IMAGE));
        }
        return;
    }
    if failure == reason::NEVER_PULL {
        if *why != reason::NEVER_PULL {
            *why = reason::NEVER_PULL;
            event(reason::NEVER_PULL, text.to_owned());
            event("Failed", format!("Error: {}", reason::NEVER_PULL));
        }
        *message = Some(text.to_owned());
        return;
    }
    let waiting = || format!("Back-off pulling image \"{image}\": ErrImagePull: {text}");
    if *why == reason::IMAGE_BACK_OFF {
        // The newest cause.
        *message = Some(waiting());
        return;
    }
    if *why != reason::ERR_IMAGE_PULL {
        *why = reason::ERR_IMAGE_PULL;
        *message = Some(text.to_owned());
        *until = Some(now + super::RETRY);
        event(
            "Failed",
            format!("Failed to pull image \"{image}\": {text}"),
        );
        event("Failed", format!("Error: {}", reason::ERR_IMAGE_PULL));
    }
    match *until {
        Some(time) if time > now => decision.wake_at(time),
        Some(_) | None => {
            *why = reason::IMAGE_BACK_OFF;
            *message = Some(waiting());
            *until = None;
            event("BackOff", format!("Back-off pulling image \"{image}\""));
            event("Failed", format!("Error: {}", reason::IMAGE_BACK_OFF));
        }
    }
}

/// Whether no regular container runs or will run again. Whoever is `Exited` was already judged by
/// the restart policy.
fn is_over(state: &PodState) -> bool {
    let failed_init = state
        .containers
        .iter()
        .any(|c| c.kind == Kind::Init && matches!(&c.state, State::Exited(exit) if exit.code != 0));
    failed_init
        || state
            .containers
            .iter()
            .filter(|c| c.kind == Kind::Regular)
            .all(|c| matches!(c.state, State::Exited(_)))
}

fn terminate(state: &mut PodState, now: Timestamp, decision: &mut Decision) {
    let Some(termination) = state.termination.clone() else {
        return;
    };
    let left = termination.deadline.duration_since(now).as_secs().max(0);
    // Regular containers first, then sidecars, the last one first. Hooks of all run at once, and
    // when the time is over, nobody waits for a turn any more.
    let mut later_active = false;
    for c in state.containers.iter_mut().rev() {
        let held = c.kind == Kind::Sidecar && later_active && now < termination.deadline;
        let message = format!("Stopping container {}", c.name);
        stop(c, message, left, held, now, decision);
        if !held {
            release(c, decision);
        }
        later_active |= c.kind != Kind::Init && c.is_active();
    }
    if later_active && now < termination.deadline {
        decision.wake_at(termination.deadline);
    }
    for c in &mut state.containers {
        c.ready = false;
        if let State::Running {
            stopping: Some(stopping),
            ..
        } = &mut c.state
        {
            stopping.deadline = stopping.deadline.min(termination.deadline);
        }
    }
    if !termination.finished && !state.containers.iter().any(Container::is_active) {
        decision.effects.push(Effect::Finish {
            cause: termination.cause,
        });
        state.termination = Some(Termination {
            finished: true,
            ..termination
        });
    }
}

/// Lets a container have its stop signal, if that was held back.
fn release(c: &mut Container, decision: &mut Decision) {
    if let State::Running {
        stopping: Some(stopping),
        ..
    } = &mut c.state
        && std::mem::take(&mut stopping.held)
    {
        decision.effects.push(Effect::Release {
            container: c.name.clone(),
        });
    }
}

fn stop(
    c: &mut Container,
    message: String,
    grace_seconds: i64,
    held: bool,
    now: Timestamp,
    decision: &mut Decision,
) {
    if let State::Running {
        stopping: stopping @ None,
        ..
    } = &mut c.state
    {
        *stopping = Some(Stopping {
            deadline: now + SignedDuration::from_secs(grace_seconds.clamp(0, i64::from(i32::MAX))),
            held,
            signalled: None,
            killed: false,
        });
        decision.effects.push(Effect::Event(Event {
            warning: false,
            reason: "Killing",
            message,
            container: Some(c.name.clone()),
        }));
        decision.effects.push(Effect::Stop {
            container: c.name.clone(),
            grace_seconds,
            held,
        });
    }
}

fn kill_overdue(state: &mut PodState, now: Timestamp, decision: &mut Decision) {
    for c in &mut state.containers {
        if let State::Running {
            stopping: Some(stopping),
            ..
        } = &mut c.state
            && !stopping.killed
        {
            if stopping.kill_at() <= now {
                stopping.killed = true;
                decision.effects.push(Effect::Kill {
                    container: c.name.clone(),
                });
            } else {
                decision.wake_at(stopping.kill_at());
            }
        }
    }
}

fn grace(pod: &Pod) -> i64 {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.termination_grace_period_seconds)
        .unwrap_or(DEFAULT_GRACE)
}
