//! Writes an environment's status, newest first: what is overtaken meanwhile is never written.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use monopod_api::environment::{
    Environment, EnvironmentPhase, EnvironmentStatus, ImagePhase, ImageStatus, PhaseTime,
};
use monopod_api::timeline::Step;
use monopod_core::owner;
use monopod_core::timeline::record;
use monopod_wire::ImageState;
use serde_json::json;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Delay before a failed write is tried again.
const RETRY: Duration = Duration::from_millis(500);
/// Images that are shown; no pod may have more.
const IMAGES: usize = 64;
/// Time between two writes of progress alone.
const PROGRESS: Duration = Duration::from_secs(1);

/// The status of one environment, written in the background.
#[derive(Debug)]
pub(crate) struct Status {
    current: EnvironmentStatus,
    sender: watch::Sender<EnvironmentStatus>,
    writer: JoinHandle<()>,
}

impl Status {
    /// Goes on from what is stored.
    pub(crate) fn new(
        client: Client,
        name: String,
        uid: String,
        stored: EnvironmentStatus,
    ) -> Self {
        let (sender, receiver) = watch::channel(stored.clone());
        let writer = tokio::spawn(write(Api::all(client), name, uid, receiver));
        Self {
            current: stored,
            sender,
            writer,
        }
    }

    pub(crate) fn phase(&self) -> EnvironmentPhase {
        self.current.phase
    }

    /// When a step of the start was done.
    pub(crate) fn done(&self, step: Step) -> Option<Timestamp> {
        let mut timeline = self.current.timeline.iter();
        timeline
            .find(|entry| entry.step == step)
            .map(|entry| entry.done.0)
    }

    /// What the whole start took, once it is over.
    pub(crate) fn total(&self) -> Option<SignedDuration> {
        let begin = self
            .current
            .timeline
            .iter()
            .map(|entry| entry.began.0)
            .min()?;
        Some(self.done(Step::Running)?.duration_since(begin))
    }

    /// Keeps that a step is done, and gives what it took if it is new. It is written with what is
    /// written next: the start does not wait for its own timeline.
    pub(crate) fn step(
        &mut self,
        step: Step,
        began: Option<Timestamp>,
        done: Timestamp,
        detail: Option<&str>,
    ) -> Option<SignedDuration> {
        let timeline = &mut self.current.timeline;
        // Of a start that was not seen from its beginning, or is over, nothing is told.
        let told = timeline.is_empty() == (step == Step::Request);
        let over = timeline.iter().any(|entry| entry.step == Step::Running);
        if !told || over {
            return None;
        }
        record(timeline, step, began, done, detail)
    }

    /// Enters a later phase; an earlier one is ignored.
    pub(crate) fn enter(&mut self, phase: EnvironmentPhase) {
        if !owner::enters(self.current.phase, phase) {
            return;
        }
        self.current.phase = phase;
        self.current.phases.push(PhaseTime {
            phase,
            time: MicroTime(Timestamp::now()),
        });
        self.publish();
    }

    /// Enters the phase `Failed`, unless it ended already.
    pub(crate) fn fail(&mut self, reason: &str, message: String) {
        if self.current.phase.is_terminal() {
            return;
        }
        self.current.reason = Some(reason.to_owned());
        self.current.message = Some(message);
        self.enter(EnvironmentPhase::Failed);
    }

    /// Shows how far an image has come.
    pub(crate) fn image(&mut self, reference: &str, state: &ImageState) {
        let new = shown(reference, state);
        let images = &mut self.current.images;
        match images.iter().position(|i| i.reference == reference) {
            Some(at) => images[at] = new,
            None if images.len() < IMAGES => images.push(new),
            None => return,
        }
        self.publish();
    }

    /// Has the status written as it is now.
    pub(crate) fn publish(&self) {
        // The writer lives until it is told to stop.
        self.sender.send_replace(self.current.clone());
    }

    /// Stops the writer; what is not written any more is about an object that goes away.
    pub(crate) fn close(self) {
        self.writer.abort();
    }
}

