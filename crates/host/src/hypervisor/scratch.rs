//! The writable disk of a VM: a sparse file without a name, with an ext4 of the pod's size.

use super::HypervisorError;
use crate::files::unnamed;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::process::Command;

/// Makes disks by copying an empty one of the same size, of which little is not holes.
#[derive(Debug)]
pub(super) struct Disks {
    directory: PathBuf,
    empty: Mutex<BTreeMap<u64, Arc<File>>>,
}

impl Disks {
    /// Disks that take room in this directory.
    pub(super) fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            empty: Mutex::default(),
        }
    }

    /// Makes a disk of so many bytes. Its room is given back when nobody has it open any more.
    pub(super) async fn make(&self, bytes: u64) -> Result<File, HypervisorError> {
        let known = self.lock().get(&bytes).cloned();
        let empty = if let Some(empty) = known {
            empty
        } else {
            let file = self.file(bytes)?;
            format(&file).await?;
            let empty = Arc::new(file);
            self.lock().insert(bytes, Arc::clone(&empty));
            empty
        };
        let disk = self.file(bytes)?;
        let copied = tokio::task::spawn_blocking(move || {
            copy(&empty, &disk, bytes)?;
            Ok(disk)
        });
        copied
            .await
            .unwrap_or_else(|died| Err(died.into()))
            .map_err(HypervisorError::io("copy an empty scratch disk"))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Arc<File>>> {
        self.empty.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, bytes: u64) -> Result<File, HypervisorError> {
        let make = || {
            let file = unnamed(&self.directory)?;
            file.set_len(bytes)?;
            Ok(file)
        };
        make().map_err(HypervisorError::io(format!(
            "make a scratch disk in {}",
            self.directory.display()
        )))
    }
}

/// The options leave out what a disk that lives as long as a pod does not need: reserved blocks,
/// room to grow, many inodes and initialised tables (16–29 ms and some 0.3 MB, `vm-disks.md`).
async fn format(file: &File) -> Result<(), HypervisorError> {
    let copy = file
        .try_clone()
        .map_err(HypervisorError::io("copy a descriptor"))?;
    let output = Command::new("mkfs.ext4")
        .args(["-q", "-F", "-m", "0", "-i", "65536", "-J", "size=16"])
        .args(["-O", "^resize_inode", "-E"])
        .arg("lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0")
        .arg("/proc/self/fd/0")
        .stdin(Stdio::from(copy))
        .kill_on_drop(true)
        .output()
        .await
        .map_err(HypervisorError::io("start mkfs.ext4; install e2fsprogs"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(HypervisorError::Program {
        program: "mkfs.ext4",
        message: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Copies what is not a hole: some hundred kilobytes, in the page cache.
fn copy(from: &File, to: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::SeekFrom;
    let mut position = 0;
    while position < bytes {
        // Looked for by a descriptor that others use too; all copying is by position.
        let start = match rustix::fs::seek(from, SeekFrom::Data(position)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(start))?;
        let (mut source, mut target) = (start, start);
        while source < end {
            let length = usize::try_from(end - source).unwrap_or(usize::MAX);
            let (from, to) = (from.as_fd(), to.as_fd());
            let copied = rustix::fs::copy_file_range(
                from,
                Some(&mut source),
                to,
                Some(&mut target),
                length,
            )?;
            if copied == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        position = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[tokio::test]
    async fn each_disk_is_an_empty_file_system_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let disks = Disks::new(directory.path().to_owned());
        for _ in 0..2 {
            let disk = disks.make(1 << 30).await.unwrap();
            assert_eq!(disk.metadata().unwrap().len(), 1 << 30);
            assert!(disk.metadata().unwrap().blocks() * 512 < 8 << 20);
            let check = std::process::Command::new("fsck.ext4")
                .args(["-fn", "/proc/self/fd/0"])
                .stdin(disk.try_clone().unwrap())
                .output()
                .unwrap();
            assert!(check.status.success(), "{check:?}");
            // Does no harm to the next.
            disk.write_all_at(&[0xff; 8192], 0).unwrap();
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
