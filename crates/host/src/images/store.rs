//! The images that this machine has.

use super::digest::Digest;
use super::index::{Entry, Index, Target};
use super::source::Source;
use super::{ImageError, config, flatten, layer, squash};
use crate::files::{absent_is_fine, space};
use crate::garbage::Uses;
use jiff::{SignedDuration, Timestamp};
use monopod_core::image::access::Access;
use monopod_core::image::garbage;
use monopod_core::image::reference::{Reference, normalise};
use monopod_wire::ContainerImageConfig;
use rustix::fs::FlockOperation;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// How exactly the last use is known; each note writes the index.
const NOTE: SignedDuration = SignedDuration::from_mins(1);
/// Prefix of directories in which images are made.
const WORK: &str = ".make-";

/// Images in a directory. Several processes may use it at once.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
    /// Files that this process has verified.
    verified: Arc<Mutex<BTreeSet<Digest>>>,
}

/// An image that can be given to a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredImage {
    /// The reference in full.
    pub reference: String,
    /// `sha256:…` of the image's manifest.
    pub digest: String,
    /// `name@sha256:…` of what the reference means in its registry.
    pub id: String,
    /// The flattened file system.
    pub squashfs: PathBuf,
    /// Its size in bytes.
    pub size: u64,
    /// How to run it.
    pub config: ContainerImageConfig,
    /// Who may use it.
    pub access: Access,
    /// When a pod last began to use it, or it was stored.
    pub last_used: Timestamp,
}

/// An image that was pulled: what it was asked for as, and what the registry said.
#[derive(Clone, Debug)]
pub(crate) struct Pulled<'a> {
    /// As it was asked for.
    pub(crate) reference: &'a Reference,
    /// What the registry gave for it.
    pub(crate) resolved: &'a Digest,
    /// Fingerprint of the credential that reached it; none if none was needed.
    pub(crate) fingerprint: Option<&'a str>,
}

impl Store {
    /// Uses a directory, which is made if it is missing.
    pub fn open(directory: &Path) -> Result<Self, ImageError> {
        std::fs::create_dir_all(directory)
            .map_err(ImageError::io(format!("create {}", directory.display())))?;
        Ok(Self {
            directory: directory.to_owned(),
            verified: Arc::default(),
        })
    }

    /// The store's directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Adds the image of an OCI archive or layout directory, under a name or the archive's own.
    ///
    /// Blocks: it reads and writes the whole image.
    pub fn load(&self, path: &Path, name: Option<&str>) -> Result<StoredImage, ImageError> {
        let mut source = Source::open(path)?;
        let image = config::read(&mut source)?;
        let Some(name) = name.or(image.name.as_deref()) else {
            return Err(ImageError::Unsupported {
                what: "an archive that does not name its image".into(),
                why: "give it a name with --name".into(),
            });
        };
        let reference = normalise(name)?;
        if reference.digest.is_some() {
            return Err(ImageError::InvalidName {
                reference: name.into(),
                why: "an image is stored under a tag; its digest follows from its content",
            });
        }
        let target = Target {
            image: image.digest.clone(),
            resolved: image.digest.clone(),
        };
        self.add(&mut source, image, &reference, &target, |index| {
            index.refer_loaded(&reference, &target);
            if let Some(entry) = index.images.get_mut(&target.image) {
                entry.access.loaded = true;
            }
        })
    }

    /// Adds what was downloaded into a layout directory. Blocks as [`Store::load`] does.
    pub(crate) fn add_pulled(
        &self,
        layout: &Path,
        pulled: &Pulled<'_>,
    ) -> Result<StoredImage, ImageError> {
        let mut source = Source::open(layout)?;
        let image = config::read(&mut source)?;
        let target = Target {
            image: image.digest.clone(),
            resolved: pulled.resolved.clone(),
        };
        self.add(&mut source, image, pulled.reference, &target, |index| {
            index.refer(pulled.reference, &target);
            if let Some(entry) = index.images.get_mut(&target.image) {
                entry
                    .access
                    .prove(&pulled.reference.name, pulled.fingerprint);
            }
        })
    }

