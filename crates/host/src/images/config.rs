//! An image's configuration, and everything about an image but its layers' contents.

use super::ImageError;
use super::digest::Digest;
use super::manifest::{Descriptor, Manifest, Part, describe};
use super::source::Source;
use monopod_wire::ContainerImageConfig;
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::Path;

/// Largest document. The configuration must also fit into a message to the guest.
const DOCUMENT: u64 = 512 << 10;
/// Indexes may name other indexes, but not without end.
const DEPTH: usize = 4;

/// A layout's own index, which may lack what a registry's must have.
#[derive(Debug, Deserialize)]
struct Index {
    #[serde(default)]
    manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
struct Configuration {
    architecture: String,
    os: String,
    config: Option<Run>,
    rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
struct RootFs {
    diff_ids: Vec<Digest>,
}

/// Any of these may be absent or null.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Run {
    user: Option<String>,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: Option<String>,
    stop_signal: Option<String>,
    volumes: Option<BTreeMap<String, serde_json::Value>>,
    labels: Option<BTreeMap<String, String>>,
}

/// Everything about an image but its layers' contents.
#[derive(Debug)]
pub(super) struct Image {
    /// The manifest's digest.
    pub(super) digest: Digest,
    /// The name that the archive gives it, if it is a whole reference.
    pub(super) name: Option<String>,
    /// The layers, lowest first, each with the digest of its uncompressed form.
    pub(super) layers: Vec<(Descriptor, Digest)>,
    /// How to run it.
    pub(super) config: ContainerImageConfig,
}

impl Image {
    /// Bytes of the layers as they are in an archive or a registry.
    pub(super) fn compressed(&self) -> u64 {
        self.layers
            .iter()
            .fold(0, |sum, (layer, _)| sum.saturating_add(layer.size))
    }
}

/// The documents of an image from a registry, which fit together.
pub(crate) struct ManifestDocuments {
    manifest: Manifest,
    manifest_bytes: Vec<u8>,
    config_bytes: Vec<u8>,
}

impl ManifestDocuments {
    /// Checks that the configuration belongs to the manifest and is for this system.
    pub(crate) fn new(
        manifest: Manifest,
        manifest_bytes: Vec<u8>,
        config_bytes: Vec<u8>,
    ) -> Result<Self, ImageError> {
        configuration(&manifest, &config_bytes)?;
        Ok(Self {
            manifest,
            manifest_bytes,
            config_bytes,
        })
    }

    /// The manifest's digest.
    pub(crate) fn digest(&self) -> String {
        sum(&self.manifest_bytes)
    }

    /// The layers to download, each once.
    pub(crate) fn parts(&self) -> Vec<Part> {
        self.manifest.parts()
    }

    /// Bytes of the image in its registry.
    pub(crate) fn size(&self) -> u64 {
        let layers: u64 = self.parts().iter().map(|part| part.size).sum();
        layers.saturating_add((self.manifest_bytes.len() + self.config_bytes.len()) as u64)
    }

    /// Makes a directory that holds the layers a layout of this image.
    pub(crate) fn write(&self, layout: &Path) -> Result<(), ImageError> {
        let blobs = layout.join("blobs/sha256");
        let write = || {
            std::fs::create_dir_all(&blobs)?;
            for bytes in [&self.manifest_bytes, &self.config_bytes] {
                std::fs::write(blobs.join(hex::encode(Sha256::digest(bytes))), bytes)?;
            }
            let index = json!({"schemaVersion": 2, "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": self.digest(), "size": self.manifest_bytes.len(),
            }]});
            std::fs::write(layout.join("index.json"), index.to_string())
        };
        write().map_err(ImageError::io(format!("write {}", layout.display())))
    }
}

