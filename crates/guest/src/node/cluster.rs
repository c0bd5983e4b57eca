//! The node's clients of the API server, made again whenever its credentials are renewed.

use base64::Engine as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, Config};
use monopod_wire::Credentials;
use std::fmt;
use std::time::Duration;
use tokio::sync::watch;

/// How long a connection to the API server may take to open.
const CONNECT: Duration = Duration::from_secs(10);

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClusterError {
    /// The task names no API server.
    #[error("the task's API server is not a URL")]
    Url(#[from] http::uri::InvalidUri),
    /// The credentials are no PEM text.
    #[error("the credentials cannot be read: {0}")]
    Credentials(String),
    /// The client cannot be made.
    #[error("no client can be made of the credentials")]
    Client(#[from] Box<kube::Error>),
}

/// The current client. Clones share it.
#[derive(Clone)]
pub(crate) struct Cluster {
    clients: watch::Receiver<Client>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").finish_non_exhaustive()
    }
}

impl Cluster {
    /// Follows the clients that a channel holds.
    pub(crate) fn new(clients: watch::Receiver<Client>) -> Self {
        Self { clients }
    }

    /// The client to use now.
    pub(crate) fn client(&self) -> Client {
        self.clients.borrow().clone()
    }

    /// Waits until there is a newer client.
    pub(crate) async fn renewed(&mut self) {
        if self.clients.changed().await.is_err() {
            // No one renews any more: the client stays as it is.
            std::future::pending::<()>().await;
        }
    }

    /// Pods of a namespace.
    pub(crate) fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client(), namespace)
    }
}

/// How long a request that is no watch may take; a lease is renewed as often.
const REQUEST: Duration = Duration::from_secs(10);

/// A request that gives up instead of waiting for an API server that does not answer.
pub(crate) async fn bounded<T>(request: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    match tokio::time::timeout(REQUEST, request).await {
        Ok(outcome) => outcome,
        Err(elapsed) => Err(kube::Error::Service(Box::new(elapsed))),
    }
}

/// Makes a client of credentials.
pub(crate) fn client(url: &str, credentials: &Credentials) -> Result<Client, ClusterError> {
    let encode = |pem: &str| base64::engine::general_purpose::STANDARD.encode(pem);
    let roots = monopod_kubelet::pem::certificates(&credentials.ca)
        .map_err(|error| ClusterError::Credentials(error.to_string()))?;
    let mut config = Config::new(url.parse()?);
    config.root_cert = Some(roots.iter().map(|der| der.to_vec()).collect());
    config.connect_timeout = Some(CONNECT);
    config.auth_info = serde_json::from_value(serde_json::json!({
        "client-certificate-data": encode(&credentials.client_certificate),
        "client-key-data": encode(&credentials.key),
    }))
    .map_err(|error| ClusterError::Credentials(error.to_string()))?;
    Client::try_from(config).map_err(|error| ClusterError::Client(Box::new(error)))
}
