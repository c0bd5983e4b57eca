//! One image's name at one endpoint, asked with one credential or none.

use super::challenge::{self, Challenge};
use super::wire::{Http, body, refusal, text};
use super::{DOCUMENT, RegistryError};
use crate::images::Digest;
use monopod_core::image::endpoints::Endpoint;
use monopod_core::image::keyring::Credential;
use reqwest::header::{ACCEPT, CONTENT_RANGE, CONTENT_TYPE, HeaderName, RANGE};
use reqwest::{Response, StatusCode, Url};
use sha2::{Digest as _, Sha256};
use std::sync::{Arc, Mutex, PoisonError};

/// The kinds of manifests that are understood.
const MANIFESTS: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// A document of a registry with what identifies it.
#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) bytes: Vec<u8>,
    pub(super) digest: Digest,
    pub(super) media_type: String,
}

/// A repository to ask.
pub(super) struct Repository {
    http: Arc<Http>,
    endpoint: Endpoint,
    path: String,
    credential: Option<Credential>,
    authorization: Mutex<Option<String>>,
}

impl Repository {
    pub(super) fn new(
        http: Arc<Http>,
        endpoint: Endpoint,
        path: &str,
        credential: Option<Credential>,
    ) -> Self {
        Self {
            http,
            endpoint,
            path: path.to_owned(),
            credential,
            authorization: Mutex::default(),
        }
    }

    pub(super) fn host(&self) -> &str {
        &self.endpoint.host
    }

    pub(super) fn credential(&self) -> Option<&Credential> {
        self.credential.as_ref()
    }

    /// A manifest or an index, by tag or digest.
    pub(super) async fn manifest(&self, version: &str) -> Result<Document, RegistryError> {
        let url = self.url(&format!("manifests/{version}"))?;
        let response = self.get(&url, &[(ACCEPT, MANIFESTS.to_owned())]).await?;
        let media_type = text(response.headers(), &CONTENT_TYPE)
            .and_then(|value| value.split(';').next())
            .unwrap_or_default()
            .trim()
            .to_owned();
        let bytes = body(self.host(), "the manifest", response, DOCUMENT).await?;
        self.document(bytes, media_type, version)
    }

    /// A small blob, whole.
    pub(super) async fn small_blob(&self, digest: &Digest) -> Result<Document, RegistryError> {
        let url = self.url(&format!("blobs/{digest}"))?;
        let response = self.get(&url, &[]).await?;
        let bytes = body(self.host(), "the configuration", response, DOCUMENT).await?;
        self.document(bytes, String::new(), &digest.to_string())
    }

    /// A blob from an offset on. Gives the offset from which it really comes: that, or 0.
    pub(super) async fn blob(
        &self,
        digest: &Digest,
        offset: u64,
    ) -> Result<(Response, u64), RegistryError> {
        let url = self.url(&format!("blobs/{digest}"))?;
        let range = (RANGE, format!("bytes={offset}-"));
        let headers = if offset == 0 {
            &[][..]
        } else {
            std::slice::from_ref(&range)
        };
        let response = match self.get(&url, headers).await {
            // What is here already is more than there is.
            Err(RegistryError::Refused { status, .. })
                if status == StatusCode::RANGE_NOT_SATISFIABLE =>
            {
                self.get(&url, &[]).await?
            }
            response => response?,
        };
        if response.status() != StatusCode::PARTIAL_CONTENT {
            return Ok((response, 0));
        }
        let begins = text(response.headers(), &CONTENT_RANGE)
            .and_then(|range| range.strip_prefix("bytes "))
            .and_then(|range| range.split('-').next())
            .and_then(|start| start.parse::<u64>().ok());
        match begins {
            Some(begins) if begins == offset => Ok((response, offset)),
            Some(_) | None => Err(RegistryError::wrong(
                self.host(),
                digest.to_string(),
                format!("it was asked for the bytes from {offset} on and gives others"),
            )),
        }
    }

    fn document(
        &self,
        bytes: Vec<u8>,
        media_type: String,
        wanted: &str,
    ) -> Result<Document, RegistryError> {
        let sum = format!("sha256:{}", hex::encode(Sha256::digest(&bytes)));
        if wanted.starts_with("sha256:") && wanted != sum {
            return Err(RegistryError::wrong(
                self.host(),
                wanted,
                format!("its content has the digest {sum}"),
            ));
        }
        let digest = Digest::try_from(sum)
            .map_err(|why| RegistryError::wrong(self.host(), "a digest", why))?;
        Ok(Document {
            bytes,
            digest,
            media_type,
        })
    }

    fn url(&self, rest: &str) -> Result<Url, RegistryError> {
        let namespace = self.endpoint.mirror_of.as_deref();
        let query = namespace.map_or_else(String::new, |name| format!("?ns={name}"));
        let text = format!("{}/{}/{rest}{query}", self.endpoint.base, self.path);
        Url::parse(&text)
            .map_err(|error| RegistryError::wrong(self.host(), "its URL", error.to_string()))
    }

    /// Asks, and asks again with what the registry wants to see.
    async fn get(
        &self,
        url: &Url,
        headers: &[(HeaderName, String)],
    ) -> Result<Response, RegistryError> {
        let authorization = self
            .authorization
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let first = self
            .http
            .get(url, headers, authorization.as_deref())
            .await?;
        if first.status() != StatusCode::UNAUTHORIZED {
            return self.accepted(first).await;
        }
        // No token yet, or it has expired.
        let Some(challenge) = challenge::parse(first.headers()) else {
            return Err(refusal(self.host(), first).await);
        };
        let Some(header) = self.answer(&challenge).await? else {
            return Err(refusal(self.host(), first).await);
        };
        let response = self.http.get(url, headers, Some(&header)).await?;
        *self
            .authorization
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(header);
        self.accepted(response).await
    }

    async fn accepted(&self, response: Response) -> Result<Response, RegistryError> {
        match response.status() {
            StatusCode::OK | StatusCode::PARTIAL_CONTENT => Ok(response),
            _ => Err(refusal(self.host(), response).await),
        }
    }

    /// The header that answers a challenge; none if nothing could.
    async fn answer(&self, challenge: &Challenge) -> Result<Option<String>, RegistryError> {
        match challenge {
            Challenge::Basic => Ok(self.credential.as_ref().map(challenge::basic)),
            Challenge::Bearer { realm, service } => {
                let mut url = Url::parse(realm).map_err(|error| {
                    RegistryError::wrong(self.host(), "its token server", error.to_string())
                })?;
                self.http.check(self.host(), "sends for a token to", &url)?;
                {
                    let mut query = url.query_pairs_mut();
                    if let Some(service) = service {
                        query.append_pair("service", service);
                    }
                    // Not the challenge's own: nothing but this image is asked for.
                    query.append_pair("scope", &format!("repository:{}:pull", self.path));
                }
                let host = super::wire::authority(&url);
                let password = self.credential.as_ref().map(challenge::basic);
                let response = self.http.get(&url, &[], password.as_deref()).await?;
                if response.status() != StatusCode::OK {
                    return Err(refusal(&host, response).await);
                }
                let answer = body(&host, "its token", response, DOCUMENT).await?;
                match challenge::bearer(&answer) {
                    Some(header) => Ok(Some(header)),
                    None => Err(RegistryError::wrong(
                        &host,
                        "its token",
                        "the answer holds none",
                    )),
                }
            }
        }
    }
}
