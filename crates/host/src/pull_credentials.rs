//! The registry credentials that control hands to this host, by environment.
//!
//! Each is a secret in the namespace of this host, which no other host can read.

use k8s_openapi::api::core::v1::Secret;
use kube::runtime::watcher::Config;
use kube::{Client, ResourceExt};
use monopod_api::names;
use monopod_core::image::credentials::{DATA_KEY, SECRET_TYPE};
use monopod_core::image::keyring::Keyrings;
use monopod_ops::watch::{Change, changes_in};
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Credentials by the environment's name.
pub(crate) type Given = watch::Receiver<BTreeMap<String, Arc<Keyrings>>>;

/// Starts the watch; the future keeps what it shows up to date until the token is cancelled.
pub(crate) fn follow(
    client: Client,
    host: &str,
    shutdown: CancellationToken,
) -> (Given, impl Future<Output = ()> + use<>) {
    let (sender, receiver) = watch::channel(BTreeMap::new());
    let namespace = names::host_namespace(host);
    let of_type = Config::default().fields(&format!("type={SECRET_TYPE}"));
    let work = async move {
        changes_in(client, &namespace, of_type, shutdown, |change| {
            take(&sender, change);
        })
        .await;
    };
    (receiver, work)
}

fn take(given: &watch::Sender<BTreeMap<String, Arc<Keyrings>>>, change: Change<Secret>) {
    match change {
        Change::Applied(secret) => {
            let environment = secret.name_any();
            let data = secret.data.as_ref().and_then(|data| data.get(DATA_KEY));
            let parsed = data.map(|data| serde_json::from_slice::<Keyrings>(&data.0));
            let Some(Ok(keyrings)) = parsed else {
                tracing::error!(%environment, "credentials of this environment cannot be understood; is control of another release?");
                return;
            };
            given.send_if_modified(|all| {
                let changed = all.get(&environment).is_none_or(|old| **old != keyrings);
                all.insert(environment, Arc::new(keyrings));
                changed
            });
        }
        Change::Deleted { name, .. } => {
            given.send_if_modified(|all| all.remove(&name).is_some());
        }
        Change::Synced => {}
    }
}
