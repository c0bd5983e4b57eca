//! Passwords and tokens, and that a private image in the store needs a proof.

use crate::fixture::{Fixture, chain, keyrings, plain, pusher, tls};
use crate::image::{Image, Packing, Pusher, layer};
use crate::server::{Registry, Wants, answering, free_port, reply};
use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use monopod_api::environment::PullPolicy;
use monopod_core::image::access::{Plan, plan};
use monopod_core::image::reference::normalise;
use rcgen::SigningKey as _;
use serde_json::json;
use std::sync::{Arc, Mutex};

#[tokio::test(flavor = "multi_thread")]
async fn passwords_are_tried_in_order_and_the_registrys_words_are_kept() {
    let registry = Registry::start(&Wants::Password, false);
    let host = registry.host();
    pusher(&registry)
        .image("private/app", "1", &Image::small("private"))
        .await;
    let fixture = Fixture::new(&plain(std::slice::from_ref(&host)));
    let reference = format!("{host}/private/app:1");
    let anonymous = chain(&fixture.pull(&reference).await.unwrap_err());
    assert!(
        anonymous.contains("401 Unauthorized: unauthorized: authentication required"),
        "{anonymous}"
    );
    let wrong = fixture
        .pull_with(&reference, &[(&host, "right", "wrong")])
        .await;
    let wrong = chain(&wrong.unwrap_err());
    assert!(wrong.contains("401 Unauthorized"), "{wrong}");
    assert!(
        !wrong.contains("wrong"),
        "no password in a message: {wrong}"
    );
    // The longer path comes first, then the next.
    let both = [
        (&*format!("{host}/private"), "right", "wrong"),
        (&host, "right", "right"),
    ];
    fixture.pull_with(&reference, &both).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_image_in_the_store_is_used_only_with_proof() {
    let registry = Registry::start(&Wants::Password, false);
    let host = registry.host();
    let image = Image::small("private");
    pusher(&registry).image("app", "1", &image).await;
    let fixture = Fixture::new(&plain(std::slice::from_ref(&host)));
    let reference = normalise(&format!("{host}/app:1")).unwrap();
    let decide = |secrets: &[(&str, &str, &str)]| {
        let stored = fixture.store.find(&reference).unwrap();
        let offered = fixture.puller.fingerprints(&reference, &keyrings(secrets));
        let access = stored.as_ref().map(|image| &image.access);
        plan(PullPolicy::IfNotPresent, &reference, access, &offered)
    };
    let (first, second) = ((&*host, "right", "right"), (&*host, "right2", "right2"));
    fixture
        .pull_with(&reference.to_string(), &[first])
        .await
        .unwrap();
    assert_eq!(decide(&[first]), Plan::Use);
    for others in [&[][..], &[second], &[(&*host, "right", "wrong")]] {
        assert_eq!(decide(others), Plan::Ask, "{others:?}");
    }
    // Another account proves itself by a question, without a second download.
    fixture
        .pull_with(&reference.to_string(), &[second])
        .await
        .unwrap();
    assert_eq!(decide(&[second]), Plan::Use);
    assert_eq!(registry.fetches(&image.blobs[0].digest()), 1);
    assert!(fixture.pull(&reference.to_string()).await.is_err());
    assert_eq!(decide(&[]), Plan::Ask);
}

/// A registry of an attacker who knows a private image's manifest does not get its layers.
#[tokio::test(flavor = "multi_thread")]
async fn content_is_not_given_to_another_name_by_its_digest() {
    let registry = Registry::start(&Wants::Password, false);
    let image = Image::new(&[(layer("secret", b"secret"), Packing::Gzip)], false);
    pusher(&registry).image("app", "1", &image).await;
    let (manifest, config) = (image.manifest.clone(), image.blobs[1].clone());
    let evil = answering(move |request, client| {
        if request.contains("/manifests/") {
            let kind = format!("Content-Type: {}\r\n", manifest.media_type);
            reply(client, "200 OK", &kind, &manifest.bytes);
        } else if request.contains(&config.digest()) {
            reply(client, "200 OK", "", &config.bytes);
        } else {
            reply(client, "404 Not Found", "", b"");
        }
    });
    let fixture = Fixture::new(&plain(&[registry.host(), evil.to_string()]));
    let host = registry.host();
    let own = format!("{host}/app:1");
    fixture
        .pull_with(&own, &[(&host, "right", "right")])
        .await
        .unwrap();
    let stolen = format!("{evil}/app@{}", image.manifest.digest());
    let error = chain(&fixture.pull(&stolen).await.unwrap_err());
    assert!(error.contains("404 Not Found"), "{error}");
    assert!(fixture.store.resolve(&stolen).unwrap().is_none());
}

/// A token server: checks the password and signs for what is asked.
struct Tokens {
    address: std::net::SocketAddr,
    directory: tempfile::TempDir,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Tokens {
    fn start() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let parameters = rcgen::CertificateParams::new(vec!["tokens".to_owned()]).unwrap();
        let certificate = parameters.self_signed(&key).unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("cert.pem"), certificate.pem()).unwrap();
        let der = BASE64_STANDARD.encode(certificate.der());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        let password = format!("Basic {}", BASE64_STANDARD.encode("right:right"));
        let address = answering(move |request, client| {
            let line = request.lines().next().unwrap_or_default().to_owned();
            seen.lock().unwrap().push(line.clone());
            let right = request.contains(&password);
            if request.to_lowercase().contains("authorization:") && !right {
                let words = br#"{"details":"incorrect username or password"}"#;
                return reply(client, "401 Unauthorized", "", words);
            }
            // `private/…` is for those who have shown the password.
            let scope = line.split("scope=").nth(1).unwrap_or_default();
            let scope = scope.split([' ', '&']).next().unwrap_or_default();
            let scope = scope
                .replace("%3A", ":")
                .replace("%2F", "/")
                .replace("%2C", ",");
            let parts: Vec<&str> = scope.split(':').collect();
            let name = parts.get(1).copied().unwrap_or_default();
            let allowed = right || !name.starts_with("private/");
            let access = if allowed {
                json!([{"type": "repository", "name": name, "actions": ["pull", "push"]}])
            } else {
                json!([])
            };
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap()
                .as_secs();
            let encode =
                |value: serde_json::Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
            let head = encode(json!({"typ": "JWT", "alg": "ES256", "x5c": [der]}));
            let claims = encode(
                json!({"iss": "test-issuer", "sub": "right", "aud": "test-registry",
                "exp": now + 300, "nbf": now - 10, "iat": now, "jti": "1", "access": access}),
            );
            let signature = key.sign(format!("{head}.{claims}").as_bytes()).unwrap();
            let token = format!(
                "{head}.{claims}.{}",
                BASE64_URL_SAFE_NO_PAD.encode(raw(&signature))
            );
            reply(
                client,
                "200 OK",
                "",
                json!({"token": token}).to_string().as_bytes(),
            );
        });
        Self {
            address,
            directory,
            asked,
        }
    }
}

