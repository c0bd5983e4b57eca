//! The server over real TLS: who may speak to it, and what it answers.

use super::*;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::SendRequest;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::broadcast;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut parameters = CertificateParams::new(Vec::new()).unwrap();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = parameters.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(parameters, key),
            pem,
        }
    }

    /// Certificate and key.
    fn sign(&self, name: &str, purpose: ExtendedKeyUsagePurpose) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut parameters = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.extended_key_usages = vec![purpose];
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        (certificate.pem(), key.serialize_pem())
    }
}

struct Scene {
    authority: Authority,
    port: u16,
    shared: Shared,
}

impl Scene {
    async fn new() -> Self {
        let authority = Authority::new();
        let (serving_certificate, key) =
            authority.sign("system:node:n", ExtendedKeyUsagePurpose::ServerAuth);
        let credentials = Credentials {
            ca: authority.pem.clone(),
            key,
            client_certificate: String::new(),
            serving_certificate,
        };
        let (_sender, configs) = watch::channel(tls::config(&credentials).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Shared::default();
        tokio::spawn(listen(listener, configs, shared.clone()));
        Self {
            authority,
            port,
            shared,
        }
    }

    async fn ask(
        &self,
        client: Option<(String, String)>,
        path: &str,
    ) -> Result<(u16, String), String> {
        let (response, _sender) = self.begin(client, path).await?;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        Ok((status, String::from_utf8(body.to_vec()).unwrap()))
    }

    /// The beginning of an answer, and what keeps the connection for another question.
    async fn begin(
        &self,
        client: Option<(String, String)>,
        path: &str,
    ) -> Result<(Response<Incoming>, SendRequest<Full<Bytes>>), String> {
        self.begin_on(self.connect().await, client, path).await
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).await.unwrap()
    }

    async fn begin_on(
        &self,
        stream: TcpStream,
        client: Option<(String, String)>,
        path: &str,
    ) -> Result<(Response<Incoming>, SendRequest<Full<Bytes>>), String> {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(self.authority.pem.as_bytes()).unwrap())
            .unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match client {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder
                .with_client_auth_cert(
                    vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()],
                    PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
                )
                .unwrap(),
        };
        let stream = TlsConnector::from(Arc::new(config))
            .connect(ServerName::try_from("127.0.0.1").unwrap(), stream)
            .await
            .map_err(|error| error.to_string())?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        let request = Request::builder()
            .uri(path)
            .header("host", "node")
            .body(Full::new(Bytes::new()))
            .unwrap();
        let response = sender.send_request(request).await;
        Ok((response.map_err(|error| error.to_string())?, sender))
    }

    async fn ask_as(&self, name: &str, path: &str) -> (u16, String) {
        let client = self
            .authority
            .sign(name, ExtendedKeyUsagePurpose::ClientAuth);
        self.ask(Some(client), path).await.unwrap()
    }
}

const API_SERVER: &str = "kube-apiserver-kubelet-client";

#[tokio::test]
async fn only_the_api_server_is_served() {
    let scene = Scene::new().await;
    assert_eq!(
        scene.ask_as(API_SERVER, "/healthz").await,
        (200, "ok".to_owned())
    );
    for name in [
        "system:node:n",
        "kubernetes-admin",
        "",
        "kube-apiserver-kubelet-client2",
    ] {
        for path in [
            "/healthz",
            "/containerLogs/ns/p/c",
            "/exec/ns/p/c?command=sh&output=1",
        ] {
            assert_eq!(scene.ask_as(name, path).await.0, 403, "{name} {path}");
        }
    }
    assert!(scene.ask(None, "/healthz").await.is_err(), "no certificate");
    let stranger = Authority::new().sign(API_SERVER, ExtendedKeyUsagePurpose::ClientAuth);
    assert!(
        scene.ask(Some(stranger), "/healthz").await.is_err(),
        "another authority"
    );
    let server = scene
        .authority
        .sign(API_SERVER, ExtendedKeyUsagePurpose::ServerAuth);
    assert!(
        scene.ask(Some(server), "/healthz").await.is_err(),
        "no client certificate"
    );
}

