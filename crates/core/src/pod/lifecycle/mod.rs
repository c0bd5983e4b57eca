//! Which container starts, stops or is killed now.
//!
//! ```text
//!            start              Started              Exited, not to be restarted
//!  Waiting --------> Creating ----------> Running ------------------------------> Exited
//!     ^  ^               |                   |
//!     |  +---------------+ CannotStart       | Exited, to be restarted (back-off)
//!     +--------------------------------------+
//! ```
//!
//! [`observe`] takes in what happened, [`step`] decides what to do. Both are functions of their
//! arguments. Invariants:
//!
//! * A container is started only from `Waiting`, so it never runs twice.
//! * Nothing starts once the pod terminates, and [`Effect::Finish`] comes once, after the last
//!   container ended.
//! * Regular containers start only after every init container succeeded and every sidecar started.

mod backoff;
mod observe;
mod pulling;
mod step;

#[cfg(test)]
mod tests;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container as ContainerSpec, Pod};
use monopod_wire::Pulled;
use std::collections::BTreeMap;

pub use backoff::Backoff;
pub use observe::observe;
pub use step::{Decision, step};

/// How long a container that could not be made waits; the kubelet's sync loop comes by as often.
const RETRY: SignedDuration = SignedDuration::from_secs(10);

/// How a container takes part in the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Runs to its end before the next one starts.
    Init,
    /// An init container that keeps running (`restartPolicy: Always`).
    Sidecar,
    /// One of `spec.containers`.
    Regular,
}

/// How a container ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The container's id, without its scheme.
    pub id: String,
    /// Exit code; 128 and the number for a signal.
    pub code: i32,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// `Completed`, `Error`, `OOMKilled` or `StartError`.
    pub reason: String,
    /// Termination message.
    pub message: Option<String>,
    /// When it had started.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub finished_at: Timestamp,
}

/// What a container has at least from its stop signal to its end, however long its preStop hook
/// took; the kubelet's `minimumGracePeriodInSeconds`.
const LEAST_GRACE: SignedDuration = SignedDuration::from_secs(2);

/// A running container that is to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopping {
    /// The end of its grace period.
    pub deadline: Timestamp,
    /// Its stop signal waits for its turn: sidecars end after those that they serve.
    pub held: bool,
    /// When the stop signal was sent. The preStop hook comes before.
    pub signalled: Option<Timestamp>,
    /// Whether it was killed.
    pub killed: bool,
}

impl Stopping {
    /// When it is killed, if nothing changes. A hook that overruns gets no more than it must.
    pub fn kill_at(&self) -> Timestamp {
        match self.signalled {
            Some(signalled) => self.deadline.max(signalled + LEAST_GRACE),
            None => self.deadline + LEAST_GRACE,
        }
    }
}

/// Where a container stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Not started, for a reason that the status shows.
    Waiting {
        /// The reason in the kubelet's word.
        reason: &'static str,
        /// For people.
        message: Option<String>,
        /// Not to be started before.
        until: Option<Timestamp>,
    },
    /// Being started.
    Creating,
    /// Running.
    Running {
        /// The container's id, without its scheme.
        id: String,
        /// Since when.
        since: Timestamp,
        /// Set once it is to end.
        stopping: Option<Stopping>,
    },
    /// Ended, and not to be started again.
    Exited(Exit),
}

/// A container with its history.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent facts of the status, none of which excludes another"
)]
pub struct Container {
    /// Its name in the spec.
    pub name: String,
    /// How it takes part.
    pub kind: Kind,
    /// Where it stands.
    pub state: State,
    /// How often it was started again.
    pub restarts: u32,
    /// How it ended the last time, if it was started since or waits to be.
    pub last: Option<Exit>,
    /// Its waits between restarts.
    pub backoff: Backoff,
    /// Whether its startup probe succeeded (at once if it has none).
    pub started: bool,
    /// Whether it was ever `started`.
    pub ever_started: bool,
    /// Whether the last attempt failed before it ran, so that the next one is no restart.
    pub attempt_failed: bool,
    /// Whether its readiness probe succeeded last.
    pub ready: bool,
    /// Its postStart hook runs: it is said to be created still, and later containers wait.
    pub posting: bool,
    /// Set by a failed probe or hook: why it must be stopped and started again.
    pub unhealthy: Option<Unhealthy>,
}