    fn add(
        &self,
        source: &mut Source,
        image: config::Image,
        reference: &Reference,
        target: &Target,
        refer: impl FnOnce(&mut Index),
    ) -> Result<StoredImage, ImageError> {
        let known = self.index()?.images.contains_key(&image.digest);
        let made = if known && self.file(&image.digest).exists() {
            None
        } else {
            Some(self.make(source, &image)?)
        };
        let now = Timestamp::now();
        self.change(|index| {
            if let Some(made) = made {
                let size = self.place(&image.digest, &made)?;
                index
                    .images
                    .entry(image.digest.clone())
                    .or_insert_with(|| Entry {
                        size,
                        file: None,
                        config: image.config,
                        access: Access::default(),
                        stored: now,
                        last_used: now,
                    });
                if let Some(entry) = index.images.get_mut(&image.digest) {
                    (entry.size, entry.file) = (size, Some(made.sum));
                }
            }
            refer(index);
            let entry = index
                .images
                .get_mut(&image.digest)
                .ok_or_else(|| ImageError::damaged("the image", "it was removed meanwhile"))?;
            entry.last_used = now;
            Ok(self.stored(&reference.to_string(), target, entry.clone()))
        })
    }

    /// Uses what is stored for a reference that a registry just gave for these credentials; none
    /// if the image is not here, or must not be given for this name without a download.
    pub(crate) fn reuse(
        &self,
        image: &str,
        pulled: &Pulled<'_>,
    ) -> Result<Option<StoredImage>, ImageError> {
        let name = &pulled.reference.name;
        let Some(digest) = self
            .index()?
            .images
            .iter()
            .find(|(digest, entry)| digest.to_string() == image && entry.access.covers(name))
            .map(|(digest, _)| digest.clone())
        else {
            return Ok(None);
        };
        if !self.verify(&digest)? {
            return Ok(None);
        }
        self.change(|index| {
            let Some(entry) = index.images.get_mut(&digest) else {
                return Ok(None);
            };
            entry.access.prove(name, pulled.fingerprint);
            entry.last_used = Timestamp::now();
            let entry = entry.clone();
            let target = Target {
                image: digest.clone(),
                resolved: pulled.resolved.clone(),
            };
            index.refer(pulled.reference, &target);
            let reference = pulled.reference.to_string();
            Ok(Some(self.stored(&reference, &target, entry)))
        })
    }

    /// The image that a pod's reference means; none if it is not here.
    pub fn resolve(&self, reference: &str) -> Result<Option<StoredImage>, ImageError> {
        self.find(&normalise(reference)?)
    }

    /// The image that a reference means; none if it is not here.
    pub fn find(&self, wanted: &Reference) -> Result<Option<StoredImage>, ImageError> {
        let index = self.index()?;
        let found = index.find(wanted);
        Ok(found.and_then(|(key, target)| {
            let entry = index.images.get(&target.image)?.clone();
            Some(self.stored(key, target, entry))
        }))
    }

    /// The image that a reference means, verified and noted as used.
    pub(crate) fn take(&self, wanted: &Reference) -> Result<Option<StoredImage>, ImageError> {
        let Some(image) = self.find(wanted)? else {
            return Ok(None);
        };
        let digest = Digest::try_from(image.digest.clone())
            .map_err(|why| ImageError::damaged("the store's index", why))?;
        if !self.verify(&digest)? {
            return Ok(None);
        }
        if Timestamp::now().duration_since(image.last_used) >= NOTE {
            self.change(|index| {
                if let Some(entry) = index.images.get_mut(&digest) {
                    entry.last_used = Timestamp::now();
                }
                Ok(())
            })?;
        }
        Ok(Some(image))
    }

    /// All images, by reference.
    pub fn list(&self) -> Result<Vec<StoredImage>, ImageError> {
        let index = self.index()?;
        let all = index.references.iter().filter_map(|(key, target)| {
            let entry = index.images.get(&target.image)?.clone();
            Some(self.stored(key, target, entry))
        });
        Ok(all.collect())
    }

