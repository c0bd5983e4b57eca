//! Watches that never end and survive objects that cannot be read.

use futures::{StreamExt, TryStreamExt};
use kube::core::{DeserializeGuard, NamespaceResourceScope};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::fmt::Debug;
use tokio_util::sync::CancellationToken;

/// A change of the watched set.
#[derive(Debug)]
pub enum Change<K> {
    /// The object is new or changed.
    Applied(K),
    /// The object is gone.
    Deleted {
        /// Its namespace; empty if it has none.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// Everything that there is was reported at least once.
    Synced,
}

/// Watches a whole kind until the token is cancelled. An object that does not parse is logged and skipped.
///
/// After a broken watch the list is read again, and what is missing from it is reported as deleted.
pub async fn changes<K>(
    client: Client,
    config: watcher::Config,
    shutdown: CancellationToken,
    on: impl FnMut(Change<K>),
) where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    follow(Api::all(client), config, shutdown, on).await;
}

/// Watches a kind in one namespace, as [`changes`] does everywhere.
pub async fn changes_in<K>(
    client: Client,
    namespace: &str,
    config: watcher::Config,
    shutdown: CancellationToken,
    on: impl FnMut(Change<K>),
) where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + 'static,
{
    follow(Api::namespaced(client, namespace), config, shutdown, on).await;
}

async fn follow<K>(
    api: Api<DeserializeGuard<K>>,
    config: watcher::Config,
    shutdown: CancellationToken,
    mut on: impl FnMut(Change<K>),
) where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut stream = watcher::watcher(api, config).default_backoff().boxed();
    let mut known: BTreeSet<(String, String)> = BTreeSet::new();
    let mut listed: BTreeSet<(String, String)> = BTreeSet::new();
    loop {
        let next = tokio::select! {
            () = shutdown.cancelled() => return,
            next = stream.try_next() => next,
        };
        match next {
            Ok(Some(Event::Init)) => listed.clear(),
            Ok(Some(Event::InitApply(guard))) => {
                listed.insert(key(&guard));
                known.insert(key(&guard));
                apply(guard, &mut on);
            }
            Ok(Some(Event::InitDone)) => {
                for (namespace, name) in known.difference(&listed).cloned().collect::<Vec<_>>() {
                    on(Change::Deleted { namespace, name });
                }
                known.clone_from(&listed);
                on(Change::Synced);
            }
            Ok(Some(Event::Apply(guard))) => {
                known.insert(key(&guard));
                apply(guard, &mut on);
            }
            Ok(Some(Event::Delete(guard))) => {
                known.remove(&key(&guard));
                let (namespace, name) = key(&guard);
                on(Change::Deleted { namespace, name });
            }
            Ok(None) => return,
            Err(error) => {
                let kind = K::kind(&());
                tracing::warn!(%kind, %error, "watch broke; it is tried again");
            }
        }
    }
}

fn key<K: Resource<DynamicType = ()>>(guard: &DeserializeGuard<K>) -> (String, String) {
    (guard.namespace().unwrap_or_default(), guard.name_any())
}

fn apply<K: Resource<DynamicType = ()>>(
    guard: DeserializeGuard<K>,
    on: &mut impl FnMut(Change<K>),
) {
    let (namespace, name) = key(&guard);
    match guard.0 {
        Ok(object) => on(Change::Applied(object)),
        Err(invalid) => {
            let kind = K::kind(&());
            tracing::warn!(%kind, %namespace, %name, error = %invalid.error, "object cannot be read; skipped");
        }
    }
}
