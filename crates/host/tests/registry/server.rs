//! Servers: Debian's registry with its own storage and port, and byte pipes that break.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A running registry, ended when it is dropped.
pub(crate) struct Registry {
    child: Child,
    directory: tempfile::TempDir,
    pub(crate) port: u16,
    /// PEM file of the authority that its certificate is from, if it speaks TLS.
    pub(crate) ca: Option<PathBuf>,
}

/// What a registry wants to see.
pub(crate) enum Wants {
    Nothing,
    /// The user `right` with the password `right`, or `right2` twice.
    Password,
    /// A token of this server, whose certificate is in this file.
    Token {
        realm: String,
        certificate: PathBuf,
    },
}

/// bcrypt of `right` and of `right2`, each for the user of the same name.
const ACCOUNTS: &str = "right:$2b$05$abcdefghijklmnopqrstuu8xaCxxL82bnl.UY74PMksDxIJShppPC\n\
                        right2:$2b$05$abcdefghijklmnopqrstuuELnzw.A.SCg3HdD8h7UfHs1jhZkJ7DO\n";

/// A port that is free now.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

impl Registry {
    /// Starts a registry at a free port; at another one if somebody else was faster.
    pub(crate) fn start(wants: &Wants, tls: bool) -> Self {
        let mut tries = 0;
        loop {
            match Self::try_start(wants, tls) {
                Ok(registry) => return registry,
                Err(log) => assert!(tries < 10, "no registry: {log}"),
            }
            tries += 1;
        }
    }

    fn try_start(wants: &Wants, tls: bool) -> Result<Self, String> {
        let directory = tempfile::tempdir().unwrap();
        let port = free_port();
        let at = |name: &str| directory.path().join(name);
        let (mut http, mut ca) = (String::new(), None);
        if tls {
            let key = rcgen::KeyPair::generate().unwrap();
            let parameters = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
            let certificate = parameters.self_signed(&key).unwrap();
            std::fs::write(at("cert.pem"), certificate.pem()).unwrap();
            std::fs::write(at("key.pem"), key.serialize_pem()).unwrap();
            http = format!(
                "  tls:\n    certificate: {}\n    key: {}\n",
                at("cert.pem").display(),
                at("key.pem").display()
            );
            ca = Some(at("cert.pem"));
        }
        let auth = match wants {
            Wants::Nothing => String::new(),
            Wants::Password => {
                std::fs::write(at("accounts"), ACCOUNTS).unwrap();
                format!(
                    "auth:\n  htpasswd:\n    realm: test\n    path: {}\n",
                    at("accounts").display()
                )
            }
            Wants::Token { realm, certificate } => format!(
                "auth:\n  token:\n    realm: {realm}\n    service: test-registry\n    issuer: test-issuer\n    rootcertbundle: {}\n",
                certificate.display()
            ),
        };
        let text = format!(
            "version: 0.1\nlog:\n  level: info\n  accesslog:\n    disabled: false\nstorage:\n  filesystem:\n    rootdirectory: {}\n  delete:\n    enabled: true\nhttp:\n  addr: 127.0.0.1:{port}\n{http}{auth}",
            at("storage").display()
        );
        std::fs::write(at("config.yml"), text).unwrap();
        let log = std::fs::File::create(at("log")).unwrap();
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(at("config.yml"))
            .env("OTEL_TRACES_EXPORTER", "none")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("the Debian package docker-registry is installed");
        let mut registry = Self {
            child,
            directory,
            port,
            ca,
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        // Only its own word says that it is not somebody else who listens there.
        while !registry.log().contains("listening on") {
            let ended = registry.child.try_wait().unwrap().is_some();
            if ended || Instant::now() >= deadline {
                return Err(registry.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            if Instant::now() >= deadline {
                return Err(registry.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(registry)
    }

    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn url(&self) -> String {
        let scheme = if self.ca.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.host())
    }

    pub(crate) fn log(&self) -> String {
        let bytes = std::fs::read(self.directory.path().join("log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// How often something was fetched, by the access log.
    pub(crate) fn fetches(&self, part: &str) -> usize {
        self.log()
            .lines()
            .filter(|line| line.contains("\"GET ") && line.contains(part))
            .count()
    }

    /// The file in which it keeps a blob.
    pub(crate) fn stored(&self, digest: &str) -> PathBuf {
        let hex = digest.trim_start_matches("sha256:");
        self.directory.path().join(format!(
            "storage/docker/registry/v2/blobs/sha256/{}/{hex}/data",
            &hex[..2]
        ))
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Passes bytes to a registry and breaks each connection after so many of its answer.
pub(crate) struct Pipe {
    pub(crate) port: u16,
    pub(crate) passed: Arc<AtomicU64>,
    limit: Arc<AtomicUsize>,
}

impl Pipe {
    pub(crate) fn to(port: u16, limit: usize) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let own = listener.local_addr().unwrap().port();
        let (passed, limit) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicUsize::new(limit)),
        );
        let (count, most) = (Arc::clone(&passed), Arc::clone(&limit));
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
                let (count, most) = (Arc::clone(&count), Arc::clone(&most));
                let up = (client.try_clone().unwrap(), server.try_clone().unwrap());
                std::thread::spawn(move || drop(std::io::copy(&mut &up.0, &mut &up.1)));
                std::thread::spawn(move || pass(&server, &client, &count, &most));
            }
        });
        Self {
            port: own,
            passed,
            limit,
        }
    }

    pub(crate) fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::SeqCst);
    }
}

fn pass(mut server: &TcpStream, mut client: &TcpStream, count: &AtomicU64, limit: &AtomicUsize) {
    let mut buffer = [0; 16 << 10];
    let mut passed = 0;
    while let Ok(read) = server.read(&mut buffer) {
        if read == 0 || client.write_all(&buffer[..read]).is_err() {
            break;
        }
        passed += read;
        count.fetch_add(read as u64, Ordering::SeqCst);
        if passed >= limit.load(Ordering::SeqCst) {
            break;
        }
    }
    drop(server.shutdown(std::net::Shutdown::Both));
    drop(client.shutdown(std::net::Shutdown::Both));
}

/// A server that answers each path as it is told, whatever that is.
pub(crate) fn answering(
    answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let answer = Arc::new(answer);
    // The thread ends with the test's process.
    std::thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let answer = Arc::clone(&answer);
            std::thread::spawn(move || {
                let mut request = Vec::new();
                let mut byte = [0];
                while !request.ends_with(b"\r\n\r\n") && request.len() < 64 << 10 {
                    match client.read(&mut byte) {
                        Ok(1) => request.push(byte[0]),
                        Ok(_) | Err(_) => return,
                    }
                }
                answer(&String::from_utf8_lossy(&request), &mut client);
            });
        }
    });
    address
}

/// A whole answer. The connection is closed after it.
pub(crate) fn reply(client: &mut TcpStream, status: &str, headers: &str, body: &[u8]) {
    let head = format!(
        "HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    drop(client.write_all(head.as_bytes()));
    drop(client.write_all(body));
}

/// A file of registries for the puller.
pub(crate) fn write_config(directory: &Path, text: &str) -> PathBuf {
    let path = directory.join("registries.yaml");
    std::fs::write(&path, text).unwrap();
    path
}
