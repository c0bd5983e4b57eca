//! Images made for the tests, and how they are pushed.

use monopod_core::image::keyring::Credential;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::io::Write;

pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";

pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// A blob or a document with its type.
#[derive(Clone)]
pub(crate) struct Blob {
    pub(crate) bytes: Vec<u8>,
    pub(crate) media_type: &'static str,
}

impl Blob {
    pub(crate) fn digest(&self) -> String {
        digest(&self.bytes)
    }

    pub(crate) fn descriptor(&self) -> Value {
        json!({"mediaType": self.media_type, "digest": self.digest(), "size": self.bytes.len()})
    }
}

/// An image: its layers, its configuration and its manifest.
#[derive(Clone)]
pub(crate) struct Image {
    pub(crate) blobs: Vec<Blob>,
    pub(crate) manifest: Blob,
}

/// How layers are packed.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Packing {
    Plain,
    Gzip,
    Zstd,
}

/// A layer of one file.
pub(crate) fn layer(path: &str, content: &[u8]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    header.set_cksum();
    builder.append_data(&mut header, path, content).unwrap();
    builder.into_inner().unwrap()
}

/// Bytes that no packing makes smaller.
pub(crate) fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
        .collect()
}

pub(crate) fn pack(plain: &[u8], packing: Packing) -> Vec<u8> {
    match packing {
        Packing::Plain => plain.to_vec(),
        Packing::Gzip => {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(plain).unwrap();
            encoder.finish().unwrap()
        }
        Packing::Zstd => zstd::encode_all(plain, 1).unwrap(),
    }
}

impl Image {
    /// An image of these layers, in OCI's or in Docker's words.
    pub(crate) fn new(layers: &[(Vec<u8>, Packing)], docker: bool) -> Self {
        let mut blobs: Vec<Blob> = layers
            .iter()
            .map(|(plain, packing)| Blob {
                bytes: pack(plain, *packing),
                media_type: match (packing, docker) {
                    (Packing::Plain, false) => "application/vnd.oci.image.layer.v1.tar",
                    (Packing::Gzip, false) => "application/vnd.oci.image.layer.v1.tar+gzip",
                    (Packing::Zstd, _) => "application/vnd.oci.image.layer.v1.tar+zstd",
                    (Packing::Plain, true) => "application/vnd.docker.image.rootfs.diff.tar",
                    (Packing::Gzip, true) => "application/vnd.docker.image.rootfs.diff.tar.gzip",
                },
            })
            .collect();
        let diff_ids: Vec<String> = layers.iter().map(|(plain, _)| digest(plain)).collect();
        let config = json!({
            "architecture": "amd64", "os": "linux", "config": {"Cmd": ["/run"], "Env": ["A=b"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let config = Blob {
            bytes: config.to_string().into_bytes(),
            media_type: if docker {
                "application/vnd.docker.container.image.v1+json"
            } else {
                "application/vnd.oci.image.config.v1+json"
            },
        };
        let media_type = if docker {
            DOCKER_MANIFEST
        } else {
            OCI_MANIFEST
        };
        let manifest = json!({
            "schemaVersion": 2, "mediaType": media_type, "config": config.descriptor(),
            "layers": blobs.iter().map(Blob::descriptor).collect::<Vec<_>>(),
        });
        blobs.push(config);
        Self {
            blobs,
            manifest: Blob {
                bytes: manifest.to_string().into_bytes(),
                media_type,
            },
        }
    }

    /// One small layer with a file `name` in it.
    pub(crate) fn small(name: &str) -> Self {
        Self::new(&[(layer(name, name.as_bytes()), Packing::Gzip)], false)
    }
}

/// An index in which the image stands beside one for another system.
pub(crate) fn index(image: &Image, media_type: &'static str) -> Blob {
    let entry = |architecture: &str, digest: String| {
        json!({"mediaType": image.manifest.media_type, "digest": digest, "size": image.manifest.bytes.len(),
            "platform": {"os": "linux", "architecture": architecture}})
    };
    let index = json!({"schemaVersion": 2, "mediaType": media_type, "manifests": [
        entry("arm64", image.manifest.digest()), entry("amd64", image.manifest.digest())]});
    Blob {
        bytes: index.to_string().into_bytes(),
        media_type,
    }
}

/// Pushes to a registry under its base URL, such as `http://127.0.0.1:5000`.
pub(crate) struct Pusher {
    client: reqwest::Client,
    base: String,
    shows: Shows,
}

enum Shows {
    Password(Credential),
    Token(String),
}

impl Pusher {
    pub(crate) fn new(base: &str, credential: Credential, tls: rustls::ClientConfig) -> Self {
        Self::showing(base, Shows::Password(credential), tls)
    }

    pub(crate) fn with_token(base: &str, token: String, tls: rustls::ClientConfig) -> Self {
        Self::showing(base, Shows::Token(token), tls)
    }

    fn showing(base: &str, shows: Shows, tls: rustls::ClientConfig) -> Self {
        let client = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .no_proxy()
            .build()
            .unwrap();
        Self {
            client,
            base: base.to_owned(),
            shows,
        }
    }

    fn with(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.shows {
            Shows::Password(c) => request.basic_auth(&c.username, Some(&c.password)),
            Shows::Token(token) => request.bearer_auth(token),
        }
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> reqwest::Response {
        let response = self.with(request).send().await.unwrap();
        let status = response.status();
        assert!(
            status.is_success(),
            "{status}: {}",
            response.text().await.unwrap()
        );
        response
    }

    pub(crate) async fn image(&self, name: &str, tag: &str, image: &Image) {
        for blob in &image.blobs {
            let begin = format!("{}/v2/{name}/blobs/uploads/", self.base);
            let answer = self.send(self.client.post(begin)).await;
            let location = answer.headers()["location"].to_str().unwrap();
            let mut url = reqwest::Url::parse(&self.base)
                .unwrap()
                .join(location)
                .unwrap();
            url.query_pairs_mut().append_pair("digest", &blob.digest());
            let put = self.client.put(url).body(blob.bytes.clone());
            self.send(put).await;
        }
        self.manifest(name, tag, &image.manifest).await;
    }

    pub(crate) async fn manifest(&self, name: &str, tag: &str, manifest: &Blob) {
        let url = format!("{}/v2/{name}/manifests/{tag}", self.base);
        let put = self
            .client
            .put(url)
            .header("content-type", manifest.media_type)
            .body(manifest.bytes.clone());
        self.send(put).await;
    }
}
