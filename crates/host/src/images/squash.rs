//! Makes a squashfs from a tar stream, by `sqfstar`.

use super::ImageError;
use crate::files::space;
use std::fs::File;
use std::io::{BufWriter, Read, Seek, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// What of the program's complaints is kept.
const MESSAGE: u64 = 2048;

/// Space that is left free: the control plane's store may be on the same disk.
const RESERVE: u64 = 512 << 20;
/// How much may be written between two looks at the free space.
const LOOK: u64 = 64 << 20;

/// Makes `file` from what `write_tar` writes. LZ4 is the fastest to read for an emulated guest.
///
/// `newest` is the latest time in the image, in seconds since 1970. The root, of which no tar
/// stream says a time, would otherwise have that of now, and the same image give other bytes.
pub(crate) fn make(
    file: &Path,
    newest: u64,
    write_tar: impl FnOnce(&mut dyn Write) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    let starting = || ImageError::io("start sqfstar; install squashfs-tools");
    let mut complaints = tempfile::tempfile().map_err(starting())?;
    let errors = complaints.try_clone().map_err(starting())?;
    let mut child = Command::new("sqfstar")
        .args(["-comp", "lz4", "-quiet", "-no-progress"])
        .args(["-root-mode", "0755", "-root-uid", "0", "-root-gid", "0"])
        .arg(file)
        // Later times become this one, of which there is only the root's, but for an image from the
        // future. `-root-time` of 4.5.1 does nothing.
        .env("SOURCE_DATE_EPOCH", newest.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(errors)
        .spawn()
        .map_err(starting())?;
    let stdin = child.stdin.take().expect("piped above");
    let stdin = BufWriter::with_capacity(256 << 10, stdin);
    let mut stdin = Watched {
        inner: stdin,
        file,
        until_look: 0,
    };
    let filled = write_tar(&mut stdin).and_then(|()| {
        let flushed = stdin.flush();
        drop(stdin);
        flushed.map_err(ImageError::io("write to sqfstar"))
    });
    if filled.is_err() {
        // It may wait for more; its own complaint, if any, explains a broken pipe.
        child.kill().map_err(ImageError::io("stop sqfstar"))?;
    }
    let status = child.wait().map_err(ImageError::io("wait for sqfstar"))?;
    let message = read_back(&mut complaints).unwrap_or_default();
    match filled {
        Ok(()) if status.success() => Ok(()),
        Err(error) if message.is_empty() => Err(error),
        Ok(()) | Err(_) => Err(ImageError::Squash { message }),
    }
}

/// Writes as long as the disk has room.
struct Watched<'a, W> {
    inner: W,
    file: &'a Path,
    until_look: u64,
}

impl<W: Write> Write for Watched<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.until_look == 0 {
            let space = space(self.file.parent().unwrap_or(self.file))?;
            if space.available < RESERVE {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::StorageFull,
                    "the disk is nearly full; remove images with `monopod image rm`",
                ));
            }
            self.until_look = LOOK;
        }
        let written = self.inner.write(bytes)?;
        self.until_look = self.until_look.saturating_sub(written as u64);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}

fn read_back(complaints: &mut File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    complaints.rewind()?;
    complaints.take(MESSAGE).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}
