//! A simulated machine: its host process, which decides by `core::owner`, and its VMs, which outlive it.

use super::api::{Api, Kind, Object, Only, Refused, Seen, Watches};
use super::guest::{State, Vm};
use super::ledger::Ledger;
use super::schedule::{Fate, Sabotage};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use kube::ResourceExt;
use monopod_api::environment::{Environment, EnvironmentPhase, EnvironmentStatus, PhaseTime};
use monopod_api::{labels, messages};
use monopod_core::owner::{self, Begin, Found};
use std::collections::BTreeMap;

pub(super) struct Machine {
    pub(super) name: String,
    pub(super) process: Option<Process>,
    /// Running or not: a record is one, too.
    pub(super) vms: Vec<Vm>,
    /// Reaches nobody, and nobody reaches it.
    pub(super) cut_off: bool,
    /// Without power.
    pub(super) down: bool,
    pub(super) skew: SignedDuration,
}

/// A host process.
#[derive(Default)]
pub(super) struct Process {
    watches: Watches,
    owners: BTreeMap<String, Owner>,
    /// Environments whose name an older one has still.
    next: BTreeMap<String, Environment>,
}

struct Owner {
    environment: Environment,
    status: EnvironmentStatus,
    written: bool,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Begin,
    Start,
    Live,
    Release,
}

/// What a machine can do next.
#[derive(Debug, Clone)]
pub(super) enum Option_ {
    Watch,
    Owner(String),
    Guest(usize),
}

impl Machine {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            process: Some(Process::default()),
            vms: Vec::new(),
            cut_off: false,
            down: false,
            skew: SignedDuration::ZERO,
        }
    }

    pub(super) fn reaches(&self, api: &Api) -> Result<(), Refused> {
        if self.cut_off {
            return Err(Refused::Unreachable);
        }
        api.answers()
    }

    pub(super) fn options(&self, api: &Api) -> Vec<Option_> {
        let mut options = Vec::new();
        if self.down {
            return options;
        }
        let reaches = self.reaches(api).is_ok();
        if let Some(process) = &self.process {
            if reaches && process.watches.has_next(api, Kind::Environment) {
                options.push(Option_::Watch);
            }
            let busy = process
                .owners
                .iter()
                .filter(|(name, owner)| owner.has_work(self.vm(name), reaches));
            options.extend(busy.map(|(name, _)| Option_::Owner(name.clone())));
        }
        let told = |vm: &Vm| {
            let owner = self
                .process
                .as_ref()
                .and_then(|p| p.owners.get(&vm.environment));
            owner.is_some_and(|owner| owner.stage == Stage::Live)
        };
        for (at, vm) in self.vms.iter().enumerate() {
            if vm.has_work(api, reaches, told(vm)) {
                options.push(Option_::Guest(at));
            }
        }
        options
    }

    fn vm(&self, environment: &str) -> Option<&Vm> {
        self.vms.iter().find(|vm| vm.environment == environment)
    }

    pub(super) fn act(
        &mut self,
        api: &mut Api,
        option: Option_,
        fate: Fate,
        sabotage: Sabotage,
        ledger: &mut Ledger,
    ) {
        match option {
            Option_::Watch => self.watch(api, ledger),
            Option_::Owner(name) => self.owner(api, &name, fate, sabotage, ledger),
            Option_::Guest(at) => {
                let reaches = self.reaches(api).is_ok() && fate == Fate::Done;
                if let Some(vm) = self.vms.get_mut(at) {
                    vm.act(api, reaches, ledger);
                }
            }
        }
    }

    fn watch(&mut self, api: &Api, ledger: &mut Ledger) {
        let Some(process) = &mut self.process else {
            return;
        };
        match process.watches.next(api, Kind::Environment) {
            Some(Seen::Applied(Object::Environment(seen))) if seen.spec.host == self.name => {
                process.apply(*seen);
            }
            Some(Seen::Deleted(_, name)) => process.gone(&name, api),
            // Removes what no environment has any more.
            Some(Seen::Synced(_)) => {
                let known: Vec<String> = process.owners.keys().cloned().collect();
                self.end(api, ledger, |vm| !known.contains(&vm.environment));
            }
            Some(Seen::Applied(_)) | None => {}
        }
    }

    /// Ends VMs and removes their records.
    fn end(&mut self, api: &Api, ledger: &mut Ledger, which: impl Fn(&Vm) -> bool) {
        for vm in self.vms.extract_if(.., |vm| which(vm)) {
            if vm.is_alive() {
                ledger.ended_by_host(api, &vm);
            }
        }
    }

    fn owner(
        &mut self,
        api: &mut Api,
        name: &str,
        fate: Fate,
        sabotage: Sabotage,
        ledger: &mut Ledger,
    ) {
        let now = api.now + self.skew;
        let reaches = self.reaches(api).is_ok();
        let Some(owner) = self.process.as_mut().and_then(|p| p.owners.get_mut(name)) else {
            return;
        };
        let vm = self.vms.iter_mut().find(|vm| vm.environment == name);
        let deleted = owner.environment.metadata.deletion_timestamp.is_some();
        let uid = owner.environment.metadata.uid.clone();
        match owner.stage {
            Stage::Begin | Stage::Start | Stage::Live if deleted => {
                owner.stage = Stage::Release;
            }
            Stage::Begin => {
                let found = match &vm {
                    None => Found::Nothing,
                    Some(vm) if vm.is_alive() => Found::Running,
                    Some(_) => Found::Ended,
                };
                let begin = match sabotage {
                    Sabotage::StartWithoutLooking => Begin::Start,
                    _honest => owner::begin(owner.status.phase, found),
                };
                owner.stage = Stage::Live;
                match begin {
                    Begin::Start => {
                        owner.enter(EnvironmentPhase::Booting, now);
                        owner.stage = Stage::Start;
                    }
                    Begin::Adopt | Begin::Nothing => {}
                    Begin::Lost => {
                        owner.fail("the VM was gone when the host process started", now);
                        self.end(api, ledger, |vm| vm.environment == name);
                    }
                }
            }
            Stage::Start => {
                owner.stage = Stage::Live;
                let vm = Vm::new(&owner.environment, now);
                self.vms.push(vm);
            }
            Stage::Live => {
                let phase = vm.as_ref().map_or(owner.status.phase, |vm| vm.phase());
                if let Some(State::Exited(said)) = vm.map(|vm| &vm.state) {
                    match owner::failure(said.clone(), false) {
                        None => owner.enter(EnvironmentPhase::Finished, now),
                        Some(why) => owner.fail(&why, now),
                    }
                    self.end(api, ledger, |vm| vm.environment == name);
                } else if owner::enters(owner.status.phase, phase) {
                    owner.enter(phase, now);
                } else if reaches {
                    owner.write(api, name, fate);
                }
            }
            Stage::Release => {
                self.end(api, ledger, |vm| vm.environment == name);
                if reaches && release(api, name, uid.as_ref(), fate) {
                    self.process
                        .iter_mut()
                        .for_each(|process| process.over(name));
                }
            }
        }
    }
}

