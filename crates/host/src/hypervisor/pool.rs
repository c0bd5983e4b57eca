//! VMs that are started before anyone asks for them, so that a pod's start need not wait for one.
//!
//! Each is a clone whose guest has gone through a pod's start once, for practice: under emulation
//! most of a start is the translation of code that runs for the first time. Then it is paused, and
//! costs some memory and nothing else. `core::pool` says how many there are of which kind.

use super::launch::{Launcher, Source};
use super::qemu::Machine;
use super::qemu_vm::QemuVm;
use super::rehearsal::Props;
use super::{Events, HypervisorError, Kind, Shape, Vm, VmEvent};
use jiff::Timestamp;
use monopod_core::pool::Demand;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, OnceCell};

/// How often it is looked whether all is as it should be; also after each start.
const LOOK: Duration = Duration::from_secs(30);

type Started = (QemuVm, Events);

/// The VMs that wait, and what they wait for.
#[derive(Debug)]
pub(super) struct Pool {
    limit: usize,
    state: Mutex<State>,
    changed: Notify,
    props: OnceCell<Props>,
}

#[derive(Debug, Default)]
struct State {
    demand: Demand<Kind>,
    ready: BTreeMap<Kind, Vec<Started>>,
}

impl Pool {
    /// A pool of so many VMs at most.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            state: Mutex::default(),
            changed: Notify::new(),
            props: OnceCell::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.lock().ready.values().map(Vec::len).sum()
    }

    /// A VM of this kind, if one waits.
    pub(super) async fn take(&self, launcher: &Launcher, kind: Kind) -> Option<Started> {
        self.lock().demand.started(kind, Timestamp::now());
        self.changed.notify_one();
        loop {
            let (mut vm, mut events) = self.lock().ready.get_mut(&kind)?.pop()?;
            let dead = matches!(events.try_recv(), Ok(VmEvent::Exited));
            match vm.resume().await {
                Ok(()) if !dead => return Some((vm, events)),
                Ok(()) => tracing::warn!(vm = vm.id(), "a VM died while it waited"),
                Err(error) => tracing::warn!(
                    vm = vm.id(),
                    error = &error as &dyn std::error::Error,
                    "a VM that waited cannot be used"
                ),
            }
            launcher.end(&vm).await;
        }
    }

    /// Keeps as many VMs as are wanted and no others, for ever.
    pub(super) async fn keep(&self, machine: &Machine) {
        loop {
            machine.launcher.discard_stuck().await;
            if let Err(error) = self.level(machine).await {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "no VM is started in advance"
                );
                tokio::time::sleep(LOOK).await;
            }
            // What was noted while nobody waited is noted in the demand too.
            drop(tokio::time::timeout(LOOK, self.changed.notified()).await);
        }
    }

    async fn level(&self, machine: &Machine) -> Result<(), HypervisorError> {
        loop {
            let (surplus, missing) = self.difference();
            for (vm, _events) in surplus {
                machine.launcher.end(&vm).await;
            }
            let Some(kind) = missing else { return Ok(()) };
            // Without a template a VM takes too much to be kept for later.
            let template = machine.templates.get(&machine.launcher, kind.shape).await;
            let Some(template) = template else {
                return Ok(());
            };
            // One at a time and at low priority: whoever starts a pod now comes first.
            let (mut vm, mut events) = machine
                .launcher
                .launch(kind.shape, kind.scratch_bytes, Source::Clone(&template))
                .await?;
            match self
                .prepare(machine, &mut vm, &mut events, kind.shape)
                .await
            {
                Ok(()) => {
                    let mut state = self.lock();
                    state.ready.entry(kind).or_default().push((vm, events));
                }
                Err(error) => {
                    machine.launcher.end(&vm).await;
                    return Err(error);
                }
            }
        }
    }

    async fn prepare(
        &self,
        machine: &Machine,
        vm: &mut QemuVm,
        events: &mut Events,
        shape: Shape,
    ) -> Result<(), HypervisorError> {
        vm.stand_back(true)?;
        let props = self
            .props
            .get_or_try_init(|| Props::make(&machine.launcher.spare))
            .await?;
        props.rehearse(vm, events, &machine.disks, shape).await?;
        vm.pause().await
    }

    /// The VMs that nobody wants any more, and a kind of which there are too few.
    fn difference(&self) -> (Vec<Started>, Option<Kind>) {
        let mut state = self.lock();
        let wanted = state.demand.wanted(self.limit, Timestamp::now());
        let mut surplus = Vec::new();
        for (kind, ready) in &mut state.ready {
            let keep = wanted.get(kind).copied().unwrap_or(0).min(ready.len());
            surplus.extend(ready.drain(keep..));
        }
        let count = |kind| state.ready.get(kind).map_or(0, Vec::len);
        let missing = wanted.iter().find(|(kind, wanted)| count(kind) < **wanted);
        (surplus, missing.map(|(kind, _)| *kind))
    }
}
