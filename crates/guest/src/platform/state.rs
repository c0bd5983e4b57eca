//! What the host said last and what the guest reached.

use crate::metadata::Numbered;
use monopod_wire::{
    Credentials, Ended, GuestPhase, Image, LogPiece, LogStored, Report, Stage, Task,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use tokio::sync::watch;

/// Phases that are kept to be told again. The guest's own are fewer.
const PHASES: usize = 64;
/// References that are kept. A pod's specification has fewer.
const IMAGES: usize = 256;

/// What the node posted.
#[derive(Debug)]
pub(super) enum Post {
    /// A phase was reached.
    Phase(GuestPhase),
    /// Figures.
    Report(Report),
    /// A piece of a log.
    Log(Box<LogPiece>),
    /// The host has all logs.
    LogsComplete,
    /// The guest is to end.
    Ended(Ended),
}

/// A value in its newest version, if there is one.
pub(super) type Newest<T> = watch::Sender<Option<Numbered<T>>>;

/// What the host told this guest to be, and whether it is.
#[derive(Debug)]
struct Told {
    task: Task,
    became: bool,
}

/// Shared between the link and the endpoint.
#[derive(Debug)]
pub(super) struct State {
    task: watch::Sender<Option<Told>>,
    pub(super) credentials: Newest<Credentials>,
    pub(super) images: Newest<Vec<Image>>,
    phases: Mutex<Vec<GuestPhase>>,
    /// The host listens.
    connected: AtomicBool,
    /// Held while a piece of a log is on its way.
    pub(super) carrying: tokio::sync::Mutex<()>,
    /// What the host said of the piece that is on its way.
    pub(super) stored: watch::Sender<Option<LogStored>>,
    /// The host answers for the logs.
    pub(super) taken: watch::Sender<bool>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            task: watch::Sender::new(None),
            credentials: watch::Sender::new(None),
            images: watch::Sender::new(None),
            phases: Mutex::default(),
            connected: AtomicBool::new(false),
            carrying: tokio::sync::Mutex::default(),
            stored: watch::Sender::new(None),
            taken: watch::Sender::new(false),
        }
    }
}

impl State {
    /// Remembers the task; false if there was one already.
    pub(super) fn start(&self, task: &Task) -> bool {
        self.task.send_if_modified(|told| {
            let first = told.is_none();
            told.get_or_insert_with(|| Told {
                task: task.clone(),
                became: false,
            });
            first
        })
    }

    /// pid1 did all that the task's Go asks for.
    pub(super) fn became(&self) {
        self.task.send_modify(|told| {
            if let Some(told) = told {
                told.became = true;
            }
        });
    }

    /// The task, as soon as this guest is the one that it is for.
    pub(super) async fn task(&self) -> Option<Task> {
        let mut told = self.task.subscribe();
        let became = told.wait_for(|told| told.as_ref().is_some_and(|told| told.became));
        let told = became.await.ok()?;
        told.as_ref().map(|told| told.task.clone())
    }

    /// Forgets a rehearsal.
    pub(super) fn forget(&self) {
        self.task.send_replace(None);
        self.credentials.send_replace(None);
        self.images.send_replace(None);
        self.phases
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    pub(super) fn connect(&self, connected: bool) {
        self.connected.store(connected, Ordering::Relaxed);
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Relaxed)
    }

    pub(super) fn stage(&self) -> Stage {
        if self.task.borrow().is_some() {
            Stage::Going
        } else {
            Stage::Ready
        }
    }

    pub(super) fn set_credentials(&self, credentials: Credentials) {
        self.credentials.send_if_modified(|newest| {
            let changed = newest
                .as_ref()
                .is_none_or(|newest| newest.value != credentials);
            if changed {
                *newest = Some(Numbered {
                    version: newest.as_ref().map_or(1, |newest| newest.version + 1),
                    value: credentials,
                });
            }
            changed
        });
    }

    pub(super) fn set_image(&self, image: Image) {
        self.images.send_if_modified(|newest| {
            let images = newest.get_or_insert_with(|| Numbered {
                version: 0,
                value: Vec::new(),
            });
            let known = images
                .value
                .iter()
                .position(|known| known.reference == image.reference);
            match known {
                Some(at) if images.value[at] == image => return false,
                Some(at) => images.value[at] = image,
                None if images.value.len() < IMAGES => images.value.push(image),
                None => return false,
            }
            images.version += 1;
            true
        });
    }

    pub(super) fn reached(&self, phase: GuestPhase) {
        let mut phases = self.phases.lock().unwrap_or_else(PoisonError::into_inner);
        if phases.len() < PHASES {
            phases.push(phase);
        }
    }

    pub(super) fn phases(&self) -> Vec<GuestPhase> {
        self.phases
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use monopod_wire::ImageState;

    fn image(reference: &str, message: &str) -> Image {
        Image {
            reference: reference.into(),
            state: ImageState::Failed {
                reason: "ErrImagePull".into(),
                message: message.into(),
            },
        }
    }

    #[test]
    fn a_version_is_counted_only_for_a_change() {
        let state = State::default();
        let version = || state.images.borrow().as_ref().map(|images| images.version);
        assert_eq!(version(), None);
        state.set_image(image("a", "x"));
        state.set_image(image("a", "x"));
        assert_eq!(version(), Some(1));
        state.set_image(image("a", "y"));
        state.set_image(image("b", "x"));
        assert_eq!(version(), Some(3));
    }
}
