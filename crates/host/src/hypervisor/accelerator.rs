//! How guests' code is run on this machine, which a probe finds out while the host does other things.

use super::jail::Program;
use super::probe;
use super::tsc;
use std::path::PathBuf;
use tokio::sync::watch;

/// How a guest's code is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accelerator {
    /// The processor itself.
    Kvm,
    /// Emulation, with the machine's time stamp counter in kHz.
    Tcg {
        /// Without it the guest's own calibration fails at random on a loaded machine.
        tsc_khz: u64,
    },
}

/// The accelerator of this machine, once it is known.
#[derive(Clone, Debug)]
pub(super) struct Choice(watch::Receiver<Option<(Accelerator, String)>>);

impl Choice {
    /// Begins to find out. Takes some seconds where KVM seems to exist and runs nothing.
    pub(super) fn begin(program: Program, guest_image: PathBuf) -> Self {
        let (sender, receiver) = watch::channel(None);
        tokio::spawn(async move {
            let tsc_khz = tokio::task::spawn_blocking(tsc::khz).await.unwrap_or(0);
            let chosen = match probe::kvm(&program, &guest_image).await {
                Ok(()) => (Accelerator::Kvm, "kvm".to_owned()),
                Err(why) => (Accelerator::Tcg { tsc_khz }, format!("tcg: {why}")),
            };
            tracing::info!(accelerator = %chosen.1, "virtual machines can be run");
            sender.send_replace(Some(chosen));
        });
        Self(receiver)
    }

    /// Waits until it is known; none if finding out died.
    pub(super) async fn known(&self) -> Option<Accelerator> {
        let mut receiver = self.0.clone();
        let chosen = receiver.wait_for(Option::is_some).await.ok()?;
        chosen.as_ref().map(|(accelerator, _reason)| *accelerator)
    }

    /// The accelerator and why it is this one, if that is known already.
    pub(super) fn reason(&self) -> Option<String> {
        let chosen = self.0.borrow();
        chosen.as_ref().map(|(_accelerator, reason)| reason.clone())
    }
}
