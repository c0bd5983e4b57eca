//! Who this host is to the API server: a client whose certificate is renewed before it ends.
//!
//! Only the certificate changes: the key stays the machine's, so that the two are never apart and one file
//! is replaced. kube-proxy reads the same file.

use crate::credentials::{CredentialsError, signed};
use crate::owner::until;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use monopod_api::labels;
use monopod_core::certificates::HOST_SIGNER;
use monopod_core::rotation::Validity;
use monopod_ops::certificate::validity;
use rand::Rng;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Between attempts: a cluster that is away answers no sooner for being asked more often.
const RETRY: Duration = Duration::from_secs(5);

/// Files of this host's identity. The kubeconfig names the other two.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The kubeconfig.
    pub kubeconfig: PathBuf,
    /// The certificate, which is replaced when it is renewed.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// Why there is no identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file cannot be read or written.
    #[error("{path} cannot be used")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The kubeconfig is none.
    #[error("the host's kubeconfig cannot be used; `monopod up` writes it anew")]
    Kubeconfig(#[from] KubeconfigError),
    /// No client can be made of it.
    #[error("the host's credentials cannot be used")]
    Client(#[from] kube::Error),
    /// The certificate is none.
    #[error("{} is no certificate; remove it and join again with a new token", .0.display())]
    Certificate(PathBuf),
    /// It is not renewed.
    #[error("the host's certificate was not renewed")]
    Request(#[from] CredentialsError),
    /// The request cannot be made.
    #[error("the host's key cannot be used")]
    Key(#[from] rcgen::Error),
}

/// Keeps the certificate of a host.
pub(crate) struct Renewal {
    identity: Identity,
    host: String,
    newest: watch::Sender<Client>,
}

/// A client that goes on with the newest certificate, and what renews it.
pub(crate) async fn client(
    identity: Identity,
    host: &str,
) -> Result<(Client, Renewal), IdentityError> {
    let (newest, current) = watch::channel(connect(&identity.kubeconfig).await?);
    let service = move |request: http::Request<Body>| {
        let client = current.borrow().clone();
        async move { client.send(request).await }
    };
    let client = Client::new(tower::service_fn(service), "default");
    let renewal = Renewal {
        identity,
        host: host.to_owned(),
        newest,
    };
    Ok((client, renewal))
}

async fn connect(kubeconfig: &Path) -> Result<Client, IdentityError> {
    let read = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

impl Renewal {
    /// Renews the certificate in time, until the token is cancelled.
    pub(crate) async fn keep(self, shutdown: CancellationToken) {
        let work = async {
            let (mut issued_at, mut denied) = (None, 0u32);
            loop {
                match self.step(issued_at).await {
                    Ok(now) => (issued_at, denied) = (Some(now), 0),
                    Err(error) => {
                        tracing::warn!(
                            error = &error as &dyn std::error::Error,
                            "this host's certificate is not renewed; tried again"
                        );
                        let delay = match &error {
                            IdentityError::Request(error) => error.delay(&mut denied),
                            _other => None,
                        };
                        tokio::time::sleep(delay.unwrap_or(RETRY)).await;
                        // The machine may have joined again.
                        if let Ok(client) = connect(&self.identity.kubeconfig).await {
                            self.newest.send_replace(client);
                        }
                    }
                }
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = work => {}
        }
    }

    /// Waits until it is time, and renews once; gives when. Signers date certificates back, so the time
    /// of issue is known better here, if it is.
    async fn step(&self, issued_at: Option<Timestamp>) -> Result<Timestamp, IdentityError> {
        let path = &self.identity.certificate;
        let pem = read(path)?;
        let (from, end) = validity(&pem).ok_or_else(|| IdentityError::Certificate(path.clone()))?;
        let life = Validity {
            from: issued_at.unwrap_or(from),
            until: end,
        };
        tokio::time::sleep(until(life.renew_at())).await;
        let key = KeyPair::from_pem(&read(&self.identity.key)?)?;
        let now = Timestamp::now();
        let client = self.newest.borrow().clone();
        let attempt: u32 = rand::rng().random();
        let name = format!("monopod-host-{}-{attempt:08x}", self.host);
        let renewed = signed(client, request(name, &self.host, &key)?).await?;
        write(path, &renewed)?;
        self.newest
            .send_replace(connect(&self.identity.kubeconfig).await?);
        let until = validity(&renewed).map(|(_, until)| until);
        tracing::info!(?until, "this host's certificate is renewed");
        Ok(now)
    }
}

/// A request of this name for the certificate of a host.
pub fn request(
    name: String,
    host: &str,
    key: &KeyPair,
) -> Result<CertificateSigningRequest, rcgen::Error> {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    let names = [
        (DnType::OrganizationName, labels::HOSTS_GROUP.to_owned()),
        (
            DnType::CommonName,
            format!("{}{host}", labels::HOST_USER_PREFIX),
        ),
    ];
    for (kind, name) in names {
        parameters.distinguished_name.push(kind, name);
    }
    Ok(CertificateSigningRequest {
        metadata: ObjectMeta {
            name: Some(name),
            ..Default::default()
        },
        spec: CertificateSigningRequestSpec {
            signer_name: HOST_SIGNER.to_owned(),
            request: ByteString(parameters.serialize_request(key)?.pem()?.into_bytes()),
            usages: Some(vec![
                "digital signature".to_owned(),
                "client auth".to_owned(),
            ]),
            ..Default::default()
        },
        ..Default::default()
    })
}

fn read(path: &Path) -> Result<String, IdentityError> {
    std::fs::read_to_string(path).map_err(|source| IdentityError::File {
        path: path.to_owned(),
        source,
    })
}

fn write(path: &Path, text: &str) -> Result<(), IdentityError> {
    crate::files::replace(path, text.as_bytes()).map_err(|source| IdentityError::File {
        path: path.to_owned(),
        source,
    })
}
