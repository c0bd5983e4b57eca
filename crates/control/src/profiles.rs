//! Carries out what `core` decides about Fargate profiles.

use crate::FIELD_MANAGER;
use crate::events::Events;
use crate::execute::ExecuteError;
use crate::index::{Index, Shared};
use crate::metrics::{Drained, Metrics};
use jiff::Timestamp;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client, Resource, ResourceExt};
use monopod_api::environment::PodReference;
use monopod_api::labels::{self, PROFILE_FINALIZER};
use monopod_api::profile::FargateProfile;
use monopod_core::profiles::{Decision, Effect, Observed, ProfilePod, Told, decide};
use monopod_ops::answer::absent_is_fine;
use monopod_ops::eviction::{self, Eviction};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Clone)]
pub(crate) struct Profiles {
    client: Client,
    index: Shared,
    events: Events,
    metrics: Metrics,
    /// The condition that this process wrote last.
    served: Arc<Mutex<Option<String>>>,
}

impl Profiles {
    pub(crate) fn new(client: Client, index: Shared, metrics: Metrics) -> Self {
        Self {
            events: Events::new(client.clone(), labels::PROFILE_REPORTER),
            client,
            index,
            metrics,
            served: Arc::default(),
        }
    }

    /// Looks at all profiles; gives when to look again.
    pub(crate) async fn reconcile(&self) -> Result<Option<Timestamp>, ExecuteError> {
        let (Decision { effects, wake }, profiles) = self.decide();
        // What is served decides on the rest, which is then looked at without an event.
        let serves = effects.iter().any(|e| matches!(e, Effect::Serve(_)));
        let mut failed = None;
        for effect in effects {
            tracing::debug!(?effect, "effect");
            // One profile's trouble is not the others'.
            if let Err(error) = self.carry_out(effect, &profiles).await {
                failed.get_or_insert(error);
            }
        }
        match failed {
            Some(error) => Err(error),
            None if serves => Ok(Some(Timestamp::now())),
            None => Ok(wake),
        }
    }

    async fn carry_out(
        &self,
        effect: Effect,
        profiles: &BTreeMap<String, FargateProfile>,
    ) -> Result<(), ExecuteError> {
        match effect {
            Effect::Serve(condition) => {
                self.serve(&condition).await?;
                *self.served() = Some(condition);
                Ok(())
            }
            Effect::Hold(name) => self.hold(profiles, &name, true).await,
            Effect::LetGo(name) => self.hold(profiles, &name, false).await,
            Effect::Report(name, status) => {
                let uid = profiles.get(&name).and_then(ResourceExt::uid);
                let patch = json!({"metadata": {"uid": uid}, "status": status});
                let (api, parameters) = (self.profiles(), PatchParams::default());
                let patched = api
                    .patch_status(&name, &parameters, &Patch::Merge(patch))
                    .await;
                Ok(absent_is_fine(patched)?)
            }
            Effect::Tell(name, told) => {
                self.tell(profiles.get(&name), told).await;
                Ok(())
            }
            Effect::Evict(pod) => {
                let (api, metrics) = (self.pods(&pod), self.metrics.clone());
                drop(tokio::spawn(async move {
                    metrics.drained(evict(api, pod).await);
                }));
                Ok(())
            }
            Effect::Delete(pod) => {
                tracing::warn!(pod = %pod.uid, "the deadline of its profile's deletion is over");
                let deleted = self.pods(&pod).delete(&pod.name, &only(&pod.uid)).await;
                absent_is_fine(deleted)?;
                self.metrics.drained(Drained::Deleted);
                Ok(())
            }
        }
    }

    fn decide(&self) -> (Decision, BTreeMap<String, FargateProfile>) {
        let index = self.index.lock();
        let now = Timestamp::now();
        let snapshot = index.snapshot(now);
        let served = self.served().clone();
        let observed = Observed {
            profiles: &index.profiles,
            limit: index.profile_limit(),
            roles: &snapshot.roles,
            network: &snapshot.network,
            pods: &pods_of_deleted(&index),
            served: served.as_deref(),
        };
        (decide(&observed, now), index.profiles.clone())
    }

