//! Writes the pod's status, the latest one, until it is taken; and again if somebody else changes it.

use super::cluster::bounded;
use super::tools::Tools;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::api::{Api, Patch, PatchParams};
use monopod_core::pod::status::is_overridden;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Between attempts while the API server does not take a status.
const RETRY: Duration = Duration::from_millis(500);

/// Writes statuses in the background.
#[derive(Debug)]
pub(crate) struct StatusWriter {
    latest: Option<watch::Sender<Option<PodStatus>>>,
    seen: watch::Sender<Option<Arc<Pod>>>,
    task: Option<JoinHandle<()>>,
}

impl StatusWriter {
    /// For this pod.
    pub(crate) fn start(tools: Tools, pod: &Pod) -> Self {
        let (latest, statuses) = watch::channel(None);
        let (seen, objects) = watch::channel(None);
        let meta = &pod.metadata;
        let task = tokio::spawn(write(
            tools,
            meta.namespace.clone().unwrap_or_default(),
            meta.name.clone().unwrap_or_default(),
            meta.uid.clone().unwrap_or_default(),
            statuses,
            objects,
        ));
        Self {
            latest: Some(latest),
            seen,
            task: Some(task),
        }
    }

    /// Replaces what is to be written.
    pub(crate) fn write(&self, status: PodStatus) {
        if let Some(latest) = &self.latest {
            latest.send_replace(Some(status));
        }
    }

    /// Shows what the API server has.
    pub(crate) fn seen(&self, pod: Arc<Pod>) {
        self.seen.send_replace(Some(pod));
    }

    /// Waits until the last status was taken, or the pod's object is gone. Nothing can be
    /// written afterwards.
    pub(crate) async fn flush(&mut self) {
        self.latest = None;
        if let Some(task) = self.task.take()
            && let Err(error) = task.await
        {
            tracing::error!(%error, "the writer of the status failed");
        }
    }
}

async fn write(
    tools: Tools,
    namespace: String,
    name: String,
    uid: String,
    mut statuses: watch::Receiver<Option<PodStatus>>,
    mut objects: watch::Receiver<Option<Arc<Pod>>>,
) {
    let mut told = false;
    let mut taken = None;
    loop {
        tokio::select! {
            changed = statuses.changed() => if changed.is_err() { return },
            Ok(()) = objects.changed() => {
                let object = objects.borrow_and_update().clone();
                if !object.is_some_and(|pod| taken.as_ref().is_some_and(|taken| undone(taken, &pod))) {
                    continue;
                }
                tracing::info!("somebody else changed the pod's status; it is written again");
            }
        }
        loop {
            let Some(status) = statuses.borrow_and_update().clone() else {
                break;
            };
            let pods: Api<Pod> = tools.cluster.pods(&namespace);
            match patch_status(&pods, &name, &uid, &status).await {
                Ok(version) => {
                    taken = version.map(|version| (status.clone(), version));
                    if !told && status.phase.as_deref() == Some("Running") {
                        told = true;
                        tools.phase("running");
                    }
                    break;
                }
                // Gone, or another incarnation: there is nothing to write to any more.
                Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => {
                    tracing::info!(code = answer.code, "the pod's object is gone");
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "the pod's status was not taken");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

/// Whether an object that is newer than the status which was taken has another one.
fn undone((status, version): &(PodStatus, u64), pod: &Pod) -> bool {
    version_of(pod).is_some_and(|seen| seen > *version) && is_overridden(status, pod)
}

/// Versions of an object can be compared as numbers (KEP-5504).
fn version_of(pod: &Pod) -> Option<u64> {
    pod.metadata.resource_version.as_ref()?.parse().ok()
}

/// Writes a status, and gives the object's version since. The uid is a precondition.
pub(crate) async fn patch_status(
    pods: &Api<Pod>,
    name: &str,
    uid: &str,
    status: &PodStatus,
) -> kube::Result<Option<u64>> {
    let patch = json!({"metadata": {"uid": uid}, "status": with_nulls(status)});
    let parameters = PatchParams::default();
    let taken = bounded(pods.patch_status(name, &parameters, &Patch::Strategic(patch))).await?;
    Ok(version_of(&taken))
}

/// A strategic merge keeps what it does not name, so what is absent must be named as null.
fn with_nulls(status: &PodStatus) -> Value {
    let mut value = json!(status);
    let absent = |object: &mut Value, keys: &[&str]| {
        if let Some(object) = object.as_object_mut() {
            for key in keys {
                object.entry(*key).or_insert(Value::Null);
            }
        }
    };
    absent(&mut value, &["reason", "message"]);
    if let Some(conditions) = value.get_mut("conditions").and_then(Value::as_array_mut) {
        for condition in conditions {
            absent(condition, &["reason", "message"]);
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::fake_api::{self, Answer};

    fn ready(status: &str, version: u64) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"namespace": "ns", "name": "p", "uid": "u", "resourceVersion": version.to_string()},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": status}]},
        }))
        .unwrap()
    }

    /// The node controller says that pods of a node which is not heard of are not Ready, and never
    /// takes it back.
    #[tokio::test]
    async fn what_somebody_else_changed_is_written_again() {
        let (cluster, requests) = fake_api::start(vec![Answer::ok(&json!(ready("True", 7))); 4]);
        let pod = ready("False", 5);
        let mut writer = StatusWriter::start(fake_api::tools(cluster), &pod);
        let written = async |count: usize| {
            for _ in 0..500 {
                let patches = requests.lock().unwrap().len();
                if patches >= count {
                    return patches;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            panic!("no {count}: {:?}", requests.lock().unwrap());
        };
        writer.write(ready("True", 0).status.unwrap());
        written(1).await;
        // Of before the write, and what the write made of it.
        for (status, version) in [("False", 6), ("True", 7), ("True", 8)] {
            writer.seen(Arc::new(ready(status, version)));
            tokio::task::yield_now().await;
        }
        writer.seen(Arc::new(ready("False", 9)));
        assert_eq!(written(2).await, 2, "once, and for nothing but the last");
        assert_eq!(
            requests.lock().unwrap()[1].1["status"]["conditions"][0]["status"],
            "True"
        );
        writer.flush().await;
        assert_eq!(requests.lock().unwrap().len(), 2);
    }

    #[test]
    fn what_is_absent_is_cleared() {
        let status: PodStatus = serde_json::from_value(json!({
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
        }))
        .unwrap();
        let patch = with_nulls(&status);
        assert_eq!(patch["message"], Value::Null);
        assert!(patch.as_object().unwrap().contains_key("reason"));
        assert!(
            patch["conditions"][0]
                .as_object()
                .unwrap()
                .contains_key("message")
        );
        assert_eq!(patch["phase"], "Running");
    }
}