    /// Removes an image by one of its references, with all references that mean it.
    pub fn remove(&self, reference: &str) -> Result<Option<StoredImage>, ImageError> {
        let Some(image) = self.resolve(reference)? else {
            return Ok(None);
        };
        self.discard(std::slice::from_ref(&image.digest), Timestamp::MAX)?;
        Ok(Some(image))
    }

    /// What is stored and how much room there is, for the choice of what to remove.
    pub(crate) fn inventory(
        &self,
        in_use: &Uses,
    ) -> Result<(Vec<garbage::Stored>, garbage::Space), ImageError> {
        let index = self.index()?;
        // What is no reference means nothing.
        let meant: BTreeSet<&Digest> = in_use
            .references
            .iter()
            .filter_map(|reference| Some(&index.find(&normalise(reference).ok()?)?.1.image))
            .collect();
        let stored = index.images.iter().map(|(digest, entry)| {
            let named = meant.contains(digest);
            let digest = digest.to_string();
            garbage::Stored {
                kept: entry.access.loaded || named || in_use.digests.contains(&digest),
                size: entry.size,
                last_used: entry.last_used,
                digest,
            }
        });
        let space = space(&self.directory).map_err(ImageError::reading(&self.directory))?;
        Ok((stored.collect(), space))
    }

    /// Removes images by the digests of their manifests, unless they were used after `until`.
    pub(crate) fn discard(&self, digests: &[String], until: Timestamp) -> Result<(), ImageError> {
        self.change(|index| {
            let gone: Vec<Digest> = digests
                .iter()
                .filter_map(|digest| Digest::try_from(digest.clone()).ok())
                .filter(|digest| {
                    let entry = index.images.get(digest);
                    entry.is_none_or(|entry| entry.last_used <= until)
                })
                .collect();
            index.forget(&gone);
            for digest in &gone {
                self.verified().remove(digest);
                let file = self.file(digest);
                absent_is_fine(std::fs::remove_file(&file))
                    .map_err(ImageError::io(format!("remove {}", file.display())))?;
            }
            Ok(())
        })
    }

    /// Removes what processes left that ended while they made an image.
    pub(crate) fn sweep(&self) -> Result<(), ImageError> {
        let sweep = || {
            for entry in std::fs::read_dir(&self.directory)? {
                let entry = entry?;
                if !entry.file_name().to_string_lossy().starts_with(WORK) {
                    continue;
                }
                let directory = File::open(entry.path())?;
                // Whoever works in it holds the lock.
                match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
                    Ok(()) => std::fs::remove_dir_all(entry.path())?,
                    Err(rustix::io::Errno::WOULDBLOCK) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(())
        };
        sweep().map_err(ImageError::reading(&self.directory))
    }

    fn make(&self, source: &mut Source, image: &config::Image) -> Result<Made, ImageError> {
        let writing = || ImageError::io(format!("write to {}", self.directory.display()));
        let work = tempfile::Builder::new()
            .prefix(WORK)
            .tempdir_in(&self.directory)
            .map_err(writing())?;
        let lock = File::open(work.path()).map_err(writing())?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|error| writing()(error.into()))?;
        let unfinished = work.path().join("squashfs");
        let budget = layer::budget(image.compressed());
        let tree = flatten::survey(source, &image.layers, budget)?;
        squash::make(&unfinished, tree.newest(), |output| {
            flatten::write(&tree, source, &image.layers, budget, output)
        })?;
        let finish = || {
            // Handed to VMs as a descriptor; their users must not be able to open it for writing.
            std::fs::set_permissions(&unfinished, std::fs::Permissions::from_mode(0o444))?;
            File::open(&unfinished)?.sync_all()
        };
        finish().map_err(writing())?;
        let sum = sum(&unfinished)?;
        Ok(Made {
            file: unfinished,
            sum,
            _lock: lock,
            _work: work,
        })
    }

