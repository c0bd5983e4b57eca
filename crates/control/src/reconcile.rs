//! Takes keys from the queue, lets `core` decide and carries the decision out.

use crate::execute::{self, ExecuteError, Subject};
use crate::identity::{self, Unmarked};
use crate::index::{Index, Shared};
use crate::metrics::Metrics;
use crate::profiles::Profiles;
use crate::watches;
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use monopod_api::names;
use monopod_api::network::NetworkInterface;
use monopod_core::lifecycle::{self, Attempts, Decision, Effect, InterfaceEffect, Observed, World};
use monopod_ops::admin::Readiness;
use monopod_ops::election::Leadership;
use monopod_ops::queue::Queue;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// What is worked on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    /// A pod's uid, whether the pod exists or only its environment.
    Pod(String),
    /// An interface's name.
    Interface(String),
    /// An environment's name: its registry credentials.
    Credentials(String),
    /// What an environment that is not there any more may have left.
    Remains {
        /// Its name.
        environment: String,
        /// The name of its node.
        node: String,
    },
    /// All profiles, and what the API server asks the webhook.
    Profiles,
    /// An object without its id.
    Unmarked(Unmarked),
}

/// Delay after a failed request; the reason is mostly a changed object, which a watch shows soon.
pub(crate) const RETRY: Duration = Duration::from_millis(500);

#[derive(Clone)]
pub(crate) struct Reconciler {
    client: Client,
    index: Shared,
    queue: Queue<Key>,
    kubernetes_version: String,
    executor: execute::Executor,
    leadership: Leadership,
    profiles: Profiles,
    metrics: Metrics,
}

impl Reconciler {
    pub(crate) fn new(
        client: Client,
        index: Shared,
        queue: Queue<Key>,
        kubernetes_version: String,
        leadership: Leadership,
        metrics: Metrics,
    ) -> Self {
        let executor = execute::Executor::new(client.clone(), index.clone(), metrics.clone());
        Self {
            profiles: Profiles::new(client.clone(), index.clone(), metrics.clone()),
            client,
            index,
            queue,
            kubernetes_version,
            executor,
            leadership,
            metrics,
        }
    }

    /// Works until the token is cancelled, beginning once every watch has its first list.
    pub(crate) async fn run(
        self,
        parallel: usize,
        readiness: Readiness,
        shutdown: CancellationToken,
    ) {
        if !readiness.all(&shutdown).await {
            return;
        }
        let (this, queue) = (self.clone(), self.queue.clone());
        let work = queue.run(parallel, shutdown, move |key| {
            let this = this.clone();
            async move { this.work(key).await }
        });
        tokio::join!(work, self.begin_again());
    }

    /// Looks at everything whenever this replica begins to act: what came before was not for it to do.
    async fn begin_again(&self) {
        let mut leadership = self.leadership.clone();
        while leadership.begins().await {
            let keys = self.index.lock().everything();
            for key in keys {
                self.queue.add(key);
            }
        }
    }

    async fn work(&self, key: Key) {
        if !self.leadership.holds() {
            return;
        }
        let result = match &key {
            Key::Pod(uid) => self.pod(uid).await,
            Key::Interface(name) => self.interface(name).await,
            Key::Credentials(environment) => self.executor.credentials.hand_over(environment).await,
            Key::Remains { environment, node } => {
                self.executor.clear(environment, node).await.map(|()| None)
            }
            Key::Profiles => self.profiles.reconcile().await,
            Key::Unmarked(unmarked) => identity::mark(&self.client, unmarked)
                .await
                .map(|()| None)
                .map_err(ExecuteError::from),
        };
        match result {
            Ok(None) => {}
            Ok(Some(wake)) => {
                let delay = wake
                    .duration_since(Timestamp::now())
                    .max(SignedDuration::ZERO);
                self.queue.add_after(key, delay.unsigned_abs());
            }
            Err(error) => {
                self.metrics.effect_failed(error.category());
                if !error.is_race() {
                    tracing::warn!(
                        ?key,
                        error = &error as &dyn std::error::Error,
                        "will be tried again"
                    );
                }
                self.queue.add_after(key, RETRY);
            }
        }
    }

