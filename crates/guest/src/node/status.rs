//! Writes the pod's status, the latest one, until it is taken.

use super::cluster::bounded;
use super::tools::Tools;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Between attempts while the API server does not take a status.
const RETRY: Duration = Duration::from_millis(500);

/// Writes statuses in the background.
#[derive(Debug)]
pub(crate) struct StatusWriter {
    latest: Option<watch::Sender<Option<PodStatus>>>,
    task: Option<JoinHandle<()>>,
}

impl StatusWriter {
    /// For this pod.
    pub(crate) fn start(tools: Tools, pod: &Pod) -> Self {
        let (latest, statuses) = watch::channel(None);
        let meta = &pod.metadata;
        let task = tokio::spawn(write(
            tools,
            meta.namespace.clone().unwrap_or_default(),
            meta.name.clone().unwrap_or_default(),
            meta.uid.clone().unwrap_or_default(),
            statuses,
        ));
        Self {
            latest: Some(latest),
            task: Some(task),
        }
    }

    /// Replaces what is to be written.
    pub(crate) fn write(&self, status: PodStatus) {
        if let Some(latest) = &self.latest {
            latest.send_replace(Some(status));
        }
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
) {
    let mut told = false;
    while statuses.changed().await.is_ok() {
        loop {
            let Some(status) = statuses.borrow_and_update().clone() else {
                break;
            };
            let pods: Api<Pod> = tools.cluster.pods(&namespace);
            match patch_status(&pods, &name, &uid, &status).await {
                Ok(()) => {
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

/// Writes a status. The uid is a precondition.
pub(crate) async fn patch_status(
    pods: &Api<Pod>,
    name: &str,
    uid: &str,
    status: &PodStatus,
) -> kube::Result<()> {
    let patch = json!({"metadata": {"uid": uid}, "status": with_nulls(status)});
    bounded(pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(patch))).await?;
    Ok(())
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
