//! A second control process, which the cluster does not start by itself.

use monopod_testkit::Cluster;
use std::process::Child;

/// Its name in the election.
const IDENTITY: &str = "second";

/// A control process that ends with the scene.
pub(crate) struct Second(Child);

impl Second {
    pub(crate) fn start(cluster: &Cluster) -> Self {
        let identity = format!("--identity={IDENTITY}");
        Self(cluster.start(&[
            "control",
            &identity,
            "--webhook-address=127.0.0.1:0",
            "--admin-address=127.0.0.1:0",
        ]))
    }

    pub(crate) fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }
}

/// Whether the second is the one that acts.
pub(crate) fn second_acts(cluster: &Cluster) -> bool {
    let lease = cluster.get("kube-system", "lease", "monopod-control");
    lease.is_some_and(|lease| lease["spec"]["holderIdentity"] == IDENTITY)
}

impl Drop for Second {
    fn drop(&mut self) {
        // It may have been killed as the fault.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
