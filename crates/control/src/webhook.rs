//! The mutating webhook that makes a matching pod ours before it is stored.
//!
//! Only the API server may call it: the client certificate must come from an authority that
//! signed for nobody else.

use crate::index::Shared;
use axum::extract::{DefaultBodyLimit, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use axum_server::tls_rustls::RustlsConfig;
use k8s_openapi::api::core::v1::Pod;
use kube::core::DynamicObject;
use kube::core::admission::{AdmissionRequest, AdmissionResponse, AdmissionReview};
use monopod_core::admission::{Admission, decide, patch};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A pod is at most 1.5 MiB in etcd, and a review holds it once on creation.
const MAX_BODY: usize = 4 << 20;

/// Where the webhook is served, and with which certificates (PEM files).
#[derive(Debug, Clone)]
pub struct WebhookOptions {
    /// Address and port.
    pub address: SocketAddr,
    /// Serving certificate.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Authority of the API server's client certificate.
    pub client_ca: PathBuf,
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
    /// The certificates do not fit together.
    #[error("certificate, key and authority do not fit together")]
    Tls(#[source] Box<dyn std::error::Error + Send + Sync>),
}

#[derive(Clone)]
struct Context {
    index: Shared,
    seconds: Histogram,
}

/// Starts the server; the future ends when the token is cancelled or the server fails.
pub(crate) fn serve(
    options: &WebhookOptions,
    index: Shared,
    registry: &mut Registry,
    shutdown: CancellationToken,
) -> Result<impl Future<Output = std::io::Result<()>> + use<>, CertificateError> {
    let seconds = Histogram::new(exponential_buckets(0.000_05, 2.0, 14));
    registry.register(
        "webhook_seconds",
        "Time that the webhook took to answer",
        seconds.clone(),
    );
    let tls = RustlsConfig::from_config(Arc::new(server_config(options)?));
    let router = Router::new()
        .route("/mutate", post(mutate))
        .route("/healthz", get(|| async { "ok\n" }))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Context { index, seconds });
    let handle = axum_server::Handle::new();
    let server = axum_server::bind_rustls(options.address, tls)
        .handle(handle.clone())
        .serve(router.into_make_service());
    Ok(async move {
        let stop = async {
            shutdown.cancelled().await;
            handle.graceful_shutdown(Some(Duration::from_secs(2)));
        };
        tokio::join!(server, stop).0
    })
}

fn server_config(options: &WebhookOptions) -> Result<ServerConfig, CertificateError> {
    let file = |path: &PathBuf| {
        let path = path.clone();
        move |source| CertificateError::File { path, source }
    };
    let tls = |error: Box<dyn std::error::Error + Send + Sync>| CertificateError::Tls(error);
    let chain = CertificateDer::pem_file_iter(&options.certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(file(&options.certificate))?;
    let key = PrivateKeyDer::from_pem_file(&options.key).map_err(file(&options.key))?;
    let ca = CertificateDer::from_pem_file(&options.client_ca).map_err(file(&options.client_ca))?;
    let mut roots = RootCertStore::empty();
    roots.add(ca).map_err(|error| tls(error.into()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()
            .map_err(|error| tls(error.into()))?;
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| tls(error.into()))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(|error| tls(error.into()))
}

async fn mutate(
    State(context): State<Context>,
    Json(review): Json<AdmissionReview<Pod>>,
) -> Json<AdmissionReview<DynamicObject>> {
    let start = tokio::time::Instant::now();
    let request: Result<AdmissionRequest<Pod>, _> = review.try_into();
    let answer = request.map_or_else(AdmissionResponse::invalid, |request| {
        answer(&context.index, &request)
    });
    context.seconds.observe(start.elapsed().as_secs_f64());
    Json(answer.into_review())
}

fn answer(index: &Shared, request: &AdmissionRequest<Pod>) -> AdmissionResponse {
    let response = AdmissionResponse::from(request);
    let Some(pod) = &request.object else {
        return response;
    };
    let profiles = index.lock().active_profiles();
    let namespace = request.namespace.as_deref().unwrap_or_default();
    let Admission::Select { profile } = decide(pod, namespace, &profiles) else {
        return response;
    };
    let operations =
        serde_json::from_value(patch(pod, &profile)).expect("our own patch is RFC 6902");
    match response.with_patch(operations) {
        Ok(patched) => patched,
        Err(error) => AdmissionResponse::invalid(error),
    }
}
