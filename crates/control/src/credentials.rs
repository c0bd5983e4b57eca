//! Hands the registry credentials of one environment to its host: the role's secrets, then the
//! pod's own, in one secret that only that host can read.
//!
//! Control may `get` secrets by their name and nothing more, so it looks at those that an
//! environment names again and again: often while its images are missing, rarely afterwards.

use crate::FIELD_MANAGER;
use crate::events::Events;
use crate::execute::ExecuteError;
use crate::index::Shared;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client, Resource, ResourceExt};
use monopod_api::environment::{Environment, ImagePhase};
use monopod_api::profile::SecretReference;
use monopod_api::{labels, messages, names};
use monopod_core::image::credentials::{Asked, Assembled, DATA_KEY, SECRET_TYPE, assemble, of_pod};
use monopod_core::lifecycle::trusts;
use monopod_core::profiles::Told;
use monopod_ops::answer::absent_is_fine;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Time between two looks while an image is missing, and afterwards.
const SOON: SignedDuration = SignedDuration::from_secs(5);
const LATER: SignedDuration = SignedDuration::from_mins(2);

/// What was last done for an environment.
#[derive(Clone, Default, PartialEq)]
struct Done {
    assembled: Assembled,
    stored: bool,
}

#[derive(Clone)]
pub(crate) struct Credentials {
    client: Client,
    index: Shared,
    events: Events,
    done: Arc<Mutex<BTreeMap<String, Done>>>,
}

/// What is known of an environment at one moment.
struct Subject {
    environment: Environment,
    pod: Pod,
    role: Vec<SecretReference>,
    of_pod: Vec<SecretReference>,
}

impl Credentials {
    pub(crate) fn new(client: Client, index: Shared, events: Events) -> Self {
        Self {
            client,
            index,
            events,
            done: Arc::default(),
        }
    }

    /// Looks at an environment's secrets and hands them over; gives when to look again.
    pub(crate) async fn hand_over(&self, name: &str) -> Result<Option<Timestamp>, ExecuteError> {
        let Some(subject) = self.subject(name) else {
            self.done().remove(name);
            return Ok(None);
        };
        let before = self.done().get(name).cloned().unwrap_or_default();
        if subject.role.is_empty() && subject.of_pod.is_empty() {
            if before.stored {
                self.remove(&subject.environment).await?;
            }
            self.done().remove(name);
            // A role that is given secrets later is seen by its own watch.
            return Ok(None);
        }
        let role = self.fetch(&subject.role).await?;
        let pod = self.fetch(&subject.of_pod).await?;
        let assembled = assemble(&role, &pod, &subject.environment.spec.images);
        if !before.stored || before.assembled.keyrings != assembled.keyrings {
            self.store(&subject.environment, &assembled).await?;
        }
        self.complain(&subject, &before.assembled, &assembled).await;
        let settled = settled(&subject.environment);
        let done = Done {
            assembled,
            stored: true,
        };
        self.done().insert(name.to_owned(), done);
        Ok(Some(Timestamp::now() + if settled { LATER } else { SOON }))
    }

    /// Removes what a host was given for an environment that is released.
    pub(crate) async fn remove(&self, environment: &Environment) -> Result<(), ExecuteError> {
        let name = environment.name_any();
        let stored = self.done().get(&name).is_some_and(|done| done.stored);
        if !stored && !environment.spec.pull_credentials {
            return Ok(());
        }
        let api = self.given(environment);
        let deleted = api.delete(&name, &DeleteParams::default()).await;
        Ok(absent_is_fine(deleted)?)
    }

    /// None if there is nothing to hand over to anybody.
    fn subject(&self, name: &str) -> Option<Subject> {
        let index = self.index.lock();
        let environment = index.environments.get(name)?;
        let ended = environment
            .status
            .as_ref()
            .is_some_and(|status| status.phase.is_terminal());
        // An environment without a uid is only assumed so far.
        if ended
            || environment.metadata.deletion_timestamp.is_some()
            || environment.metadata.uid.is_none()
        {
            return None;
        }
        let pod = index.pods.get(&environment.spec.pod.uid)?;
        // Trust may be withdrawn, and a role made anew, while the pod runs.
        let role = index
            .roles
            .get(&environment.spec.pod_execution_role)
            .filter(|role| trusts(&role.spec, &environment.spec.profile));
        Some(Subject {
            role: role.map_or_else(Vec::new, |role| role.spec.image_pull_secrets.clone()),
            of_pod: of_pod(pod),
            environment: environment.clone(),
            pod: pod.clone(),
        })
    }

    async fn fetch(&self, references: &[SecretReference]) -> Result<Vec<Asked>, ExecuteError> {
        let mut all = Vec::new();
        for reference in references {
            let api: Api<Secret> = Api::namespaced(self.client.clone(), &reference.namespace);
            all.push(Asked {
                secret: api.get_opt(&reference.name).await?,
                reference: reference.clone(),
            });
        }
        Ok(all)
    }

    async fn store(
        &self,
        environment: &Environment,
        assembled: &Assembled,
    ) -> Result<(), ExecuteError> {
        let Ok(data) = serde_json::to_vec(&assembled.keyrings) else {
            return Err(ExecuteError::Gone {
                what: "form of the credentials",
            });
        };
        let name = environment.name_any();
        let secret = Secret {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                namespace: Some(names::host_namespace(&environment.spec.host)),
                labels: Some([(labels::ENVIRONMENT.to_owned(), name.clone())].into()),
                // The garbage collector removes it if control is killed before it does.
                owner_references: Some(vec![OwnerReference {
                    api_version: Environment::api_version(&()).into_owned(),
                    kind: Environment::kind(&()).into_owned(),
                    name: name.clone(),
                    uid: environment.uid().unwrap_or_default(),
                    ..OwnerReference::default()
                }]),
                ..ObjectMeta::default()
            },
            type_: Some(SECRET_TYPE.to_owned()),
            data: Some([(DATA_KEY.to_owned(), ByteString(data))].into()),
            ..Secret::default()
        };
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        self.given(environment)
            .patch(&name, &parameters, &Patch::Apply(&secret))
            .await?;
        tracing::info!(environment = %name, host = %environment.spec.host, "registry credentials handed over");
        Ok(())
    }

    /// Says once what is missing, and again when something else is.
    async fn complain(&self, subject: &Subject, before: &Assembled, now: &Assembled) {
        for (secret, why) in &now.unusable_of_role {
            if !before
                .unusable_of_role
                .iter()
                .any(|(s, w)| (s, w) == (secret, why))
            {
                tracing::warn!(
                    role = %subject.environment.spec.pod_execution_role,
                    secret = %format!("{}/{}", secret.namespace, secret.name),
                    why,
                    "a role's secret cannot be used"
                );
            }
        }
        if now.unusable.is_empty() || now.unusable == before.unusable {
            return;
        }
        let told = Told {
            warning: true,
            reason: messages::NO_PULL_SECRET,
            message: messages::no_pull_secret(&now.unusable),
        };
        self.events.tell(subject.pod.object_ref(&()), told).await;
    }

    fn given(&self, environment: &Environment) -> Api<Secret> {
        let namespace = names::host_namespace(&environment.spec.host);
        Api::namespaced(self.client.clone(), &namespace)
    }

    fn done(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Done>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether every image of the environment is attached to its VM.
fn settled(environment: &Environment) -> bool {
    let present = environment.status.iter().flat_map(|status| &status.images);
    let present = present.filter(|image| image.state == ImagePhase::Present);
    present.count() >= environment.spec.images.len()
}
