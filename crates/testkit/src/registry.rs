//! Debian's own registry on loopback, and how an image gets into it.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// bcrypt of `right`.
const ACCOUNT: &str = "right:$2b$05$abcdefghijklmnopqrstuu8xaCxxL82bnl.UY74PMksDxIJShppPC\n";
/// `right:right` in base64.
const AUTHORIZATION: &str = "Basic cmlnaHQ6cmlnaHQ=";

/// A running registry, ended when it is dropped.
#[derive(Debug)]
pub struct Registry {
    child: Child,
    directory: tempfile::TempDir,
    port: u16,
}

impl Registry {
    /// Starts a registry at a port. A private one knows the user `right` with the password `right`.
    ///
    /// # Panics
    /// If the Debian package `docker-registry` is missing or the port is taken.
    pub fn start(port: u16, private: bool) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let at = |name: &str| directory.path().join(name);
        let auth = if private {
            std::fs::write(at("accounts"), ACCOUNT).expect("written");
            format!(
                "auth:\n  htpasswd:\n    realm: test\n    path: {}\n",
                at("accounts").display()
            )
        } else {
            String::new()
        };
        let config = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: 127.0.0.1:{port}\n{auth}",
            at("storage").display()
        );
        std::fs::write(at("config.yml"), config).expect("written");
        let log = std::fs::File::create(at("log")).expect("created");
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(at("config.yml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log)
            .spawn()
            .expect("the Debian package docker-registry is installed");
        let registry = Self {
            child,
            directory,
            port,
        };
        crate::wait("the registry listens", Duration::from_secs(20), || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port))
                .map(drop)
                .map_err(|error| format!("{error}: {}", registry.log()))
        });
        registry
    }

    /// Host and port, as references have it.
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// What it logged.
    pub fn log(&self) -> String {
        let bytes = std::fs::read(self.directory.path().join("log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Pushes the image of an OCI archive with a label of its own, so that it is another image than
    /// what the cluster has loaded. Gives its digest.
    ///
    /// # Panics
    /// If the registry refuses it.
    pub fn push(&self, archive: &Path, name: &str, tag: &str) -> String {
        let layout = tempfile::tempdir().expect("a temporary directory");
        let unpacked = Command::new("tar")
            .arg("-xf")
            .arg(archive)
            .arg("-C")
            .arg(layout.path())
            .status();
        assert!(unpacked.is_ok_and(|status| status.success()), "unpacked");
        let blob = |digest: &str| {
            let hex = digest.trim_start_matches("sha256:");
            std::fs::read(layout.path().join("blobs/sha256").join(hex)).expect("a blob")
        };
        let index = std::fs::read(layout.path().join("index.json")).expect("an index");
        let index: Value = serde_json::from_slice(&index).expect("JSON");
        let digest = index["manifests"][0]["digest"].as_str().expect("a digest");
        let bytes = blob(digest);
        let mut manifest: Value = serde_json::from_slice(&bytes).expect("JSON");
        let mut blobs: Vec<Vec<u8>> = manifest["layers"]
            .as_array()
            .expect("layers")
            .iter()
            .filter_map(|layer| Some(blob(layer["digest"].as_str()?)))
            .collect();
        let config = blob(manifest["config"]["digest"].as_str().expect("a digest"));
        let mut config: Value = serde_json::from_slice(&config).expect("JSON");
        config["config"]["Labels"] = json!({"pushed-as": format!("{name}:{tag}")});
        let config = config.to_string().into_bytes();
        manifest["config"]["digest"] = json!(sum(&config));
        manifest["config"]["size"] = json!(config.len());
        blobs.push(config);
        for bytes in blobs {
            let digest = sum(&bytes);
            let begun = self.request("POST", &format!("/v2/{name}/blobs/uploads/"), "", &[]);
            let location = begun
                .lines()
                .find_map(|line| line.strip_prefix("Location: "))
                .expect("an upload begins");
            let path = location
                .split_once(&self.host())
                .map_or(location, |(_, path)| path);
            let put = self.request(
                "PUT",
                &format!("{}&digest={digest}", path.trim()),
                "application/octet-stream",
                &bytes,
            );
            assert!(put.starts_with("HTTP/1.1 201"), "{put}");
        }
        let bytes = manifest.to_string().into_bytes();
        let media_type = manifest["mediaType"].as_str().expect("a type");
        let put = self.request(
            "PUT",
            &format!("/v2/{name}/manifests/{tag}"),
            media_type,
            &bytes,
        );
        assert!(put.starts_with("HTTP/1.1 201"), "{put}");
        sum(&bytes)
    }

    fn request(&self, method: &str, path: &str, media_type: &str, body: &[u8]) -> String {
        let mut stream =
            TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).expect("the registry listens");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nAuthorization: {AUTHORIZATION}\r\nContent-Type: {media_type}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.host(),
            body.len()
        );
        let mut answer = Vec::new();
        stream
            .write_all(head.as_bytes())
            .and_then(|()| stream.write_all(body))
            .and_then(|()| stream.read_to_end(&mut answer))
            .expect("the registry answers");
        String::from_utf8_lossy(&answer).into_owned()
    }
}

fn sum(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

impl Drop for Registry {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
