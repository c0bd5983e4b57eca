//! Carries out what `core` decided. Every effect is idempotent and names the incarnation it is for.

use crate::certificates;
use crate::credentials::Credentials;
use crate::events::Events;
use crate::index::Shared;
use crate::metrics::Metrics;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Binding, Node, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client, Resource, ResourceExt};
use monopod_api::environment::Environment;
use monopod_api::network::{InterfacePhase, NetworkInterface};
use monopod_api::{labels, messages};
use monopod_core::lifecycle::{self, COOLING, Effect, Observed, lost_status};
use monopod_core::profiles::Told;
use monopod_ops::answer::{absent_is_fine, was_there};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt::Debug;

/// Why an effect failed. It is decided anew after a short time.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecuteError {
    /// The API server refused or could not be reached.
    #[error("request to the API server failed")]
    Api(#[from] kube::Error),
    /// The effect needs an object that is not there any more.
    #[error("the {what} is gone")]
    Gone {
        /// What is missing.
        what: &'static str,
    },
    /// The environment is not there any more, and perhaps no watch tells of it.
    #[error("there is no such environment")]
    NoEnvironment,
}

/// What [`ExecuteError::category`] gives.
pub(crate) const CATEGORIES: [&str; 6] = [
    "conflict",
    "not_found",
    "forbidden",
    "refused",
    "unreachable",
    "gone",
];

impl ExecuteError {
    /// A closed set of words for metrics.
    pub(crate) fn category(&self) -> &'static str {
        match self {
            Self::Api(kube::Error::Api(status)) => match status.code {
                409 => "conflict",
                404 => "not_found",
                403 => "forbidden",
                _other => "refused",
            },
            Self::Api(_) => "unreachable",
            Self::Gone { .. } | Self::NoEnvironment => "gone",
        }
    }

    /// Whether somebody else was only faster, which the next look at the index settles.
    pub(crate) fn is_race(&self) -> bool {
        matches!(self.category(), "conflict" | "not_found" | "gone")
    }
}

/// The objects that the effects of one decision are about.
#[derive(Debug, Clone)]
pub(crate) struct Subject {
    pub(crate) uid: String,
    pub(crate) pod: Option<Pod>,
    pub(crate) environment: Option<Environment>,
    pub(crate) interface: Option<NetworkInterface>,
}

impl Subject {
    pub(crate) fn of(uid: &str, observed: &Observed<'_>) -> Self {
        Self {
            uid: uid.to_owned(),
            pod: observed.pod.cloned(),
            environment: observed.environment.cloned(),
            interface: observed.interface.cloned(),
        }
    }

    fn pod(&self) -> Result<&Pod, ExecuteError> {
        self.pod.as_ref().ok_or(ExecuteError::Gone { what: "pod" })
    }

    fn environment(&self) -> Result<&Environment, ExecuteError> {
        self.environment.as_ref().ok_or(ExecuteError::Gone {
            what: "environment",
        })
    }
}

#[derive(Clone)]
pub(crate) struct Executor {
    pub(crate) credentials: Credentials,
    client: Client,
    index: Shared,
    events: Events,
    metrics: Metrics,
}

impl Executor {
    pub(crate) fn new(client: Client, index: Shared, metrics: Metrics) -> Self {
        let events = Events::new(client.clone(), labels::SCHEDULER_NAME);
        Self {
            credentials: Credentials::new(client.clone(), index.clone(), events.clone()),
            events,
            client,
            index,
            metrics,
        }
    }

