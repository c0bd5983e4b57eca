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
        // It would say on standard error that standard error takes no more, and panic: the logs of
        // all parts are files, and a full disk must end none of them.
        .log_internal_errors(false)
        .init();
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::process::Command;

    const WRITES: &str = "MONOPOD_TEST_WRITES_A_LOG";

    #[test]
    fn a_full_disk_ends_nobody_who_logs() {
        if std::env::var_os(WRITES).is_some() {
            super::init();
            tracing::error!("nobody will read this");
            return;
        }
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let name = "logs::tests::a_full_disk_ends_nobody_who_logs";
        let itself = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(WRITES, "")
            .stderr(full)
            .output()
            .unwrap();
        assert!(itself.status.success(), "{:?}", itself.status);
        assert!(String::from_utf8_lossy(&itself.stdout).contains("1 passed"));
    }
}
