//! Blobs into an OCI layout, resumed where an interruption left them, also one of this process.

use super::repository::Repository;
use super::{RegistryError, shown};
use crate::files::space;
use crate::images::{Digest, Part};
use futures::TryStreamExt;
use sha2::{Digest as _, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Layers that are downloaded at once.
const PARALLEL: usize = 3;
/// Tries of one blob before the pull fails; each goes on where the one before ended.
const TRIES: u32 = 3;
/// A connection that gives less than this in this time is given up: 1 KiB/s.
const PACE: (u64, Duration) = (60 << 10, Duration::from_mins(1));
/// Space that downloads leave free: the control plane's store may be on the same disk.
const RESERVE: u64 = 512 << 20;

/// Where blobs go, and who is told.
pub(super) struct Target<'a> {
    /// Directory of the layout.
    pub(super) layout: &'a Path,
    /// Bytes of all parts that are here already.
    pub(super) done: &'a AtomicU64,
    /// Cancelled when nobody waits any more.
    pub(super) abandoned: &'a CancellationToken,
}

impl Target<'_> {
    fn blob(&self, digest: &Digest) -> PathBuf {
        self.layout.join("blobs/sha256").join(digest.hex())
    }
}

fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> RegistryError {
    let what = what.into();
    move |source| RegistryError::Io { what, source }
}

/// Downloads all parts. Everything that is there at the end has the right digest.
pub(super) async fn download(
    repository: &Repository,
    parts: &[Part],
    target: &Target<'_>,
) -> Result<(), RegistryError> {
    let blobs = target.layout.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).map_err(io(format!("create {}", blobs.display())))?;
    let total: u64 = parts.iter().map(|part| part.size).sum();
    enough_space(target.layout, total)?;
    let wanted: Vec<Result<&Part, RegistryError>> = parts.iter().map(Ok).collect();
    let all = futures::stream::iter(wanted).try_for_each_concurrent(PARALLEL, |part| async move {
        blob(repository, part, target).await
    });
    tokio::select! {
        result = all => result,
        () = target.abandoned.cancelled() => Err(RegistryError::Abandoned),
    }
}

/// Refuses what would fill the disk.
fn enough_space(directory: &Path, bytes: u64) -> Result<(), RegistryError> {
    let space = space(directory).map_err(io(format!("look at {}", directory.display())))?;
    let available = space.available;
    // The image is stored once more, as a file system, before its blobs are deleted.
    let needed = bytes.saturating_mul(2).saturating_add(RESERVE);
    if available < needed {
        return Err(RegistryError::TooLarge {
            what: format!("an image of {bytes} bytes"),
            why: format!(
                "the disk has {available} bytes free of the {needed} that it needs; remove images with `monopod image rm`"
            ),
        });
    }
    Ok(())
}

async fn blob(
    repository: &Repository,
    part: &Part,
    target: &Target<'_>,
) -> Result<(), RegistryError> {
    let file = target.blob(&part.digest);
    if file.exists() {
        target.done.fetch_add(part.size, Ordering::Relaxed);
        return Ok(());
    }
    let mut tries = 0;
    loop {
        tries += 1;
        match attempt(repository, part, target).await {
            Err(RegistryError::Unreachable { .. } | RegistryError::Slow { .. })
                if tries < TRIES =>
            {
                tracing::debug!(digest = %part.digest, tries, "download broke; it goes on");
            }
            Err(error) => return Err(error),
            Ok(partial) => {
                return std::fs::rename(&partial, &file)
                    .map_err(io(format!("keep {}", part.digest)));
            }
        }
    }
}

/// What is in the partial file so far, which is hashed again: it may be of another process.
fn so_far(path: &Path, limit: u64) -> std::io::Result<(File, Sha256, u64)> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    if file.metadata()?.len() > limit {
        file.set_len(0)?;
    }
    let (mut hash, mut length) = (Sha256::new(), 0);
    let mut buffer = vec![0; 128 << 10];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok((file, hash, length));
        }
        hash.update(&buffer[..read]);
        length += read as u64;
    }
}

async fn attempt(
    repository: &Repository,
    part: &Part,
    target: &Target<'_>,
) -> Result<PathBuf, RegistryError> {
    let partial = target.blob(&part.digest).with_extension("partial");
    let writing = || io(format!("write {}", partial.display()));
    let (mut file, mut hash, mut length) = so_far(&partial, part.size).map_err(writing())?;
    if length < part.size {
        let (mut response, offset) = repository.blob(&part.digest, length).await?;
        if offset != length {
            use std::io::Seek as _;
            file.set_len(0).map_err(writing())?;
            file.rewind().map_err(writing())?;
            (hash, length) = (Sha256::new(), 0);
        }
        target.done.fetch_add(length, Ordering::Relaxed);
        let mut counted = Counted {
            done: target.done,
            bytes: length,
            keep: false,
        };
        let mut pace = (Instant::now(), 0);
        while let Some(chunk) =
            response
                .chunk()
                .await
                .map_err(|source| RegistryError::Unreachable {
                    host: repository.host().to_owned(),
                    source: source.without_url(),
                })?
        {
            length += chunk.len() as u64;
            if length > part.size {
                drop(file);
                remove(&partial)?;
                return Err(RegistryError::wrong(
                    repository.host(),
                    part.digest.to_string(),
                    format!(
                        "it gives more than the {} bytes of its descriptor",
                        part.size
                    ),
                ));
            }
            file.write_all(&chunk).map_err(writing())?;
            hash.update(&chunk);
            counted.add(chunk.len() as u64);
            pace.1 += chunk.len() as u64;
            if pace.0.elapsed() >= PACE.1 {
                if pace.1 < PACE.0 {
                    return Err(RegistryError::Slow {
                        host: repository.host().to_owned(),
                        what: "a blob comes with less than a kilobyte per second",
                    });
                }
                pace = (Instant::now(), 0);
            }
        }
        if length < part.size {
            return Err(RegistryError::wrong(
                repository.host(),
                part.digest.to_string(),
                format!("it ended after {length} of {} bytes", part.size),
            ));
        }
        counted.keep = true;
    } else {
        target.done.fetch_add(length, Ordering::Relaxed);
    }
    let sum = hex::encode(hash.finalize());
    if sum != part.digest.hex() {
        // It may be what an earlier interruption left: the next try begins anew.
        drop(file);
        remove(&partial)?;
        target.done.fetch_sub(part.size, Ordering::Relaxed);
        return Err(RegistryError::wrong(
            repository.host(),
            part.digest.to_string(),
            format!("its content has the digest sha256:{}", shown(&sum)),
        ));
    }
    file.sync_data().map_err(writing())?;
    Ok(partial)
}

fn remove(path: &Path) -> Result<(), RegistryError> {
    std::fs::remove_file(path).map_err(io(format!("remove {}", path.display())))
}

/// Progress of one attempt, taken back when the attempt fails, as the next counts from its beginning.
struct Counted<'a> {
    done: &'a AtomicU64,
    bytes: u64,
    keep: bool,
}

impl Counted<'_> {
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if !self.keep {
            self.done.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}
