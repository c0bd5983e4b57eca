//! How a machine becomes a host of a cluster: an invitation that is worth one certificate.
//!
//! ```text
//!  cluster's machine                                    new machine
//!  bootstrap token, for this host's name alone
//!  invitation {machine, authority, settings, token} ──▶ key; request as system:bootstrap:ID
//!  control writes on the token who used it, approves ◀─ monopod:host:NAME, monopod:hosts
//!                                certificate ─────────▶ kubeconfig; the host process starts
//! ```

use super::client;
use super::pki;
use crate::settings::{Layout, Settings};
use anyhow::Context;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt};
use monopod_api::labels;
use monopod_host::identity;
use monopod_ops::answer::absent_is_fine;
use monopod_ops::certificate::validity;
use rcgen::KeyPair;
use serde::{Deserialize, Serialize};
use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

/// How long control may take to approve a certificate, and the controller manager to sign it.
const PATIENCE: Duration = Duration::from_mins(1);
/// Type of the secrets that are bootstrap tokens.
const TOKEN: &str = "bootstrap.kubernetes.io/token";
/// Longest invitation; one has some two kilobytes.
const LONGEST: usize = 64 << 10;

/// What a machine needs to know to join. It is a secret until it is used.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Invitation {
    /// Address of the cluster's machine.
    pub machine: Ipv4Addr,
    /// The cluster's certificate authority, PEM.
    pub authority: String,
    /// Name that the host gets.
    pub host: String,
    /// The bootstrap token: an id and a secret.
    pub token: String,
    /// The cluster's settings, from which the host's follow.
    pub settings: Settings,
}

impl Invitation {
    /// One word, for the command line of the other machine.
    pub fn encode(&self) -> anyhow::Result<String> {
        Ok(BASE64_URL_SAFE_NO_PAD.encode(serde_json::to_vec(self)?))
    }

    /// Reads what [`Invitation::encode`] made.
    pub fn decode(text: &str) -> anyhow::Result<Self> {
        anyhow::ensure!(text.len() <= LONGEST, "TOKEN is too long to be one");
        BASE64_URL_SAFE_NO_PAD
            .decode(text.trim())
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .context("TOKEN is none of this release: copy what `monopod host token NAME` prints on the cluster's machine, all of it")
    }
}

/// Makes an invitation for one host.
pub async fn invite(
    admin: &Client,
    layout: &Layout,
    settings: Settings,
    machine: Ipv4Addr,
    host: &str,
    life: Duration,
) -> anyhow::Result<Invitation> {
    let (id, secret) = (random(6)?, random(16)?);
    let expiration = Timestamp::now() + life;
    let data = [
        ("token-id", id.as_str()),
        ("token-secret", &secret),
        ("usage-bootstrap-authentication", "true"),
        ("auth-extra-groups", labels::INVITED_GROUP),
        ("expiration", &format!("{expiration:.0}")),
    ];
    let object = Secret {
        metadata: ObjectMeta {
            name: Some(format!("{}{id}", labels::BOOTSTRAP_SECRET_PREFIX)),
            annotations: Some([(labels::INVITED_HOST.to_owned(), host.to_owned())].into()),
            ..Default::default()
        },
        type_: Some(TOKEN.to_owned()),
        data: Some(
            data.map(|(key, value)| (key.to_owned(), ByteString(value.as_bytes().to_vec())))
                .into(),
        ),
        ..Default::default()
    };
    let api: Api<Secret> = Api::namespaced(admin.clone(), labels::BOOTSTRAP_NAMESPACE);
    api.create(&PostParams::default(), &object)
        .await
        .context("cannot keep the token in the cluster")?;
    Ok(Invitation {
        machine,
        authority: fs::read_to_string(pki::files(&layout.pki(), "ca").0)?,
        host: host.to_owned(),
        token: format!("{id}.{secret}"),
        settings,
    })
}

/// Deletes all tokens for a host, used or not.
pub async fn withdraw(admin: &Client, host: &str) -> Result<(), kube::Error> {
    let api: Api<Secret> = Api::namespaced(admin.clone(), labels::BOOTSTRAP_NAMESPACE);
    let tokens = ListParams::default().fields(&format!("type={TOKEN}"));
    for token in api.list(&tokens).await? {
        if token
            .annotations()
            .get(labels::INVITED_HOST)
            .is_some_and(|invited| invited == host)
        {
            absent_is_fine(
                api.delete(&token.name_any(), &DeleteParams::default())
                    .await,
            )?;
        }
    }
    Ok(())
}

