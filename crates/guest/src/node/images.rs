//! Images: from a disk's serial to a mounted, read-only file system.

use monopod_core::pod::lifecycle::Image as Known;
use monopod_wire::{ContainerImageConfig, Image, ImageState};
use rustix::mount::{MountFlags, mount};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where images are mounted, each under its disk's serial.
const MOUNTS: &str = "/run/images";

/// A mounted image.
#[derive(Clone, Debug)]
pub(crate) struct Mounted {
    /// Root of its file system.
    pub(crate) root: PathBuf,
    /// What it says about how to run it.
    pub(crate) config: ContainerImageConfig,
}

/// All images by reference.
#[derive(Clone, Debug, Default)]
pub(crate) struct Images {
    /// For the pod loop.
    pub(crate) known: BTreeMap<String, Known>,
    /// Those that can be used.
    pub(crate) mounted: BTreeMap<String, Mounted>,
}

impl Images {
    /// Takes in what the host said, and mounts what became available. Returns what could not be
    /// mounted, to be tried again.
    pub(crate) fn update(&mut self, images: Vec<Image>) -> Vec<Image> {
        let mut failed = Vec::new();
        for image in images {
            let Image { reference, state } = image.clone();
            let known = match state {
                ImageState::Pulling { done, total } => Known::Pulling { done, total },
                ImageState::Failed { reason, message } => Known::Failed { reason, message },
                ImageState::Attached {
                    serial,
                    id,
                    pulled,
                    config,
                    ..
                } => match mount_disk(&serial) {
                    Ok(root) => {
                        let config = *config;
                        self.mounted
                            .insert(reference.clone(), Mounted { root, config });
                        Known::Present { id, pulled }
                    }
                    Err(error) => {
                        tracing::error!(%error, serial, reference, "an image cannot be mounted");
                        failed.push(image);
                        Known::Failed {
                            reason: "ErrImagePull".to_owned(),
                            message: format!(
                                "the image's disk {serial} cannot be mounted: {error}"
                            ),
                        }
                    }
                },
            };
            self.known.insert(reference, known);
        }
        failed
    }
}

/// Mounts the squashfs on the disk with this serial, unless it is mounted already.
fn mount_disk(serial: &str) -> io::Result<PathBuf> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_' || c == '.';
    if serial.is_empty() || serial.starts_with('.') || !serial.chars().all(is_name) {
        return Err(io::Error::other("the serial is not a name"));
    }
    let target = Path::new(MOUNTS).join(serial);
    if target.is_dir() && is_mounted(&target)? {
        return Ok(target);
    }
    let device = find_disk(serial)?;
    fs::create_dir_all(&target)?;
    flush(&device)?;
    mount(
        &device,
        &target,
        "squashfs",
        MountFlags::RDONLY | MountFlags::NODEV,
        None::<&std::ffi::CStr>,
    )?;
    Ok(target)
}

/// A directory is a mount if it is on another device than its parent.
fn is_mounted(path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    let parent = path.parent().unwrap_or_else(|| Path::new("/"));
    Ok(fs::metadata(path)?.dev() != fs::metadata(parent)?.dev())
}

fn find_disk(serial: &str) -> io::Result<PathBuf> {
    for entry in fs::read_dir("/sys/block")? {
        let entry = entry?;
        if fs::read_to_string(entry.path().join("serial")).is_ok_and(|text| text.trim() == serial) {
            return Ok(Path::new("/dev").join(entry.file_name()));
        }
    }
    Err(io::Error::new(
        io::ErrorKind::NotFound,
        format!("no disk has the serial {serial}"),
    ))
}

/// Drops what the kernel cached of a disk: the slot was another, empty one before.
fn flush(device: &Path) -> io::Result<()> {
    let file = fs::File::open(device)?;
    flush_buffers(&file)
}

#[expect(unsafe_code, reason = "rustix has no wrapper for the ioctl BLKFLSBUF")]
fn flush_buffers(file: &fs::File) -> io::Result<()> {
    use rustix::ioctl::{NoArg, ioctl, opcode};
    const BLKFLSBUF: rustix::ioctl::Opcode = opcode::none(0x12, 97);
    // SAFETY: BLKFLSBUF takes no argument and touches no memory of this process.
    unsafe {
        let request = NoArg::<BLKFLSBUF>::new();
        Ok(ioctl(file, request)?)
    }
}