/// Gives up the host's finalizer. True if that is known to be done.
fn release(api: &mut Api, name: &str, uid: Option<&String>, fate: Fate) -> bool {
    let current = api.get::<Environment>(name).cloned();
    let Some(environment) = current.filter(|e| e.metadata.uid.as_ref() == uid) else {
        return true;
    };
    if fate == Fate::Lost {
        return false;
    }
    let only = Only::as_read(&environment);
    let done = api.update::<Environment>(name, &only, |held| {
        let finalizers = held.metadata.finalizers.iter_mut();
        finalizers.for_each(|all| all.retain(|f| f != labels::HOST_FINALIZER));
    });
    done.is_ok() && fate == Fate::Done
}

impl Process {
    fn apply(&mut self, environment: Environment) {
        let name = environment.name_any();
        if let Some(owner) = self.owners.get_mut(&name) {
            if owner.environment.metadata.uid == environment.metadata.uid {
                owner.environment = environment;
            } else {
                owner.environment.metadata.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
                self.next.insert(name, environment);
            }
            return;
        }
        if !environment
            .finalizers()
            .iter()
            .any(|f| f == labels::HOST_FINALIZER)
        {
            return;
        }
        let owner = Owner {
            status: environment.status.clone().unwrap_or_default(),
            environment,
            written: true,
            stage: Stage::Begin,
        };
        self.owners.insert(name, owner);
    }

    fn gone(&mut self, name: &str, api: &Api) {
        self.next.remove(name);
        if let Some(owner) = self.owners.get_mut(name) {
            owner.environment.metadata.deletion_timestamp = Some(Time(api.now));
        }
    }

    /// An owner's task has ended.
    fn over(&mut self, name: &str) {
        self.owners.remove(name);
        if let Some(next) = self.next.remove(name) {
            self.apply(next);
        }
    }

    pub(super) fn broken(&mut self) {
        self.watches.broken(Kind::Environment);
    }
}

impl Owner {
    fn has_work(&self, vm: Option<&Vm>, reaches: bool) -> bool {
        let deleted = self.environment.metadata.deletion_timestamp.is_some();
        match self.stage {
            Stage::Begin | Stage::Start => true,
            Stage::Live => {
                let exited = vm.is_some_and(|vm| !vm.is_alive());
                let behind = vm.is_some_and(|vm| owner::enters(self.status.phase, vm.phase()));
                deleted || exited || behind || (!self.written && reaches)
            }
            Stage::Release => vm.is_some() || reaches,
        }
    }

    fn enter(&mut self, phase: EnvironmentPhase, now: Timestamp) {
        if owner::enters(self.status.phase, phase) {
            let time = MicroTime(now);
            self.status.phase = phase;
            self.status.phases.push(PhaseTime { phase, time });
            self.written = false;
        }
    }

    fn fail(&mut self, why: &str, now: Timestamp) {
        if !self.status.phase.is_terminal() {
            self.status.reason = Some(messages::ENVIRONMENT_LOST.to_owned());
            self.status.message = Some(why.to_owned());
            self.enter(EnvironmentPhase::Failed, now);
        }
    }

    fn write(&mut self, api: &mut Api, name: &str, fate: Fate) {
        if self.written || fate == Fate::Lost {
            return;
        }
        let only = Only::uid(self.environment.metadata.uid.as_ref());
        let status = self.status.clone();
        let done = api.update::<Environment>(name, &only, |e| e.status = Some(status));
        // The writer gives up only on an object that is another.
        self.written =
            matches!(done, Err(Refused::NotFound | Refused::Conflict)) || fate == Fate::Done;
    }
}