fn shown(reference: &str, state: &ImageState) -> ImageStatus {
    let mut shown = ImageStatus {
        reference: reference.to_owned(),
        ..ImageStatus::default()
    };
    match state {
        ImageState::Pulling { done, total } => {
            shown.state = ImagePhase::Pulling;
            shown.done_bytes = Some(*done);
            shown.total_bytes = Some(*total).filter(|total| *total > 0);
        }
        ImageState::Attached { pulled, .. } => {
            shown.state = ImagePhase::Present;
            shown.total_bytes = pulled.map(|pulled| pulled.size);
            shown.done_bytes = shown.total_bytes;
        }
        ImageState::Failed { message, .. } => {
            shown.state = ImagePhase::Failed;
            shown.message = Some(message.clone());
        }
    }
    shown
}

/// Waits before a status is written that differs from the one before only in its images, or that
/// lacks the end of the timeline, which comes a moment after the phase `Running`.
async fn settle(
    written: Option<&(EnvironmentPhase, Instant)>,
    status: &mut watch::Receiver<EnvironmentStatus>,
) {
    let now = Instant::now();
    let same = |status: &EnvironmentStatus| written.filter(|(phase, _)| status.phase == *phase);
    loop {
        let until = {
            let current = status.borrow_and_update();
            match same(&current) {
                Some((_, at)) => *at + PROGRESS,
                None if is_about_to_run(&current) => now + PROGRESS,
                None => return,
            }
        };
        tokio::select! {
            () = tokio::time::sleep_until(until) => return,
            changed = status.changed() => if changed.is_err() { return },
        }
    }
}

/// The container runs, but the API server has not been told yet.
fn is_about_to_run(status: &EnvironmentStatus) -> bool {
    let done = |step| status.timeline.iter().any(|entry| entry.step == step);
    status.phase == EnvironmentPhase::Running
        && done(Step::ContainerStarted)
        && !done(Step::Running)
}

async fn write(
    api: Api<Environment>,
    name: String,
    uid: String,
    mut status: watch::Receiver<EnvironmentStatus>,
) {
    let mut written = None;
    while status.changed().await.is_ok() {
        settle(written.as_ref(), &mut status).await;
        loop {
            let current = status.borrow_and_update().clone();
            let phase = current.phase;
            let patch = json!({"metadata": {"uid": uid}, "status": current});
            match api
                .patch_status(&name, &PatchParams::default(), &Patch::Merge(patch))
                .await
            {
                Ok(_) => {
                    written = Some((phase, Instant::now()));
                    break;
                }
                Err(kube::Error::Api(answer)) if answer.code == 404 || answer.code == 409 => return,
                Err(error) => {
                    tracing::warn!(environment = %name, error = &error as &dyn std::error::Error, "status will be written again");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use monopod_api::timeline::StepTime;

    fn status(phase: EnvironmentPhase, last: Step) -> EnvironmentStatus {
        let now = MicroTime(Timestamp::UNIX_EPOCH);
        EnvironmentStatus {
            phase,
            timeline: vec![StepTime {
                step: last,
                began: now.clone(),
                done: now,
                detail: None,
            }],
            ..EnvironmentStatus::default()
        }
    }

    /// Seconds after which a status is written, if this is published after so many.
    async fn written_after(
        first: EnvironmentStatus,
        later: EnvironmentStatus,
        after: Duration,
    ) -> Duration {
        let (sender, mut receiver) = watch::channel(first);
        let begin = Instant::now();
        let publish = async {
            tokio::time::sleep(after).await;
            sender.send_replace(later);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = settle(None, &mut receiver) => begin.elapsed(),
            () = publish => unreachable!("it publishes, and then waits for ever"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_the_timeline_is_written_with_the_phase_but_not_waited_for_long() {
        let started = || status(EnvironmentPhase::Running, Step::ContainerStarted);
        let seen = || status(EnvironmentPhase::Running, Step::Running);
        let (soon, late) = (Duration::from_millis(30), Duration::from_secs(5));
        assert_eq!(written_after(started(), seen(), soon).await, soon);
        assert_eq!(written_after(started(), seen(), late).await, PROGRESS);
    }

    #[tokio::test(start_paused = true)]
    async fn other_phases_are_written_at_once() {
        let registered = || status(EnvironmentPhase::Registered, Step::Registered);
        let after = written_after(registered(), registered(), PROGRESS).await;
        assert_eq!(after, Duration::ZERO);
    }
}
