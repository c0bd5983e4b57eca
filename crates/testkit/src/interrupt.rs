//! Ctrl-C and the end asked for by others: what a run brought up is removed before it ends.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

/// As shells tell that a program ended by Ctrl-C.
const EXIT_CODE: i32 = 130;

static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(|| {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The second time the process ends at once.
        register_conditional_shutdown(signal, EXIT_CODE, Arc::clone(&flag)).expect("a signal");
        register(signal, Arc::clone(&flag)).expect("a signal");
    }
    flag
});

/// From now on the first signal does not end the process: it fails what waits, so that all is cleaned up.
pub(crate) fn watch() {
    LazyLock::force(&INTERRUPTED);
}

/// Whether this run was asked to end.
pub fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Whether this run was asked to end, once: what removes things may wait again.
pub(crate) fn take() -> bool {
    INTERRUPTED.swap(false, Ordering::Relaxed)
}
