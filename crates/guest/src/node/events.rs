//! Events on pods, in the kubelet's words. Best effort, in order, counted when they repeat.

use super::cluster::{Cluster, bounded};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as ApiEvent, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Api, Patch, PatchParams, PostParams};
use monopod_core::pod::lifecycle::Event;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Events that wait while the API server is slow; more are dropped.
const QUEUE: usize = 64;
/// Different events that are remembered to count them; a crash loop makes three.
const REMEMBERED: usize = 256;
/// How long the end of the VM waits for its last events.
const FLUSH: Duration = Duration::from_secs(1);

/// Takes events. Clones write to the same queue.
#[derive(Clone, Debug)]
pub(crate) struct Recorder {
    queue: mpsc::Sender<Item>,
}

#[derive(Debug)]
enum Item {
    Event(Box<(ObjectReference, Event)>),
    /// Answered when everything before it was written.
    Flush(oneshot::Sender<()>),
}

impl Recorder {
    /// Starts the task that writes events.
    pub(crate) fn start(cluster: Cluster, node: String) -> Self {
        let (queue, events) = mpsc::channel(QUEUE);
        tokio::spawn(write(cluster, node, events));
        Self { queue }
    }

    /// Waits until everything recorded so far was written, but not long.
    pub(crate) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        let flush = async {
            if self.queue.send(Item::Flush(done)).await.is_ok() && flushed.await.is_err() {
                tracing::debug!("the recorder ended");
            }
        };
        if tokio::time::timeout(FLUSH, flush).await.is_err() {
            tracing::warn!("the last events were not written in time");
        }
    }

    /// Records an event on a pod, or on one of its containers.
    pub(crate) fn record(&self, pod: &Pod, event: Event) {
        let meta = &pod.metadata;
        let is_init = event.container.as_ref().is_some_and(|name| {
            pod.spec
                .iter()
                .flat_map(|spec| spec.init_containers.iter().flatten())
                .any(|container| container.name == *name)
        });
        let list = if is_init {
            "spec.initContainers"
        } else {
            "spec.containers"
        };
        let reference = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: meta.namespace.clone(),
            name: meta.name.clone(),
            uid: meta.uid.clone(),
            resource_version: meta.resource_version.clone(),
            field_path: event
                .container
                .as_ref()
                .map(|name| format!("{list}{{{name}}}")),
        };
        if self
            .queue
            .try_send(Item::Event(Box::new((reference, event))))
            .is_err()
        {
            tracing::warn!("an event was dropped: the API server takes them too slowly");
        }
    }
}

async fn write(cluster: Cluster, node: String, mut items: mpsc::Receiver<Item>) {
    let mut written: BTreeMap<String, (String, i32)> = BTreeMap::new();
    while let Some(item) = items.recv().await {
        let (object, event) = match item {
            Item::Event(event) => *event,
            Item::Flush(done) => {
                // Whoever asked may have given up.
                let _asked = done.send(()).is_ok();
                continue;
            }
        };
        let key = format!("{:?} {event:?}", object.uid);
        let namespace = object.namespace.clone().unwrap_or_default();
        let api: Api<ApiEvent> = Api::namespaced(cluster.client(), &namespace);
        let now = Timestamp::now();
        if let Some((name, count)) = written.get_mut(&key) {
            *count = count.saturating_add(1);
            let patch = serde_json::json!({"count": *count, "lastTimestamp": Time(now)});
            let outcome =
                bounded(api.patch(name, &PatchParams::default(), &Patch::Merge(patch))).await;
            match outcome {
                Ok(_) => continue,
                Err(error) => tracing::debug!(%error, "an event was not counted"),
            }
        }
        // As the kubelet names them: the object and the time.
        let name = format!(
            "{}.{:x}",
            object.name.as_deref().unwrap_or_default(),
            now.as_nanosecond()
        );
        let object = ApiEvent {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                namespace: Some(namespace),
                ..ObjectMeta::default()
            },
            involved_object: object,
            reason: Some(event.reason.to_owned()),
            message: Some(event.message),
            type_: Some(if event.warning { "Warning" } else { "Normal" }.to_owned()),
            count: Some(1),
            first_timestamp: Some(Time(now)),
            last_timestamp: Some(Time(now)),
            source: Some(EventSource {
                component: Some("kubelet".to_owned()),
                host: Some(node.clone()),
            }),
            reporting_component: Some("kubelet".to_owned()),
            reporting_instance: Some(node.clone()),
            ..ApiEvent::default()
        };
        match bounded(api.create(&PostParams::default(), &object)).await {
            Ok(_) => {
                if written.len() >= REMEMBERED {
                    written.clear();
                }
                written.insert(key, (name, 1));
            }
            Err(error) => tracing::warn!(%error, reason = event.reason, "an event was not taken"),
        }
    }
}