    pub(crate) async fn execute(
        &self,
        subject: &Subject,
        effect: Effect,
    ) -> Result<(), ExecuteError> {
        match effect {
            Effect::CreateInterface(new) => {
                let created = self
                    .all::<NetworkInterface>()
                    .create(&PostParams::default(), &new)
                    .await?;
                self.index
                    .lock()
                    .interfaces
                    .insert(created.name_any(), created);
            }
            Effect::CreateEnvironment(new) => {
                tracing::info!(pod = %subject.uid, environment = %new.name_any(), host = %new.spec.host, "requested");
                let created = self
                    .all::<Environment>()
                    .create(&PostParams::default(), &new)
                    .await?;
                if let Some(asked) = subject.pod()?.creation_timestamp() {
                    self.metrics.phase("request", asked.0);
                }
                self.index
                    .lock()
                    .environments
                    .insert(created.name_any(), created);
            }
            Effect::Nominate { node } => {
                self.patch_pod_status(subject, json!({"nominatedNodeName": node}))
                    .await?;
            }
            Effect::Annotate(pairs) => {
                let annotations: serde_json::Map<String, Value> = pairs
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), json!(value)))
                    .collect();
                let pod = subject.pod()?;
                let patch = json!({"metadata": {"uid": subject.uid, "annotations": annotations}});
                self.pods(pod)
                    .patch(
                        &pod.name_any(),
                        &PatchParams::default(),
                        &Patch::Merge(patch),
                    )
                    .await?;
            }
            Effect::Bind { node } => self.bind(subject, &node).await?,
            Effect::Explain { cause, message } => {
                self.explain(subject, cause.reason(), message).await?;
                self.metrics.refused(cause);
            }
            Effect::FailPod { message } => self.fail_pod(subject, &message).await?,
            Effect::DeletePod => {
                let pod = subject.pod()?;
                let parameters = DeleteParams::default()
                    .grace_period(0)
                    .preconditions(only(&subject.uid));
                absent_is_fine(self.pods(pod).delete(&pod.name_any(), &parameters).await)?;
                self.metrics.overruled.inc();
            }
            Effect::DeleteEnvironment => self.delete_environment(subject).await?,
            Effect::DeleteNode => {
                let environment = subject.environment()?;
                let (name, node) = (environment.name_any(), &environment.spec.node);
                let found = self.all::<Node>().get_opt(node).await?;
                self.delete_node(&name, node, found.as_ref()).await?;
                certificates::forget(&self.client, &name).await?;
            }
            Effect::CoolInterface => {
                if let Some(interface) = &subject.interface {
                    self.cool(interface).await?;
                }
            }
            Effect::ReleaseEnvironment => {
                let environment = subject.environment()?;
                self.credentials.remove(environment).await?;
                self.release(environment).await?;
            }
            // Kept in memory by the reconciler, which never passes it on.
            Effect::RememberFailure(_) => {}
        }
        Ok(())
    }

    /// Starts the time after which an interface's address may be used again.
    pub(crate) async fn cool(&self, interface: &NetworkInterface) -> Result<(), ExecuteError> {
        let until = Timestamp::now() + COOLING;
        let patch = json!({
            "metadata": {"uid": interface.uid()},
            "status": {"phase": InterfacePhase::Cooling, "coolingUntil": until.to_string()},
        });
        let api = self.all::<NetworkInterface>();
        let patched = api
            .patch_status(
                &interface.name_any(),
                &PatchParams::default(),
                &Patch::Merge(patch),
            )
            .await;
        Ok(absent_is_fine(patched)?)
    }

    /// Frees an interface's address.
    pub(crate) async fn delete_interface(
        &self,
        interface: &NetworkInterface,
    ) -> Result<(), ExecuteError> {
        let name = interface.name_any();
        self.delete::<NetworkInterface>(&name, interface.uid().as_deref())
            .await?;
        // Ours alone is on it, for as long as an environment may have the address.
        let patch = json!({"metadata": {"uid": interface.uid(), "finalizers": null}});
        let api = self.all::<NetworkInterface>();
        let patched = api
            .patch(&name, &PatchParams::default(), &Patch::Merge(patch))
            .await;
        Ok(absent_is_fine(patched)?)
    }

    async fn bind(&self, subject: &Subject, node: &str) -> Result<(), ExecuteError> {
        let (pod, environment) = (subject.pod()?, subject.environment()?);
        let environments = self.all::<Environment>();
        let current = environments.get_opt(&environment.name_any()).await?;
        if !lifecycle::is_there(environment, current.as_ref()) {
            return Err(ExecuteError::Gone {
                what: "environment to bind to",
            });
        }
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        let binding = Binding {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                namespace: Some(namespace.clone()),
                uid: Some(subject.uid.clone()),
                ..Default::default()
            },
            target: ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(node.to_owned()),
                ..Default::default()
            },
        };
        self.pods(pod)
            .create_subresource::<Binding, Value>(
                "binding",
                &name,
                &PostParams::default(),
                &binding,
            )
            .await?;
        tracing::info!(pod = %subject.uid, %node, "bound");
        if let Some(registered) = subject
            .environment
            .as_ref()
            .and_then(|e| e.status.as_ref()?.phases.last())
        {
            self.metrics.phase("bind", registered.time.0);
        }
        let told = Told {
            warning: false,
            reason: messages::SCHEDULED,
            message: messages::assigned(&namespace, &name, node),
        };
        self.events.tell(pod.object_ref(&()), told).await;
        Ok(())
    }

    async fn explain(
        &self,
        subject: &Subject,
        reason: &str,
        message: String,
    ) -> Result<(), ExecuteError> {
        // Since when the pod waits, whatever it waited for before.
        let conditions = subject
            .pod()?
            .status
            .iter()
            .flat_map(|s| s.conditions.iter().flatten());
        let since = conditions
            .filter(|c| c.type_ == "PodScheduled" && c.status == "False")
            .find_map(|c| c.last_transition_time.clone())
            .map_or_else(Timestamp::now, |time| time.0);
        let told = Told {
            warning: true,
            reason: messages::FAILED_SCHEDULING,
            message: message.clone(),
        };
        let pod = subject.pod()?.object_ref(&());
        // First: what the condition says counts as told.
        self.events.store(pod, told, since).await?;
        let condition = json!({
            "type": "PodScheduled", "status": "False", "reason": reason, "message": message,
            "lastTransitionTime": since.to_string(), "lastProbeTime": Timestamp::now().to_string(),
        });
        self.patch_pod_status(subject, json!({"conditions": [condition]}))
            .await
    }

    /// Writes the end of a pod whose VM cannot any more. Based on the pod as it is now: what its node
    /// wrote last is kept.
    async fn fail_pod(&self, subject: &Subject, message: &str) -> Result<(), ExecuteError> {
        let pod = subject.pod()?;
        let current = self
            .pods(pod)
            .get_opt(&pod.name_any())
            .await?
            .filter(|current| current.uid().as_ref() == Some(&subject.uid))
            .ok_or(ExecuteError::Gone { what: "pod" })?;
        let Some(status) = lost_status(&current, message, Timestamp::now()) else {
            return Ok(());
        };
        tracing::warn!(pod = %subject.uid, message, "pod failed: its environment is lost");
        let based_on = json!({"uid": subject.uid, "resourceVersion": current.resource_version()});
        self.patch_status(pod, &based_on, &status).await?;
        self.metrics.lost.inc();
        let told = Told {
            warning: true,
            reason: messages::ENVIRONMENT_LOST,
            message: message.to_owned(),
        };
        self.events.tell(pod.object_ref(&()), told).await;
        Ok(())
    }

    /// Asks for the end of an environment, once the pod as it is now does not speak against it.
    async fn delete_environment(&self, subject: &Subject) -> Result<(), ExecuteError> {
        let environment = subject.environment()?;
        let pod = &environment.spec.pod;
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let current = api.get_opt(&pod.name).await?;
        if lifecycle::stays(environment, subject.pod.as_ref(), current.as_ref()) {
            return Err(ExecuteError::Gone {
                what: "reason to delete the environment",
            });
        }
        tracing::info!(pod = %subject.uid, environment = %environment.name_any(), "releasing");
        let (name, uid) = (environment.name_any(), environment.uid());
        if self.delete::<Environment>(&name, uid.as_deref()).await? {
            Ok(())
        } else {
            Err(ExecuteError::NoEnvironment)
        }
    }

    /// Removes what an environment has left that somebody took the finalizers off.
    pub(crate) async fn clear(&self, environment: &str, node: &str) -> Result<(), ExecuteError> {
        if self.index.lock().has_node(environment, node) {
            return Ok(());
        }
        let requests = certificates::of(&self.client, environment).await?;
        // Another of its name, as the same pod may have by now, asks later than that, and has another node.
        match self.all::<Environment>().get_opt(environment).await? {
            Some(current) if current.spec.node == node => return Ok(()),
            Some(_) => {}
            None => {
                for request in requests {
                    certificates::delete(&self.client, &request).await?;
                }
            }
        }
        let found = self.all::<Node>().get_opt(node).await?;
        if found.is_some() {
            self.delete_node(environment, node, found.as_ref()).await?;
        }
        Ok(())
    }

    /// Deletes a node and its lease, unless what is `found` of this name is another environment's.
    async fn delete_node(
        &self,
        environment: &str,
        name: &str,
        found: Option<&Node>,
    ) -> Result<(), ExecuteError> {
        if let Some(node) = found {
            if lifecycle::environment_of(node) != Some(environment) {
                return Ok(());
            }
            self.delete::<Node>(name, node.uid().as_deref()).await?;
        }
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), "kube-node-lease");
        absent_is_fine(leases.delete(name, &DeleteParams::default()).await)?;
        Ok(())
    }

    async fn release(&self, environment: &Environment) -> Result<(), ExecuteError> {
        let finalizers: Vec<&String> = environment
            .finalizers()
            .iter()
            .filter(|f| *f != labels::CONTROL_FINALIZER)
            .collect();
        let patch = json!({"metadata": {
            "uid": environment.uid(), "resourceVersion": environment.resource_version(), "finalizers": finalizers,
        }});
        let uid = environment.uid().unwrap_or_default();
        // First, as the watch may tell of its end before the answer.
        self.index.lock().cleared.insert(uid.clone());
        let api = self.all::<Environment>();
        let patched = api
            .patch(
                &environment.name_any(),
                &PatchParams::default(),
                &Patch::Merge(patch),
            )
            .await;
        if patched.is_err() {
            self.index.lock().cleared.remove(&uid);
        }
        Ok(absent_is_fine(patched)?)
    }

    async fn patch_pod_status(&self, subject: &Subject, status: Value) -> Result<(), ExecuteError> {
        let pod = subject.pod()?;
        // The uid is a precondition: a pod of the same name made meanwhile is not touched.
        self.patch_status(pod, &json!({"uid": subject.uid}), &status)
            .await
    }

    async fn patch_status(
        &self,
        pod: &Pod,
        metadata: &Value,
        status: &impl Serialize,
    ) -> Result<(), ExecuteError> {
        let patch = json!({"metadata": metadata, "status": status});
        self.pods(pod)
            .patch_status(
                &pod.name_any(),
                &PatchParams::default(),
                &Patch::Strategic(patch),
            )
            .await?;
        Ok(())
    }

    /// Whether it was there.
    async fn delete<K>(&self, name: &str, uid: Option<&str>) -> Result<bool, ExecuteError>
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        let mut parameters = DeleteParams::default();
        if let Some(uid) = uid {
            parameters = parameters.preconditions(only(uid));
        }
        let deleted = self.all::<K>().delete(name, &parameters).await;
        Ok(was_there(deleted)?)
    }

    fn all<K: Resource<DynamicType = ()>>(&self) -> Api<K> {
        Api::all(self.client.clone())
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default())
    }
}

fn only(uid: &str) -> Preconditions {
    Preconditions {
        uid: Some(uid.to_owned()),
        resource_version: None,
    }
}
