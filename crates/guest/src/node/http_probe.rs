//! HTTP and TCP from the node to the pod, for probes and hooks.

use super::handlers::{Outcome, Warned};
use http::uri::PathAndQuery;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction, TCPSocketAction};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use monopod_core::pod::probe;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Bytes of an answer that are read; the kubelet's.
const MAX_BODY: usize = 10 << 10;
/// Requests that are made at most, as redirects are followed; Go's.
const MAX_REQUESTS: usize = 10;
/// How long a hook's server may take; a hook has no time-out of its own.
const HOOK: Duration = Duration::from_hours(1);

/// Opens a connection to a port and closes it.
pub(crate) async fn tcp(
    address: &str,
    container: &Container,
    action: &TCPSocketAction,
    timeout: Duration,
) -> Outcome {
    let Some(port) = probe::port(container, &action.port) else {
        return Outcome::Unknown(no_port(&action.port));
    };
    let host = non_empty(action.host.as_deref()).unwrap_or(address);
    match tokio::time::timeout(timeout, TcpStream::connect((host, port))).await {
        Ok(Ok(_)) => Outcome::Success,
        Ok(Err(error)) => Outcome::Failure(dial_error(host, port, &error)),
        Err(_) => Outcome::Failure(format!("dial tcp {host}:{port}: i/o timeout")),
    }
}

/// Asks by HTTP. From 200 to 299 is a success; redirects on the same host are followed, and
/// others are a success with a warning.
pub(crate) async fn probe(
    address: &str,
    container: &Container,
    action: &HTTPGetAction,
    timeout: Duration,
) -> Outcome {
    let mut url = match Url::of(address, container, action) {
        Ok(url) => url,
        Err(message) => return Outcome::Unknown(message),
    };
    let first = url.to_string();
    let failed = |why: &str| Outcome::Failure(format!("Get \"{first}\": {why}"));
    let ask = async {
        let host = url.host.clone();
        for _ in 0..MAX_REQUESTS {
            let answer = match url.get(action, "probe").await {
                Ok(answer) => answer,
                Err(message) => return failed(&message),
            };
            match answer.status {
                200..=299 => return Outcome::Success,
                300..=399 => match answer.location.and_then(|to| url.redirected(&to)) {
                    Some(next) if next.host == host => url = next,
                    Some(_) | None => {
                        let body = String::from_utf8_lossy(&answer.body);
                        return Outcome::Warning(format!(
                            "Probe terminated redirects, Response body: {body}"
                        ));
                    }
                },
                status => {
                    return Outcome::Failure(format!(
                        "HTTP probe failed with statuscode: {status}"
                    ));
                }
            }
        }
        failed(&format!("stopped after {MAX_REQUESTS} redirects"))
    };
    match tokio::time::timeout(timeout, ask).await {
        Ok(outcome) => outcome,
        Err(_) => {
            failed("context deadline exceeded (Client.Timeout exceeded while awaiting headers)")
        }
    }
}

/// Tells a hook's server. Any answer will do. One that does not speak TLS is asked without.
pub(crate) async fn hook(
    address: &str,
    container: &Container,
    action: &HTTPGetAction,
) -> Result<Warned, String> {
    let mut url = Url::of(address, container, action)?;
    let ask = async {
        match url.get(action, "lifecycle").await {
            Ok(_) => Ok(None),
            Err(_) if url.secure => {
                url.secure = false;
                url.get(action, "lifecycle").await?;
                let message = format!(
                    "request to HTTPS lifecycle hook {}:{} got HTTP response, retry with HTTP succeeded",
                    url.host, url.port
                );
                Ok(Some(("LifecycleHTTPFallback", message)))
            }
            Err(message) => Err(message),
        }
    };
    match tokio::time::timeout(HOOK, ask).await {
        Ok(outcome) => outcome,
        Err(_) => Err("the server does not answer".to_owned()),
    }
}

fn non_empty(text: Option<&str>) -> Option<&str> {
    text.filter(|text| !text.is_empty())
}

