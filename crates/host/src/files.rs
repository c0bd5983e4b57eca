//! What making and removing files has in common.

use monopod_core::image::garbage::Space;
use std::fs::File;
use std::io::{ErrorKind, Result};
use std::path::Path;

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

/// Replaces a secret file at once and whole.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let partial = path.with_extension("partial");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&partial)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(partial, path)
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
