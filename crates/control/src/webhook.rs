//! The mutating webhook that makes a matching pod ours before it is stored.
//!
//! Only the API server may call it: the client certificate must come from an authority that
//! signed for nobody else.

use crate::index::Shared;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use axum_server::tls_rustls::RustlsConfig;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use monopod_core::admission::{Admission, Profiles, decide, patch, warning};
use monopod_core::irsa::{self, AccountRole};
use monopod_ops::admin::Readiness;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, ServerConfig};
use serde_json::Value;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::net::TcpSocket;
use tokio_util::sync::CancellationToken;

/// A pod is at most 1.5 MiB in etcd, and a review holds it once on creation.
const MAX_BODY: usize = 4 << 20;

/// Connections that are not accepted yet.
const BACKLOG: u32 = 1024;

/// How long a pod's service account may take to be seen, and how often it is looked for.
const ACCOUNT_LIMIT: Duration = Duration::from_secs(1);
const ACCOUNT_LOOK: Duration = Duration::from_millis(5);

/// Where the webhook is served, and to whom.
#[derive(Debug, Clone)]
pub struct WebhookOptions {
    /// Address and port.
    pub address: SocketAddr,
    /// Authority of the API server's client certificate, a PEM file.
    pub client_ca: PathBuf,
    /// The region that pods with an IAM role are told.
    pub region: String,
}

/// The certificate that is served now, and until when it can be; none at first. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Served(Arc<RwLock<Current>>);

type Current = Option<(Arc<CertifiedKey>, Timestamp)>;

impl Served {
    /// Each connection that begins from now on is served with this one.
    pub(crate) fn set(&self, certificate: CertifiedKey, until: Timestamp) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) =
            Some((Arc::new(certificate), until));
    }

    /// When the one that is served now ends.
    pub(crate) fn until(&self) -> Option<Timestamp> {
        let served = self.0.read().unwrap_or_else(PoisonError::into_inner);
        served.as_ref().map(|(_, until)| *until)
    }
}

impl ResolvesServerCert for Served {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let served = self.0.read().unwrap_or_else(PoisonError::into_inner);
        served
            .as_ref()
            .map(|(certificate, _)| Arc::clone(certificate))
    }
}

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read or is not PEM.
    #[error("{path}: not a readable PEM file")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    /// It is no authority.
    #[error("the authority of the API server's client certificate cannot be used")]
    Tls(#[source] Box<dyn std::error::Error + Send + Sync>),
}

#[derive(Clone)]
struct Context {
    index: Shared,
    region: Arc<str>,
    seconds: Histogram,
}

/// What a control process is not ready without.
const PART: &str = "webhook";

/// Starts the server once everything else of this process is ready: who listens is asked, and must
/// know all profiles by then. The future ends when the token is cancelled or the server fails.
pub(crate) fn serve(
    options: &WebhookOptions,
    certificate: Served,
    index: Shared,
    registry: &mut Registry,
    readiness: Readiness,
    shutdown: CancellationToken,
) -> Result<impl Future<Output = std::io::Result<()>> + use<>, CertificateError> {
    let seconds = Histogram::new(exponential_buckets(0.000_05, 2.0, 14));
    registry.register(
        "webhook_seconds",
        "Time that the webhook took to answer",
        seconds.clone(),
    );
    let tls = RustlsConfig::from_config(Arc::new(server_config(options, certificate)?));
    let router = Router::new()
        .route("/mutate", post(mutate))
        .route("/healthz", get(|| async { "ok\n" }))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Context {
            index,
            region: options.region.as_str().into(),
            seconds,
        });
    let handle = axum_server::Handle::new();
    let address = options.address;
    readiness.expect(PART);
    Ok(async move {
        let others = readiness.others(PART);
        if shutdown.run_until_cancelled(others).await.is_none() {
            return Ok(());
        }
        let server = axum_server::from_tcp_rustls(listen(address)?, tls)?
            .handle(handle.clone())
            .serve(router.into_make_service());
        readiness.done(PART);
        let stop = async {
            shutdown.cancelled().await;
            handle.graceful_shutdown(Some(Duration::from_secs(2)));
        };
        tokio::join!(server, stop).0
    })
}

