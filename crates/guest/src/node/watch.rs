//! Watches the pods that are bound to the node, and lets in only one.

use super::cluster::bounded;
use super::pod::{self, Input};
use super::status::patch_status;
use super::tools::Tools;
use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::Api;
use kube::runtime::watcher;
use monopod_core::pod::admission::{self, Refusal};
use monopod_core::pod::lifecycle::Event;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::sync::mpsc;

/// Between attempts to watch; the own pod waits for this.
const RETRY: Duration = Duration::from_millis(500);

/// Watches for ever. The first pod that is admitted gets `received`, and runs.
pub(crate) async fn watch_pods(
    tools: Tools,
    inputs: mpsc::Sender<Input>,
    received: mpsc::Receiver<Input>,
) {
    let mut door = Door {
        tools: tools.clone(),
        inputs,
        received: Some(received),
        refused: BTreeSet::new(),
        seen: false,
    };
    let mut cluster = tools.cluster.clone();
    loop {
        let pods: Api<Pod> = Api::all(cluster.client());
        let config =
            watcher::Config::default().fields(&format!("spec.nodeName={}", tools.task.node));
        let mut events = std::pin::pin!(watcher(pods, config));
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = cluster.renewed() => break,
            };
            match event {
                Some(Ok(watcher::Event::Init)) => door.seen = false,
                Some(Ok(watcher::Event::InitApply(pod) | watcher::Event::Apply(pod))) => {
                    door.knock(pod).await;
                }
                Some(Ok(watcher::Event::Delete(pod))) => door.gone(&pod).await,
                Some(Ok(watcher::Event::InitDone)) => door.listed().await,
                Some(Err(error)) => {
                    tracing::warn!(%error, "pods cannot be watched");
                    tokio::time::sleep(RETRY).await;
                }
                None => break,
            }
        }
    }
}

struct Door {
    tools: Tools,
    inputs: mpsc::Sender<Input>,
    /// Taken by the own pod when it is admitted.
    received: Option<mpsc::Receiver<Input>>,
    /// Uids of pods that were refused.
    refused: BTreeSet<String>,
    /// Whether the own pod is in the list that is being received.
    seen: bool,
}

impl Door {
    fn is_own(&self, pod: &Pod) -> bool {
        pod.metadata.uid.as_ref() == Some(&self.tools.task.pod.uid)
    }

    async fn knock(&mut self, pod: Pod) {
        let own = self.is_own(&pod);
        if own && self.received.is_none() && !self.is_refused(&pod) {
            self.seen = true;
            self.tell(Input::Pod(Box::new(pod))).await;
            return;
        }
        if self.is_refused(&pod) {
            return;
        }
        let admitted = match admission::admit(&self.tools.task.pod, &pod) {
            Ok(()) => self.admit_class(&pod).await,
            refused => refused,
        };
        match admitted {
            Ok(()) => {
                self.seen = true;
                if let Some(received) = self.received.take() {
                    let task = pod::run_pod(self.tools.clone(), pod, self.inputs.clone(), received);
                    tokio::spawn(task);
                }
            }
            Err(refusal) => self.refuse(&pod, refusal, own),
        }
    }

