//! GO: what makes a guest the one for its task.

use jiff::Timestamp;
use monopod_wire::{Go, Task};
use rand::RngCore;

/// A task with randomness of its own and the time of this moment.
pub(crate) fn go(task: Task) -> Go {
    let mut seed = [0u8; 32];
    rand::rng().fill_bytes(&mut seed);
    Go {
        seed: hex::encode(seed),
        time_ns: u64::try_from(Timestamp::now().as_nanosecond()).unwrap_or_default(),
        task,
    }
}
