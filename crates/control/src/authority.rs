//! The webhook's authority and certificate: made here, rotated by [`monopod_core::rotation`].
//!
//! Authorities are kept in a Secret, which the replica that acts fills and whose certificates it writes
//! into the webhook's configuration. A replica's own certificate and its key are in its memory alone.

use crate::webhook::Served;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use monopod_api::labels;
use monopod_core::rotation::{Authority, Decision, Validity, decide};
use monopod_ops::admin::Readiness;
use monopod_ops::certificate::validity;
use monopod_ops::election::Leadership;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use serde_json::{Map, Value, json};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio_util::sync::CancellationToken;

/// Owner of the field that is written here; another than that of the namespaces the webhook is asked about.
const FIELD_MANAGER: &str = "monopod-control-authority";
/// Before there is a certificate, and after a failure.
const RETRY: Duration = Duration::from_millis(500);
/// What a control process is not ready without.
const PART: &str = "webhook certificate";
/// Looks in an authority's life, a minute apart at most: its third and twelfth are not missed.
const LOOKS: i32 = 48;
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_mins(1);
/// Others' clocks may be behind by as much.
const BACKDATED: SignedDuration = SignedDuration::from_mins(5);

/// Why there is no new authority or certificate. It is tried again.
#[derive(Debug, thiserror::Error)]
enum AuthorityError {
    #[error("the API server was asked in vain")]
    Api(#[from] kube::Error),
    #[error(
        "there is no secret kube-system/{}; create an empty one, or run `monopod down` and `monopod up`",
        labels::WEBHOOK_AUTHORITY
    )]
    Missing,
    #[error("a certificate cannot be made")]
    Make(#[from] rcgen::Error),
    #[error("the certificate that was made is not PEM")]
    Pem(#[from] rustls::pki_types::pem::Error),
    #[error("the certificate that was made cannot be served")]
    Serve(#[from] rustls::Error),
}

/// An authority as it is stored: the second it was made in names its two entries.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stored {
    validity: Validity,
    certificate: String,
    key: String,
}

/// What is signed, and by whom.
struct Own {
    validity: Validity,
    authority: Validity,
}

/// Keeps the webhook's certificate.
pub(crate) struct Keeper {
    pub(crate) client: Client,
    pub(crate) leadership: Leadership,
    /// Where the certificate is served.
    pub(crate) served: Served,
    /// The address that it is for.
    pub(crate) address: IpAddr,
    /// How long an authority lasts.
    pub(crate) lifetime: SignedDuration,
}

impl Keeper {
    /// Has a certificate served at each moment until the token is cancelled.
    pub(crate) fn keep(
        self,
        readiness: Readiness,
        shutdown: CancellationToken,
    ) -> impl Future<Output = ()> {
        readiness.expect(PART);
        self.look_on(readiness, shutdown)
    }

    async fn look_on(self, readiness: Readiness, shutdown: CancellationToken) {
        let usual = (self.lifetime / LOOKS).clamp(SignedDuration::from_secs(1), LONGEST_PAUSE);
        let usual = Duration::try_from(usual).unwrap_or(RETRY);
        let mut own = None;
        loop {
            let pause = match self.look(&mut own).await {
                Ok(true) => {
                    readiness.done(PART);
                    usual
                }
                Ok(false) => RETRY,
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "the webhook's certificate was not looked after; tried again"
                    );
                    RETRY
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Gives whether what is served is trusted.
    async fn look(&self, own: &mut Option<Own>) -> Result<bool, AuthorityError> {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), "kube-system");
        let secret = secrets.get_opt(labels::WEBHOOK_AUTHORITY).await?;
        let mut secret = secret.ok_or(AuthorityError::Missing)?;
        let webhooks: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        let mut published = bundle(webhooks.get_opt(labels::WEBHOOK).await?.as_ref());
        let now = Timestamp::now();
        let (mut stored, mut decision) = judge(&secret, &published, now);
        if self.leadership.holds() {
            if decision.make || decision.trusted.len() < stored.len() {
                secret = self
                    .replace(&secrets, &secret, &stored, &decision, now)
                    .await?;
                (stored, decision) = judge(&secret, &published, now);
            }
            let wanted: String = decision
                .trusted
                .iter()
                .map(|place| stored[*place].certificate.as_str())
                .collect();
            if wanted != published {
                publish(&webhooks, &wanted).await?;
                published = wanted;
                (stored, decision) = judge(&secret, &published, now);
            }
        }
        let Some(authority) = decision.signer.map(|place| &stored[place]) else {
            return Ok(false);
        };
        let stays = own.as_ref().is_some_and(|own| {
            own.authority == authority.validity && now < own.validity.renew_at()
        });
        if !stays {
            let validity = authority.validity.signs(now);
            let certificate = sign(authority, validity, self.address)?;
            self.served.set(certificate, validity.until);
            tracing::info!(until = %validity.until, authority = %authority.validity.from, "the webhook has a new certificate");
            *own = Some(Own {
                validity,
                authority: authority.validity,
            });
        }
        Ok(published.contains(&authority.certificate))
    }

    /// Adds an authority if there is to be another, and forgets those that have ended. Only one replica
    /// can do so to one version of the secret.
    async fn replace(
        &self,
        secrets: &Api<Secret>,
        secret: &Secret,
        stored: &[Stored],
        decision: &Decision,
        now: Timestamp,
    ) -> Result<Secret, AuthorityError> {
        let mut data = Map::new();
        for (place, authority) in stored.iter().enumerate() {
            if !decision.trusted.contains(&place) {
                for name in entries(authority.validity.from) {
                    data.insert(name, Value::Null);
                }
            }
        }
        if decision.make {
            let made = make(now, self.lifetime)?;
            tracing::info!(until = %made.validity.until, "the webhook has a new authority");
            let texts = [made.certificate, made.key].map(|text| ByteString(text.into_bytes()));
            for (name, text) in entries(made.validity.from).into_iter().zip(texts) {
                data.insert(name, json!(text));
            }
        }
        let patch =
            json!({"metadata": {"resourceVersion": secret.resource_version()}, "data": data});
        let (name, parameters) = (labels::WEBHOOK_AUTHORITY, PatchParams::default());
        Ok(secrets
            .patch(name, &parameters, &Patch::Merge(patch))
            .await?)
    }
}

fn judge(secret: &Secret, published: &str, now: Timestamp) -> (Vec<Stored>, Decision) {
    let stored = read(secret);
    let authorities: Vec<Authority> = stored
        .iter()
        .map(|authority| Authority {
            validity: authority.validity,
            is_published: published.contains(&authority.certificate),
        })
        .collect();
    let decision = decide(&authorities, now);
    (stored, decision)
}

/// Names of an authority's certificate and key in the secret.
fn entries(from: Timestamp) -> [String; 2] {
    ["crt", "key"].map(|kind| format!("{}.{kind}", from.as_second()))
}

/// The authorities of a secret, oldest first. What is none is left alone.
fn read(secret: &Secret) -> Vec<Stored> {
    let data = secret.data.clone().unwrap_or_default();
    let text = |name: &String| {
        let bytes = data.get(name).map(|ByteString(bytes)| bytes.clone())?;
        String::from_utf8(bytes).ok()
    };
    let mut stored: Vec<Stored> = data
        .keys()
        .filter_map(|name| {
            let seconds = name.strip_suffix(".crt")?.parse().ok()?;
            let from = Timestamp::from_second(seconds).ok()?;
            let [certificate, key] = entries(from);
            let (certificate, key) = (text(&certificate)?, text(&key)?);
            let (_, until) = validity(&certificate)?;
            Some(Stored {
                validity: Validity { from, until },
                certificate,
                key,
            })
        })
        .collect();
    stored.sort_by_key(|authority| authority.validity.from);
    stored
}

/// What the API server trusts for all of the configuration's webhooks.
fn bundle(configuration: Option<&MutatingWebhookConfiguration>) -> String {
    let webhooks = configuration.and_then(|c| c.webhooks.as_ref());
    let mut bundles = webhooks.into_iter().flatten().map(|webhook| {
        let bundle = webhook.client_config.ca_bundle.clone();
        String::from_utf8(bundle.unwrap_or_default().0).unwrap_or_default()
    });
    let first = bundles.next().unwrap_or_default();
    if bundles.all(|other| other == first) {
        first
    } else {
        String::new()
    }
}

async fn publish(
    api: &Api<MutatingWebhookConfiguration>,
    bundle: &str,
) -> Result<(), AuthorityError> {
    let bundle = ByteString(bundle.as_bytes().to_vec());
    let webhooks: Vec<Value> = [labels::WEBHOOK, labels::WEBHOOK_OF_KUBE_SYSTEM]
        .map(|name| json!({"name": name, "clientConfig": {"caBundle": bundle}}))
        .into();
    let patch = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": labels::WEBHOOK}, "webhooks": webhooks,
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    api.patch(labels::WEBHOOK, &parameters, &Patch::Apply(patch))
        .await?;
    Ok(())
}

/// The same for the same authority, so that it can sign with nothing but its stored key.
fn parameters(validity: Validity) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    parameters.distinguished_name.push(
        DnType::CommonName,
        format!("monopod-webhook-{}", validity.from.as_second()),
    );
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::KeyCertSign,
    ];
    limit(&mut parameters, validity);
    parameters
}

