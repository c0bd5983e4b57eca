//! What the faults do to the cluster.

use super::{LATE, SECOND, Scene, TARGET, until};
use crate::fault::{Fault, Phase};
use crate::vm::{self, Stored};
use anyhow::{Context, Result};
use monopod_testkit::{Frozen, SECOND_CONTROL, freeze, is_ready, is_vm, kill, part};
use serde_json::Value;
use std::time::Duration;

/// The pod that a fault meets, and what is known of it then.
pub(super) struct Met {
    /// Its machine.
    pub(super) host: &'static str,
    /// Where it is in its life.
    pub(super) phase: Phase,
    /// Its environment, if it must have one by then.
    pub(super) environment: Option<Value>,
    /// The newest VM of its machine from before it was there.
    pub(super) newest: Option<String>,
}

impl Scene {
    /// Lets the fault happen, and waits until what can come back has. Gives what was lost by it.
    pub(super) fn happen(&mut self, fault: Fault, met: &Met) -> Result<Option<String>> {
        match fault {
            Fault::Control => {
                let (pid, supervised) = self.acting()?;
                if supervised {
                    self.kill_part("control", "host-1")?;
                } else {
                    kill(pid);
                    self.control = self.cluster.second_control();
                }
            }
            Fault::ControlFrozen => freeze_for(self.acting()?.0, fault.lasts()),
            Fault::Host => self.kill_part("host", met.host)?,
            Fault::Etcd => self.kill_part("etcd", "host-1")?,
            Fault::ApiServer => self.kill_part("kube-apiserver", "host-1")?,
            Fault::Vm => kill(self.vm(met)?),
            Fault::VmFrozen => freeze(self.vm(met)?),
            Fault::ApiServerFrozen => {
                let (pid, _) = self.process("kube-apiserver", "host-1")?;
                freeze_for(pid, fault.lasts());
            }
            Fault::HostCutOff => return self.cut_off(fault.lasts(), met),
            Fault::DiskFull => return Ok(self.fill_disk(fault.lasts())),
        }
        Ok(None)
    }

    /// Takes the second machine off the network. Whatever is decided meanwhile, the pod and its environment do not go
    /// as long as its VM runs.
    fn cut_off(&self, lasts: Duration, met: &Met) -> Result<Option<String>> {
        let environment = met.environment.as_ref().context("no environment")?;
        self.second.plug(false);
        // Nothing but that keeps the pod from the other machine.
        self.only(None);
        std::thread::sleep(lasts);
        let vm = vm::of(&self.second.site(), environment).and_then(|vm| vm.pid);
        let now = self
            .cluster
            .environment_of(&self.pod(TARGET).unwrap_or_default());
        let there = now.is_some_and(|now| now["metadata"]["uid"] == environment["metadata"]["uid"]);
        self.second.plug(true);
        let outlived = vm.is_some_and(is_vm) && !there;
        Ok(outlived.then(|| "its VM ran on, and the pod or its environment was gone".to_owned()))
    }

    /// Lets the second machine's disk be full, and a pod be made meanwhile.
    fn fill_disk(&self, lasts: Duration) -> Option<String> {
        self.second.room().leave(0);
        self.cluster.apply(&vm::pod(LATE));
        std::thread::sleep(lasts);
        self.second.room().free();
        let ready = until("a pod that was made without room is Ready", || {
            self.pod(LATE).filter(is_ready)
        });
        ready.err().map(|error| error.to_string())
    }

    /// The control process that acts, and whether it is the cluster's own.
    fn acting(&self) -> Result<(i32, bool)> {
        if self.cluster.acting_control() == SECOND_CONTROL {
            return Ok((self.control.0.id().cast_signed(), false));
        }
        Ok((self.process("control", "host-1")?.0, true))
    }

    /// The process of the pod's VM, or, before the pod has one, of the VM that is started for it.
    fn vm(&self, met: &Met) -> Result<i32> {
        let environment = met.environment.as_ref().context("no environment")?;
        let site = self.site(met.host);
        let started = || match met.phase {
            Phase::Booting => vm::boots(&site, environment, met.newest.as_deref()),
            // Another would be nobody's.
            _has_its_own => None,
        };
        until("its VM runs", || {
            vm::of(&site, environment)
                .or_else(started)
                .and_then(|Stored { pid, .. }| pid)
        })
    }

    fn kill_part(&self, name: &str, host: &str) -> Result<()> {
        let (pid, _) = self.process(name, host)?;
        kill(pid);
        until(&format!("{name} runs again"), || {
            let (another, ready) = self.process(name, host).ok()?;
            (another != pid && ready).then_some(())
        })
    }

    /// A part's process on a machine, and whether it answers.
    fn process(&self, name: &str, host: &str) -> Result<(i32, bool)> {
        let status = ["status", "-o", "json"];
        let status = match host {
            SECOND => self.second.monopod(&status),
            _first => self.cluster.monopod(&status),
        };
        let part = part(&status, name);
        let pid = part["pid"].as_i64().and_then(|pid| pid.try_into().ok());
        let pid = pid.with_context(|| format!("{name} does not run on {host}: {}", status.err))?;
        Ok((pid, part["ready"] == true))
    }
}

/// Lets a process do nothing for a while.
fn freeze_for(pid: i32, lasts: Duration) {
    let _frozen = Frozen::new(pid);
    std::thread::sleep(lasts);
}
