//! Checks that share a cluster, reported as cargo's own tests are.

use crate::Cluster;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// A check's name and what it does.
pub type Check = (&'static str, fn(&Cluster));

/// The number that tells a suite's cluster from others on this machine, of which `MONOPOD_TEST_CLUSTER`
/// is the first; programs that may run at the same time have another `offset` each.
pub fn number(offset: u8) -> u8 {
    let first = std::env::var("MONOPOD_TEST_CLUSTER").ok();
    first.and_then(|text| text.parse().ok()).unwrap_or(101) + offset
}

/// The words by which checks are chosen.
fn filters() -> Vec<String> {
    let arguments = std::env::args().skip(1);
    arguments
        .filter(|argument| !argument.starts_with('-'))
        .collect()
}

/// Whether all checks of the suite are run.
pub fn is_whole() -> bool {
    filters().is_empty()
}

/// Lists the names of all namespaces.
const NAMESPACES: [&str; 4] = ["get", "namespaces", "-o", "name"];

/// Removes the namespaces that a failed check left, whose pods would take the machine's time from later checks.
fn remove_left(cluster: &Cluster, before: &str) {
    let now = cluster.try_kubectl(&NAMESPACES).out;
    let left = now
        .lines()
        .filter(|name| before.lines().all(|known| known != *name));
    let delete = ["delete", "--timeout=2m"].into_iter().chain(left);
    cluster.try_kubectl(&delete.collect::<Vec<_>>());
}

/// Brings up a cluster, runs the checks whose name contains one of the arguments, and removes the cluster.
///
/// The last check gets the cluster itself, to end it. Gives whether all passed.
pub fn run(
    up: impl FnOnce() -> Cluster,
    checks: &[Check],
    last: (&'static str, fn(Cluster)),
) -> bool {
    let filters = filters();
    if std::env::args().any(|argument| argument == "--list") {
        for (name, _) in checks {
            println!("{name}: test");
        }
        return true;
    }
    let chosen: Vec<&Check> = checks
        .iter()
        .filter(|(name, _)| filters.is_empty() || filters.iter().any(|part| name.contains(part)))
        .collect();
    println!("\nrunning {} tests", chosen.len() + 1);
    let cluster = up();
    let (mut passed, mut failed) = (0, Vec::new());
    let mut report = |name: &'static str, work: &mut dyn FnMut()| {
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(work));
        let word = if outcome.is_ok() { "ok" } else { "FAILED" };
        println!(
            "test {name} ... {word} ({:.1} s)",
            start.elapsed().as_secs_f64()
        );
        if outcome.is_ok() {
            passed += 1;
        } else {
            failed.push(name);
        }
        outcome.is_ok()
    };
    let before = cluster.kubectl(&NAMESPACES);
    let mut interrupted = false;
    for (name, check) in chosen {
        let is_well = report(name, &mut || check(&cluster));
        interrupted = crate::interrupt::take();
        if interrupted {
            println!("interrupted: the cluster is removed");
            break;
        }
        if !is_well {
            remove_left(&cluster, &before);
        }
    }
    let mut cluster = Some(cluster);
    report(last.0, &mut || {
        if let Some(cluster) = cluster.take() {
            last.1(cluster);
        }
    });
    for name in &failed {
        println!("failed: {name}");
    }
    let is_well = failed.is_empty() && !interrupted;
    let word = if is_well { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {word}. {passed} passed; {} failed; 0 ignored",
        failed.len()
    );
    is_well
}