#[tokio::test]
async fn what_is_not_there_is_said() {
    let scene = Scene::new().await;
    let ask = |path: &'static str| scene.ask_as(API_SERVER, path);
    assert_eq!(ask("/containerLogs/ns/p/c").await.0, 404);
    scene.shared.update(|pod| {
        pod.namespace = "ns".to_owned();
        pod.name = "p".to_owned();
        pod.uid = "u".to_owned();
        pod.containers.entry("c".to_owned()).or_default().waiting =
            Some("PodInitializing".to_owned());
    });
    assert_eq!(ask("/containerLogs/ns/other/c").await.0, 404);
    assert_eq!(ask("/containerLogs/ns/p/other").await.0, 404);
    let (status, text) = ask("/containerLogs/ns/p/c").await;
    assert_eq!(status, 400);
    assert_eq!(
        text,
        "container \"c\" in pod \"p\" is waiting to start: PodInitializing"
    );
    assert_eq!(ask("/containerLogs/ns/p/c?previous=true").await.0, 400);
    assert_eq!(
        ask("/exec/ns/p/c?command=sh&output=1").await.0,
        400,
        "no upgrade"
    );
    assert_eq!(ask("/pods").await.0, 404);
}

#[tokio::test]
async fn the_end_waits_for_clients_that_still_read_but_not_for_ever() {
    let scene = Scene::new().await;
    let directory = tempfile::tempdir().unwrap();
    let log = Log::create(directory.path().join("log"), 1 << 20, Arc::default()).unwrap();
    let said = vec![b'x'; 400_000];
    log.clone()
        .copy(&said[..], false, broadcast::Sender::new(64))
        .await;
    log.close();
    let (_running, running) = watch::channel(false);
    scene.shared.update(|pod| {
        pod.namespace = "ns".to_owned();
        pod.name = "p".to_owned();
        pod.containers.entry("c".to_owned()).or_default().current = Some(Run {
            id: String::new(),
            log,
            process: serde_json::Value::Null,
            uid: 0,
            output: broadcast::Sender::new(1),
            input: None,
            terminal: None,
            running,
        });
    });
    let api_server = || {
        scene
            .authority
            .sign(API_SERVER, ExtendedKeyUsagePurpose::ClientAuth)
    };
    let (health, _kept) = scene.begin(Some(api_server()), "/healthz").await.unwrap();
    health.into_body().collect().await.unwrap();
    let path = "/containerLogs/ns/p/c?follow=true";
    let (reader, _kept_too) = scene.begin(Some(api_server()), path).await.unwrap();
    let connections = scene.shared.connections.clone();
    assert_eq!(connections.end(Duration::from_millis(500)).await, 1);
    let (open, body) = tokio::join!(
        connections.end(Duration::from_secs(30)),
        reader.into_body().collect()
    );
    assert_eq!(open, 0, "it was waited for");
    assert_eq!(body.unwrap().to_bytes(), said);
    assert_eq!(
        scene.ask_as(API_SERVER, path).await.1.len(),
        said.len(),
        "who comes late is answered, too"
    );
    // Nor is one cut off who has only come in when the address is handed over.
    let arrived = scene.connect().await;
    let (open, late) = tokio::join!(connections.hand_over(Duration::from_secs(30)), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (reader, _kept) = scene.begin_on(arrived, Some(api_server()), path).await?;
        tokio::time::sleep(Duration::from_millis(300)).await;
        Ok::<_, String>(reader.into_body().collect().await.unwrap().to_bytes())
    });
    assert_eq!(late.unwrap(), said);
    assert_eq!(open, 0, "it was waited for, too");
    assert!(
        timeout(Duration::from_millis(500), scene.connect())
            .await
            .is_err(),
        "who comes now is neither let in nor refused"
    );
}

#[test]
fn an_upgrade_names_a_key_and_a_known_protocol() {
    let headers = |pairs: &[(&'static str, &'static str)]| -> HeaderMap {
        pairs
            .iter()
            .map(|&(name, value)| {
                (
                    header::HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect()
    };
    let good = [
        ("connection", "keep-alive, Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        (
            "sec-websocket-protocol",
            "v5.channel.k8s.io,v4.channel.k8s.io",
        ),
    ];
    let upgrade = read_upgrade(&headers(&good)).unwrap();
    assert_eq!(upgrade.protocol.name, "v5.channel.k8s.io");
    // The example of RFC 6455, section 1.3.
    assert_eq!(upgrade.accept, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    for missing in 0..3 {
        let mut pairs = good.to_vec();
        pairs.remove(missing);
        assert!(
            read_upgrade(&headers(&pairs)).is_err(),
            "{:?}",
            good[missing]
        );
    }
}
