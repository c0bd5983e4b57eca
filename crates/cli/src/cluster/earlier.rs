//! Parts of a supervisor that was killed. Each gets SIGTERM by its death, and may heed it late, or, as an API server
//! whose etcd is gone, never; nothing else can listen where it does meanwhile.

use super::supervisor::Progress;
use crate::settings::Layout;
use anyhow::ensure;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::Path;
use std::time::Duration;
use tokio::time::Instant;

/// How long they may take. No request waits for them any more.
const GRACE: Duration = Duration::from_secs(3);
/// How long they may take that were killed.
const GONE: Duration = Duration::from_secs(10);
/// Time between looks.
const PERIOD: Duration = Duration::from_millis(50);

/// Parts that run.
#[derive(Debug)]
pub struct Parts(Vec<Pid>);

impl Parts {
    /// Those of what was reached last. Nobody holds the supervisor's lock, or it is the caller.
    pub fn of(layout: &Layout) -> Self {
        let phases = Progress::read(layout).phases.into_iter();
        let numbers = phases.filter_map(|phase| phase.pid);
        let mut parts = Self(numbers.filter_map(Pid::from_raw).collect());
        parts.look(layout);
        parts
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Ends them.
    ///
    /// # Errors
    /// If one does not end.
    pub async fn end(mut self, layout: &Layout) -> anyhow::Result<()> {
        let begin = Instant::now();
        let mut killed = false;
        while !self.is_empty() {
            if begin.elapsed() > GRACE && !killed {
                killed = true;
                for part in &self.0 {
                    if let Err(error) = kill_process(*part, Signal::KILL) {
                        tracing::debug!(?part, %error, "already gone");
                    }
                }
            }
            ensure!(
                begin.elapsed() < GRACE + GONE,
                "processes of the cluster that ran before do not end: {:?}",
                self.0
            );
            tokio::time::sleep(PERIOD).await;
            self.look(layout);
        }
        Ok(())
    }

    /// Keeps those that are there. A number may be another process's by now.
    fn look(&mut self, layout: &Layout) {
        self.0.retain(|pid| {
            let path = format!("/proc/{}/cmdline", pid.as_raw_nonzero());
            let arguments = fs::read(path).unwrap_or_default();
            is_of(&String::from_utf8_lossy(&arguments), &layout.data)
        });
    }
}

/// Whether a command line, as `/proc` has it, names a file in the data directory: every part's does.
fn is_of(arguments: &str, data: &Path) -> bool {
    let mut words = arguments.split(['\0', '=']);
    words.any(|word| Path::new(word).starts_with(data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_known_by_a_file_of_its_cluster() {
        let data = Path::new("/var/lib/monopod");
        for (arguments, is_part) in [
            ("monopod\0control\0--data=/var/lib/monopod\0", true),
            ("etcd\0--data-dir=/var/lib/monopod/etcd\0", true),
            ("monopod\0--data\0/var/lib/monopod\0host\0", true),
            ("etcd\0--data-dir=/var/lib/monopod2/etcd\0", false),
            ("sleep\0forever\0", false),
            ("", false),
        ] {
            assert_eq!(is_of(arguments, data), is_part, "{arguments}");
        }
    }
}
