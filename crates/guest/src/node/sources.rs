//! Fetching what a container's variables come from.

use super::cluster::bounded;
use super::plan;
use super::run::Start;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::Api;
use monopod_core::pod::environment::Sources;
use std::time::Duration;

/// Attempts while the API server still refuses what a pod that was just bound may read.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(150);

/// Fetches what the container's variables come from.
pub(crate) async fn sources(start: &Start) -> Result<Sources, String> {
    let (maps, secrets) = plan::references(&start.container);
    let namespace = start.pod.metadata.namespace.as_deref().unwrap_or_default();
    let mut sources = Sources {
        services: start.services.clone(),
        ..Sources::default()
    };
    for name in maps {
        let api: Api<ConfigMap> = Api::namespaced(start.cluster.client(), namespace);
        if let Some(map) = fetch(&api, &name).await? {
            sources.config_maps.insert(name, map);
        }
    }
    for name in secrets {
        let api: Api<Secret> = Api::namespaced(start.cluster.client(), namespace);
        if let Some(secret) = fetch(&api, &name).await? {
            sources.secrets.insert(name, secret);
        }
    }
    Ok(sources)
}

async fn fetch<K>(api: &Api<K>, name: &str) -> Result<Option<K>, String>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let mut attempt = 0;
    loop {
        attempt += 1;
        match bounded(api.get_opt(name)).await {
            Ok(found) => return Ok(found),
            Err(kube::Error::Api(status)) if status.code == 403 && attempt < ATTEMPTS => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return Err(format!("cannot read {name}: {error}")),
        }
    }
}
