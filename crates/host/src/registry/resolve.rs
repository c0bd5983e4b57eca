//! What a reference means now, by one pod's own credentials: its proof of access.

use super::repository::{Document, Repository};
use super::wire::Http;
use super::{PullError, RegistryError};
use crate::images::{Digest, ManifestDocuments, choose, describe};
use monopod_core::image::keyring::{Credential, Keyrings};
use monopod_core::image::reference::Reference;
use std::sync::Arc;

/// Credentials that are tried at one endpoint.
const CANDIDATES: usize = 16;
/// Indexes may name other indexes, but not without end.
const DEPTH: usize = 4;

/// What a reference means, and where its parts are.
pub(super) struct Resolved {
    /// The digest that the registry gave for the reference: an index's or a manifest's.
    pub(super) digest: Digest,
    /// The documents of the image for this system.
    pub(super) documents: ManifestDocuments,
    pub(super) repository: Repository,
}

/// Credentials for all endpoints of a reference, in the order in which they are tried.
pub(super) fn candidates(
    http: &Http,
    reference: &Reference,
    keyrings: &Keyrings,
) -> Vec<Credential> {
    let mut all = Vec::new();
    for endpoint in http.registries().endpoints(reference) {
        for credential in keyrings.lookup(&endpoint.credentials_for) {
            if !all.contains(&credential) {
                all.push(credential);
            }
        }
    }
    all
}

/// Asks each endpoint with each credential until one answers.
pub(super) async fn resolve(
    http: &Arc<Http>,
    reference: &Reference,
    keyrings: &Keyrings,
) -> Result<Resolved, PullError> {
    let mut words: Vec<String> = Vec::new();
    for endpoint in http.registries().endpoints(reference) {
        let found = keyrings.lookup(&endpoint.credentials_for);
        let credentials: Vec<Option<Credential>> = if found.is_empty() {
            vec![None]
        } else {
            found.into_iter().take(CANDIDATES).map(Some).collect()
        };
        for credential in credentials {
            let repository = Repository::new(
                Arc::clone(http),
                endpoint.clone(),
                reference.repository(),
                credential,
            );
            match ask(repository, reference).await {
                Ok(resolved) => return Ok(resolved),
                Err(error) => {
                    let other_credentials_may_help = error.is_refusal();
                    let said = crate::owner::chain(&error);
                    if !words.contains(&said) {
                        words.push(said);
                    }
                    if !other_credentials_may_help {
                        break;
                    }
                }
            }
        }
    }
    Err(PullError::Resolve {
        reference: reference.to_string(),
        why: words.join("; "),
    })
}

async fn ask(repository: Repository, reference: &Reference) -> Result<Resolved, RegistryError> {
    let first = repository.manifest(reference.version()).await?;
    let digest = first.digest.clone();
    let manifest = of_this_system(&repository, first, DEPTH).await?;
    let wrong = |what: &str, error: &dyn std::error::Error| {
        RegistryError::wrong(repository.host(), what, crate::owner::chain(error))
    };
    let descriptor = describe(&manifest.bytes, &manifest.media_type)
        .map_err(|error| wrong("the manifest", &error))?;
    let config = repository.small_blob(descriptor.config()).await?;
    let documents = ManifestDocuments::new(descriptor, manifest.bytes, config.bytes)
        .map_err(|error| wrong("the image", &error))?;
    Ok(Resolved {
        digest,
        documents,
        repository,
    })
}

/// The manifest of the image for this system, through indexes.
async fn of_this_system(
    repository: &Repository,
    first: Document,
    depth: usize,
) -> Result<Document, RegistryError> {
    let mut document = first;
    for _ in 0..=depth {
        let chosen = choose(&document.bytes, &document.media_type).map_err(|error| {
            RegistryError::wrong(repository.host(), "the index", crate::owner::chain(&error))
        })?;
        match chosen {
            None => return Ok(document),
            Some((digest, media_type)) => {
                document = repository.manifest(&digest.to_string()).await?;
                if document.media_type.is_empty() {
                    document.media_type = media_type;
                }
            }
        }
    }
    Err(RegistryError::wrong(
        repository.host(),
        "the index",
        "indexes are nested too deeply",
    ))
}
