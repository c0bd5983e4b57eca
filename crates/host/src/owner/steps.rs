//! The timeline of the start: what each step took, for the status and for the metrics.

use super::State;
use crate::hypervisor::Hypervisor;
use jiff::Timestamp;
use kube::ResourceExt;
use monopod_api::environment::EnvironmentPhase;
use monopod_api::labels;
use monopod_api::timeline::Step;
use monopod_core::timeline::guest_time;
use monopod_wire::GuestPhase;
use tokio::time::Instant;

impl<H: Hypervisor> State<H> {
    /// A step is done that began at this time, or else with the last of those before it.
    pub(super) fn step(&mut self, step: Step, began: Option<Timestamp>) {
        self.step_at(step, began, Timestamp::now(), None);
    }

    /// The host saw the environment, and begins.
    pub(super) fn requested(&mut self) {
        let asked = self.environment.annotations().get(labels::REQUESTED_AT);
        let asked = asked.and_then(|text| text.parse().ok());
        self.step(Step::Request, asked);
    }

    /// An image is attached.
    pub(super) fn image_step(&mut self, reference: &str) {
        self.step_at(Step::Image, None, Timestamp::now(), Some(reference));
    }

    /// The guest did a step. Its clock is the host's as it was told with GO.
    pub(super) fn guest_phase(&mut self, phase: &GuestPhase) {
        let Some(step) = Step::of_guest(&phase.name) else {
            return;
        };
        let told = self.status.done(Step::Tap);
        let done = guest_time(phase.time_ns, told, Timestamp::now());
        // It may say it again, as often as it likes.
        let first = self.step_at(step, None, done, None);
        if first {
            tracing::info!(environment = %self.name, pod = %self.environment.spec.pod.uid, phase = step.name(), "guest phase");
        }
        match step {
            Step::Registered => self.status.enter(EnvironmentPhase::Registered),
            Step::ContainerStarted => self.status.enter(EnvironmentPhase::Running),
            Step::Running if first => {
                self.limit_at = self.limit_at.map(|_later| Instant::now());
                if let Some(total) = self.status.total() {
                    self.context.metrics.phase("total", total.as_secs_f64());
                }
                self.status.publish();
            }
            _finer => {}
        }
    }

    /// True if it was not done before.
    fn step_at(
        &mut self,
        step: Step,
        began: Option<Timestamp>,
        done: Timestamp,
        detail: Option<&str>,
    ) -> bool {
        let took = self.status.step(step, began, done, detail);
        if let Some(took) = took {
            self.context.metrics.phase(step.name(), took.as_secs_f64());
        }
        took.is_some()
    }
}
