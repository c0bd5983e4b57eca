//! The beginning of a VM: started, or taken over from a former host process.

use super::{State, Tap, chain, is_deleted, limit};
use crate::hypervisor::{Events, Hypervisor, Vm, VmSpec};
use crate::metrics::VmFailure;
use crate::network;
use crate::policy::View;
use monopod_api::environment::{Environment, EnvironmentPhase};
use monopod_api::timeline::Step;
use monopod_core::owner::{self, Begin, Found};
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// How long a VM waits for its interface's subnet.
const SUBNET_WAIT: Duration = Duration::from_secs(30);

impl<H: Hypervisor> State<H> {
    /// Starts the VM, or adopts the one that a former host process started.
    pub(super) async fn begin(
        &mut self,
        mut view: watch::Receiver<View>,
        updates: &mut watch::Receiver<Environment>,
    ) -> Option<Events> {
        if self.status.phase().is_terminal() {
            return None;
        }
        // A VM gets the environment's name once and for good, before its guest is told anything.
        let had_vm = self.context.hypervisor.has(&self.name);
        let adopted = match self.context.hypervisor.adopt(&self.name).await {
            Ok(adopted) => adopted,
            Err(error) => {
                self.fail(VmFailure::NotAdopted, &chain(&error)).await;
                return None;
            }
        };
        let found = match (&adopted, had_vm) {
            (Some(_), _) => Found::Running,
            (None, true) => Found::Ended,
            (None, false) => Found::Nothing,
        };
        let begin = owner::begin(self.status.phase(), found);
        self.gateway = tokio::select! {
            gateway = self.find_gateway(begin, &mut view) => gateway,
            Ok(deleted) = updates.wait_for(is_deleted) => {
                self.environment = deleted.clone();
                return None;
            }
        };
        match (begin, adopted) {
            (Begin::Adopt, Some((vm, events))) => self.adopt(vm, events).await,
            (Begin::Start, _) => self.start(updates).await,
            (Begin::Lost | Begin::Adopt, _) => {
                self.fail(
                    VmFailure::Gone,
                    "the VM was gone when the host process started",
                )
                .await;
                None
            }
            (Begin::Nothing, _) => None,
        }
    }

    /// A VM that runs does not depend on its interface's subnet: its route says the gateway. It
    /// may not have one yet.
    async fn find_gateway(
        &self,
        begin: Begin,
        view: &mut watch::Receiver<View>,
    ) -> Option<Ipv4Addr> {
        match begin {
            Begin::Adopt => {
                match network::gateway(&self.context.options.network, self.address).await {
                    Ok(None) => {}
                    Ok(gateway) => return gateway,
                    Err(error) => {
                        let error = chain(&error);
                        tracing::warn!(environment = %self.name, error, "its route is not known");
                    }
                }
            }
            Begin::Start => {}
            Begin::Lost | Begin::Nothing => return None,
        }
        let interface = &self.environment.spec.network_interface;
        let known = view.wait_for(|view| view.gateway(interface).is_some());
        match tokio::time::timeout(SUBNET_WAIT, known).await {
            Ok(Ok(view)) => view.gateway(interface),
            Ok(Err(_)) | Err(_) => None,
        }
    }

    async fn adopt(&mut self, vm: H::Vm, events: Events) -> Option<Events> {
        tracing::info!(environment = %self.name, pod = %self.environment.spec.pod.uid, "VM adopted");
        // The host process may have ended before it did so.
        if let Err(message) = self.plug(vm.id()).await {
            self.fail(VmFailure::NotAdopted, &message).await;
            return None;
        }
        for (_, squashfs) in vm.attached() {
            self.context.in_use.has(&self.name, &squashfs);
        }
        self.vm = Some(vm);
        self.context.metrics.vms.inc();
        self.limit_at = Some(Instant::now());
        Some(events)
    }

    async fn start(&mut self, updates: &mut watch::Receiver<Environment>) -> Option<Events> {
        self.status.enter(EnvironmentPhase::Booting);
        let started = tokio::select! {
            started = self.try_start() => started,
            Ok(deleted) = updates.wait_for(is_deleted) => {
                self.environment = deleted.clone();
                return None;
            }
        };
        match started {
            Ok((vm, events)) => {
                tracing::info!(environment = %self.name, vm = vm.id(), pod = %self.environment.spec.pod.uid, "VM started");
                self.vm = Some(vm);
                self.limit_at = Some(Instant::now() + limit::UNLIMITED);
                self.context.metrics.vms.inc();
                self.listening = true;
                self.tell_everything();
                Some(events)
            }
            Err(message) => {
                self.fail(VmFailure::NotStarted, &message).await;
                None
            }
        }
    }

    async fn try_start(&mut self) -> Result<(H::Vm, Events), String> {
        let spec = VmSpec {
            environment: self.name.clone(),
            size: self.environment.spec.size,
            scratch_bytes: u64::from(self.environment.spec.scratch_gib) << 30,
        };
        let started = self.context.hypervisor.start(spec).await;
        let (vm, events) = started.map_err(|error| chain(&error))?;
        self.step(Step::Vm, None);
        self.plug(vm.id()).await?;
        Ok((vm, events))
    }

    /// Gives the VM its interface.
    async fn plug(&mut self, vm: &str) -> Result<(), String> {
        let gateway = self.gateway.ok_or_else(|| {
            format!(
                "network interface {} or its subnet is missing",
                self.environment.spec.network_interface
            )
        })?;
        let interface = self.interface(gateway);
        network::plug(&self.context.options.network, &interface, vm)
            .await
            .map_err(|error| chain(&error))?;
        self.tap.send_replace(Tap::Plugged);
        self.step(Step::Tap, None);
        Ok(())
    }
}
