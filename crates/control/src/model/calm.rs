//! After the faults: everything heals, time goes on, and all must come to a good end.

use super::api::Only;
use super::drain::{PROFILE, profile};
use super::guest::Vm;
use super::ledger::is_over;
use super::machine::Machine;
use super::schedule::{Action, Sabotage};
use super::world::{World, follows, is_alone};
use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use monopod_api::environment::Environment;
use monopod_api::host::Host;
use monopod_api::network::NetworkInterface;
use monopod_api::profile::FargateProfile;

/// Longer than upstream's toleration of a silent node and two provisioning limits.
const SETTLING: SignedDuration = SignedDuration::from_secs(1200);
/// After the end of the grace period nothing may be left (invariant 5), nor may an address rest for longer.
const LEAVING: SignedDuration = SignedDuration::from_secs(10);
/// Time between two looks of upstream's controllers, and less than a leader may do nothing.
const LOOK: SignedDuration = SignedDuration::from_secs(6);
/// Pods of this size that a machine of the model has room for.
const ROOM: usize = 3;
/// Steps in which everybody must come to rest.
const REST: usize = 5000;

/// What the schedule breaks, if it does.
pub(super) fn run(schedule: &[Action], sabotage: Sabotage) -> Result<World, String> {
    let mut world = World::new(sabotage);
    for (at, action) in schedule.iter().enumerate() {
        world.act(*action);
        if let Some(broken) = &world.ledger.broken {
            return Err(format!("after step {at} ({action:?}): {broken}"));
        }
    }
    heal(&mut world);
    go_on(&mut world, SETTLING)?;
    settled(&world)?;
    let pods: Vec<Pod> = world.api.list::<Pod>().cloned().collect();
    for pod in pods {
        world
            .ledger
            .delete(pod.uid().as_deref().unwrap_or_default());
        drop(world.api.delete_pod(&pod.name_any(), &Only::default(), 30));
    }
    go_on(&mut world, LEAVING)?;
    nothing_left(&world)?;
    Ok(world)
}

fn heal(world: &mut World) {
    world.api.away_until = world.api.now;
    for at in 0..world.machines.len() {
        let machine = &mut world.machines[at];
        machine.cut_off = false;
        machine.skew = SignedDuration::ZERO;
        world.act(Action::MachineBack(u8::try_from(at).expect("two")));
        let name = world.machines[at].name.clone();
        let uncordoned = |host: &mut Host| host.spec.unschedulable = false;
        drop(
            world
                .api
                .update::<Host>(&name, &Only::default(), uncordoned),
        );
    }
    for control in &mut world.controls {
        control.skew = SignedDuration::ZERO;
    }
    world.role_back();
    drop(world.api.create(profile()));
}

/// Lets everybody come to rest, and time pass to the next moment at which somebody has to do something.
fn go_on(world: &mut World, time: SignedDuration) -> Result<(), String> {
    let end = world.api.now + time;
    loop {
        let mut steps = 0;
        loop {
            world.upstream();
            if !world.everybody() {
                break;
            }
            steps += 1;
            if steps > REST {
                return Err(format!("nobody comes to rest: {}", world.busy()));
            }
        }
        if let Some(broken) = &world.ledger.broken {
            return Err(format!("after the faults: {broken}"));
        }
        if world.api.now >= end {
            return Ok(());
        }
        let next = world.wakes().chain([world.api.now + LOOK, end]);
        let next = next.filter(|at| *at > world.api.now).min().unwrap_or(end);
        let step = next.duration_since(world.api.now);
        world.pass(step);
    }
}

/// Every pod runs, has ended, or waits for what is true.
fn settled(world: &World) -> Result<(), String> {
    let alive: Vec<_> = world
        .machines
        .iter()
        .flat_map(|m| &m.vms)
        .filter(|vm| vm.is_alive())
        .collect();
    for vm in &alive {
        let pod = world
            .api
            .list::<Pod>()
            .find(|p| p.uid().as_ref() == Some(&vm.pod.uid));
        if pod.is_none() {
            return Err(format!("the VM of {} outlived its pod", vm.environment));
        }
    }
    let profile = world.api.get::<FargateProfile>(PROFILE);
    if profile.is_some_and(|profile| profile.metadata.deletion_timestamp.is_some()) {
        return Err("the profile is being deleted for ever".to_owned());
    }
    for pod in world.api.list::<Pod>() {
        let uid = pod.uid().unwrap_or_default();
        let status = pod.status.clone().unwrap_or_default();
        let lives = alive.iter().any(|vm| vm.pod.uid == uid);
        if is_over(pod) {
            continue;
        }
        if pod.metadata.deletion_timestamp.is_some() {
            return Err(format!("the pod {uid} is terminating for ever"));
        }
        if status.phase.as_deref() == Some("Running") {
            if !lives {
                return Err(format!("the pod {uid} is said to run, but has no VM"));
            }
            continue;
        }
        let reason = status
            .conditions
            .iter()
            .flatten()
            .find(|c| c.type_ == "PodScheduled");
        let message = reason.and_then(|c| c.message.clone()).unwrap_or_default();
        for machine in &world.machines {
            let Some(truth) = refusal(world, machine, pod) else {
                return Err(format!(
                    "the pod {uid} waits although there is room on {}: {message:?}",
                    machine.name
                ));
            };
            if !message.contains(truth) {
                return Err(format!(
                    "the pod {uid} waits without a true reason ({truth}): {message:?}"
                ));
            }
        }
    }
    Ok(())
}

/// Why a machine cannot take the pod, as things are.
fn refusal(world: &World, machine: &Machine, pod: &Pod) -> Option<&'static str> {
    if world.api.get::<FargateProfile>(PROFILE).is_none() {
        return Some("does not exist");
    }
    let alive = || machine.vms.iter().filter(|vm| vm.is_alive());
    let is_alone_there = |vm: &Vm| {
        let mut pods = world.api.list::<Pod>();
        let there = pods.find(|pod| pod.uid().as_ref() == Some(&vm.pod.uid));
        there.is_some_and(|there| is_alone(there) && !is_over(there))
    };
    if alive().count() >= ROOM {
        Some("not enough memory")
    } else if is_alone(pod) && alive().any(is_alone_there) {
        Some("didn't match pod anti-affinity rules")
    } else if follows(pod) && !alive().any(is_alone_there) {
        Some("didn't match pod affinity rules")
    } else {
        None
    }
}

fn nothing_left(world: &World) -> Result<(), String> {
    let api = &world.api;
    let left: Vec<String> = [
        names::<Pod>(world),
        names::<Environment>(world),
        names::<NetworkInterface>(world),
        names::<Node>(world),
        api.leases
            .keys()
            .map(|name| format!("lease {name}"))
            .collect(),
        // Those of an environment that was let go while nobody acted Kubernetes removes, in an hour.
        api.requests
            .iter()
            .filter(|name| !world.ledger.was_let_go(name))
            .map(|name| format!("request of {name}"))
            .collect(),
        world
            .machines
            .iter()
            .flat_map(|m| &m.vms)
            .map(|vm| format!("VM of {}", vm.environment))
            .collect(),
    ]
    .concat();
    if left.is_empty() {
        return Ok(());
    }
    Err(format!("left when all pods were gone: {}", left.join(", ")))
}

fn names<K: super::api::Stored>(world: &World) -> Vec<String> {
    world
        .api
        .list::<K>()
        .map(|object| {
            format!(
                "{:?} {}",
                K::KIND,
                object.meta().name.clone().unwrap_or_default()
            )
        })
        .collect()
}
