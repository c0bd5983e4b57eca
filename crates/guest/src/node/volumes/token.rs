//! Service account tokens: asked for once, and again before they expire.

use super::VolumeError;
use crate::node::cluster::{Cluster, bounded};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount, ServiceAccountTokenProjection};
use kube::api::{Api, PostParams};
use std::collections::BTreeMap;

/// The API's default for `expirationSeconds`.
const DEFAULT_SECONDS: i64 = 3600;
/// However long a token lives, it is asked for again after this time; upstream's.
const OLDEST: SignedDuration = SignedDuration::from_hours(24);

#[derive(Debug)]
struct Token {
    text: String,
    renew_at: Timestamp,
}

/// The tokens of a pod.
#[derive(Debug)]
pub(super) struct Tokens {
    cluster: Cluster,
    known: BTreeMap<(String, i64), Token>,
}

impl Tokens {
    pub(super) fn new(cluster: Cluster) -> Self {
        Self {
            cluster,
            known: BTreeMap::new(),
        }
    }

    /// The token of a projection; a fresh one after 80 % of its life.
    pub(super) async fn get(
        &mut self,
        pod: &Pod,
        projection: &ServiceAccountTokenProjection,
    ) -> Result<String, VolumeError> {
        let audience = projection.audience.clone().unwrap_or_default();
        let seconds = projection.expiration_seconds.unwrap_or(DEFAULT_SECONDS);
        let key = (audience.clone(), seconds);
        let now = Timestamp::now();
        if let Some(token) = self.known.get(&key)
            && now < token.renew_at
        {
            return Ok(token.text.clone());
        }
        let meta = &pod.metadata;
        let account = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.service_account_name.as_deref())
            .unwrap_or("default");
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: Some(if audience.is_empty() {
                    Vec::new()
                } else {
                    vec![audience]
                }),
                expiration_seconds: Some(seconds),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Pod".to_owned()),
                    name: meta.name.clone(),
                    uid: meta.uid.clone(),
                }),
                ..TokenRequestSpec::default()
            }),
            ..TokenRequest::default()
        };
        let namespace = meta.namespace.as_deref().unwrap_or_default();
        let accounts: Api<ServiceAccount> = Api::namespaced(self.cluster.client(), namespace);
        let parameters = PostParams::default();
        let outcome = bounded(accounts.create_token_request(account, &parameters, &request)).await;
        let status = match outcome {
            Ok(answer) => answer.status.unwrap_or_default(),
            // The old one is better than none, while it lasts.
            Err(error) => {
                return match self.known.get(&key) {
                    Some(token) => {
                        tracing::warn!(%error, "a token was not renewed");
                        Ok(token.text.clone())
                    }
                    None => Err(Box::new(error).into()),
                };
            }
        };
        let life = status
            .expiration_timestamp
            .map_or(SignedDuration::ZERO, |end| end.0.duration_since(now));
        let text = status.token.unwrap_or_default();
        let token = Token {
            text: text.clone(),
            renew_at: now + (life * 4 / 5).min(OLDEST),
        };
        self.known.insert(key, token);
        Ok(text)
    }
}
