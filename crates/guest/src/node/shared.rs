//! What the pod's task tells the server: its containers, and how to reach them.

use super::logs::{Log, Output};
use bytes::Bytes;
use monopod_kubelet::serve::Connections;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{broadcast, mpsc, watch};

/// One run of a container.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// The container's id.
    pub(crate) id: String,
    /// Its log.
    pub(crate) log: Log,
    /// Its OCI process, the model for commands executed in it.
    pub(crate) process: Value,
    /// User that owns its pipes.
    pub(crate) uid: u32,
    /// What it writes.
    pub(crate) output: broadcast::Sender<Output>,
    /// What it reads, if it reads anything, and whether only the first client may write.
    pub(crate) input: Option<(mpsc::Sender<Bytes>, bool)>,
    /// Its terminal, if it has one.
    pub(crate) terminal: Option<Arc<std::os::fd::OwnedFd>>,
    /// False once it ended.
    pub(crate) running: watch::Receiver<bool>,
}

/// The runs of a container that are kept.
#[derive(Clone, Debug, Default)]
pub(crate) struct Runs {
    /// The one that runs, or ran last.
    pub(crate) current: Option<Run>,
    /// The one before.
    pub(crate) previous: Option<Run>,
    /// Why it does not run yet, in the kubelet's word.
    pub(crate) waiting: Option<String>,
}

/// The admitted pod.
#[derive(Clone, Debug, Default)]
pub(crate) struct PodView {
    /// Its namespace.
    pub(crate) namespace: String,
    /// Its name.
    pub(crate) name: String,
    /// Its uid.
    pub(crate) uid: String,
    /// Its containers by name.
    pub(crate) containers: BTreeMap<String, Runs>,
}

/// The admitted pod, if there is one. Clones share it; locks are short.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shared {
    pod: Arc<Mutex<Option<PodView>>>,
    /// Of the API server.
    pub(crate) connections: Connections,
}

impl Shared {
    /// Changes the view of the pod, making it if there is none.
    pub(crate) fn update(&self, change: impl FnOnce(&mut PodView)) {
        let mut pod = self.pod.lock().unwrap_or_else(PoisonError::into_inner);
        change(pod.get_or_insert_default());
    }

    /// The pod, if this is its name.
    pub(crate) fn find(&self, namespace: &str, name: &str) -> Option<PodView> {
        let pod = self.pod.lock().unwrap_or_else(PoisonError::into_inner);
        pod.as_ref()
            .filter(|pod| pod.namespace == namespace && pod.name == name)
            .cloned()
    }

    /// How many containers run.
    pub(crate) fn running(&self) -> usize {
        let pod = self.pod.lock().unwrap_or_else(PoisonError::into_inner);
        pod.iter()
            .flat_map(|pod| pod.containers.values())
            .filter_map(|runs| runs.current.as_ref())
            .filter(|run| *run.running.borrow())
            .count()
    }
}