/// Replicas on a machine share the port. The kernel gives each connection to one of those that listen,
/// so the API server reaches another as soon as one has ended. Only processes of the same user can share it.
fn listen(address: SocketAddr) -> std::io::Result<std::net::TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)?.into_std()
}

fn server_config(
    options: &WebhookOptions,
    certificate: Served,
) -> Result<ServerConfig, CertificateError> {
    let tls = |error: Box<dyn std::error::Error + Send + Sync>| CertificateError::Tls(error);
    let ca = CertificateDer::from_pem_file(&options.client_ca).map_err(|source| {
        CertificateError::File {
            path: options.client_ca.clone(),
            source,
        }
    })?;
    let mut roots = RootCertStore::empty();
    roots.add(ca).map_err(|error| tls(error.into()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()
            .map_err(|error| tls(error.into()))?;
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| tls(error.into()))?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(certificate));
    Ok(config)
}

async fn mutate(
    State(context): State<Context>,
    Json(review): Json<AdmissionReview<Pod>>,
) -> Result<Json<AdmissionReview<DynamicObject>>, StatusCode> {
    let start = tokio::time::Instant::now();
    // A control that was just started knows no profile yet, and must not say that none matches.
    let profiles = context.index.lock().active_profiles();
    let profiles = profiles.ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
    let request: Result<AdmissionRequest<Pod>, _> = review.try_into();
    let answer = match request {
        Ok(request) => {
            let role = context.role(&request).await;
            answer(&profiles, role?, &context.region, &request)
        }
        Err(error) => AdmissionResponse::invalid(error),
    };
    context.seconds.observe(start.elapsed().as_secs_f64());
    Ok(Json(answer.into_review()))
}

impl Context {
    /// The IAM role of the pod's service account. The account exists, as the API server has looked at
    /// it before, but may be so new that the watch is behind.
    async fn role(
        &self,
        request: &AdmissionRequest<Pod>,
    ) -> Result<Option<AccountRole>, StatusCode> {
        let name = request
            .object
            .as_ref()
            .and_then(|pod| pod.spec.as_ref()?.service_account_name.clone());
        let Some(name) = name else {
            return Ok(None);
        };
        let key = (request.namespace.clone().unwrap_or_default(), name);
        let deadline = tokio::time::Instant::now() + ACCOUNT_LIMIT;
        loop {
            if let Some(role) = self.index.lock().accounts.get(&key) {
                return Ok(role.clone());
            }
            if tokio::time::Instant::now() >= deadline {
                return Err(StatusCode::SERVICE_UNAVAILABLE);
            }
            tokio::time::sleep(ACCOUNT_LOOK).await;
        }
    }
}

fn answer(
    profiles: &Profiles,
    role: Option<AccountRole>,
    region: &str,
    request: &AdmissionRequest<Pod>,
) -> AdmissionResponse {
    let mut response = AdmissionResponse::from(request);
    let Some(pod) = &request.object else {
        return response;
    };
    let namespace = request.namespace.as_deref().unwrap_or_default();
    let profile = match decide(pod, namespace, profiles) {
        Admission::Select { profile } => profile,
        Admission::Leave(left) => {
            response.warnings = warning(pod, left).map(|warning| vec![warning]);
            return response;
        }
    };
    let mut operations = patch(pod, &profile);
    operations.extend(role.map_or_else(Vec::new, |role| irsa::patch(pod, &role, region)));
    let operations =
        serde_json::from_value(Value::Array(operations)).expect("our own patch is RFC 6902");
    match response.with_patch(operations) {
        Ok(patched) => patched,
        Err(error) => AdmissionResponse::invalid(error),
    }
}