/// Characters that a bootstrap token may have, each with the same probability.
fn random(length: usize) -> anyhow::Result<String> {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut bytes = vec![0; length];
    let random = fs::File::open("/dev/urandom").context("cannot open /dev/urandom")?;
    std::io::Read::read_exact(&mut &random, &mut bytes)?;
    Ok(bytes
        .iter()
        .map(|byte| char::from(LETTERS[usize::from(byte % 32)]))
        .collect())
}

/// Gets this machine's certificate and keeps it with its key. Done again, it goes on.
pub async fn accept(
    layout: &Layout,
    settings: &Settings,
    invitation: &Invitation,
) -> anyhow::Result<()> {
    let dir = layout.pki();
    let (certificate, key_file) = pki::files(&dir, "host");
    let kept = fs::read_to_string(&certificate).unwrap_or_default();
    if validity(&kept).is_some_and(|(_, until)| Timestamp::now() < until) {
        return Ok(());
    }
    pki::keep_authority(&dir, &invitation.authority)?;
    let key = match fs::read_to_string(&key_file) {
        Ok(kept) => KeyPair::from_pem(&kept).context("the host's key is not readable")?,
        Err(_none) => {
            let made = KeyPair::generate()?;
            pki::write(&key_file, &made.serialize_pem(), 0o600)?;
            made
        }
    };
    let path = layout.kubeconfig("invited");
    let config = client::invited(layout, &settings.server(), &invitation.token)?;
    client::write(&path, &serde_json::to_vec_pretty(&config)?)?;
    let issued = request(&path, &key, settings, invitation).await;
    fs::remove_file(&path)?;
    pki::write(&certificate, &issued?, 0o600)
}

async fn request(
    kubeconfig: &Path,
    key: &KeyPair,
    settings: &Settings,
    invitation: &Invitation,
) -> anyhow::Result<String> {
    let id = invitation.token.split('.').next().unwrap_or_default();
    let name = format!("monopod-host-{id}");
    let object = identity::request(name.clone(), &settings.host_name, key)?;
    let client = client::connect(kubeconfig).await?;
    let api: Api<CertificateSigningRequest> = Api::all(client);
    let used = || {
        format!(
            "the token was used or has expired; make another with `monopod host token {}` on the cluster's machine",
            settings.host_name
        )
    };
    match api.create(&PostParams::default(), &object).await {
        Ok(_) => {}
        // Asked before it was interrupted, or by another machine.
        Err(kube::Error::Api(status)) if status.code == 409 => {
            let asked = api.get(&name).await?;
            anyhow::ensure!(asked.spec.request == object.spec.request, used());
        }
        Err(kube::Error::Api(status)) if status.code == 401 => anyhow::bail!(used()),
        Err(error) => {
            return Err(error).with_context(|| {
                format!(
                    "the cluster's API server at {} cannot be asked",
                    settings.server()
                )
            });
        }
    }
    issued(&api, &name).await
}

async fn issued(api: &Api<CertificateSigningRequest>, name: &str) -> anyhow::Result<String> {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let status = api.get(name).await?.status.unwrap_or_default();
        if let Some(ByteString(certificate)) = status.certificate {
            return String::from_utf8(certificate).context("the certificate is no text");
        }
        let denied = status.conditions.unwrap_or_default();
        if let Some(condition) = denied
            .iter()
            .find(|condition| condition.type_ != "Approved")
        {
            anyhow::bail!(
                "the cluster gives this machine no certificate: {}",
                condition.message.as_deref().unwrap_or_default()
            );
        }
        anyhow::ensure!(
            tokio::time::Instant::now() < deadline,
            "the cluster did not sign this machine's certificate within {} s; is its `control` up? (`monopod status` there)",
            PATIENCE.as_secs()
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_is_one_word_and_anything_else_is_refused() {
        for text in ["", "!", "YQ", &"a".repeat(LONGEST + 1)] {
            assert!(Invitation::decode(text).is_err(), "{}", text.len());
        }
    }

    #[test]
    fn tokens_have_the_form_of_bootstrap_tokens() {
        let (one, other) = (random(16).unwrap(), random(16).unwrap());
        assert_ne!(one, other);
        assert!(
            one.bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        );
        assert_eq!(one.len(), 16);
    }
}
