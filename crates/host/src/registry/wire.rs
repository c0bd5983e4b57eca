//! HTTP as registries are spoken to: bounded answers, redirects under our own rules, and for each
//! host the certificates that are believed for it.

use super::{RegistryError, WORDS, shown};
use monopod_core::image::endpoints::Registries;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, LOCATION};
use reqwest::{Client, Response, StatusCode, Url, redirect};
use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long a connection may take, an answer may pause, and a document may take in all.
const CONNECT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(30);
const WHOLE: Duration = Duration::from_mins(1);
/// Redirects that are followed; content networks need one or two.
const REDIRECTS: usize = 5;
/// What is read of an answer that is a refusal.
const REFUSAL: usize = 64 << 10;

/// Headers of a request.
pub(super) type Headers<'a> = &'a [(HeaderName, String)];

/// HTTP clients by host.
pub(super) struct Http {
    registries: Registries,
    system: Arc<RootCertStore>,
    clients: Mutex<BTreeMap<String, Client>>,
}

impl Http {
    pub(super) fn new(registries: Registries) -> Self {
        let mut system = RootCertStore::empty();
        let found = rustls_native_certs::load_native_certs();
        let (added, _) = system.add_parsable_certificates(found.certs);
        if added == 0 {
            tracing::info!(
                "this machine has no certificate authorities; install ca-certificates to pull from public registries"
            );
        }
        Self {
            registries,
            system: Arc::new(system),
            clients: Mutex::default(),
        }
    }

    pub(super) fn registries(&self) -> &Registries {
        &self.registries
    }

    /// Asks for a URL and follows redirects. The authorization goes to the first host alone.
    pub(super) async fn get(
        &self,
        url: &Url,
        headers: Headers<'_>,
        authorization: Option<&str>,
    ) -> Result<Response, RegistryError> {
        let first = origin(url);
        let mut url = url.clone();
        for _ in 0..=REDIRECTS {
            let host = authority(&url);
            let mut request = self.client(&url)?.get(url.clone());
            for (name, value) in headers {
                request = request.header(name, value);
            }
            if let Some(authorization) = authorization.filter(|_| origin(&url) == first) {
                request = request.header(AUTHORIZATION, authorization);
            }
            let sent = tokio::time::timeout(WHOLE, request.send()).await;
            let response = sent
                .map_err(|_elapsed| RegistryError::Slow {
                    host: host.clone(),
                    what: "no answer within a minute",
                })?
                .map_err(|source| RegistryError::Unreachable {
                    host: host.clone(),
                    source: source.without_url(),
                })?;
            match redirected(&response) {
                None => return Ok(response),
                Some(target) => {
                    let next = url.join(&target).map_err(|error| {
                        RegistryError::wrong(&host, "its redirect", error.to_string())
                    })?;
                    self.check(&host, "redirects to", &next)?;
                    url = next;
                }
            }
        }
        Err(RegistryError::wrong(
            &authority(&url),
            "its redirects",
            "there is no end to them",
        ))
    }

    /// Refuses a URL that is not https, unless its host is named to be plain.
    pub(super) fn check(
        &self,
        host: &str,
        what: &'static str,
        url: &Url,
    ) -> Result<(), RegistryError> {
        let allowed = match url.scheme() {
            "https" => true,
            "http" => self.registries.is_plain(&authority(url)),
            _other => false,
        };
        if allowed && url.username().is_empty() && url.password().is_none() {
            return Ok(());
        }
        Err(RegistryError::Insecure {
            host: host.to_owned(),
            what,
            url: shown(&format!("{}://{}", url.scheme(), authority(url))),
        })
    }