fn no_port(port: &IntOrString) -> String {
    match port {
        IntOrString::Int(number) => format!("invalid port number: {number}"),
        IntOrString::String(name) => {
            format!("couldn't find port: the container has none that is named {name:?}")
        }
    }
}

/// As Go says it.
fn dial_error(host: &str, port: u16, error: &io::Error) -> String {
    let why = match error.kind() {
        io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
        io::ErrorKind::HostUnreachable => "connect: no route to host".to_owned(),
        io::ErrorKind::NetworkUnreachable => "connect: network is unreachable".to_owned(),
        _ => error.to_string(),
    };
    format!("dial tcp {host}:{port}: {why}")
}

/// Where to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Url {
    secure: bool,
    host: String,
    port: u16,
    path: String,
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        write!(f, "{scheme}://{}:{}{}", self.host, self.port, self.path)
    }
}

impl Url {
    fn of(address: &str, container: &Container, action: &HTTPGetAction) -> Result<Self, String> {
        let path = action.path.as_deref().unwrap_or("/");
        let slash = if path.starts_with('/') { "" } else { "/" };
        Ok(Self {
            secure: action.scheme.as_deref() == Some("HTTPS"),
            host: non_empty(action.host.as_deref())
                .unwrap_or(address)
                .to_owned(),
            port: probe::port(container, &action.port).ok_or_else(|| no_port(&action.port))?,
            path: format!("{slash}{path}"),
        })
    }

    /// Where a redirect leads; none if that is no URL.
    fn redirected(&self, location: &str) -> Option<Self> {
        let uri: Uri = location.parse().ok()?;
        let path = uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let Some(authority) = uri.authority() else {
            let directory = self
                .path
                .split('?')
                .next()
                .and_then(|path| path.rsplit_once('/'));
            let path = match directory {
                Some((directory, _)) if !location.starts_with('/') => {
                    format!("{directory}/{location}")
                }
                Some(_) | None => path.to_owned(),
            };
            return Some(Self {
                path,
                ..self.clone()
            });
        };
        let secure = uri
            .scheme_str()
            .map_or(self.secure, |scheme| scheme == "https");
        Some(Self {
            secure,
            host: authority.host().to_owned(),
            port: authority
                .port_u16()
                .unwrap_or(if secure { 443 } else { 80 }),
            path: path.to_owned(),
        })
    }

    /// Asks once, without following anything.
    async fn get(&self, action: &HTTPGetAction, purpose: &str) -> Result<Answer, String> {
        let request = self.request(action, purpose)?;
        let (host, port) = (self.host.as_str(), self.port);
        let stream = TcpStream::connect((host, port))
            .await
            .map_err(|error| dial_error(host, port, &error))?;
        if !self.secure {
            return exchange(stream, request).await;
        }
        let name = ServerName::try_from(self.host.clone()).map_err(|error| error.to_string())?;
        let stream = TlsConnector::from(trusting())
            .connect(name, stream)
            .await
            .map_err(|error| format!("tls: {error}"))?;
        exchange(stream, request).await
    }

    /// The spec's headers go before our own; an empty `Accept` means none.
    fn request(
        &self,
        action: &HTTPGetAction,
        purpose: &str,
    ) -> Result<Request<Empty<Bytes>>, String> {
        let given = |name: &str| {
            let mut headers = action.http_headers.iter().flatten();
            headers.find(|header| header.name.eq_ignore_ascii_case(name))
        };
        let mut request = Request::builder().uri(&self.path);
        for header in action.http_headers.iter().flatten() {
            let dropped = header.name.eq_ignore_ascii_case("accept") && header.value.is_empty();
            if !dropped {
                request = request.header(&header.name, &header.value);
            }
        }
        let own = [
            ("host", format!("{}:{}", self.host, self.port)),
            ("user-agent", user_agent(purpose)),
            ("accept", "*/*".to_owned()),
            ("connection", "close".to_owned()),
        ];
        for (name, value) in own {
            if given(name).is_none() {
                request = request.header(name, value);
            }
        }
        request
            .body(Empty::new())
            .map_err(|error| format!("the request cannot be made: {error}"))
    }
}

