//! The store's index: what references mean, and what is known of each image.

use super::ImageError;
use super::digest::Digest;
use jiff::Timestamp;
use monopod_core::image::access::Access;
use monopod_core::image::reference::{Reference, normalise};
use monopod_wire::ContainerImageConfig;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the format.
const VERSION: u32 = 2;

/// The whole index.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Index {
    version: u32,
    /// By reference in full, with a tag or a digest.
    pub(super) references: BTreeMap<String, Target>,
    /// By the digest of the image's manifest.
    pub(super) images: BTreeMap<Digest, Entry>,
}

/// What a reference means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Target {
    /// The image's manifest.
    pub(super) image: Digest,
    /// What the registry gave for the reference: the manifest, or an index that names it.
    pub(super) resolved: Digest,
}

/// What is known of an image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Entry {
    /// Bytes of its file.
    pub(super) size: u64,
    /// Digest of its file, by which it is verified before it is used again; none in images that
    /// the first version stored.
    #[serde(default)]
    pub(super) file: Option<Digest>,
    pub(super) config: ContainerImageConfig,
    pub(super) access: Access,
    pub(super) stored: Timestamp,
    pub(super) last_used: Timestamp,
}

/// The first version's: loaded images alone.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct First {
    #[serde(rename = "version")]
    _version: u32,
    images: BTreeMap<String, FirstEntry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct FirstEntry {
    digest: Digest,
    size: u64,
    config: ContainerImageConfig,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            version: VERSION,
            references: BTreeMap::new(),
            images: BTreeMap::new(),
        }
    }
}

impl Index {
    pub(super) fn parse(text: &[u8]) -> Result<Self, ImageError> {
        let document = |source| ImageError::Document {
            what: "the image store's index".into(),
            source,
        };
        let Version { version } = serde_json::from_slice(text).map_err(document)?;
        match version {
            VERSION => serde_json::from_slice(text).map_err(document),
            1 => serde_json::from_slice::<First>(text)
                .map(Self::from)
                .map_err(document),
            newer => Err(ImageError::Unsupported {
                what: format!("version {newer} of the image store's index"),
                why: "a later release of Monopod wrote it; use that one".into(),
            }),
        }
    }

    /// What a reference means, and its key. A digest may be the manifest's or an index's.
    pub(super) fn find(&self, wanted: &Reference) -> Option<(&str, &Target)> {
        let exact = self.references.get_key_value(&wanted.to_string());
        let by_digest = || {
            let digest = wanted.digest.as_deref()?;
            self.references.iter().find(|(key, target)| {
                let same = |d: &Digest| d.to_string() == digest;
                (same(&target.resolved) || same(&target.image))
                    && normalise(key).is_ok_and(|reference| reference.name == wanted.name)
            })
        };
        exact
            .or_else(by_digest)
            .map(|(key, target)| (key.as_str(), target))
    }

    /// Lets a reference mean an image that an operator loaded. What it meant before is not the
    /// operator's wish any more.
    pub(super) fn refer_loaded(&mut self, reference: &Reference, target: &Target) {
        let before = self
            .references
            .insert(reference.to_string(), target.clone());
        let Some(before) = before else { return };
        let still = self.references.values().any(|t| t.image == before.image);
        if let Some(entry) = self.images.get_mut(&before.image).filter(|_| !still) {
            entry.access.loaded = false;
        }
    }

    /// Lets a reference mean an image. The digest means it as well, also once the tag moves on.
    pub(super) fn refer(&mut self, reference: &Reference, target: &Target) {
        let by_digest = format!("{}@{}", reference.name, target.resolved);
        self.references
            .insert(reference.to_string(), target.clone());
        self.references.insert(by_digest, target.clone());
    }

    /// Forgets images, and what meant them.
    pub(super) fn forget(&mut self, images: &[Digest]) {
        self.images.retain(|digest, _| !images.contains(digest));
        let known = &self.images;
        self.references
            .retain(|_, target| known.contains_key(&target.image));
    }
}

impl From<First> for Index {
    fn from(first: First) -> Self {
        let mut index = Self::default();
        for (reference, entry) in first.images {
            let target = Target {
                image: entry.digest.clone(),
                resolved: entry.digest.clone(),
            };
            index.references.insert(reference, target);
            index.images.insert(
                entry.digest,
                Entry {
                    size: entry.size,
                    file: None,
                    config: entry.config,
                    access: Access {
                        loaded: true,
                        ..Access::default()
                    },
                    stored: Timestamp::UNIX_EPOCH,
                    last_used: Timestamp::UNIX_EPOCH,
                },
            );
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "sha256:1111111111111111111111111111111111111111111111111111111111111111";
    const TWO: &str = "sha256:2222222222222222222222222222222222222222222222222222222222222222";

    fn digest(text: &str) -> Digest {
        Digest::try_from(text.to_owned()).unwrap()
    }

    #[test]
    fn the_first_versions_index_is_understood() {
        let text = format!(
            r#"{{"version":1,"images":{{"monopod.local/nginx:latest":{{"digest":"{ONE}","size":3,"config":{{"cmd":["nginx"]}}}}}}}}"#
        );
        let index = Index::parse(text.as_bytes()).unwrap();
        let (_, target) = index
            .find(&normalise("monopod.local/nginx").unwrap())
            .unwrap();
        let entry = &index.images[&target.image];
        assert!(entry.access.loaded && entry.config.cmd == ["nginx"] && entry.size == 3);
        let again = serde_json::to_vec(&index).unwrap();
        assert_eq!(Index::parse(&again).unwrap(), index);
        let error = Index::parse(br#"{"version":3}"#).unwrap_err();
        assert!(error.to_string().contains("version 3"), "{error}");
    }

    #[test]
    fn digests_of_an_index_and_of_its_image_find_it_under_its_name_only() {
        let mut index = Index::default();
        let target = Target {
            image: digest(ONE),
            resolved: digest(TWO),
        };
        index.refer(&normalise("r.io/a:1").unwrap(), &target);
        for found in [
            "r.io/a:1".to_owned(),
            format!("r.io/a@{ONE}"),
            format!("r.io/a@{TWO}"),
            format!("r.io/a:9@{TWO}"),
        ] {
            assert!(index.find(&normalise(&found).unwrap()).is_some(), "{found}");
        }
        for missing in [
            "r.io/a:2".to_owned(),
            format!("r.io/b@{ONE}"),
            "a:1".to_owned(),
        ] {
            assert!(
                index.find(&normalise(&missing).unwrap()).is_none(),
                "{missing}"
            );
        }
        // The tag moves on; the digest stays.
        let moved = Target {
            image: digest(TWO),
            resolved: digest(ONE),
        };
        index.refer(&normalise("r.io/a:1").unwrap(), &moved);
        let (_, old) = index
            .find(&normalise(&format!("r.io/a@{TWO}")).unwrap())
            .unwrap();
        assert_eq!(*old, target);
    }
}