/// The two numbers of an ECDSA signature, from its ASN.1 form to the form of tokens.
fn raw(signature: &[u8]) -> Vec<u8> {
    let first = usize::from(signature[3]);
    let numbers = [&signature[4..4 + first], &signature[6 + first..]];
    let mut raw = Vec::new();
    for number in numbers {
        let digits: Vec<u8> = number.iter().copied().skip_while(|&b| b == 0).collect();
        raw.extend(std::iter::repeat_n(0, 32 - digits.len()));
        raw.extend(digits);
    }
    raw
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_fetched_for_the_image_alone_and_only_over_tls_unless_named() {
    let tokens = Tokens::start();
    let wants = Wants::Token {
        realm: format!("http://{}/token", tokens.address),
        certificate: tokens.directory.path().join("cert.pem"),
    };
    let registry = Registry::start(&wants, false);
    let host = registry.host();
    for name in ["public/app", "private/app"] {
        let scope = format!(
            "http://{}/token?service=test-registry&scope=repository:{name}:pull,push",
            tokens.address
        );
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls(None))
            .no_proxy()
            .build()
            .unwrap();
        let answer = client
            .get(scope)
            .basic_auth("right", Some("right"))
            .send()
            .await
            .unwrap();
        let answer: serde_json::Value =
            serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        let token = answer["token"].as_str().unwrap().to_owned();
        Pusher::with_token(&registry.url(), token, tls(None))
            .image(name, "1", &Image::small(name))
            .await;
    }
    let only_registry = Fixture::new(&plain(std::slice::from_ref(&host)));
    let error = only_registry
        .pull(&format!("{host}/public/app:1"))
        .await
        .unwrap_err();
    let error = chain(&error);
    assert!(
        error.contains("sends for a token to http://") && error.contains("not https"),
        "{error}"
    );

    let fixture = Fixture::new(&plain(&[host.clone(), tokens.address.to_string()]));
    tokens.asked.lock().unwrap().clear();
    fixture.pull(&format!("{host}/public/app:1")).await.unwrap();
    let asked = tokens.asked.lock().unwrap().clone();
    assert!(
        !asked.is_empty()
            && asked
                .iter()
                .all(|line| line.contains("scope=repository%3Apublic%2Fapp%3Apull ")),
        "{asked:?}"
    );
    let private = format!("{host}/private/app:1");
    let anonymous = chain(&fixture.pull(&private).await.unwrap_err());
    assert!(anonymous.contains("401 Unauthorized"), "{anonymous}");
    let wrong = chain(
        &fixture
            .pull_with(&private, &[(&host, "right", "wrong")])
            .await
            .unwrap_err(),
    );
    assert!(wrong.contains("incorrect username or password"), "{wrong}");
    fixture
        .pull_with(&private, &[(&host, "right", "right")])
        .await
        .unwrap();
}

