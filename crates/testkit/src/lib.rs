//! Test helpers: a real cluster of its own, a suite of checks that share it, and waiting on states.
//!
//! Nothing here is a fake: the cluster is brought up by the `monopod` that users run, in a data directory,
//! network namespace, link and ports of its own, and it is removed at the end, also after a failure.

#![expect(
    clippy::print_stdout,
    reason = "a test harness reports on standard output"
)]

mod certificate;
mod cluster;
mod control;
mod down;
mod export;
mod interrupt;
mod machine;
mod process;
mod record;
mod registry;
mod release;
mod remains;
mod room;
mod suite;

pub use cluster::{Cluster, Output, is_ready};
pub use control::SECOND_CONTROL;
pub use export::{figure, scrape};
pub use interrupt::is_interrupted;
pub use machine::{Machine, Switch};
pub use process::{Ended, Frozen, command_line, cpu_time, freeze, kill, processes_with};
pub use record::{
    grouped, is_vm, process, record, record_of, recorded, records, records_in, running,
};
pub use registry::Registry;
pub use release::Release;
pub use remains::{Site, leftovers, part, tap};
pub use room::Room;
pub use suite::{Check, is_whole, number, run};

use std::time::{Duration, Instant};

/// Waits until a state is reached, asking for it again and again; fails with what it saw last.
///
/// # Panics
/// If the state is not reached in time, or the run is interrupted.
#[track_caller]
pub fn wait<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        assert!(!is_interrupted(), "{what}: interrupted");
        match look() {
            Ok(found) => return found,
            Err(seen) => assert!(
                Instant::now() < deadline,
                "{what}: not after {limit:?}; last seen: {seen}"
            ),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
