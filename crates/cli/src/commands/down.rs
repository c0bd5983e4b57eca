//! `monopod down`: stops the supervisor, which stops everything else in order.

use super::up::running;
use crate::cluster::earlier::Parts;
use crate::cluster::supervisor::{HAND_OVER, network};
use crate::settings::Layout;
use anyhow::Context;
use clap::Args;
use rustix::process::{Pid, Signal};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// All parts' grace periods together, and the VMs.
const LIMIT: Duration = Duration::from_secs(150);

#[derive(Args, Debug)]
pub(crate) struct Down {
    /// Also delete the cluster's data: objects, keys and images
    #[arg(long)]
    purge: bool,
    /// Leave the pods' VMs running and the network as it is, for an upgrade: the next `monopod up` takes them over
    #[arg(long, conflicts_with = "purge")]
    keep_pods: bool,
}

impl Down {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let settings = layout.read_settings()?;
        if running(layout)? {
            let text = std::fs::read_to_string(layout.supervisor())?;
            let pid = text
                .trim()
                .parse()
                .ok()
                .and_then(Pid::from_raw)
                .context("the supervisor has not written its process id yet")?;
            println!("Stopping the cluster in {}.", layout.data.display());
            let how = if self.keep_pods {
                HAND_OVER
            } else {
                Signal::TERM
            };
            rustix::process::kill_process(pid, how).context("cannot signal the supervisor")?;
            let deadline = Instant::now() + LIMIT;
            while running(layout)? {
                if Instant::now() >= deadline {
                    anyhow::bail!(
                        "the supervisor (process {pid:?}) did not stop within {LIMIT:?}; see {}",
                        layout.log("supervisor").display()
                    );
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        // It stops them in order, unless it was killed.
        Parts::of(layout).end(layout).await?;
        if self.keep_pods {
            println!(
                "Stopped; the pods go on. `monopod up` takes them over, `monopod down` ends them."
            );
            return Ok(ExitCode::SUCCESS);
        }
        // The supervisor has done this already, unless it was killed.
        monopod_host::end_vms(&layout.host()).await?;
        monopod_host::network::remove(&network(&settings)).await?;
        if self.purge {
            std::fs::remove_dir_all(&layout.data)
                .with_context(|| format!("cannot delete {}", layout.data.display()))?;
        }
        println!("Stopped.");
        Ok(ExitCode::SUCCESS)
    }
}
