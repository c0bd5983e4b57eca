//! Indexes and manifests: which image is for this system, and of which parts it is made.

use super::ImageError;
use super::digest::Digest;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// Layers of an image; Docker stops at 127.
const LAYERS: usize = 256;
/// Bytes of all layers together, as they are in a registry.
const COMPRESSED: u64 = 32 << 30;
/// Entries of an index; those in use have some dozens.
const ENTRIES: usize = 1024;

const CONFIGS: [&str; 2] = [
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
];
/// What layers are called; how they are packed is seen from their content.
const LAYER_TYPES: [&str; 8] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
];

/// Names a blob.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    #[serde(default)]
    pub(super) media_type: String,
    /// Its digest.
    pub(super) digest: Digest,
    /// Its size in bytes.
    pub(super) size: u64,
    pub(super) platform: Option<Platform>,
    #[serde(default)]
    pub(super) annotations: Option<BTreeMap<String, String>>,
}

impl Descriptor {
    /// Whether it is, or may be, of this system.
    pub(super) fn is_for_us(&self) -> bool {
        self.platform
            .as_ref()
            .is_none_or(|platform| platform.os == "linux" && platform.architecture == "amd64")
    }

    pub(super) fn is_index(&self) -> bool {
        is_index_type(&self.media_type)
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Platform {
    pub(super) architecture: String,
    pub(super) os: String,
}

/// A part of an image that is downloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Its digest.
    pub(crate) digest: Digest,
    /// Its size in bytes.
    pub(crate) size: u64,
}

/// Either kind of document: what is one and claims to be the other is refused.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(default)]
    schema_version: u32,
    #[serde(default)]
    media_type: String,
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

/// An image's manifest.
#[derive(Clone, Debug)]
pub(crate) struct Manifest {
    config: Descriptor,
    /// Lowest first.
    layers: Vec<Descriptor>,
}

impl Manifest {
    /// The configuration's digest.
    pub(crate) fn config(&self) -> &Digest {
        &self.config.digest
    }

    pub(super) fn config_descriptor(&self) -> &Descriptor {
        &self.config
    }

    pub(super) fn layers(&self) -> &[Descriptor] {
        &self.layers
    }

