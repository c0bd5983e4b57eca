//! Log lines of a process.

use tracing_subscriber::EnvFilter;

/// The client's own line for each refused request says less than the caller's, which follows it.
const DEFAULT: &str = "info,kube_client::client::builder=off";

/// Sends log lines to standard error; the variable `MONOPOD_LOG` chooses what is logged.
///
/// # Panics
/// If it is called twice in one process.
pub fn init() {
    let filter =
        EnvFilter::try_from_env("MONOPOD_LOG").unwrap_or_else(|_unset| EnvFilter::new(DEFAULT));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .init();
}