struct Answer {
    status: u16,
    location: Option<String>,
    body: Vec<u8>,
}

/// As the kubelet names itself: `kube-probe/1.37`, `kube-lifecycle/1.37`.
pub(super) fn user_agent(purpose: &str) -> String {
    let version = monopod_api::KUBERNETES_VERSION.trim_start_matches('v');
    let minor = version.rsplit_once('.').map_or(version, |(minor, _)| minor);
    format!("kube-{purpose}/{minor}")
}

async fn exchange<S>(stream: S, request: Request<Empty<Bytes>>) -> Result<Answer, String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    let connection = tokio::spawn(connection);
    let outcome = async {
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| error.to_string())?;
        let mut answer = Answer {
            status: response.status().as_u16(),
            location: response
                .headers()
                .get("location")
                .and_then(|value| value.to_str().ok())
                .map(str::to_owned),
            body: Vec::new(),
        };
        // A server that is cut off in the middle of its answer logs an error.
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| error.to_string())?;
            let data = frame.data_ref().map_or(&[][..], |data| data);
            let room = MAX_BODY - answer.body.len();
            answer.body.extend_from_slice(&data[..data.len().min(room)]);
            if data.len() > room {
                break;
            }
        }
        Ok(answer)
    };
    let answer = outcome.await;
    connection.abort();
    answer
}

/// Probes do not verify certificates, as upstream's do not.
fn trusting() -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(Trusting(Arc::clone(&provider)));
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has the default versions' cipher suites")
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    Arc::new(config)
}

#[derive(Debug)]
struct Trusting(Arc<CryptoProvider>);

