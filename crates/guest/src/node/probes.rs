//! Probes of running containers: one task for each, which ends with the container's run.

use super::handlers::{self, Outcome, Site};
use super::pod::Input;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ExecAction, Probe};
use monopod_core::pod::lifecycle::{Event, Observation, Unhealthy};
use monopod_core::pod::probe::{Count, Purpose, Timing};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// How often a probe is tried that could not be carried out; the kubelet's `maxProbeRetries`.
const TRIES: usize = 3;

/// Starts the probes of a container that runs since a moment ago.
///
/// Liveness and startup probes end as soon as the pod terminates.
pub(crate) fn start(
    site: &Site,
    inputs: &mpsc::Sender<Input>,
    started_at: Timestamp,
    terminating: &watch::Receiver<bool>,
) {
    let container = &site.container;
    let (started, has_started) = watch::channel(container.startup_probe.is_none());
    let spawn = |probe: &Option<Probe>, purpose, started: Option<watch::Sender<bool>>| {
        let Some(probe) = probe.clone() else { return };
        let worker = Worker {
            timing: Timing::of(&probe),
            site: site.clone(),
            inputs: inputs.clone(),
            started_at,
            probe,
            purpose,
        };
        let has_started = has_started.clone();
        let mut running = site.run.running.clone();
        let mut terminating = terminating.clone();
        tokio::spawn(async move {
            let ends = async {
                if purpose == Purpose::Readiness || terminating.wait_for(|is| *is).await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = worker.work(started, has_started) => {}
                _ended = running.wait_for(|running| !running) => {}
                () = ends => {}
            }
        });
    };
    spawn(&container.startup_probe, Purpose::Startup, Some(started));
    spawn(&container.liveness_probe, Purpose::Liveness, None);
    spawn(&container.readiness_probe, Purpose::Readiness, None);
}

struct Worker {
    timing: Timing,
    site: Site,
    inputs: mpsc::Sender<Input>,
    started_at: Timestamp,
    probe: Probe,
    purpose: Purpose,
}

impl Worker {
    async fn work(
        &self,
        started: Option<watch::Sender<bool>>,
        mut has_started: watch::Receiver<bool>,
    ) {
        if self.purpose != Purpose::Startup && has_started.wait_for(|is| *is).await.is_err() {
            return;
        }
        // Counted from the container's start, also where a startup probe came first.
        let ran = Timestamp::now().duration_since(self.started_at);
        let delay = Duration::from_secs(self.timing.initial_delay);
        tokio::time::sleep(delay.saturating_sub(ran.try_into().unwrap_or_default())).await;
        let mut ticks = tokio::time::interval(Duration::from_secs(self.timing.period));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        let mut count = Count::default();
        let mut ready = false;
        loop {
            ticks.tick().await;
            let Some(succeeded) = self.attempt().await else {
                continue;
            };
            let Some(decided) = count.record(succeeded, &self.timing) else {
                continue;
            };
            let container = self.site.container.name.clone();
            let why = match (self.purpose, decided) {
                (Purpose::Startup, true) => {
                    if let Some(started) = &started {
                        started.send_replace(true);
                    }
                    return self.tell(Observation::StartupSucceeded { container }).await;
                }
                (Purpose::Liveness, true) => continue,
                (Purpose::Startup, false) => Unhealthy::Startup,
                (Purpose::Liveness, false) => Unhealthy::Liveness,
                (Purpose::Readiness, is) => {
                    if is != ready {
                        ready = is;
                        self.tell(Observation::Ready { container, ready }).await;
                    }
                    continue;
                }
            };
            return self.tell(Observation::Unhealthy { container, why }).await;
        }
    }

    /// Probes once, and tells what is worth an event. None if the probe could not be carried out,
    /// which decides nothing.
    async fn attempt(&self) -> Option<bool> {
        let name = self.purpose.name();
        for tries_left in (0..TRIES).rev() {
            match self.probe().await {
                Outcome::Success => return Some(true),
                Outcome::Warning(message) => {
                    self.event("ProbeWarning", format!("{name} probe warning: {message}"))
                        .await;
                    return Some(true);
                }
                Outcome::Failure(message) => {
                    self.event("Unhealthy", format!("{name} probe failed: {message}"))
                        .await;
                    return Some(false);
                }
                Outcome::Unknown(_) if tries_left > 0 => {}
                Outcome::Unknown(message) => {
                    let text =
                        format!("{name} probe errored and resulted in unknown state: {message}");
                    self.event("Unhealthy", text).await;
                }
            }
        }
        None
    }

    async fn probe(&self) -> Outcome {
        let (site, probe) = (&self.site, &self.probe);
        let timeout = Duration::from_secs(self.timing.timeout);
        if let Some(ExecAction { command }) = &probe.exec {
            let command = command.as_deref().unwrap_or_default();
            handlers::exec(site, command, Some(timeout)).await
        } else if let Some(action) = &probe.http_get {
            handlers::http(site, action, timeout).await
        } else if let Some(action) = &probe.tcp_socket {
            handlers::tcp(site, action, timeout).await
        } else if let Some(action) = &probe.grpc {
            handlers::grpc(site, action, timeout).await
        } else {
            Outcome::Unknown("missing probe handler".to_owned())
        }
    }

    async fn event(&self, reason: &'static str, message: String) {
        let event = Event {
            warning: true,
            reason,
            message,
            container: Some(self.site.container.name.clone()),
        };
        self.send(Input::Event(event)).await;
    }

    async fn tell(&self, observation: Observation) {
        self.send(Input::Observed(observation)).await;
    }

    async fn send(&self, input: Input) {
        if self.inputs.send(input).await.is_err() {
            tracing::debug!("the pod's task ended before this probe");
        }
    }
}
