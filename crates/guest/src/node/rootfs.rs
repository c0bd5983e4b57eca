//! A container's root: the image below, what it writes above, on the scratch disk.
//!
//! Images are hostile: paths in them are resolved so that no link leaves the root.

use rustix::fs::{Mode, OFlags, ResolveFlags, mkdirat, openat2};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

/// Where containers have their directories, by name and attempt.
const ROOT: &str = "/run/scratch/containers";
/// Most bytes read of a file such as `/etc/passwd`.
const MAX_FILE: u64 = 1 << 20;

/// The directory of one run of a container.
#[derive(Clone, Debug)]
pub(crate) struct Rootfs {
    directory: PathBuf,
}

impl Rootfs {
    /// Mounts a new root over an image.
    pub(crate) fn create(container: &str, attempt: u32, image: &Path) -> io::Result<Self> {
        let directory = Path::new(ROOT).join(container).join(attempt.to_string());
        let this = Self { directory };
        if this.directory.exists() {
            this.remove();
        }
        for part in ["upper", "work", "root"] {
            fs::create_dir_all(this.directory.join(part))?;
        }
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            image.display(),
            this.directory.join("upper").display(),
            this.directory.join("work").display(),
        );
        let options = CString::new(options).map_err(io::Error::other)?;
        mount(
            "overlay",
            this.root(),
            "overlay",
            MountFlags::NODEV,
            Some(options.as_c_str()),
        )?;
        Ok(this)
    }

    /// The root.
    pub(crate) fn root(&self) -> PathBuf {
        self.directory.join("root")
    }

    /// A path beside the root: the bundle's own files.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The bundle.
    pub(crate) fn bundle(&self) -> &Path {
        &self.directory
    }

    /// Text of a small file in the root; empty if there is none or it is too large.
    pub(crate) fn text(&self, path: &str) -> String {
        let read = || -> io::Result<String> {
            let root = open_root(&self.root())?;
            let file = File::from(resolve(
                &root,
                Path::new(path),
                OFlags::RDONLY | OFlags::NONBLOCK,
            )?);
            let mut text = Vec::new();
            if file.metadata()?.is_file() {
                file.take(MAX_FILE).read_to_end(&mut text)?;
            }
            Ok(String::from_utf8_lossy(&text).into_owned())
        };
        read().unwrap_or_default()
    }

    /// Makes a directory in the root, with those above it, unless it exists.
    pub(crate) fn make_directory(&self, path: &Path) -> io::Result<()> {
        let root = open_root(&self.root())?;
        let mut so_far = PathBuf::new();
        for part in path.components() {
            let Component::Normal(name) = part else {
                continue;
            };
            let parent = resolve(&root, &so_far, OFlags::PATH | OFlags::DIRECTORY)?;
            so_far.push(name);
            if resolve(&root, &so_far, OFlags::PATH | OFlags::DIRECTORY).is_err() {
                mkdirat(&parent, name, Mode::from_raw_mode(0o755))?;
            }
        }
        Ok(())
    }

    /// Unmounts and deletes the directory.
    pub(crate) fn remove(&self) {
        if let Err(error) = unmount(self.root(), UnmountFlags::DETACH) {
            tracing::debug!(%error, "a container's root was not mounted");
        }
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            tracing::warn!(%error, "a container's directory was not deleted");
        }
    }
}

fn open_root(root: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(
        root,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

fn resolve(root: &OwnedFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let path = path.strip_prefix("/").unwrap_or(path);
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
        ResolveFlags::IN_ROOT,
    )?)
}