fn sum(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// Reads the documents of the one image for this system.
pub(super) fn read(source: &mut Source) -> Result<Image, ImageError> {
    let index: Index = parse(&source.index(DOCUMENT)?, "index.json")?;
    let candidates = resolve(source, index, DEPTH)?;
    let descriptor = match candidates.as_slice() {
        [one] => one,
        [] => {
            return Err(ImageError::Unsupported {
                what: "the image".into(),
                why: "there is none for linux/amd64".into(),
            });
        }
        [..] => {
            return Err(ImageError::Unsupported {
                what: "an archive of several images".into(),
                why: "it must hold one; copy the wanted one into an archive of its own".into(),
            });
        }
    };
    let manifest = describe(&whole(source, descriptor, "the manifest")?, "")?;
    let bytes = whole(source, manifest.config_descriptor(), "the configuration")?;
    let (configuration, layers) = configuration(&manifest, &bytes)?;
    let annotations = descriptor.annotations.as_ref();
    let annotated = |key| {
        annotations
            .and_then(|annotations| annotations.get(key))
            .cloned()
    };
    Ok(Image {
        digest: descriptor.digest.clone(),
        name: annotated("io.containerd.image.name").or_else(|| {
            // Often a tag alone, which names nothing.
            annotated("org.opencontainers.image.ref.name").filter(|name| name.contains('/'))
        }),
        layers,
        config: configuration.config.unwrap_or_default().into(),
    })
}

/// A layer, and the digest of its uncompressed form.
type Layer = (Descriptor, Digest);

/// The configuration of a manifest's image, and its layers with the digests that it gives them.
fn configuration(
    manifest: &Manifest,
    bytes: &[u8],
) -> Result<(Configuration, Vec<Layer>), ImageError> {
    if bytes.len() as u64 > DOCUMENT {
        return Err(ImageError::damaged(
            "the configuration",
            format!("it is larger than {DOCUMENT} bytes"),
        ));
    }
    let configuration: Configuration = parse(bytes, "the configuration")?;
    if (
        configuration.os.as_str(),
        configuration.architecture.as_str(),
    ) != ("linux", "amd64")
    {
        return Err(ImageError::Unsupported {
            what: format!(
                "an image for {}/{}",
                configuration.os, configuration.architecture
            ),
            why: "it must be for linux/amd64".into(),
        });
    }
    let diff_ids = &configuration.rootfs.diff_ids;
    if diff_ids.len() != manifest.layers().len() {
        return Err(ImageError::damaged(
            "the configuration",
            "it names another number of layers than the manifest",
        ));
    }
    let layers = manifest
        .layers()
        .iter()
        .cloned()
        .zip(diff_ids.iter().cloned())
        .collect();
    Ok((configuration, layers))
}

/// Manifests for this system, through nested indexes.
fn resolve(source: &mut Source, index: Index, depth: usize) -> Result<Vec<Descriptor>, ImageError> {
    let mut found: Vec<Descriptor> = Vec::new();
    for descriptor in index.manifests {
        if !descriptor.is_for_us() {
            continue;
        }
        if !descriptor.is_index() {
            found.push(descriptor);
        } else if depth == 0 {
            return Err(ImageError::damaged(
                "index.json",
                "indexes are nested too deeply",
            ));
        } else {
            let nested: Index = parse(&whole(source, &descriptor, "an index")?, "an index")?;
            for mut inner in resolve(source, nested, depth - 1)? {
                inner.annotations = inner.annotations.or_else(|| descriptor.annotations.clone());
                found.push(inner);
            }
        }
    }
    // The same image may have several names.
    found.sort_by(|a, b| a.digest.cmp(&b.digest));
    found.dedup_by(|a, b| a.digest == b.digest);
    Ok(found)
}

fn whole(source: &mut Source, descriptor: &Descriptor, what: &str) -> Result<Vec<u8>, ImageError> {
    if descriptor.size > DOCUMENT {
        return Err(ImageError::damaged(
            what,
            format!("it is larger than {DOCUMENT} bytes"),
        ));
    }
    source.whole(descriptor)
}

fn parse<T: serde::de::DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T, ImageError> {
    serde_json::from_slice(bytes).map_err(|source| ImageError::Document {
        what: what.into(),
        source,
    })
}

impl From<Run> for ContainerImageConfig {
    fn from(run: Run) -> Self {
        Self {
            entrypoint: run.entrypoint.unwrap_or_default(),
            cmd: run.cmd.unwrap_or_default(),
            env: run.env.unwrap_or_default(),
            working_dir: run.working_dir.unwrap_or_default(),
            user: run.user.unwrap_or_default(),
            stop_signal: run.stop_signal.unwrap_or_default(),
            volumes: run.volumes.unwrap_or_default().into_keys().collect(),
            labels: run.labels.unwrap_or_default(),
        }
    }
}
