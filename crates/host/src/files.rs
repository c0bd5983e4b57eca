//! What making and removing files has in common.

use monopod_core::image::garbage::Space;
use std::fs::File;
use std::io::{ErrorKind, Result};
use std::path::{Path, PathBuf};

/// Whether something was removed or was not there.
pub(crate) fn absent_is_fine(removed: Result<()>) -> Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Names of what is in a directory; none is fine.
pub(crate) fn names(directory: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    entries
        .filter_map(|entry| match entry {
            Ok(entry) => entry.file_name().into_string().ok().map(Ok),
            Err(error) => Some(Err(error)),
        })
        .collect()
}

/// Replaces a secret file at once and whole. What was written of it is removed if that fails, as on a
/// full disk; it stays if this process is killed meanwhile.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let partial = partial(path);
    let replaced = write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
    if replaced.is_err() {
        absent_is_fine(std::fs::remove_file(&partial))?;
    }
    replaced
}

/// Removes a file that is replaced at times, and what an interrupted replacement left of it.
pub(crate) fn remove(path: &Path) -> Result<()> {
    absent_is_fine(std::fs::remove_file(partial(path)))?;
    absent_is_fine(std::fs::remove_file(path))
}

fn partial(path: &Path) -> PathBuf {
    path.with_extension("partial")
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// How much room there is where a directory is.
pub(crate) fn space(directory: &Path) -> Result<Space> {
    let disk = rustix::fs::statvfs(directory)?;
    Ok(Space {
        capacity: disk.f_blocks.saturating_mul(disk.f_frsize),
        available: disk.f_bavail.saturating_mul(disk.f_frsize),
    })
}

/// Makes a file without a name, which takes room until nobody has it open any more. Only root may
/// open it again.
pub(crate) fn unnamed(directory: &Path) -> Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    Ok(rustix::fs::open(directory, flags, mode)?.into())
}

#[cfg(test)]
mod tests {
    use super::{names, remove, replace};

    #[test]
    fn a_replacement_that_fails_leaves_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("env-1");
        replace(&path, b"first").expect("written");
        replace(&path, b"second").expect("written");
        assert_eq!(std::fs::read(&path).expect("read"), b"second");
        // No file takes the place of a directory.
        let taken = directory.path().join("env-2");
        std::fs::create_dir(&taken).expect("made");
        replace(&taken, b"third").expect_err("it is a directory");
        let mut left = names(directory.path()).expect("listed");
        left.sort();
        assert_eq!(left, ["env-1", "env-2"]);
    }

    #[test]
    fn what_an_interrupted_replacement_left_goes_with_its_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("env-1");
        for partial in [true, false] {
            std::fs::write(&path, "whole").expect("written");
            if partial {
                std::fs::write(directory.path().join("env-1.partial"), "half").expect("written");
            }
            remove(&path).expect("removed");
            assert_eq!(names(directory.path()).expect("listed"), [""; 0]);
        }
        remove(&path).expect("what is not there is removed");
    }
}
