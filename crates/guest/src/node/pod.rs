//! The task that owns the pod: observations in, effects out, status to the API server.

use super::cluster::{Cluster, bounded};
use super::images::Images;
use super::run::{self, Order, Start};
use super::status::StatusWriter;
use super::tools::Tools;
use super::volumes::Ready;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::api::{Api, DeleteParams, Preconditions};
use monopod_api::messages::UNSUPPORTED_POD_SPEC;
use monopod_core::pod::admission::unsupported_changes;
use monopod_core::pod::lifecycle::{
    self, Cause, Desired, Effect, Event, Observation, PodState, State,
};
use monopod_core::pod::resources;
use monopod_core::pod::status::{View, status};
use monopod_core::pod::{container_spec, shares_processes};
use monopod_wire::{Ended, Image};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Inputs that wait to be taken in.
const QUEUE: usize = 64;
/// Between attempts to delete the pod's object, or to mount an image.
const RETRY: Duration = Duration::from_secs(1);
/// How long clients may take to read what the pod said last; the host answers for a finished one
/// then.
const LAST_ANSWERS: Duration = Duration::from_secs(20);
/// The same of a deleted pod: a part of `monopod_core::lifecycle::TERMINATION_MARGIN`.
const LAST_ANSWERS_OF_DELETED: Duration = Duration::from_secs(2);
/// `SIGTERM`.
const TERM: i32 = 15;

/// Something for the pod's task.
#[derive(Debug)]
pub(crate) enum Input {
    /// The pod's object changed.
    Pod(Box<Pod>),
    /// The pod's object is gone: deleted by force.
    Gone,
    /// The host said something about images.
    Images(Vec<Image>),
    /// Images that could not be mounted before.
    MountAgain(Vec<Image>),
    /// A container did something.
    Observed(Observation),
    /// Something worth an event happened.
    Event(Event),
    /// Volumes and services are there.
    Prepared(BTreeMap<String, Ready>),
}

/// A channel to a pod's task.
pub(crate) fn channel() -> (mpsc::Sender<Input>, mpsc::Receiver<Input>) {
    mpsc::channel(QUEUE)
}

/// Limits the pod to what it asks for itself, beside its containers.
fn limit(pod: &Pod, tools: &Tools) {
    let Some(spec) = &pod.spec else {
        return;
    };
    match resources::of_pod(spec, tools.facts().cpu_millis) {
        Ok(Some(limits)) => {
            if let Err(error) = crate::container::limit(limits) {
                tracing::error!(%error, "the pod's own limits cannot be set");
            }
        }
        Ok(None) => {}
        // The API server lets none pass.
        Err(error) => tracing::error!(%error, "the pod's own resources cannot be read"),
    }
}

struct PodTask {
    tools: Tools,
    pod: Arc<Pod>,
    state: PodState,
    images: Images,
    volumes: Option<BTreeMap<String, Ready>>,
    orders: BTreeMap<String, mpsc::Sender<Order>>,
    written: Option<PodStatus>,
    writer: StatusWriter,
    inputs: mpsc::Sender<Input>,
    first_started: bool,
    /// Tells probes that the pod is ending.
    terminating: tokio::sync::watch::Sender<bool>,
    /// Changes of the spec that were told already.
    unsupported: Vec<String>,
}