    async fn serve(&self, condition: &str) -> Result<(), ExecuteError> {
        let conditions = json!([{"name": "a-profile-may-select-it", "expression": condition}]);
        let webhooks: Vec<Value> = [labels::WEBHOOK, labels::WEBHOOK_OF_KUBE_SYSTEM]
            .map(|name| json!({"name": name, "matchConditions": conditions}))
            .into();
        let patch = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": labels::WEBHOOK}, "webhooks": webhooks,
        });
        let api: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        api.patch(labels::WEBHOOK, &parameters, &Patch::Apply(patch))
            .await?;
        tracing::info!(condition, "the API server asks the webhook");
        Ok(())
    }

    /// Adds the finalizer or gives it up.
    async fn hold(
        &self,
        profiles: &BTreeMap<String, FargateProfile>,
        name: &str,
        held: bool,
    ) -> Result<(), ExecuteError> {
        let Some(profile) = profiles.get(name) else {
            return Ok(());
        };
        let mut finalizers = profile.finalizers().to_vec();
        finalizers.retain(|finalizer| finalizer != PROFILE_FINALIZER);
        if held {
            finalizers.push(PROFILE_FINALIZER.to_owned());
        }
        let patch = json!({"metadata": {
            "uid": profile.uid(), "resourceVersion": profile.resource_version(), "finalizers": finalizers,
        }});
        let (api, parameters) = (self.profiles(), PatchParams::default());
        let patched = api.patch(name, &parameters, &Patch::Merge(patch)).await;
        Ok(absent_is_fine(patched)?)
    }

    async fn tell(&self, profile: Option<&FargateProfile>, told: Told) {
        let Some(profile) = profile else {
            return;
        };
        tracing::info!(profile = %profile.name_any(), told.reason, told.message, "told");
        self.events.tell(profile.object_ref(&()), told).await;
    }

    fn profiles(&self) -> Api<FargateProfile> {
        Api::all(self.client.clone())
    }

    fn pods(&self, pod: &PodReference) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &pod.namespace)
    }

    fn served(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks for a pod's eviction; the next decision asks again.
async fn evict(api: Api<Pod>, pod: PodReference) -> Drained {
    match eviction::evict(&api, &pod.namespace, &pod.name, &pod.uid).await {
        Ok(Eviction::Done) => {
            tracing::info!(pod = %pod.uid, "evicted, as its profile is being deleted");
            return Drained::Evicted;
        }
        Ok(Eviction::Waits) => tracing::debug!(pod = %pod.uid, "its budget has no room"),
        Err(error) => tracing::debug!(pod = %pod.uid, %error, "not evicted"),
    }
    Drained::Held
}

fn only(uid: &str) -> DeleteParams {
    DeleteParams::default().preconditions(Preconditions {
        uid: Some(uid.to_owned()),
        resource_version: None,
    })
}

/// The pods of profiles that are being deleted: those that carry its name, and those whose environment
/// was made by it.
pub(crate) fn pods_of_deleted(index: &Index) -> BTreeMap<String, Vec<ProfilePod>> {
    let mut pods: BTreeMap<String, Vec<ProfilePod>> = BTreeMap::new();
    for (uid, pod) in &index.pods {
        let environment = index
            .environments
            .get(&monopod_api::names::environment(uid))
            .map(|environment| &environment.spec.profile);
        let Some(name) = environment.or_else(|| pod.labels().get(labels::FARGATE_PROFILE)) else {
            continue;
        };
        let deleted = index.profiles.get(name);
        if deleted.is_none_or(|profile| profile.metadata.deletion_timestamp.is_none()) {
            continue;
        }
        pods.entry(name.clone()).or_default().push(ProfilePod {
            pod: PodReference {
                namespace: pod.namespace().unwrap_or_default(),
                name: pod.name_any(),
                uid: uid.clone(),
            },
            is_deleted: pod.metadata.deletion_timestamp.is_some(),
        });
    }
    pods
}
