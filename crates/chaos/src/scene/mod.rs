//! A cluster of two machines and two control processes, with a pod on each machine that nothing may happen
//! to, and the pod that a fault meets.

mod harm;
mod judge;

use crate::fault::{Fault, Phase};
use crate::inventory::{self, Inventory};
use crate::vm;
use anyhow::{Context, Result, bail, ensure};
use harm::Met;
pub(crate) use judge::Outcome;
use monopod_testkit::{
    Cluster, Ended, Machine, Site, Switch, is_interrupted, is_ready, number, recorded,
};
use serde_json::{Value, json};
use std::array::IntoIter;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Of the cluster: apart from those of tests and measurements.
const OFFSET: u8 = 11;
/// The machine that joins; the other one is `host-1`.
const SECOND: &str = "host-2";
/// How long anything may take on a busy machine, once the fault is over.
const PATIENCE: Duration = Duration::from_mins(6);
/// The pod that faults meet.
const TARGET: &str = "target";
/// A pod that is made while its machine has no room.
const LATE: &str = "late";
/// MiB of the disk that may be full: images, templates, and what pods write.
const DISK: u64 = 8192;
/// Pods that no fault concerns, one on each machine.
const BYSTANDERS: [&str; 2] = ["bystander-1", "bystander-2"];

/// The cluster. Fields are dropped in this order: the machine leaves before its cluster.
pub(crate) struct Scene {
    second: Machine,
    control: Ended,
    cluster: Cluster,
    _switch: Switch,
    bystanders: Vec<Value>,
    /// What there is of the bystanders.
    before: BTreeSet<String>,
    tries: u32,
    /// Those that no VM had yet.
    sizes: IntoIter<(u32, u32), 12>,
}

impl Scene {
    pub(crate) fn new() -> Result<Self> {
        let number = number(OFFSET);
        let switch = Switch::new(number);
        let address = switch.address();
        let flags = ["--underlay", &address, "--disable", "coredns"];
        let cluster = Cluster::up_with(number, &flags);
        let second = Machine::new(number, 2, cluster.program()).with_room(DISK);
        let joined = second.join(&cluster.token(SECOND));
        ensure!(
            joined.success,
            "the second machine does not join: {}",
            joined.err
        );
        let mut scene = Self {
            second,
            control: cluster.second_control(),
            cluster,
            _switch: switch,
            bystanders: Vec::new(),
            before: BTreeSet::new(),
            tries: 0,
            sizes: vm::SIZES.into_iter(),
        };
        let mut had = BTreeSet::new();
        for (name, host) in BYSTANDERS.into_iter().zip(["host-1", SECOND]) {
            scene.only(Some(host));
            scene.cluster.apply(&vm::pod(name));
            let (pod, environment) = until("it is Ready", || {
                let pod = scene.pod(name).filter(is_ready)?;
                let environment = scene.cluster.environment_of(&pod)?;
                (environment["spec"]["host"] == host).then_some((pod, environment))
            })?;
            let has = inventory::of(&environment, &scene.site(host));
            had.extend(has.with_context(|| format!("{name} has no VM"))?);
            scene.bystanders.push(pod);
        }
        scene.only(None);
        let mut unseen = had.clone();
        let before = until("the inventory has what the bystanders have", || {
            let now = scene.inventory()?;
            unseen = had.difference(&now.all()).cloned().collect();
            unseen.is_empty().then_some(now.left())
        });
        scene.before = before.with_context(|| format!("what stays is not seen: {unseen:?}"))?;
        Ok(scene)
    }