impl Container {
    fn is_active(&self) -> bool {
        match self.state {
            State::Creating | State::Running { .. } => true,
            State::Waiting { .. } | State::Exited(_) => false,
        }
    }

    /// Whether the next init container may start, as far as this one is concerned.
    pub fn is_initialized(&self) -> bool {
        match (self.kind, &self.state) {
            (Kind::Init, State::Exited(exit)) => exit.code == 0,
            // Once started it counts, also while it is restarted.
            (Kind::Sidecar, _) => self.ever_started,
            (Kind::Regular, _) => true,
            (Kind::Init, State::Waiting { .. } | State::Creating | State::Running { .. }) => false,
        }
    }
}

/// Why the pod terminates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It was deleted.
    Deleted,
    /// Its containers ended and are not to be restarted.
    Completed,
    /// `activeDeadlineSeconds` passed.
    DeadlineExceeded,
}

/// The pod is ending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Termination {
    /// Why.
    pub cause: Cause,
    /// When everything that still runs is killed.
    pub deadline: Timestamp,
    /// Whether [`Effect::Finish`] was given.
    pub finished: bool,
}

/// The pod's containers, init containers first, each group in the order of the spec.
#[derive(Clone, Debug, PartialEq)]
pub struct PodState {
    /// The containers.
    pub containers: Vec<Container>,
    /// When the node took the pod on.
    pub started_at: Timestamp,
    /// Set once the pod is ending.
    pub termination: Option<Termination>,
    /// What was told of pulls, by the reference that the spec has.
    pub pulls: BTreeMap<String, Told>,
}

/// What was told of an image's pull in events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// When the pull was told last.
    pub at: Timestamp,
    /// Whether its end was told.
    pub pulled: bool,
}

impl PodState {
    /// The state of a pod that was just admitted.
    pub fn new(pod: &Pod, now: Timestamp) -> Self {
        let spec = pod.spec.as_ref();
        let init = spec
            .and_then(|spec| spec.init_containers.as_deref())
            .unwrap_or_default();
        let regular = spec.map_or(&[][..], |spec| &spec.containers);
        let waiting = |container: &ContainerSpec, kind, reason| Container {
            name: container.name.clone(),
            kind,
            state: State::Waiting {
                reason,
                message: None,
                until: None,
            },
            restarts: 0,
            last: None,
            backoff: Backoff::default(),
            started: false,
            ever_started: false,
            attempt_failed: false,
            ready: false,
            posting: false,
            unhealthy: None,
        };
        let regular_waits_for = if init.is_empty() {
            reason::CONTAINER_CREATING
        } else {
            reason::POD_INITIALIZING
        };
        let containers = init
            .iter()
            .map(|container| {
                let kind = if container.restart_policy.as_deref() == Some("Always") {
                    Kind::Sidecar
                } else {
                    Kind::Init
                };
                waiting(container, kind, reason::POD_INITIALIZING)
            })
            .chain(
                regular
                    .iter()
                    .map(|container| waiting(container, Kind::Regular, regular_waits_for)),
            )
            .collect();
        Self {
            containers,
            started_at: now,
            termination: None,
            pulls: BTreeMap::new(),
        }
    }

    /// A container by name.
    pub fn container(&self, name: &str) -> Option<&Container> {
        self.containers
            .iter()
            .find(|container| container.name == name)
    }

    fn container_mut(&mut self, name: &str) -> Option<&mut Container> {
        self.containers
            .iter_mut()
            .find(|container| container.name == name)
    }

    /// Whether every init container succeeded and every sidecar started.
    pub fn is_initialized(&self) -> bool {
        self.containers.iter().all(Container::is_initialized)
    }

    /// Whether the pod ended and every effect of that was given.
    pub fn is_finished(&self) -> bool {
        self.termination
            .as_ref()
            .is_some_and(|termination| termination.finished)
    }
}

/// An image, as far as the pod's containers are concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Image {
    /// Not there yet.
    Pulling {
        /// Bytes that were downloaded.
        done: u64,
        /// Bytes that are to be downloaded; 0 until they are known.
        total: u64,
    },
    /// Can be used.
    Present {
        /// `name@sha256:…` of it in its registry.
        id: String,
        /// How it was pulled; none if it was there already.
        pulled: Option<Pulled>,
    },
    /// Cannot be used now.
    Failed {
        /// `ErrImagePull`, `ErrImageNeverPull` or `InvalidImageName`.
        reason: String,
        /// For people.
        message: String,
    },
}