/// Runs an admitted pod to its end.
pub(crate) async fn run_pod(
    tools: Tools,
    pod: Pod,
    sender: mpsc::Sender<Input>,
    mut inputs: mpsc::Receiver<Input>,
) {
    tools.phase("pod-admitted");
    let pod = Arc::new(pod);
    let meta = &pod.metadata;
    tools.shared.update(|view| {
        view.namespace = meta.namespace.clone().unwrap_or_default();
        view.name = meta.name.clone().unwrap_or_default();
        view.uid = meta.uid.clone().unwrap_or_default();
        for container in pod.spec.iter().flat_map(|spec| {
            spec.init_containers
                .iter()
                .flatten()
                .chain(&spec.containers)
        }) {
            view.containers.entry(container.name.clone()).or_default();
        }
    });
    if let Err(error) = super::plan::write_etc(&pod, tools.task.interface.address, &tools.dns()) {
        tracing::error!(%error, "the pod's files in /etc cannot be written");
    }
    limit(&pod, &tools);
    if shares_processes(&pod) {
        let made = tokio::task::spawn_blocking(crate::container::share_pids).await;
        if let Ok(Err(error)) = made {
            let error = format!("{error:#}");
            tracing::error!(%error, "the pod's containers cannot share their processes");
        }
    }
    let (pods, changed_pods) = tokio::sync::watch::channel(Arc::clone(&pod));
    tokio::spawn(super::prepare::look_after_volumes(
        tools.clone(),
        changed_pods,
        sender.clone(),
    ));
    let mut this = PodTask {
        state: PodState::new(&pod, Timestamp::now()),
        images: Images::default(),
        volumes: None,
        orders: BTreeMap::new(),
        written: None,
        writer: StatusWriter::start(tools.clone(), &pod),
        inputs: sender,
        first_started: false,
        terminating: tokio::sync::watch::Sender::new(false),
        unsupported: Vec::new(),
        pod,
        tools,
    };
    let mut wake = this.advance().await;
    while !this.state.is_finished() {
        let sleep = async {
            match wake {
                Some(time) => {
                    let left = time.duration_since(Timestamp::now());
                    let left = Duration::try_from(left).unwrap_or_default();
                    tokio::time::sleep(left.min(Duration::from_hours(1))).await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            input = inputs.recv() => match input {
                Some(input) => this.take(input),
                None => return,
            },
            () = sleep => {}
        }
        // Whatever else is there already, so that it is decided and told at once.
        while let Ok(input) = inputs.try_recv() {
            this.take(input);
        }
        pods.send_replace(Arc::clone(&this.pod));
        wake = this.advance().await;
    }
}

impl PodTask {
    fn take(&mut self, input: Input) {
        match input {
            Input::Pod(pod) => self.change(*pod),
            Input::Gone => {
                let mut pod = Pod::clone(&self.pod);
                let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::now());
                pod.metadata.deletion_timestamp.get_or_insert(now);
                pod.metadata.deletion_grace_period_seconds = Some(0);
                self.pod = Arc::new(pod);
            }
            Input::Images(images) => {
                self.mount(images);
            }
            Input::MountAgain(images) => {
                let still = |image: &Image| {
                    let known = self.images.known.get(&image.reference);
                    matches!(known, Some(lifecycle::Image::Failed { .. }))
                };
                // The host may have said something newer meanwhile.
                let images = images.into_iter().filter(still).collect();
                self.mount(images);
            }
            Input::Observed(observation) => {
                if let Observation::Started { .. } = observation
                    && !self.first_started
                {
                    self.first_started = true;
                    self.tools.phase("container-started");
                }
                if let Observation::Exited { container, .. }
                | Observation::CannotStart { container, .. } = &observation
                {
                    self.orders.remove(container);
                }
                let events =
                    lifecycle::observe(&mut self.state, &self.pod, observation, Timestamp::now());
                for event in events {
                    self.tools.recorder.record(&self.pod, event);
                }
            }
            Input::Event(event) => self.tools.recorder.record(&self.pod, event),
            Input::Prepared(volumes) => self.volumes = Some(volumes),
        }
    }

    fn mount(&mut self, images: Vec<Image>) {
        let failed = self.images.update(images);
        if failed.is_empty() {
            return;
        }
        let inputs = self.inputs.clone();
        tokio::spawn(async move {
            tokio::time::sleep(RETRY).await;
            if inputs.send(Input::MountAgain(failed)).await.is_err() {
                tracing::debug!("the pod's task ended before its images were mounted");
            }
        });
    }

    /// Takes the new object, but goes on with the old spec if the new one cannot be followed.
    fn change(&mut self, mut pod: Pod) {
        let changes = unsupported_changes(&self.pod, &pod);
        let told = changes == self.unsupported;
        if !changes.is_empty() {
            pod.spec.clone_from(&self.pod.spec);
        }
        if !changes.is_empty() && !told {
            let event = Event {
                warning: true,
                reason: UNSUPPORTED_POD_SPEC,
                message: format!(
                    "Pod not supported: this runtime cannot change a running pod's {}: delete the pod and create it anew",
                    changes.join(", ")
                ),
                container: None,
            };
            self.tools.recorder.record(&pod, event);
        }
        self.unsupported = changes;
        self.pod = Arc::new(pod);
        self.writer.seen(Arc::clone(&self.pod));
    }

    /// Decides, acts and tells the status. Returns when to come back.
    async fn advance(&mut self) -> Option<Timestamp> {
        let decision = {
            let desired = Desired {
                pod: &self.pod,
                images: &self.images.known,
                prepared: self.volumes.is_some(),
            };
            lifecycle::step(&mut self.state, &desired, Timestamp::now())
        };
        let mut finish = None;
        for effect in decision.effects {
            match effect {
                Effect::Start { container, attempt } => self.start(&container, attempt),
                Effect::Stop {
                    container,
                    grace_seconds,
                    held,
                } => {
                    let order = Order::Stop {
                        signal: self.stop_signal(&container),
                        grace: Duration::from_secs(u64::try_from(grace_seconds).unwrap_or(0)),
                        held,
                    };
                    self.order(&container, order);
                }
                Effect::Release { container } => self.order(&container, Order::Release),
                Effect::Kill { container } => self.order(&container, Order::Kill),
                Effect::Event(event) => self.tools.recorder.record(&self.pod, event),
                Effect::Finish { cause } => finish = Some(cause),
            }
        }
        if self.state.termination.is_some() {
            self.terminating.send_replace(true);
        }
        self.tell_status();
        if let Some(cause) = finish {
            self.finish(cause).await;
        }
        decision.wake
    }

    fn start(&mut self, name: &str, attempt: u32) {
        let Some(container) = container_spec(&self.pod, name).cloned() else {
            return;
        };
        let image = container.image.as_deref().unwrap_or_default();
        let Some(image) = self.images.mounted.get(image).cloned() else {
            tracing::error!(container = name, "to be started without its image");
            return;
        };
        let (sender, receiver) = mpsc::channel(4);
        self.orders.insert(name.to_owned(), sender);
        let start = Start {
            cluster: self.tools.cluster.clone(),
            pod: Arc::clone(&self.pod),
            container,
            attempt,
            image,
            volumes: self.volumes.clone().unwrap_or_default(),
            services: self.tools.services.borrow().clone().unwrap_or_default(),
            facts: self.tools.facts(),
            domain: self.tools.task.cluster_domain.clone(),
            spare: self.tools.spare.clone(),
            shared: self.tools.shared.clone(),
            shipper: self.tools.shipper.clone(),
            terminating: self.terminating.subscribe(),
            inputs: self.inputs.clone(),
        };
        tokio::spawn(run::run(start, receiver));
    }

    fn stop_signal(&self, container: &str) -> i32 {
        container_spec(&self.pod, container)
            .and_then(|spec| self.images.mounted.get(spec.image.as_deref()?))
            .and_then(|image| super::names::signal_number(&image.config.stop_signal))
            .unwrap_or(TERM)
    }

    fn order(&self, container: &str, order: Order) {
        if let Some(orders) = self.orders.get(container)
            && let Err(error) = orders.try_send(order)
        {
            tracing::warn!(container, %error, "a container was not told to stop");
        }
    }

    fn tell_status(&mut self) {
        let address = self.tools.task.interface.address.to_string();
        let view = View {
            pod: &self.pod,
            images: &self.images.known,
            address: &address,
            prepared: self.volumes.is_some(),
        };
        let status = status(&view, &self.state, self.written.as_ref(), Timestamp::now());
        self.tools.shared.update(|pod| {
            for container in &self.state.containers {
                if let (State::Waiting { reason, .. }, Some(runs)) =
                    (&container.state, pod.containers.get_mut(&container.name))
                {
                    runs.waiting = Some((*reason).to_owned());
                }
            }
        });
        if self.written.as_ref() != Some(&status) {
            self.writer.write(status.clone());
            self.written = Some(status);
        }
    }

    /// The pod ended: its status first, then the answers that are being given, then its object if
    /// it was deleted, or else its logs, then the VM.
    async fn finish(&mut self, cause: Cause) {
        self.writer.flush().await;
        match cause {
            Cause::Deleted => {
                let ending = self.tools.shared.connections.end(LAST_ANSWERS_OF_DELETED);
                answers_ended(ending.await);
                delete(&self.tools.cluster, &self.pod).await;
            }
            Cause::Completed | Cause::DeadlineExceeded => {}
        }
        self.tools.recorder.flush().await;
        tracing::info!(?cause, "the pod ended");
        match cause {
            // Nobody can ask for them any more.
            Cause::Deleted => {}
            Cause::Completed | Cause::DeadlineExceeded => self.hand_over_logs().await,
        }
        while let Err(error) = self.tools.metadata.ended(&Ended::PodFinished).await {
            tracing::error!(%error, "the end was not told");
            tokio::time::sleep(RETRY).await;
        }
    }

    /// The host gets what it lacks of the logs, and then the node's address: from then on the node
    /// is not reached any more. Bounded, as the pod has ended.
    async fn hand_over_logs(&self) {
        if !self.tools.shipper.finish().await {
            tracing::warn!("the host did not take all logs");
        }
        let ending = self.tools.shared.connections.hand_over(LAST_ANSWERS);
        answers_ended(ending.await);
        if let Err(error) = self.tools.metadata.logs_complete().await {
            tracing::warn!(%error, "the host does not answer for the logs yet");
        }
    }
}

fn answers_ended(open: usize) {
    if open > 0 {
        tracing::info!(open, "clients have not taken all that they asked for");
    }
}

/// Deletes the pod's object, as its containers are gone. Ends when it is gone or another one.
async fn delete(cluster: &Cluster, pod: &Pod) {
    let meta = &pod.metadata;
    let (Some(namespace), Some(name)) = (&meta.namespace, &meta.name) else {
        return;
    };
    let parameters = DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(Preconditions {
            uid: meta.uid.clone(),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    loop {
        let pods: Api<Pod> = cluster.pods(namespace);
        match bounded(pods.delete(name, &parameters)).await {
            Ok(_) => return,
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => return,
            Err(error) => tracing::warn!(%error, "the pod's object was not deleted"),
        }
        tokio::time::sleep(RETRY).await;
    }
}