    /// Asks for the pod's runtime class, until there is an answer.
    async fn admit_class(&self, pod: &Pod) -> Result<(), Refusal> {
        let name = pod
            .spec
            .as_ref()
            .and_then(|s| s.runtime_class_name.as_ref());
        let Some(name) = name else {
            return Ok(());
        };
        loop {
            let classes: Api<RuntimeClass> = Api::all(self.tools.cluster.client());
            match bounded(classes.get_opt(name)).await {
                Ok(class) => return admission::admit_class(name, class.as_ref()),
                Err(error) => {
                    tracing::warn!(%error, "the pod's runtime class cannot be read");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    fn is_refused(&self, pod: &Pod) -> bool {
        pod.metadata
            .uid
            .as_ref()
            .is_some_and(|uid| self.refused.contains(uid))
    }

    /// Ends a pod that never runs here. If it is the own one, nothing is left to do for this VM.
    fn refuse(&mut self, pod: &Pod, refusal: Refusal, own: bool) {
        let meta = &pod.metadata;
        let (Some(namespace), Some(name), Some(uid)) = (&meta.namespace, &meta.name, &meta.uid)
        else {
            return;
        };
        self.refused.insert(uid.clone());
        tracing::warn!(namespace, name, refusal.message, "a pod was refused");
        let event = Event {
            warning: true,
            reason: refusal.reason,
            message: refusal.message.clone(),
            container: None,
        };
        self.tools.recorder.record(pod, event);
        let status = PodStatus {
            phase: Some("Failed".to_owned()),
            reason: Some(refusal.reason.to_owned()),
            message: Some(refusal.message),
            start_time: Some(Time(Timestamp::now())),
            observed_generation: meta.generation,
            ..PodStatus::default()
        };
        let (tools, namespace, name, uid) = (
            self.tools.clone(),
            namespace.clone(),
            name.clone(),
            uid.clone(),
        );
        tokio::spawn(async move {
            loop {
                let pods = tools.cluster.pods(&namespace);
                match patch_status(&pods, &name, &uid, &status).await {
                    Ok(_version) => break,
                    Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => break,
                    Err(error) => {
                        tracing::warn!(%error, "the status of a refused pod was not taken");
                        tokio::time::sleep(RETRY).await;
                    }
                }
            }
            if own {
                while let Err(error) = tools
                    .metadata
                    .ended(&monopod_wire::Ended::PodFinished)
                    .await
                {
                    tracing::error!(%error, "the end was not told");
                    tokio::time::sleep(RETRY).await;
                }
            }
        });
    }

    async fn gone(&mut self, pod: &Pod) {
        if self.is_own(pod) && self.received.is_none() {
            self.tell(Input::Gone).await;
        }
    }

    /// A whole list without the own pod, which ran before, means that it is gone.
    async fn listed(&mut self) {
        if self.received.is_none() && !self.seen {
            self.tell(Input::Gone).await;
        }
    }

    async fn tell(&self, input: Input) {
        if self.inputs.send(input).await.is_err() {
            tracing::debug!("the pod's task has ended");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::fake_api::{self, Answer, Requests};
    use serde_json::{Value, json};

    fn pod(namespace: &str, name: &str, uid: &str, scheduler: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"namespace": namespace, "name": name, "uid": uid},
            "spec": {"schedulerName": scheduler, "containers": [{"name": "c", "image": "i"}]},
        }))
        .unwrap()
    }

    fn door() -> (Door, Requests) {
        let (cluster, requests) =
            fake_api::start(vec![Answer::ok(&json!({"kind": "Pod", "metadata": {}})); 8]);
        let (inputs, received) = pod::channel();
        let door = Door {
            tools: fake_api::tools(cluster),
            inputs,
            received: Some(received),
            refused: BTreeSet::new(),
            seen: false,
        };
        (door, requests)
    }

    /// Waits for a request and returns its body.
    async fn request(requests: &Requests, line: &str) -> Value {
        for _ in 0..200 {
            if let Some((_, body)) = requests.lock().unwrap().iter().find(|(l, _)| l == line) {
                return body.clone();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no request {line}: {:?}", requests.lock().unwrap());
    }

    #[tokio::test]
    async fn another_pod_fails_and_never_gets_the_receiver() {
        let (mut door, requests) = door();
        door.knock(pod("ns", "intruder", "x", "default-scheduler"))
            .await;
        let patch = request(
            &requests,
            "PATCH /api/v1/namespaces/ns/pods/intruder/status",
        )
        .await;
        assert_eq!(patch["status"]["phase"], "Failed");
        assert_eq!(patch["status"]["reason"], "UnsupportedPodSpec");
        assert_eq!(patch["metadata"]["uid"], "x");
        let event = request(&requests, "POST /api/v1/namespaces/ns/events").await;
        assert_eq!(
            event["message"],
            "Pod not supported: SchedulerName is not fargate-scheduler"
        );
        assert!(door.received.is_some());
        // The same pod again, and one with the right scheduler and even the right name.
        door.knock(pod("ns", "intruder", "x", "default-scheduler"))
            .await;
        door.knock(pod("ns", "p", "not-u", "fargate-scheduler"))
            .await;
        request(&requests, "PATCH /api/v1/namespaces/ns/pods/p/status").await;
        assert!(door.received.is_some());
        assert_eq!(door.refused.len(), 2);
    }

    #[tokio::test]
    async fn a_list_without_the_pod_says_that_it_is_gone() {
        let (mut door, _requests) = door();
        let mut received = door.received.take().unwrap();
        door.listed().await;
        assert!(matches!(received.recv().await, Some(Input::Gone)));
        door.knock(pod("ns", "p", "u", "fargate-scheduler")).await;
        assert!(matches!(received.recv().await, Some(Input::Pod(_))));
        door.listed().await;
        assert!(received.try_recv().is_err(), "it was in the list");
    }
}
