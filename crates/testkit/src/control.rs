//! A second control process, which the cluster does not start by itself, and the one that acts.

use crate::{Cluster, Ended};
use monopod_api::labels;

/// Its name in the election.
pub const SECOND_CONTROL: &str = "second";

impl Cluster {
    /// Starts a second control process.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn second_control(&self) -> Ended {
        let identity = format!("--identity={SECOND_CONTROL}");
        Ended(self.start(&["control", &identity, "--admin-address=127.0.0.1:0"]))
    }

    /// The name of the control process that acts; empty if none does.
    pub fn acting_control(&self) -> String {
        let lease = self.get("kube-system", "lease", labels::CONTROL_LEASE);
        let holder = &lease.unwrap_or_default()["spec"]["holderIdentity"];
        holder.as_str().unwrap_or_default().to_owned()
    }
}