    /// Gives a finished file its name. Gives its size.
    fn place(&self, digest: &Digest, made: &Made) -> Result<u64, ImageError> {
        let file = self.file(digest);
        let place = || {
            std::fs::rename(&made.file, &file)?;
            File::open(&self.directory)?.sync_all()?;
            Ok(file.metadata()?.len())
        };
        let size = place().map_err(ImageError::io(format!("write {}", file.display())))?;
        self.verified().insert(digest.clone());
        Ok(size)
    }

    /// Whether an image's file is what was stored; each process reads it once. A file that is not
    /// is forgotten, so that it is pulled or loaded anew.
    fn verify(&self, digest: &Digest) -> Result<bool, ImageError> {
        // Somebody may have removed it since.
        if self.verified().contains(digest) && self.file(digest).exists() {
            return Ok(true);
        }
        let Some(entry) = self.index()?.images.remove(digest) else {
            return Ok(false);
        };
        let file = self.file(digest);
        let length = match file.metadata() {
            Ok(metadata) => Some(metadata.len()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(ImageError::reading(&file)(error)),
        };
        let intact = length == Some(entry.size)
            && match &entry.file {
                Some(expected) => sum(&file)? == *expected,
                // Stored by the first version, which kept no sum.
                None => true,
            };
        if intact {
            self.verified().insert(digest.clone());
        } else {
            tracing::error!(file = %file.display(), "an image's file is not what was stored; the image is removed, load or pull it anew");
            self.discard(&[digest.to_string()], Timestamp::MAX)?;
        }
        Ok(intact)
    }

    fn verified(&self) -> std::sync::MutexGuard<'_, BTreeSet<Digest>> {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stored(&self, reference: &str, target: &Target, entry: Entry) -> StoredImage {
        let name = normalise(reference).map_or_else(|_| reference.to_owned(), |r| r.name);
        StoredImage {
            reference: reference.to_owned(),
            digest: target.image.to_string(),
            id: format!("{name}@{}", target.resolved),
            squashfs: self.file(&target.image),
            size: entry.size,
            config: entry.config,
            access: entry.access,
            last_used: entry.last_used,
        }
    }

    fn file(&self, digest: &Digest) -> PathBuf {
        self.directory
            .join(format!("sha256-{}.squashfs", digest.hex()))
    }

    fn index(&self) -> Result<Index, ImageError> {
        let path = self.directory.join("index.json");
        match std::fs::read(&path) {
            Ok(text) => Index::parse(&text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Index::default()),
            Err(error) => Err(ImageError::reading(&path)(error)),
        }
    }

    /// Changes the index, alone; the new one replaces the old all or nothing.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut Index) -> Result<T, ImageError>,
    ) -> Result<T, ImageError> {
        let _lock = self.lock()?;
        let mut index = self.index()?;
        let before = index.clone();
        let result = change(&mut index)?;
        if index == before {
            return Ok(result);
        }
        let path = self.directory.join("index.json");
        let text = serde_json::to_vec_pretty(&index).map_err(|source| ImageError::Document {
            what: path.display().to_string(),
            source,
        })?;
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(&self.directory)?;
            file.write_all(&text)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            File::open(&self.directory)?.sync_all()
        };
        write().map_err(ImageError::io(format!("write {}", path.display())))?;
        Ok(result)
    }

    fn lock(&self) -> Result<File, ImageError> {
        let path = self.directory.join("lock");
        let lock = || {
            let file = File::options().create(true).append(true).open(&path)?;
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
            Ok(file)
        };
        lock().map_err(ImageError::io(format!("lock {}", path.display())))
    }
}

/// A finished file that has no name yet. Removed with its directory when it is dropped.
struct Made {
    file: PathBuf,
    sum: Digest,
    _lock: File,
    _work: tempfile::TempDir,
}

fn sum(path: &Path) -> Result<Digest, ImageError> {
    let mut hash = Sha256::new();
    let mut read = || std::io::copy(&mut File::open(path)?, &mut hash);
    read().map_err(ImageError::reading(path))?;
    Digest::try_from(format!("sha256:{}", hex::encode(hash.finalize())))
        .map_err(|why| ImageError::damaged("a digest", why))
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