    async fn pod(&self, uid: &str) -> Result<Option<Timestamp>, ExecuteError> {
        let environment_name = names::environment(uid);
        let (decision, subject) = decide(
            &mut self.index.lock(),
            uid,
            &self.kubernetes_version,
            Timestamp::now(),
        );
        let Decision { effects, wake } = decision;
        for effect in effects {
            if !self.leadership.holds() {
                self.index.lock().forget_assumed(&environment_name);
                return Ok(None);
            }
            tracing::debug!(pod = uid, ?effect, "effect");
            if let Effect::RememberFailure(attempts) = effect {
                self.metrics.failed(attempts.failure);
                self.index.lock().attempts.insert(uid.to_owned(), attempts);
                continue;
            }
            let requested = matches!(effect, Effect::CreateEnvironment(_));
            if let Err(error) = self.executor.execute(&subject, effect).await {
                let keys = watches::given_up(&mut self.index.lock(), &environment_name);
                for key in keys {
                    // Not at once: while nothing can be created, those that wait would call each other.
                    self.queue.add_after(key, RETRY);
                }
                if let (ExecuteError::NoEnvironment, Some(gone)) = (&error, &subject.environment) {
                    let keys = watches::vanished(&mut self.index.lock(), gone);
                    for key in keys {
                        self.queue.add(key);
                    }
                }
                return Err(error);
            }
            if requested {
                if self.index.lock().attempts.contains_key(uid) {
                    self.metrics.retries.inc();
                }
                self.queue.add(Key::Credentials(environment_name.clone()));
            }
        }
        Ok(wake)
    }

    async fn interface(&self, name: &str) -> Result<Option<Timestamp>, ExecuteError> {
        let decided = decide_interface(&self.index.lock(), name, Timestamp::now());
        let Some((effect, interface)) = decided else {
            return Ok(None);
        };
        match effect {
            InterfaceEffect::Keep(wake) => return Ok(wake),
            InterfaceEffect::Cool => self.executor.cool(&interface).await?,
            InterfaceEffect::Delete => self.executor.delete_interface(&interface).await?,
        }
        Ok(None)
    }
}

/// Decides for a pod from what the index holds, and reserves what is about to be created.
pub(crate) fn decide(
    index: &mut Index,
    uid: &str,
    kubernetes_version: &str,
    now: Timestamp,
) -> (Decision, Subject) {
    let environment_name = names::environment(uid);
    let environment = index.environments.get(&environment_name);
    let observed = Observed {
        pod: index.pods.get(uid),
        environment,
        interface: index.interface_of(&environment_name),
        node: environment.and_then(|e| index.nodes.get(&e.spec.node)),
        attempts: index.attempts.get(uid),
    };
    let snapshot = index.snapshot(now);
    let world = World {
        profiles: &snapshot.profiles,
        roles: &snapshot.roles,
        network: &snapshot.network,
        claims: &snapshot.claims,
        candidates: &snapshot.candidates,
        placed: &snapshot.placed,
        namespaces: &index.namespaces,
        kubernetes_version,
    };
    let decision = lifecycle::decide(&observed, &world, seed(uid, observed.attempts), now);
    let subject = Subject::of(uid, &observed);
    index.assume(&decision.effects);
    (decision, subject)
}

/// Decides for an interface; none if there is none of this name.
pub(crate) fn decide_interface(
    index: &Index,
    name: &str,
    now: Timestamp,
) -> Option<(InterfaceEffect, NetworkInterface)> {
    let interface = index.interfaces.get(name)?;
    let environment = index.environments.get(&interface.spec.environment.name);
    let used = environment.is_some_and(|e| e.spec.network_interface == name);
    let effect = lifecycle::decide_interface(interface, used, now);
    Some((effect, interface.clone()))
}

/// Spreads addresses, and tries others after a failure.
fn seed(uid: &str, attempts: Option<&Attempts>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (uid, attempts.map_or(0, |attempts| attempts.failures)).hash(&mut hasher);
    hasher.finish()
}
