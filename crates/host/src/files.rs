//! What making and removing files has in common.

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

/// Makes a file without a name, which takes room until nobody has it open any more. Only root may
/// open it again.
pub(crate) fn unnamed(directory: &Path) -> Result<File> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    Ok(rustix::fs::open(directory, flags, mode)?.into())
}
