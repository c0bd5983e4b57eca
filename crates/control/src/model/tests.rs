//! A thousand schedules, those that once broke something, and sabotage that must be noticed.

use super::calm::run;
use super::schedule::{Action, Sabotage, Schedule, draw, shrink};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Schedules that run with the tests.
const SCHEDULES: u64 = 1000;

/// A number from the environment, by which `cargo xtask chaos model` asks for more.
fn asked(name: &str, otherwise: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().expect("a number"),
        Err(_) => otherwise,
    }
}

/// The first seed from here on whose schedule breaks something, and what.
fn search(first: u64, count: u64, sabotage: Sabotage) -> Option<(u64, Schedule, String)> {
    let (next, found) = (AtomicU64::new(first), AtomicU64::new(u64::MAX));
    let ran = AtomicUsize::new(0);
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + count || seed > found.load(Ordering::Relaxed) {
                return;
            }
            match run(&draw(seed), sabotage) {
                Ok(world) => drop(ran.fetch_add(world.ledger.ran.len(), Ordering::Relaxed)),
                Err(_broken) => drop(found.fetch_min(seed, Ordering::Relaxed)),
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let seed = found.into_inner();
    if seed == u64::MAX {
        let ran = ran.into_inner();
        println!("{count} schedules from seed {first}: {ran} pods ran, no invariant was broken");
        assert!(
            sabotage != Sabotage::None || ran as u64 > count / 2,
            "hardly any pod ran"
        );
        return None;
    }
    let schedule = shrink(draw(seed), |schedule| run(schedule, sabotage).is_err());
    let broken = run(&schedule, sabotage).err().unwrap_or_default();
    Some((seed, schedule, broken))
}

fn directory() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/model/regressions")
}

#[test]
fn no_schedule_breaks_an_invariant() {
    let (first, count) = (
        asked("MONOPOD_SEED", 0),
        asked("MONOPOD_SCHEDULES", SCHEDULES),
    );
    if let Some((seed, schedule, broken)) = search(first, count, Sabotage::None) {
        let file = directory().join(format!("{seed}.json"));
        let text = serde_json::to_string(&schedule).expect("plain data");
        std::fs::write(&file, format!("{text}\n")).expect("the source is writable");
        panic!(
            "seed {seed}: {broken}\n{schedule:?}\nkept in {}",
            file.display()
        );
    }
}

#[test]
fn what_was_broken_once_is_not_broken_again() {
    let mut ran = 0;
    for entry in std::fs::read_dir(directory()).expect("there are some") {
        let path = entry.expect("readable").path();
        let text = std::fs::read_to_string(&path).expect("readable");
        let schedule: Vec<Action> = serde_json::from_str(&text).expect("a schedule");
        if let Err(broken) = run(&schedule, Sabotage::None) {
            panic!("{}: {broken}", path.display());
        }
        ran += 1;
    }
    assert!(ran > 0, "no regressions in {}", directory().display());
}

#[test]
fn sabotage_is_noticed() {
    for sabotage in Sabotage::ALL {
        let found = search(0, 3 * SCHEDULES, sabotage);
        let (seed, schedule, broken) =
            found.unwrap_or_else(|| panic!("{sabotage:?} is not noticed"));
        println!(
            "{sabotage:?}: seed {seed}, {} steps: {broken}",
            schedule.len()
        );
    }
}