/// What the pod should be, and what it needs to start.
#[derive(Clone, Copy, Debug)]
pub struct Desired<'a> {
    /// The pod as the API server has it.
    pub pod: &'a Pod,
    /// Images by the reference that the spec has.
    pub images: &'a BTreeMap<String, Image>,
    /// Whether volumes and services were fetched.
    pub prepared: bool,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Observation {
    /// The container runs. Its postStart hook, if it has one, begins.
    Started {
        /// Its name.
        container: String,
        /// Its id, without its scheme.
        id: String,
    },
    /// The container could not be made; it is tried again.
    CannotStart {
        /// Its name.
        container: String,
        /// `CreateContainerConfigError` or `CreateContainerError`.
        reason: &'static str,
        /// For people.
        message: String,
    },
    /// The container ended, or its program could not be executed (`StartError`).
    Exited {
        /// Its name.
        container: String,
        /// How.
        exit: Exit,
    },
    /// The postStart hook succeeded.
    PostStarted {
        /// Name of the container.
        container: String,
    },
    /// The stop signal was sent, after the preStop hook.
    Signalled {
        /// Name of the container.
        container: String,
    },
    /// The startup probe succeeded.
    StartupSucceeded {
        /// Name of the container.
        container: String,
    },
    /// The readiness probe changed its mind.
    Ready {
        /// Name of the container.
        container: String,
        /// Its result.
        ready: bool,
    },
    /// A probe failed too often, or a hook failed.
    Unhealthy {
        /// Name of the container.
        container: String,
        /// Which.
        why: Unhealthy,
    },
}

/// Why a container must be stopped and started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unhealthy {
    /// Its liveness probe failed.
    Liveness,
    /// Its startup probe failed.
    Startup,
    /// Its postStart hook failed.
    PostStart,
}

impl Unhealthy {
    /// The message of the event, in the kubelet's words.
    pub fn message(self, container: &str) -> String {
        let probe = match self {
            Self::Liveness => "liveness",
            Self::Startup => "startup",
            Self::PostStart => return "FailedPostStartHook".to_owned(),
        };
        format!("Container {container} failed {probe} probe, will be restarted")
    }
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Make and start a container.
    Start {
        /// Its name.
        container: String,
        /// How often it was started before.
        attempt: u32,
    },
    /// Run the preStop hook, then send the stop signal.
    Stop {
        /// Name of the container.
        container: String,
        /// Seconds of its grace period.
        grace_seconds: i64,
        /// The signal waits for [`Effect::Release`].
        held: bool,
    },
    /// Its turn has come: send the stop signal, once the preStop hook is over.
    Release {
        /// Name of the container.
        container: String,
    },
    /// Kill a container.
    Kill {
        /// Its name.
        container: String,
    },
    /// Record an event on the pod.
    Event(Event),
    /// Everything ended: write the final status, delete the pod if that was the cause, end the VM.
    Finish {
        /// Why.
        cause: Cause,
    },
}

/// An event on the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `Warning` instead of `Normal`.
    pub warning: bool,
    /// Reason, such as `BackOff`.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// Name of the container that it is about.
    pub container: Option<String>,
}

/// Reasons of waiting containers and of events, in the kubelet's words.
pub mod reason {
    /// Nothing is wrong, it is not there yet.
    pub const CONTAINER_CREATING: &str = "ContainerCreating";
    /// Init containers come first.
    pub const POD_INITIALIZING: &str = "PodInitializing";
    /// Its back-off has not passed.
    pub const CRASH_LOOP: &str = "CrashLoopBackOff";
    /// The image could not be pulled.
    pub const ERR_IMAGE_PULL: &str = "ErrImagePull";
    /// The image could not be pulled and is tried again later.
    pub const IMAGE_BACK_OFF: &str = "ImagePullBackOff";
    /// The image is not there, and the pod does not want it to be pulled.
    pub const NEVER_PULL: &str = "ErrImageNeverPull";
    /// The image's reference is not one.
    pub const INVALID_IMAGE: &str = "InvalidImageName";
    /// Something that the spec names is missing.
    pub const CONFIG_ERROR: &str = "CreateContainerConfigError";
    /// The container could not be made.
    pub const CREATE_ERROR: &str = "CreateContainerError";
}
