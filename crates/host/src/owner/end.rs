//! The end of a VM, and of its environment.

use super::{RETRY, State, Tap, bounded, chain};
use crate::files;
use crate::hypervisor::{Hypervisor, Vm};
use crate::metrics::VmFailure;
use crate::{archive, credentials, network};
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use monopod_api::environment::{Environment, EnvironmentPhase};
use monopod_api::{labels, messages};
use monopod_core::owner;
use monopod_ops::answer::absent_is_fine;
use monopod_wire::Ended;
use serde_json::json;
use std::time::Duration;
use tokio::time::Instant;

/// How long a VM without a tap has to end by itself.
const LAST_WORDS: Duration = Duration::from_secs(2);

impl<H: Hypervisor> State<H> {
    pub(super) async fn exited(&mut self) {
        let unplugged = *self.tap.borrow() == Tap::Removed;
        let category = match &self.ended {
            Some(Ended::Failed { .. }) => VmFailure::Guest,
            _said_nothing if unplugged => VmFailure::Unplugged,
            _said_nothing => VmFailure::Died,
        };
        if let Some(message) = owner::failure(self.ended.take(), unplugged) {
            return self.fail(category, &bounded(message)).await;
        }
        self.free().await;
        self.status.enter(EnvironmentPhase::Finished);
    }

    /// The VM's tap is gone. So it is shortly before its process is, which has its own reason.
    pub(super) fn tap_gone(&mut self) {
        self.tap.send_replace(Tap::Idle);
        self.kill_at = Some(Instant::now() + LAST_WORDS);
    }

    /// Somebody removed the tap. The VM can never reach anybody again, as a tap is made with
    /// its process.
    pub(super) async fn kill_unplugged(&mut self) {
        self.kill_at = None;
        self.tap.send_replace(Tap::Removed);
        // Its exit follows, and what its guest said before.
        if let Some(vm) = &self.vm
            && let Err(error) = vm.end().await
        {
            self.fail(VmFailure::Unplugged, &chain(&error)).await;
        }
    }

    pub(super) async fn fail(&mut self, category: VmFailure, message: &str) {
        tracing::warn!(environment = %self.name, pod = %self.environment.spec.pod.uid, message, "environment failed");
        self.context.metrics.failed(category);
        self.free().await;
        self.status
            .fail(messages::ENVIRONMENT_LOST, message.to_owned());
    }

    /// Ends the VM and frees what it holds on this machine; tried until it works.
    pub(super) async fn free(&mut self) {
        if let Some(vm) = self.vm.take() {
            self.context.metrics.vms.dec();
            // Also if somebody removed its directory, by which it is found.
            if let Err(error) = vm.end().await {
                tracing::error!(environment = %self.name, error = &error as &dyn std::error::Error, "a VM cannot be ended");
            }
        }
        self.listening = false;
        self.kill_at = None;
        self.tap.send_replace(Tap::Idle);
        while let Err(message) = self.try_free().await {
            tracing::error!(environment = %self.name, message, "cannot be freed; tried again");
            tokio::time::sleep(RETRY).await;
        }
        self.context.metrics.forget(&self.name);
        self.context.in_use.release(&self.name);
    }

    async fn try_free(&self) -> Result<(), String> {
        self.context
            .hypervisor
            .discard(&self.name)
            .await
            .map_err(|error| chain(&error))?;
        network::unplug(&self.context.options.network, self.address)
            .await
            .map_err(|error| chain(&error))
    }

    /// Nobody answers at the address any more, and the archive is gone.
    async fn try_forget_logs(&mut self) -> Result<(), String> {
        self.archive = None;
        network::disclaim(&self.context.options.network, self.address)
            .await
            .map_err(|error| chain(&error))?;
        let directory = archive::directory(&self.context.options.directory, &self.name);
        archive::delete(&directory).map_err(|error| chain(&error))
    }

    /// The environment is deleted: frees everything and gives up the finalizer.
    pub(super) async fn release(mut self) {
        if !self.is_deleted() {
            // The host process ends. The VM goes on.
            return;
        }
        tracing::info!(environment = %self.name, pod = %self.environment.spec.pod.uid, "releasing");
        self.free().await;
        while let Err(message) = self.try_forget_logs().await {
            tracing::error!(environment = %self.name, message, "logs cannot be removed; tried again");
            tokio::time::sleep(RETRY).await;
        }
        let path = credentials::file(&self.context.options.directory, &self.name);
        if let Err(error) = files::remove(&path) {
            tracing::error!(environment = %self.name, %error, "credentials stay behind");
        }
        let api: Api<Environment> = Api::all(self.context.client.clone());
        self.status.close();
        loop {
            match release_finalizer(&api, &self.environment).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(environment = %self.name, error = &error as &dyn std::error::Error, "finalizer not given up; tried again");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

/// Gives up a host's finalizer of an environment, whose VM has ended: by its owner, or in its place.
pub async fn release_finalizer(
    api: &Api<Environment>,
    ended: &Environment,
) -> Result<(), kube::Error> {
    let name = &ended.name_any();
    // An environment that has the name by now is another.
    let current = api.get_opt(name).await?;
    let Some(environment) = current.filter(|current| current.uid() == ended.uid()) else {
        return Ok(());
    };
    let finalizers: Vec<&String> = environment
        .finalizers()
        .iter()
        .filter(|f| *f != labels::HOST_FINALIZER)
        .collect();
    let patch = json!({"metadata": {
        "uid": environment.uid(), "resourceVersion": environment.resource_version(), "finalizers": finalizers,
    }});
    let parameters = PatchParams::default();
    absent_is_fine(api.patch(name, &parameters, &Patch::Merge(patch)).await)
}
