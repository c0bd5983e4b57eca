//! The credentials of an environment's node: made while its VM starts, renewed before they end.
//!
//! The private key never leaves this machine but over the link to its guest. It is kept in a file that only
//! root reads, so that a restarted host process can renew the node's lease after the pod finished.

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use monopod_api::environment::Environment;
use monopod_api::labels;
use monopod_core::backoff::Backoff;
use monopod_core::certificates::{CLIENT_SIGNER, LIFETIME_SECONDS, SERVING_SIGNER};
use monopod_core::rotation::Validity;
use monopod_ops::certificate::validity;
use monopod_wire::Credentials;
use rand::Rng;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long an approval and a signature may take before a new request is made.
const PATIENCE: Duration = Duration::from_secs(20);

/// Credentials with the time at which they are to be renewed.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Issued {
    pub(crate) credentials: Credentials,
    pub(crate) renew_at: Timestamp,
}

/// Why no credentials were issued. It is tried again.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// The request.
    #[error("a certificate request cannot be made")]
    Request(#[from] rcgen::Error),
    /// The API server's answer.
    #[error("the API server refused the certificate request")]
    Api(#[from] kube::Error),
    /// The watch.
    #[error("the watch on the certificate request broke")]
    Watch(#[from] kube::runtime::wait::Error),
    /// It was denied.
    #[error("certificate request {name} was denied: {why}")]
    Denied {
        /// The request.
        name: String,
        /// Why.
        why: String,
    },
    /// Nobody answered.
    #[error("certificate request {name} was not answered within {PATIENCE:?}")]
    Late {
        /// The request.
        name: String,
    },
    /// What is asked for, or what came, lacks something.
    #[error("the environment or its certificate is not complete")]
    Incomplete,
}

impl CredentialsError {
    /// After this time the next request is made, if this one was denied; counts those that were, one after the other.
    pub(crate) fn delay(&self, denied: &mut u32) -> Option<Duration> {
        let Self::Denied { .. } = self else {
            return None;
        };
        *denied = denied.saturating_add(1);
        let delay = Backoff::CERTIFICATES.jittered(*denied, rand::rng().random());
        Some(delay.unsigned_abs())
    }
}

/// Asks for the node's certificates and waits for them.
pub(crate) async fn issue(
    client: Client,
    environment: &Environment,
    ca: &str,
) -> Result<Issued, CredentialsError> {
    let name = environment
        .metadata
        .name
        .as_deref()
        .ok_or(CredentialsError::Incomplete)?;
    let address: IpAddr = environment
        .spec
        .address
        .parse()
        .map_err(|_invalid| CredentialsError::Incomplete)?;
    let key = KeyPair::generate()?;
    let now = Timestamp::now();
    let attempt: u32 = rand::rng().random();
    let request = |serving: bool| -> Result<CertificateSigningRequest, CredentialsError> {
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name = DistinguishedName::new();
        parameters
            .distinguished_name
            .push(DnType::OrganizationName, "system:nodes");
        parameters.distinguished_name.push(
            DnType::CommonName,
            format!("system:node:{}", environment.spec.node),
        );
        if serving {
            parameters
                .subject_alt_names
                .push(SanType::IpAddress(address));
        }
        let pem = parameters.serialize_request(&key)?.pem()?;
        let (kind, signer, usage) = if serving {
            ("serving", SERVING_SIGNER, "server auth")
        } else {
            ("client", CLIENT_SIGNER, "client auth")
        };
        Ok(CertificateSigningRequest {
            metadata: ObjectMeta {
                name: Some(format!("{name}-{kind}-{attempt:08x}")),
                labels: Some([(labels::ENVIRONMENT.to_owned(), name.to_owned())].into()),
                ..Default::default()
            },
            spec: CertificateSigningRequestSpec {
                request: ByteString(pem.into_bytes()),
                signer_name: signer.to_owned(),
                usages: Some(vec!["digital signature".to_owned(), usage.to_owned()]),
                expiration_seconds: Some(LIFETIME_SECONDS),
                ..Default::default()
            },
            status: None,
        })
    };
    let (client_certificate, serving_certificate) = tokio::try_join!(
        signed(client.clone(), request(false)?),
        signed(client.clone(), request(true)?)
    )?;
    // The cluster may sign for less than it was asked.
    let life = |pem: &String| {
        let (_, until) = validity(pem).ok_or(CredentialsError::Incomplete)?;
        Ok::<_, CredentialsError>(Validity { from: now, until }.renew_at())
    };
    let renew_at = life(&client_certificate)?.min(life(&serving_certificate)?);
    let credentials = Credentials {
        ca: ca.to_owned(),
        key: key.serialize_pem(),
        client_certificate,
        serving_certificate,
    };
    Ok(Issued {
        credentials,
        renew_at,
    })
}

/// Makes a request and waits for the certificate, PEM.
pub(crate) async fn signed(
    client: Client,
    request: CertificateSigningRequest,
) -> Result<String, CredentialsError> {
    let api: Api<CertificateSigningRequest> = Api::all(client);
    let name = request
        .metadata
        .name
        .clone()
        .ok_or(CredentialsError::Incomplete)?;
    api.create(&PostParams::default(), &request).await?;
    let decided = |request: Option<&CertificateSigningRequest>| {
        request.is_none_or(|r| {
            r.status.as_ref().is_some_and(|s| s.certificate.is_some()) || refusal(r).is_some()
        })
    };
    let waited = tokio::time::timeout(PATIENCE, await_condition(api, &name, decided)).await;
    let request = waited.map_err(|_elapsed| CredentialsError::Late { name: name.clone() })??;
    if let Some(why) = request.as_ref().and_then(refusal) {
        return Err(CredentialsError::Denied { name, why });
    }
    let certificate = request.and_then(|r| r.status?.certificate);
    let certificate = certificate.ok_or_else(|| CredentialsError::Denied {
        name: name.clone(),
        why: "it was deleted".to_owned(),
    })?;
    String::from_utf8(certificate.0).map_err(|_not_text| CredentialsError::Denied {
        name,
        why: "the certificate is not PEM".to_owned(),
    })
}

fn refusal(request: &CertificateSigningRequest) -> Option<String> {
    let conditions = request.status.as_ref()?.conditions.as_ref()?;
    conditions
        .iter()
        .find(|condition| condition.type_ == "Denied" || condition.type_ == "Failed")
        .map(|condition| condition.message.clone().unwrap_or_default())
}

/// The file of an environment's credentials.
pub(crate) fn file(host: &Path, environment: &str) -> PathBuf {
    directory(host).join(environment)
}

/// Where a host keeps those of its environments.
pub(crate) fn directory(host: &Path) -> PathBuf {
    host.join("credentials")
}

/// Keeps credentials for a later host process.
pub(crate) fn store(path: &Path, issued: &Issued) -> std::io::Result<()> {
    crate::files::replace(path, &serde_json::to_vec(issued)?)
}

/// Credentials that an earlier host process kept.
pub(crate) fn load(path: &Path) -> Option<Issued> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}
