//! TLS of the server, and who may speak to it: the API server alone.

use crate::pem;
use monopod_api::labels::KUBELET_CLIENT_USER;
use monopod_wire::Credentials;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use rustls_pki_types::CertificateDer;
use std::sync::Arc;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Why credentials cannot be served with.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The PEM text.
    #[error("the credentials are not PEM text")]
    Pem(#[from] rustls_pki_types::pem::Error),
    /// Certificate and key.
    #[error("the credentials cannot be used")]
    Rustls(#[from] rustls::Error),
    /// The certificate authority.
    #[error("the certificate authority cannot be used")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
}

/// Serves with the serving certificate, and asks for one that the cluster signed.
pub fn config(credentials: &Credentials) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in pem::certificates(&credentials.ca)? {
        roots.add(certificate)?;
    }
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .build()?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(
            pem::certificates(&credentials.serving_certificate)?,
            pem::key(&credentials.key)?,
        )?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Whether a client's certificate, which was verified, is the API server's.
pub fn is_api_server(certificates: Option<&[CertificateDer<'_>]>) -> bool {
    let Some(first) = certificates.and_then(<[_]>::first) else {
        return false;
    };
    let Ok((_, certificate)) = X509Certificate::from_der(first) else {
        return false;
    };
    let mut names = certificate.subject().iter_common_name();
    let name = names.next().and_then(|name| name.as_str().ok());
    // More than one name is nothing that the cluster signs.
    name == Some(KUBELET_CLIENT_USER) && names.next().is_none()
}
