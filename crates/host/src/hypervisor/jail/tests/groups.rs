//! Stand-ins in control groups: memory, threads, CPU time.

use super::{Running, Special, found, start_stand_in};
use crate::hypervisor::cgroup::{Bounds, Cgroups, Group};
use crate::hypervisor::usage;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Groups that are removed at the end, whatever that is.
struct Removed {
    group: Group,
    name: String,
}

impl Drop for Removed {
    fn drop(&mut self) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let removed = runtime.unwrap().block_on(self.group.remove());
        assert!(removed.is_ok() || std::thread::panicking(), "{removed:?}");
    }
}

fn groups(name: &str, memory_mib: u64, threads: u64) -> (Removed, Special) {
    let cgroups = Cgroups::find();
    assert_eq!(cgroups.limits().reason, None);
    let name = format!("test-{name}-{}", std::process::id());
    let group = cgroups.group(&name);
    let bounds = Bounds {
        memory_bytes: memory_mib << 20,
        threads,
    };
    let lists = group.open(bounds).unwrap();
    let special = Special {
        groups: lists,
        ..Special::default()
    };
    (Removed { group, name }, special)
}

#[test]
fn it_is_in_its_groups_from_the_start() {
    let (groups, special) = groups("member", 512, 20);
    let running = start_stand_in("spin", &special);
    let pid = running.child.id();
    let member = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let own = member
        .lines()
        .filter(|line| line.ends_with(&groups.name))
        .count();
    assert_eq!(own, groups.group.directories().len(), "{member}");
    stop(running);
}

#[test]
fn threads_are_limited() {
    let (_groups, special) = groups("threads", 512, 20);
    assert_eq!(
        found("threads", &special),
        ["threads: 20", "another: EAGAIN"]
    );
}

#[test]
fn memory_is_limited() {
    let (_groups, special) = groups("memory", 64, 20);
    let (found, status) = start_stand_in("memory", &special).end();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{found:?}");
    assert!(found.len() < 64, "{found:?}");
}

/// Two threads that could have two CPUs get exactly a share of one, from when it is set.
#[test]
fn cpu_time_is_limited_within_a_tenth() {
    let (groups, special) = groups("cpu", 512, 20);
    let running = start_stand_in("spin", &special);
    let before = share(&running, Duration::from_secs(1));
    assert!(before > 0.25, "no limit holds yet: {before}");
    for millis in [250, 500, 1000] {
        groups.group.limit_cpu(millis).unwrap();
        let limit = f64::from(millis) / 1000.0;
        // Others may want the CPUs too; then there is nothing to be held back from.
        let (mut taken, mut held) = (0.0, false);
        for _ in 0..3 {
            let periods = Periods::read(&groups.group);
            taken = share(&running, Duration::from_secs(10));
            held = Periods::read(&groups.group).held_since(&periods);
            assert!(taken < 1.1 * limit, "{millis}: {taken}");
            if held {
                break;
            }
        }
        assert!(!held || taken > 0.9 * limit, "{millis}: {taken}");
        println!(
            "{millis} m: {taken:.3} CPUs, {}",
            if held {
                "held back"
            } else {
                "the machine is busy"
            }
        );
    }
    stop(running);
}

fn stop(mut running: Running) {
    running.child.kill().unwrap();
    running.child.wait().unwrap();
}

/// CPU time that a process takes in some time, in CPUs.
fn share(running: &Running, time: Duration) -> f64 {
    let pid = i32::try_from(running.child.id()).unwrap();
    let used = || usage::read(pid).unwrap().cpu_time.as_secs_f64();
    let (start, before) = (Instant::now(), used());
    std::thread::sleep(time);
    (used() - before) / start.elapsed().as_secs_f64()
}

/// Periods in which there was something to run, and those at whose end something was held back.
struct Periods {
    all: u64,
    held: u64,
}

impl Periods {
    fn read(group: &Group) -> Self {
        let stat = |directory: &PathBuf| std::fs::read_to_string(directory.join("cpu.stat")).ok();
        let stat = group.directories().iter().find_map(stat).unwrap();
        let number = |name: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim().parse().unwrap()
        };
        Self {
            all: number("nr_periods "),
            held: number("nr_throttled "),
        }
    }

    fn held_since(&self, before: &Self) -> bool {
        (self.held - before.held) * 10 > (self.all - before.all) * 9
    }
}
