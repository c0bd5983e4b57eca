//! A cluster of two machines and two control processes, with a pod on each machine that nothing may happen
//! to, and the pod that a fault meets.

use crate::fault::{Fault, Phase};
use crate::inventory;
use crate::vm::{self, Stored};
use anyhow::{Context, Result, bail, ensure};
use monopod_testkit::{
    Cluster, Ended, Frozen, Machine, SECOND_CONTROL, Site, Switch, freeze, is_interrupted,
    is_ready, kill, number, part,
};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt;
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
const DISK: u64 = 4096;
/// Pods that no fault concerns, one on each machine.
const BYSTANDERS: [&str; 2] = ["bystander-1", "bystander-2"];

/// What came of one try.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// What happened to pods that should not have.
    pub(crate) lost: Vec<String>,
    /// What stayed.
    pub(crate) left: Vec<String>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<&str> = self
            .lost
            .iter()
            .chain(&self.left)
            .map(String::as_str)
            .collect();
        f.write_str(if all.is_empty() { "ok" } else { "NOT OK: " })?;
        f.write_str(&all.join("; "))
    }
}

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
        };
        for (name, host) in BYSTANDERS.into_iter().zip(["host-1", SECOND]) {
            scene.only(Some(host));
            scene.cluster.apply(&vm::pod(name));
            until("it is Ready", || {
                let pod = scene.pod(name).filter(is_ready)?;
                (scene.host_of(&pod).as_deref() == Some(host)).then_some(())
            })?;
        }
        scene.only(None);
        scene.bystanders = BYSTANDERS
            .into_iter()
            .filter_map(|name| scene.pod(name))
            .collect();
        scene.before = until("all is told", || scene.inventory())?;
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
        self.cluster
            .apply(&vm::target(TARGET, fault, phase, self.tries));
        let created = self.pod(TARGET).context("the pod was not stored")?;
        let environment = self.bring_to(phase, &created)?;
        let mut outcome = Outcome::default();
        let harm = self.happen(fault, host, environment.as_ref())?;
        outcome.lost.extend(harm);
        self.only(None);
        // The node of a frozen VM falls silent and is tainted, and its pod is evicted.
        let is_evicted = fault == Fault::VmFrozen && self.bound(&created);
        if is_evicted || phase == Phase::Ending {
            let gone = until("the pod is gone", || {
                self.pod(TARGET).is_none().then_some(())
            });
            outcome
                .lost
                .extend(gone.err().map(|error| error.to_string()));
        } else {
            outcome.lost.extend(self.judge(fault, phase, &created));
        }
        outcome.lost.extend(self.noticed());
        let delete = ["delete", "pod", TARGET, LATE, "--ignore-not-found"];
        self.cluster
            .try_kubectl(&[&delete[..], &["--timeout=120s"]].concat());
        outcome.left = self.left();
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

    /// Lets the fault happen, and waits until what can come back has. Gives what was lost by it.
    fn happen(
        &mut self,
        fault: Fault,
        host: &str,
        environment: Option<&Value>,
    ) -> Result<Option<String>> {
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
            Fault::Host => self.kill_part("host", host)?,
            Fault::Etcd => self.kill_part("etcd", "host-1")?,
            Fault::ApiServer => self.kill_part("kube-apiserver", "host-1")?,
            Fault::Vm => kill(self.vm(host, environment)?),
            Fault::VmFrozen => freeze(self.vm(host, environment)?),
            Fault::ApiServerFrozen => {
                let (pid, _) = self.process("kube-apiserver", "host-1")?;
                freeze_for(pid, fault.lasts());
            }
            Fault::HostCutOff => {
                self.second.plug(false);
                std::thread::sleep(fault.lasts());
                self.second.plug(true);
            }
            Fault::DiskFull => return Ok(self.fill_disk(fault.lasts())),
        }
        Ok(None)
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

    /// What is wrong with the pod that the fault met, once the cluster is whole.
    fn judge(&self, fault: Fault, phase: Phase, created: &Value) -> Option<String> {
        let uid = &created["metadata"]["uid"];
        let reached = until("the pod is as it should be", || {
            let pod = self.pod(TARGET)?;
            let has_failed = pod["status"]["phase"] == "Failed";
            // Killed before or after the pod was bound, as it happened, unless it ran.
            let as_it_should = match (fault, phase) {
                (Fault::Vm, Phase::Running) => has_failed,
                (Fault::Vm, _) => has_failed || is_ready(&pod),
                _ => is_ready(&pod),
            };
            as_it_should.then_some(pod)
        });
        let pod = match reached {
            Ok(pod) => pod,
            Err(error) => {
                let now = self.pod(TARGET).unwrap_or_default();
                return Some(format!("{error}: {}", now["status"]));
            }
        };
        if pod["metadata"]["uid"] != *uid {
            return Some("it is another pod".to_owned());
        }
        if fault == Fault::Vm && pod["status"]["phase"] == "Failed" {
            let reason = pod["status"]["reason"].as_str().unwrap_or_default();
            return (reason != "EnvironmentLost").then(|| format!("failed with {reason:?}"));
        }
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        (phase == Phase::Running && fault != Fault::Vm && *restarts != 0)
            .then(|| format!("restarted {restarts} times"))
    }

    /// Pods that should not have noticed anything, and did.
    fn noticed(&self) -> Vec<String> {
        let changed = |before: &Value| {
            let name = before["metadata"]["name"].as_str()?;
            // Its node may be told NotReady while it cannot be reached, and is Ready again.
            let ready = until("it is Ready", || self.pod(name).filter(is_ready));
            let Ok(after) = ready else {
                return Some(format!("{name} is not Ready any more"));
            };
            // Before the next fault: the time to an eviction goes on as long as it has a taint.
            if until("its node is whole", || self.has_whole_node(&after)).is_err() {
                return Some(format!("{name} is on a node with a taint"));
            }
            let same = after["metadata"]["uid"] == before["metadata"]["uid"];
            let restarts = &after["status"]["containerStatuses"][0]["restartCount"];
            (!same || *restarts != 0).then(|| format!("{name} was replaced or restarted"))
        };
        self.bystanders.iter().filter_map(changed).collect()
    }

    fn has_whole_node(&self, pod: &Value) -> Option<()> {
        let node = self
            .cluster
            .get("", "node", pod["spec"]["nodeName"].as_str()?)?;
        let mut taints = node["spec"]["taints"].as_array().into_iter().flatten();
        let has_trouble = taints.any(|taint| {
            let key = taint["key"].as_str().unwrap_or_default();
            key.starts_with("node.kubernetes.io/")
        });
        (!has_trouble).then_some(())
    }

    fn inventory(&self) -> Option<BTreeSet<String>> {
        inventory::take(
            &self.cluster,
            &["host-1", SECOND].map(|host| self.site(host)),
        )
    }

    /// What stays of all pods but the bystanders.
    fn left(&self) -> Vec<String> {
        let mut left = vec!["what cannot be told".to_owned()];
        let none = until("nothing is left", || {
            let now = self.inventory()?;
            left = now.difference(&self.before).cloned().collect();
            left.is_empty().then_some(())
        });
        if none.is_ok() { Vec::new() } else { left }
    }

    /// The process of the pod's VM, or, before the pod has one, of the VM that is started for it.
    fn vm(&self, host: &str, environment: Option<&Value>) -> Result<i32> {
        let environment = environment.context("no environment")?;
        let site = self.site(host);
        until("its VM runs", || {
            vm::of(&site, environment)
                .or_else(|| vm::started_last(&site))
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

    fn host_of(&self, pod: &Value) -> Option<String> {
        let environment = self.cluster.environment_of(pod)?;
        environment["spec"]["host"].as_str().map(str::to_owned)
    }
}

/// Lets a process do nothing for a while.
fn freeze_for(pid: i32, lasts: Duration) {
    let _frozen = Frozen::new(pid);
    std::thread::sleep(lasts);
}

/// Waits for something.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        ensure!(!is_interrupted(), "{what}: interrupted");
        if let Some(found) = look() {
            return Ok(found);
        }
        if Instant::now() >= deadline {
            bail!("{what}: not within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