/// A mirror is not told the registry's password.
#[tokio::test(flavor = "multi_thread")]
async fn credentials_do_not_go_to_mirrors_or_where_redirects_lead() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&seen);
    let listener = answering(move |request, client| {
        heard.lock().unwrap().push(request.to_lowercase());
        let ask = "WWW-Authenticate: Basic realm=\"x\"\r\n";
        reply(client, "401 Unauthorized", ask, b"");
    });
    let registry = format!("127.0.0.1:{}", free_port());
    let config = format!(
        "mirrors:\n  \"{registry}\":\n    endpoint: [\"http://{listener}\", \"http://{registry}\"]\n"
    );
    let fixture = Fixture::new(&config);
    let secret = [(&*registry, "right", "right")];
    assert!(
        fixture
            .pull_with(&format!("{registry}/app:1"), &secret)
            .await
            .is_err()
    );

    let target = listener.to_string();
    let redirecting = answering(move |request, client| {
        if request.to_lowercase().contains("authorization: basic") {
            let to = format!("Location: http://{target}/elsewhere\r\n");
            reply(client, "307 Temporary Redirect", &to, b"");
        } else {
            reply(
                client,
                "401 Unauthorized",
                "WWW-Authenticate: Basic realm=\"x\"\r\n",
                b"",
            );
        }
    });
    let fixture = Fixture::new(&plain(&[redirecting.to_string(), listener.to_string()]));
    let secret = [(&*redirecting.to_string(), "right", "right")];
    assert!(
        fixture
            .pull_with(&format!("{redirecting}/app:1"), &secret)
            .await
            .is_err()
    );
    let requests = seen.lock().unwrap().clone();
    assert!(
        requests.iter().any(|r| r.contains("/elsewhere")) && requests.len() >= 2,
        "{requests:?}"
    );
    assert!(
        requests.iter().all(|r| !r.contains("authorization")),
        "{requests:?}"
    );
    // Without the name of its host a redirect to it is refused.
    let fixture = Fixture::new(&plain(&[redirecting.to_string()]));
    let error = chain(
        &fixture
            .pull_with(&format!("{redirecting}/app:1"), &secret)
            .await
            .unwrap_err(),
    );
    assert!(error.contains("redirects to http://"), "{error}");
}
