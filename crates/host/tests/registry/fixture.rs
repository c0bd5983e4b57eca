//! A store with a puller, and how to ask it.

use crate::image::Pusher;
use crate::server::{Registry, write_config};
use monopod_core::image::keyring::{Credential, Keyring, Keyrings};
use monopod_core::image::reference::normalise;
use monopod_host::images::{Store, StoredImage};
use monopod_host::registry::{Acquired, PullError, Puller, Request, read_config};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

pub(crate) struct Fixture {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) store: Store,
    pub(crate) puller: Puller,
}

/// Lets these hosts be spoken to without TLS.
pub(crate) fn plain(hosts: &[String]) -> String {
    let mirrors: Vec<String> = hosts
        .iter()
        .map(|host| format!("  \"{host}\":\n    endpoint: [\"http://{host}\"]\n"))
        .collect();
    format!("mirrors:\n{}", mirrors.concat())
}

impl Fixture {
    /// A new store that pulls by this file of registries.
    pub(crate) fn new(config: &str) -> Self {
        Self::at(tempfile::tempdir().unwrap(), config)
    }

    /// The same store in a new process.
    pub(crate) fn restarted(self, config: &str) -> Self {
        Self::at(self.directory, config)
    }

    fn at(directory: tempfile::TempDir, config: &str) -> Self {
        let file = write_config(directory.path(), config);
        let store = Store::open(&directory.path().join("images")).unwrap();
        let puller = Puller::new(store.clone(), read_config(&file).unwrap()).unwrap();
        Self {
            directory,
            store,
            puller,
        }
    }

    pub(crate) async fn pull(&self, reference: &str) -> Result<Acquired, PullError> {
        self.pull_with(reference, &[]).await
    }

    /// Pulls with a pod's own secrets: registry, user, password.
    pub(crate) async fn pull_with(
        &self,
        reference: &str,
        secrets: &[(&str, &str, &str)],
    ) -> Result<Acquired, PullError> {
        let request = Request {
            reference: normalise(reference).unwrap(),
            keyrings: Arc::new(keyrings(secrets)),
        };
        self.puller.acquire(&request, |_, _| {}).await
    }

    /// What is left of downloads.
    pub(crate) fn leftovers(&self) -> usize {
        std::fs::read_dir(self.directory.path().join("images/pulls")).map_or(0, Iterator::count)
    }
}

pub(crate) fn keyrings(secrets: &[(&str, &str, &str)]) -> Keyrings {
    let mut keyring = Keyring::default();
    for (registry, username, password) in secrets {
        let config =
            json!({"auths": {*registry: {"username": username, "password": password}}}).to_string();
        keyring.add(config.as_bytes()).unwrap();
    }
    Keyrings {
        keyrings: vec![keyring],
    }
}

/// An error with all that is behind it.
pub(crate) fn chain(error: &PullError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// A file of the image's file system.
pub(crate) fn content(image: &StoredImage, path: &str) -> Vec<u8> {
    let output = Command::new("unsquashfs")
        .arg("-cat")
        .arg(&image.squashfs)
        .arg(path)
        .output()
        .unwrap();
    assert!(output.status.success(), "{path} is not in the image");
    output.stdout
}

pub(crate) fn pusher(registry: &Registry) -> Pusher {
    let right = Credential {
        username: "right".to_owned(),
        password: "right".to_owned(),
    };
    Pusher::new(&registry.url(), right, tls(registry.ca.as_deref()))
}

pub(crate) fn tls(ca: Option<&Path>) -> rustls::ClientConfig {
    let mut roots = rustls::RootCertStore::empty();
    if let Some(ca) = ca {
        roots
            .add(CertificateDer::from_pem_file(ca).unwrap())
            .unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth()
}