impl ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    const OK: &str = "HTTP/1.1 204 No Content\r\n\r\n";

    /// Serves these answers, one for each connection, and keeps the requests.
    async fn server(answers: Vec<&'static str>) -> (u16, tokio::task::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = tokio::spawn(async move {
            let mut requests = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 1024];
                let length = stream.read(&mut request).await.unwrap();
                requests.push(String::from_utf8_lossy(&request[..length]).into_owned());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
            requests
        });
        (port, requests)
    }

    fn action(port: u16, more: &serde_json::Value) -> HTTPGetAction {
        let mut action = json!({"path": "healthz?full=1", "port": port});
        for (key, value) in more.as_object().unwrap() {
            action[key] = value.clone();
        }
        serde_json::from_value(action).unwrap()
    }

    async fn probe_it(answers: Vec<&'static str>) -> Outcome {
        let (port, _) = server(answers).await;
        let action = action(port, &json!({}));
        let timeout = Duration::from_secs(2);
        probe("127.0.0.1", &Container::default(), &action, timeout).await
    }

    #[tokio::test]
    async fn statuses_and_redirects() {
        const BAD: &str = "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n";
        const MOVED: &str = "HTTP/1.1 302 Found\r\nlocation: /next\r\ncontent-length: 0\r\n\r\n";
        const AWAY: &str =
            "HTTP/1.1 302 Found\r\nlocation: http://example.com/\r\ncontent-length: 4\r\n\r\naway";
        assert_eq!(probe_it(vec![OK]).await, Outcome::Success);
        assert_eq!(probe_it(vec![MOVED, OK]).await, Outcome::Success);
        let away = "Probe terminated redirects, Response body: away".to_owned();
        assert_eq!(probe_it(vec![AWAY]).await, Outcome::Warning(away));
        let bad = "HTTP probe failed with statuscode: 503".to_owned();
        assert_eq!(probe_it(vec![MOVED, BAD]).await, Outcome::Failure(bad));
        let Outcome::Failure(endless) = probe_it(vec![MOVED; 12]).await else {
            panic!("redirects end")
        };
        assert!(
            endless.ends_with("healthz?full=1\": stopped after 10 redirects"),
            "{endless}"
        );
        let Outcome::Failure(closed) = probe_it(vec![]).await else {
            panic!("nobody listens")
        };
        assert!(closed.contains("Get \"http://127.0.0.1:"), "{closed}");
    }

    #[tokio::test]
    async fn headers_are_the_specs_and_ours_where_it_has_none() {
        let (port, requests) = server(vec![OK, OK]).await;
        let headers = json!({"httpHeaders": [{"name": "Host", "value": "example.com"}, {"name": "User-Agent", "value": "mine"}, {"name": "accept", "value": ""}]});
        for action in [action(port, &json!({})), action(port, &headers)] {
            let timeout = Duration::from_secs(2);
            let outcome = probe("127.0.0.1", &Container::default(), &action, timeout).await;
            assert_eq!(outcome, Outcome::Success);
        }
        let requests = requests.await.unwrap();
        let lines = |at: usize| {
            requests[at]
                .lines()
                .map(str::to_lowercase)
                .collect::<Vec<_>>()
        };
        let (plain, given) = (lines(0), lines(1));
        assert_eq!(plain[0], "get /healthz?full=1 http/1.1");
        for line in [
            &format!("host: 127.0.0.1:{port}"),
            "user-agent: kube-probe/1.37",
            "accept: */*",
            "connection: close",
        ] {
            assert!(plain.iter().any(|l| l == line), "{line} in {plain:?}");
        }
        for line in ["host: example.com", "user-agent: mine"] {
            assert!(given.iter().any(|l| l == line), "{line} in {given:?}");
        }
        let names: Vec<_> = given
            .iter()
            .filter_map(|l| l.split_once(':'))
            .map(|(name, _)| name)
            .collect();
        assert_eq!(
            names
                .iter()
                .filter(|n| **n == "host" || **n == "user-agent")
                .count(),
            2,
            "{names:?}"
        );
        assert!(!names.contains(&"accept"));
    }

    #[tokio::test]
    async fn a_hook_takes_any_answer_and_falls_back_from_tls() {
        let (port, _) = server(vec!["HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"]).await;
        let container = Container::default();
        assert_eq!(
            hook("127.0.0.1", &container, &action(port, &json!({}))).await,
            Ok(None)
        );
        let (port, requests) = server(vec!["HTTP/1.1 400 Bad Request\r\n\r\n", OK]).await;
        let secure = action(port, &json!({"scheme": "HTTPS"}));
        let warned = hook("127.0.0.1", &container, &secure)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(warned.0, "LifecycleHTTPFallback");
        assert!(requests.await.unwrap()[1].contains("kube-lifecycle/1.37"));
    }

    #[tokio::test]
    async fn https_is_not_verified() {
        let certified = rcgen::generate_simple_self_signed(vec!["elsewhere".to_owned()]).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certified.cert.der().clone()],
                rustls_pki_types::PrivateKeyDer::try_from(certified.signing_key.serialize_der())
                    .unwrap(),
            )
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
            let mut stream = acceptor.accept(stream).await.unwrap();
            let mut request = [0; 1024];
            let _length = stream.read(&mut request).await.unwrap();
            stream.write_all(OK.as_bytes()).await.unwrap();
            stream.flush().await.unwrap();
        });
        let action = action(port, &json!({"scheme": "HTTPS"}));
        let timeout = Duration::from_secs(5);
        let outcome = probe("127.0.0.1", &Container::default(), &action, timeout).await;
        assert_eq!(outcome, Outcome::Success);
        server.await.unwrap();
    }

    #[test]
    fn redirects_lead_where_a_browser_would_go() {
        let url = Url {
            secure: false,
            host: "10.0.0.1".to_owned(),
            port: 8080,
            path: "/a/b?c".to_owned(),
        };
        let to = |location: &str| url.redirected(location).map(|url| url.to_string());
        assert_eq!(to("/x?y").as_deref(), Some("http://10.0.0.1:8080/x?y"));
        assert_eq!(
            to("https://10.0.0.1/x").as_deref(),
            Some("https://10.0.0.1:443/x")
        );
        assert_eq!(to("http://other:81/").as_deref(), Some("http://other:81/"));
        assert_eq!(to("http://a b/"), None);
    }
}
