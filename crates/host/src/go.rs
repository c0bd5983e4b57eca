//! GO: what makes a guest the one for its task; and the time, which guests are told from then on.

use jiff::Timestamp;
use monopod_wire::{Go, HostTime, Task};
use rand::RngCore;

/// A task with randomness of its own and the time of this moment.
pub(crate) fn go(task: Task) -> Go {
    let mut seed = [0u8; 32];
    rand::rng().fill_bytes(&mut seed);
    Go {
        seed: hex::encode(seed),
        time_ns: time_ns(),
        task,
    }
}

/// The time of this moment, as the answer to a report of this number.
pub(crate) fn time(number: u64) -> HostTime {
    HostTime {
        time_ns: time_ns(),
        number,
    }
}

fn time_ns() -> u64 {
    u64::try_from(Timestamp::now().as_nanosecond()).unwrap_or_default()
}