    /// One try.
    pub(crate) fn play(&mut self, fault: Fault, phase: Phase) -> Result<Outcome> {
        self.tries += 1;
        // In turns, so that faults meet the machine of the API server and the other.
        let host = match fault {
            Fault::HostCutOff | Fault::DiskFull => SECOND,
            _anywhere if self.tries.is_multiple_of(2) => SECOND,
            _anywhere => "host-1",
        };
        self.only(Some(host));
        let newest = recorded(&self.site(host)).pop_last();
        // Else it would not boot, but have been booted before.
        let boots = matches!(fault, Fault::Vm | Fault::VmFrozen | Fault::HostCutOff);
        let size = (boots && phase == Phase::Booting).then(|| self.sizes.next());
        let size = size.map(|size| size.context("too many tries for the sizes that there are"));
        self.cluster
            .apply(&vm::target(TARGET, fault, size.transpose()?));
        let created = self.pod(TARGET).context("the pod was not stored")?;
        let met = Met {
            host,
            phase,
            environment: self.bring_to(phase, &created)?,
            newest,
        };
        let mut outcome = Outcome::default();
        outcome.lost.extend(self.happen(fault, &met)?);
        self.only(None);
        // The node of a frozen VM falls silent and is tainted, and its pod is evicted.
        let is_evicted = fault == Fault::VmFrozen && self.bound(&created);
        let mut gone = None;
        if is_evicted || phase == Phase::Ending {
            outcome.lost.extend(self.stays(fault, phase));
            gone = Some(Instant::now());
        } else {
            outcome.lost.extend(self.judge(fault, phase, &created));
        }
        outcome.lost.extend(self.noticed());
        let delete = ["delete", "pod", TARGET, LATE, "--ignore-not-found"];
        self.cluster
            .try_kubectl(&[&delete[..], &["--timeout=120s"]].concat());
        let gone = gone.unwrap_or_else(Instant::now);
        outcome.left = self.left();
        outcome.cleaned = gone.elapsed();
        Ok(outcome)
    }

    /// Whether the pod was bound before the fault, or is gone since.
    fn bound(&self, created: &Value) -> bool {
        let pod = self.pod(TARGET).unwrap_or_default();
        pod["metadata"]["uid"] != created["metadata"]["uid"] || pod["spec"]["nodeName"].is_string()
    }

    /// Waits until the pod is in the phase; gives its environment, if it must have one by then.
    fn bring_to(&self, phase: Phase, created: &Value) -> Result<Option<Value>> {
        match phase {
            Phase::Created => return Ok(None),
            Phase::Booting | Phase::Joining => {}
            Phase::Running | Phase::Ending => {
                until("it is Ready", || {
                    self.pod(TARGET).filter(is_ready).map(drop)
                })?;
            }
        }
        let environment = until("it has an environment", || {
            self.cluster.environment_of(created)
        })?;
        match phase {
            Phase::Joining => {
                let site = self.site(environment["spec"]["host"].as_str().unwrap_or_default());
                until("its VM belongs to it", || vm::of(&site, &environment))?;
            }
            Phase::Ending => {
                self.cluster
                    .kubectl(&["delete", "pod", TARGET, "--wait=false"]);
            }
            Phase::Created | Phase::Booting | Phase::Running => {}
        }
        Ok(Some(environment))
    }

    fn inventory(&self) -> Option<Inventory> {
        Inventory::take(&self.cluster, &self.sites())
    }

    /// VMs that hosts do not know of any more. Those that they are making meanwhile are waited for.
    pub(crate) fn forgotten(&self) -> Vec<String> {
        until_none("hosts know all VMs", || {
            Some(inventory::forgotten(&self.sites()))
        })
    }

    fn sites(&self) -> [Site; 2] {
        ["host-1", SECOND].map(|host| self.site(host))
    }

    fn site(&self, host: &str) -> Site {
        match host {
            SECOND => self.second.site(),
            _first => self.cluster.site(),
        }
    }

    /// Lets only one host take new pods, or all.
    fn only(&self, host: Option<&str>) {
        for other in ["host-1", SECOND] {
            let cordoned = host.is_some_and(|host| host != other);
            let patch = json!({"spec": {"unschedulable": cordoned}}).to_string();
            // The API server may just be coming back.
            let patched = until("the host is patched", || {
                let patch = ["patch", "host", other, "--type=merge", "-p", &patch];
                self.cluster.try_kubectl(&patch).success.then_some(())
            });
            if let Err(error) = patched {
                eprintln!("{other}: {error:#}");
            }
        }
    }

    fn pod(&self, name: &str) -> Option<Value> {
        self.cluster.get("default", "pod", name)
    }
}

/// Waits for something.
fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> Result<T> {
    within(PATIENCE, what, look)
}

/// Waits until there is nothing of a kind, and gives what there is then: what was seen last, if it took too long.
fn until_none(what: &str, mut look: impl FnMut() -> Option<BTreeSet<String>>) -> Vec<String> {
    let mut left = BTreeSet::from(["what cannot be told".to_owned()]);
    let none = until(what, || {
        left = look()?;
        left.is_empty().then_some(())
    });
    if none.is_ok() {
        return Vec::new();
    }
    left.into_iter().collect()
}

/// The same in less time.
fn within<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        ensure!(!is_interrupted(), "{what}: interrupted");
        if let Some(found) = look() {
            return Ok(found);
        }
        if Instant::now() >= deadline {
            bail!("{what}: not within {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
