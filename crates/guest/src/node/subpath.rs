//! Parts of volumes that a container mounts (`subPath`).
//!
//! What a volume contains is the containers' doing. So the path is resolved once, without leaving
//! the volume, and what was found is bound to a place of our own: whatever is changed in the volume
//! afterwards, the mount is what was checked.

use rustix::fs::{Mode, OFlags, ResolveFlags, mkdirat, openat2};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Component, Path, PathBuf};

/// Where parts of volumes are bound, by container and attempt.
const ROOT: &str = "/run/scratch/subpaths";

/// The parts that one run of a container mounts.
#[derive(Clone, Debug)]
pub(crate) struct Subpaths {
    directory: PathBuf,
}

impl Subpaths {
    /// Of a run that has none yet.
    pub(crate) fn new(container: &str, attempt: u32) -> Self {
        let directory = Path::new(ROOT).join(container).join(attempt.to_string());
        Self { directory }
    }

    /// Binds a part of a volume, made as a directory if it is missing and may be. Returns where.
    pub(crate) fn bind(
        &self,
        index: usize,
        volume: &Path,
        part: &str,
        may_make: bool,
    ) -> io::Result<PathBuf> {
        let part = Path::new(part);
        if !part
            .components()
            .all(|name| matches!(name, Component::Normal(_)))
        {
            return Err(io::Error::other(
                "a subPath must be relative and without `..`",
            ));
        }
        let root = rustix::fs::open(
            volume,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        if may_make {
            make(&root, part)?;
        }
        let found = File::from(resolve(&root, part, OFlags::PATH)?);
        fs::create_dir_all(&self.directory)?;
        let target = self.directory.join(index.to_string());
        if found.metadata()?.is_dir() {
            fs::create_dir(&target)?;
        } else {
            File::create_new(&target)?;
        }
        mount_bind(format!("/proc/self/fd/{}", found.as_raw_fd()), &target)?;
        Ok(target)
    }

    /// Unbinds all. Never deletes what was bound: only places that are empty again.
    pub(crate) fn remove(&self) {
        let Ok(entries) = fs::read_dir(&self.directory) else {
            return;
        };
        for entry in entries.flatten() {
            let path = entry.path();
            let outcome = match unmount(&path, UnmountFlags::DETACH) {
                // EINVAL: it was not bound.
                Ok(()) | Err(rustix::io::Errno::INVAL) => remove_empty(&path),
                Err(error) => Err(error.into()),
            };
            if let Err(error) = outcome {
                tracing::warn!(%error, "a part of a volume was not unbound");
            }
        }
        if let Err(error) = fs::remove_dir(&self.directory) {
            tracing::warn!(%error, "the parts of volumes were not all unbound");
        }
    }
}

fn remove_empty(path: &Path) -> io::Result<()> {
    if path.symlink_metadata()?.is_dir() {
        fs::remove_dir(path)
    } else {
        fs::remove_file(path)
    }
}

fn make(root: &OwnedFd, path: &Path) -> io::Result<()> {
    let mut so_far = PathBuf::new();
    for name in path.components() {
        let parent = resolve(root, &so_far, OFlags::PATH | OFlags::DIRECTORY)?;
        so_far.push(name);
        if resolve(root, &so_far, OFlags::PATH).is_err() {
            mkdirat(&parent, name.as_os_str(), Mode::from_raw_mode(0o755))?;
        }
    }
    Ok(())
}

fn resolve(root: &OwnedFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
    };
    Ok(openat2(
        root,
        path,
        flags | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn subpaths(directory: &Path) -> Subpaths {
        Subpaths {
            directory: directory.join("bound"),
        }
    }

    #[test]
    fn what_leaves_the_volume_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let volume = directory.path().join("volume");
        fs::create_dir(&volume).unwrap();
        symlink("/etc", volume.join("absolute")).unwrap();
        symlink("../..", volume.join("relative")).unwrap();
        let subpaths = subpaths(directory.path());
        for path in [
            "absolute",
            "relative",
            "absolute/passwd",
            "../x",
            "/etc",
            "missing",
        ] {
            assert!(subpaths.bind(0, &volume, path, false).is_err(), "{path}");
            if path != "missing" {
                assert!(subpaths.bind(0, &volume, path, true).is_err(), "{path}");
            }
        }
        subpaths.remove();
        assert!(volume.exists());
    }

    #[test]
    fn a_part_is_bound_and_survives_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let volume = directory.path().join("volume");
        fs::create_dir(&volume).unwrap();
        fs::create_dir(volume.join("..1")).unwrap();
        fs::write(volume.join("..1/file"), "text").unwrap();
        symlink("..1", volume.join("..data")).unwrap();
        symlink("..data/file", volume.join("file")).unwrap();
        let subpaths = subpaths(directory.path());
        let file = subpaths.bind(0, &volume, "file", false).unwrap();
        let made = subpaths.bind(1, &volume, "a/b", true).unwrap();
        assert_eq!(fs::read_to_string(file).unwrap(), "text");
        fs::write(made.join("x"), "y").unwrap();
        subpaths.remove();
        assert_eq!(fs::read_to_string(volume.join("a/b/x")).unwrap(), "y");
        assert_eq!(fs::read_to_string(volume.join("file")).unwrap(), "text");
        assert!(!directory.path().join("bound").exists());
    }
}
