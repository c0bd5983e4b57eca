//! Evictions, by hand: the client's own request loses its preconditions, and it asks again for minutes
//! when a disruption budget has no room.

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};
use std::time::Duration;

/// How long an eviction is waited for; who wants it asks again some seconds later.
const LIMIT: Duration = Duration::from_secs(3);

/// What came of an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// The pod is being deleted, or is gone.
    Done,
    /// Its disruption budget has no room, or the API server takes too long.
    Waits,
}

/// Asks once for the eviction of exactly this pod.
pub async fn evict(
    api: &Api<Pod>,
    namespace: &str,
    name: &str,
    uid: &str,
) -> Result<Eviction, kube::Error> {
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid}},
    });
    let parameters = PostParams::default();
    let asked = api.create_subresource::<Value, Value>("eviction", name, &parameters, &eviction);
    match tokio::time::timeout(LIMIT, asked).await {
        Ok(Ok(_)) => Ok(Eviction::Done),
        // 409: another pod has the name by now.
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(Eviction::Done),
        Ok(Err(kube::Error::Api(status))) if status.code == 429 => Ok(Eviction::Waits),
        Ok(Err(error)) => Err(error),
        Err(_late) => Ok(Eviction::Waits),
    }
}