    /// The layers, each once.
    pub(crate) fn parts(&self) -> Vec<Part> {
        let mut seen = BTreeSet::new();
        self.layers
            .iter()
            .filter(|layer| seen.insert(layer.digest.clone()))
            .map(|layer| Part {
                digest: layer.digest.clone(),
                size: layer.size,
            })
            .collect()
    }
}

/// Follows an index one step: digest and type of the entry for this system; none if the document
/// is a manifest itself.
pub(crate) fn choose(
    bytes: &[u8],
    media_type: &str,
) -> Result<Option<(Digest, String)>, ImageError> {
    let document = parse(bytes, media_type)?;
    let Some(entries) = document.manifests else {
        return Ok(None);
    };
    entries
        .into_iter()
        .find(Descriptor::is_for_us)
        .map(|entry| Some((entry.digest, entry.media_type)))
        .ok_or_else(|| ImageError::Unsupported {
            what: "the image".into(),
            why: "there is none for linux/amd64".into(),
        })
}

/// Reads a manifest and checks that a host can make a disk of the image.
pub(crate) fn describe(bytes: &[u8], media_type: &str) -> Result<Manifest, ImageError> {
    let document = parse(bytes, media_type)?;
    let (Some(config), Some(layers)) = (document.config, document.layers) else {
        return Err(ImageError::Unsupported {
            what: "an index in the place of a manifest".into(),
            why: "indexes are nested too deeply".into(),
        });
    };
    let known = |kind: &str, all: &[&str]| kind.is_empty() || all.contains(&kind);
    if !known(&config.media_type, &CONFIGS) {
        return Err(ImageError::Unsupported {
            what: format!(
                "an artifact with a configuration of the type {:?}",
                config.media_type
            ),
            why: "it must be a container image".into(),
        });
    }
    if let Some(layer) = layers.iter().find(|l| !known(&l.media_type, &LAYER_TYPES)) {
        return Err(ImageError::Unsupported {
            what: format!("layer {} of the type {:?}", layer.digest, layer.media_type),
            why: "layers must be tar archives, plain or packed by gzip or zstd".into(),
        });
    }
    if layers.len() > LAYERS {
        return Err(ImageError::damaged(
            "the manifest",
            format!(
                "it names {} layers; at most {LAYERS} are supported",
                layers.len()
            ),
        ));
    }
    let total = layers
        .iter()
        .fold(0u64, |sum, layer| sum.saturating_add(layer.size));
    if total > COMPRESSED {
        return Err(ImageError::damaged(
            "the manifest",
            format!("its layers have {total} bytes; at most {COMPRESSED} are supported"),
        ));
    }
    Ok(Manifest { config, layers })
}

fn parse(bytes: &[u8], media_type: &str) -> Result<Document, ImageError> {
    let document: Document =
        serde_json::from_slice(bytes).map_err(|source| ImageError::Document {
            what: "the manifest".into(),
            source,
        })?;
    if document.schema_version == 1 {
        return Err(ImageError::Unsupported {
            what: "a manifest of Docker's first schema".into(),
            why: "push the image anew with a client of this decade".into(),
        });
    }
    let is_index = document.manifests.is_some();
    let is_manifest = document.config.is_some() && document.layers.is_some();
    if is_index == is_manifest
        || (is_index && (document.config.is_some() || document.layers.is_some()))
    {
        return Err(ImageError::damaged(
            "the manifest",
            "it is neither an index nor a manifest, or both at once",
        ));
    }
    for kind in [media_type, &document.media_type] {
        let says_index = is_index_type(kind);
        let says_manifest = kind.contains("image.manifest") || kind.contains("manifest.v2");
        if (says_index && !is_index) || (says_manifest && is_index) {
            return Err(ImageError::damaged(
                "the manifest",
                format!("it is something else than its type {kind:?} says"),
            ));
        }
    }
    if document
        .manifests
        .as_ref()
        .is_some_and(|all| all.len() > ENTRIES)
    {
        return Err(ImageError::damaged(
            "the index",
            format!("it has more than {ENTRIES} entries"),
        ));
    }
    Ok(document)
}

fn is_index_type(media_type: &str) -> bool {
    media_type.contains("image.index") || media_type.contains("manifest.list")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn digest(n: u8) -> String {
        format!("sha256:{}", format!("{n:02x}").repeat(32))
    }

    fn manifest() -> Value {
        json!({"schemaVersion": 2,
            "config": {"mediaType": CONFIGS[0], "digest": digest(1), "size": 2},
            "layers": [{"mediaType": LAYER_TYPES[1], "digest": digest(2), "size": 3}, {"mediaType": LAYER_TYPES[6], "digest": digest(2), "size": 3}]})
    }

    #[test]
    fn the_image_for_this_system_is_chosen() {
        let entry = |n, architecture| {
            json!({"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest(n), "size": 1,
            "platform": {"os": "linux", "architecture": architecture}})
        };
        let index = json!({"schemaVersion": 2, "manifests": [entry(1, "arm64"), entry(2, "amd64"), entry(3, "amd64")]}).to_string();
        let (chosen, _) = choose(index.as_bytes(), "application/vnd.oci.image.index.v1+json")
            .unwrap()
            .unwrap();
        assert_eq!(chosen.to_string(), digest(2));
        let other = json!({"manifests": [entry(1, "arm64")]}).to_string();
        let error = choose(other.as_bytes(), "").unwrap_err().to_string();
        assert!(error.contains("linux/amd64"), "{error}");
        let manifest = manifest().to_string();
        assert_eq!(choose(manifest.as_bytes(), "").unwrap(), None);
        assert_eq!(describe(manifest.as_bytes(), "").unwrap().parts().len(), 1);
    }

    #[test]
    fn what_is_no_image_is_named() {
        let with = |path: &str, value: Value| {
            let mut document = manifest();
            *document.pointer_mut(path).unwrap() = value;
            document
        };
        let mut both = manifest();
        both["manifests"] = json!([]);
        for (document, kind, named) in [
            (with("/schemaVersion", json!(1)), "", "first schema"),
            (
                with(
                    "/config/mediaType",
                    json!("application/vnd.cncf.helm.config.v1+json"),
                ),
                "",
                "helm",
            ),
            (
                with(
                    "/layers/0/mediaType",
                    json!("application/vnd.oci.image.layer.v1.tar+gzip+encrypted"),
                ),
                "",
                "encrypted",
            ),
            (
                with("/layers/0/size", json!(u64::MAX)),
                "",
                "bytes; at most",
            ),
            (
                with("/layers", json!(vec![manifest()["layers"][0].clone(); 300])),
                "",
                "300 layers",
            ),
            (
                with("/layers/0/digest", json!("md5:00")),
                "",
                "the manifest",
            ),
            (
                manifest(),
                "application/vnd.oci.image.index.v1+json",
                "something else",
            ),
            (both, "", "both at once"),
            (json!({}), "", "neither"),
        ] {
            let error = describe(document.to_string().as_bytes(), kind).unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_documents_do_no_harm(bytes: Vec<u8>, at in 0usize..200, byte: u8) {
            let mut changed = manifest().to_string().into_bytes();
            let length = changed.len();
            changed[at % length] = byte;
            for bytes in [&bytes, &changed] {
                let _chosen = choose(bytes, "").is_ok();
                let _described = describe(bytes, "").is_ok();
            }
        }
    }
}
