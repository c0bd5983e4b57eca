//! The VM's share of the CPUs: whole ones for its start, which ends when the API server knows of it,
//! what its size says from then on, and whole ones for some seconds to power off.

use super::State;
use crate::hypervisor::{Hypervisor, Vm};
use std::time::Duration;
use tokio::time::Instant;

/// Longest that a VM may use whole CPUs until its pod is Running. Starts take seconds; a guest that
/// keeps silent about its start gains nothing after this.
pub(super) const UNLIMITED: Duration = Duration::from_mins(2);

/// Longest that a VM may use whole CPUs again once its pod has ended and all its logs are kept.
const ENDING: Duration = Duration::from_secs(10);

impl<H: Hypervisor> State<H> {
    pub(super) fn limit_cpu(&mut self) {
        self.limit_at = None;
        self.share(self.environment.spec.size.cpu_millis);
    }

    /// What is left to do is not the pod's any more. A guest gains nothing by saying so again.
    pub(super) fn hasten_end(&mut self) {
        if !self.hastened {
            self.hastened = true;
            self.limit_at = Some(Instant::now() + ENDING);
            self.share(self.environment.spec.size.vcpus() * 1000);
        }
    }

    fn share(&self, millis: u32) {
        if let Some(Err(error)) = self.vm.as_ref().map(|vm| vm.limit_cpu(millis)) {
            tracing::error!(environment = %self.name, error = &error as &dyn std::error::Error, "the VM's share of the CPUs is not limited");
        }
    }
}

/// Waits for a time; for ever, if there is none.
pub(super) async fn due(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