fn limit(parameters: &mut CertificateParams, validity: Validity) {
    let begin = validity.from.checked_sub(BACKDATED);
    parameters.not_before = SystemTime::from(begin.unwrap_or(validity.from)).into();
    parameters.not_after = SystemTime::from(validity.until).into();
}

fn make(now: Timestamp, lifetime: SignedDuration) -> Result<Stored, rcgen::Error> {
    // Stored in whole seconds.
    let from = Timestamp::from_second(now.as_second()).unwrap_or(now);
    let until = from.checked_add(lifetime).unwrap_or(Timestamp::MAX);
    let validity = Validity { from, until };
    let key = KeyPair::generate()?;
    let certificate = parameters(validity).self_signed(&key)?.pem();
    Ok(Stored {
        validity,
        certificate,
        key: key.serialize_pem(),
    })
}

fn sign(
    authority: &Stored,
    validity: Validity,
    address: IpAddr,
) -> Result<CertifiedKey, AuthorityError> {
    let authority_key = KeyPair::from_pem(&authority.key)?;
    let issuer = Issuer::new(parameters(authority.validity), authority_key);
    let mut wanted = CertificateParams::new(vec!["localhost".to_owned()])?;
    wanted.distinguished_name = DistinguishedName::new();
    wanted
        .distinguished_name
        .push(DnType::CommonName, "monopod-webhook");
    wanted.subject_alt_names.push(SanType::IpAddress(address));
    wanted.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    wanted.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    wanted.use_authority_key_identifier_extension = true;
    limit(&mut wanted, validity);
    let key = KeyPair::generate()?;
    let certificate = wanted.signed_by(&key, &issuer)?.pem();
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes())?];
    let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes())?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(CertifiedKey::from_der(chain, key, &provider)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: SignedDuration = SignedDuration::from_hours(1);

    fn secret(stored: &[&Stored]) -> Secret {
        let data = stored.iter().flat_map(|authority| {
            let texts = [&authority.certificate, &authority.key];
            let texts = texts.map(|text| ByteString(text.clone().into_bytes()));
            entries(authority.validity.from).into_iter().zip(texts)
        });
        Secret {
            data: Some(data.collect()),
            ..Default::default()
        }
    }

    #[test]
    fn what_is_stored_is_read_again_oldest_first_and_what_is_none_is_left_out() {
        let now = Timestamp::now();
        let (old, new) = (make(now - HOUR, HOUR * 2), make(now, HOUR * 2));
        let (old, new) = (old.expect("made"), new.expect("made"));
        let mut stored = secret(&[&new, &old]);
        let data = stored.data.get_or_insert_default();
        data.insert("17.crt".to_owned(), ByteString(b"no certificate".to_vec()));
        data.insert("note".to_owned(), ByteString(b"by hand".to_vec()));
        assert_eq!(read(&stored), [old, new]);
        assert_eq!(read(&Secret::default()), []);
    }

    #[test]
    fn a_certificate_is_good_for_the_address_and_its_time() {
        let now = Timestamp::now();
        let authority = make(now, HOUR).expect("made");
        let address = IpAddr::from([127, 0, 0, 1]);
        let validity = authority.validity.signs(now);
        let signed = sign(&authority, validity, address).expect("signed");
        let root = CertificateDer::from_pem_slice(authority.certificate.as_bytes()).expect("PEM");
        let mut roots = rustls::RootCertStore::empty();
        roots.add(root).expect("an authority");
        let verifier = rustls::client::WebPkiServerVerifier::builder_with_provider(
            Arc::new(roots),
            Arc::new(rustls::crypto::ring::default_provider()),
        );
        let verifier = verifier.build().expect("roots");
        let verify = |at: Timestamp, name: IpAddr| {
            use rustls::client::danger::ServerCertVerifier;
            let at = u64::try_from(at.as_second()).expect("after 1970");
            let at = rustls::pki_types::UnixTime::since_unix_epoch(Duration::from_secs(at));
            verifier.verify_server_cert(&signed.cert[0], &[], &name.into(), &[], at)
        };
        assert!(verify(now, address).is_ok());
        assert!(verify(now, IpAddr::from([127, 0, 0, 2])).is_err());
        assert!(verify(validity.until + SignedDuration::from_secs(1), address).is_err());
    }
}
