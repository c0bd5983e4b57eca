//! A small file system, to be full.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system of its own on a directory. It is removed when it is dropped.
#[derive(Debug)]
pub struct Room {
    path: PathBuf,
    _image: tempfile::NamedTempFile,
}

impl Room {
    /// Puts an empty file system of so many MiB on a directory.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(path: &Path, mib: u64) -> Self {
        let image = tempfile::NamedTempFile::new().expect("a file");
        image.as_file().set_len(mib << 20).expect("a sparse file");
        run(Command::new("mkfs.ext4")
            .args(["-q", "-F", "-m", "0"])
            .arg(image.path()));
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(image.path())
            .arg(path));
        Self {
            path: path.to_owned(),
            _image: image,
        }
    }

    /// Takes all that is free but so many bytes.
    ///
    /// # Panics
    /// If nothing can be written.
    pub fn leave(&self, bytes: u64) {
        let filler = File::create(self.filler()).expect("a file");
        let mut bytes = free(&self.path).saturating_sub(bytes);
        // What is left takes more than its own bytes.
        while bytes >= 4096 {
            let flags = rustix::fs::FallocateFlags::empty();
            let length = filler.metadata().expect("its length").len();
            if rustix::fs::fallocate(&filler, flags, length, bytes).is_err() {
                bytes /= 2;
            }
        }
    }

    /// Gives it back.
    ///
    /// # Panics
    /// If it was not taken.
    pub fn free(&self) {
        std::fs::remove_file(self.filler()).expect("removed");
    }

    fn filler(&self) -> PathBuf {
        self.path.join("filler")
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // Files of processes that still end go with the last of them.
        drop(Command::new("umount").arg("-l").arg(&self.path).status());
    }
}

fn free(path: &Path) -> u64 {
    let disk = rustix::fs::statvfs(path).expect("a file system");
    disk.f_bavail.saturating_mul(disk.f_frsize)
}

#[track_caller]
fn run(command: &mut Command) {
    let status = command.status().expect("it starts");
    assert!(status.success(), "{command:?}");
}