    fn client(&self, url: &Url) -> Result<Client, RegistryError> {
        let host = authority(url);
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(&host) {
            return Ok(client.clone());
        }
        let trust = |why: String| RegistryError::Trust {
            host: host.clone(),
            why,
        };
        let mut roots = RootCertStore::clone(&self.system);
        let config = self.registries.configs.get(&host);
        if let Some(file) = config.and_then(|config| config.tls.ca_file.as_deref()) {
            for certificate in authorities(Path::new(file)).map_err(trust)? {
                roots
                    .add(certificate)
                    .map_err(|error| trust(error.to_string()))?;
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| trust(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let client = Client::builder()
            .tls_backend_preconfigured(tls)
            .redirect(redirect::Policy::none())
            .connect_timeout(CONNECT)
            .read_timeout(PAUSE)
            .user_agent(concat!("monopod/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| trust(error.to_string()))?;
        // Hosts come from pods' specs: forget them all rather than keep each for ever.
        if clients.len() >= 64 {
            clients.clear();
        }
        clients.insert(host, client.clone());
        Ok(client)
    }
}

/// The certificates of a PEM file, which must hold one at least.
pub(super) fn authorities(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path)
        .map_err(|error| format!("{}: {error}", path.display()))?
        .collect();
    match found {
        Ok(found) if found.is_empty() => Err(format!("{} holds no certificate", path.display())),
        Ok(found) => Ok(found),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

/// Host, and port if it is not the scheme's own.
pub(super) fn authority(url: &Url) -> String {
    let host = url.host_str().unwrap_or_default();
    match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    }
}

fn origin(url: &Url) -> (String, String, Option<u16>) {
    (
        url.scheme().to_owned(),
        url.host_str().unwrap_or_default().to_owned(),
        url.port_or_known_default(),
    )
}

fn redirected(response: &Response) -> Option<String> {
    let redirects = [301, 302, 303, 307, 308].contains(&response.status().as_u16());
    let location = response.headers().get(LOCATION).filter(|_| redirects)?;
    location.to_str().ok().map(str::to_owned)
}

/// The whole body, which must not be larger than `limit`.
pub(super) async fn body(
    host: &str,
    what: &str,
    mut response: Response,
    limit: usize,
) -> Result<Vec<u8>, RegistryError> {
    let read = async {
        let mut bytes = Vec::new();
        while let Some(chunk) =
            response
                .chunk()
                .await
                .map_err(|source| RegistryError::Unreachable {
                    host: host.to_owned(),
                    source: source.without_url(),
                })?
        {
            if bytes.len() + chunk.len() > limit {
                return Err(RegistryError::wrong(
                    host,
                    what,
                    format!("it is larger than {limit} bytes"),
                ));
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    };
    match tokio::time::timeout(WHOLE, read).await {
        Ok(bytes) => bytes,
        Err(_elapsed) => Err(RegistryError::Slow {
            host: host.to_owned(),
            what: "a document took more than a minute",
        }),
    }
}

/// What a refusal says, in the registry's own words.
pub(super) async fn refusal(host: &str, response: Response) -> RegistryError {
    let status = response.status();
    let words = match body(host, "its refusal", response, REFUSAL).await {
        Ok(bytes) => words(status, &bytes),
        // That it refused is worth more than that its words cannot be read.
        Err(_unreadable) => String::new(),
    };
    RegistryError::Refused {
        host: host.to_owned(),
        status,
        words,
    }
}

#[derive(Deserialize)]
struct Errors {
    errors: Vec<OneError>,
}

#[derive(Deserialize)]
struct OneError {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

/// Token servers answer in this form.
#[derive(Deserialize)]
struct Details {
    #[serde(alias = "message", alias = "error_description")]
    details: String,
}

/// The messages of the specification's error document; of a client's error also plain text.
fn words(status: StatusCode, bytes: &[u8]) -> String {
    if let Ok(Errors { errors }) = serde_json::from_slice(bytes) {
        let all: Vec<String> = errors
            .into_iter()
            .take(4)
            .map(|error| {
                let code = error.code.to_lowercase().replace('_', " ");
                match error.message.as_str() {
                    "" => code,
                    message => format!("{code}: {message}"),
                }
            })
            .collect();
        return shown(&all.join("; "));
    }
    if let Ok(Details { details }) = serde_json::from_slice(bytes) {
        return shown(&details);
    }
    let text = std::str::from_utf8(bytes).unwrap_or_default();
    let plain = !text.contains('<') && text.len() <= WORDS && status.is_client_error();
    if plain { shown(text) } else { String::new() }
}

/// The headers of an answer, as far as they are text.
pub(super) fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_registrys_own_words_are_kept() {
        for (bytes, expected) in [
            (
                r#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown","detail":{"Tag":"x"}}]}"#,
                "manifest unknown: manifest unknown",
            ),
            (
                r#"{"errors":[{"code":"UNAUTHORIZED","message":"authentication required","detail":null},{"code":"DENIED"}]}"#,
                "unauthorized: authentication required; denied",
            ),
            (
                r#"{"details":"incorrect username or password"}"#,
                "incorrect username or password",
            ),
            ("plainly\n\x1b[31mnot", "plainly [31mnot"),
            ("<html>no</html>", ""),
        ] {
            assert_eq!(words(StatusCode::NOT_FOUND, bytes.as_bytes()), expected);
        }
    }

    proptest! {
        #[test]
        fn whatever_is_said_is_bounded_and_printable(bytes: Vec<u8>, message in ".{0,2000}") {
            let document = serde_json::json!({"errors": [{"code": message, "message": message}]}).to_string();
            for bytes in [&bytes[..], document.as_bytes()] {
                let words = words(StatusCode::BAD_REQUEST, bytes);
                prop_assert!(words.chars().count() <= WORDS && !words.chars().any(char::is_control));
            }
        }
    }
}
