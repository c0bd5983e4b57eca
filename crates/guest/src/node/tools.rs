//! What the parts of the node share: the task, its clients, the view for the server.

use super::cluster::Cluster;
use super::events::Recorder;
use super::launch::Spare;
use super::shared::Shared;
use super::shipper::Shipper;
use crate::internal::now_ns;
use crate::metadata::Metadata;
use k8s_openapi::api::core::v1::Service;
use monopod_core::pod::fields::Facts;
use monopod_core::pod::files::Dns;
use monopod_wire::{GuestPhase, Task};
use std::sync::Arc;

/// What the pod's task works with.
#[derive(Clone, Debug)]
pub(crate) struct Tools {
    /// What the node is for.
    pub(crate) task: Arc<Task>,
    /// The API server.
    pub(crate) cluster: Cluster,
    /// The platform.
    pub(crate) metadata: Metadata,
    /// Events.
    pub(crate) recorder: Recorder,
    /// A child process for the first container.
    pub(crate) spare: Spare,
    /// What the server sees.
    pub(crate) shared: Shared,
    /// What carries logs to the host.
    pub(crate) shipper: Shipper,
    /// Services, once they were listed.
    pub(crate) services: tokio::sync::watch::Receiver<Option<Vec<Service>>>,
}

impl Tools {
    /// What a pod can ask about itself.
    pub(crate) fn facts(&self) -> Facts {
        Facts {
            node: self.task.node.clone(),
            address: self.task.interface.address.to_string(),
            cpu_millis: u64::from(self.task.cpu_millis),
            memory_bytes: u64::from(self.task.memory_mib) << 20,
            scratch_bytes: self.task.scratch_bytes,
        }
    }

    /// The cluster's DNS.
    pub(crate) fn dns(&self) -> Dns {
        Dns {
            server: self.task.cluster_dns,
            domain: self.task.cluster_domain.clone(),
        }
    }

    /// Tells the host that a phase was reached; best effort.
    pub(crate) fn phase(&self, name: &'static str) {
        let metadata = self.metadata;
        let phase = GuestPhase {
            name: name.to_owned(),
            time_ns: now_ns(),
        };
        tokio::spawn(async move {
            if let Err(error) = metadata.phase(&phase).await {
                tracing::warn!(%error, name, "a phase was not told");
            }
        });
    }
}
