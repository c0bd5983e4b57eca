//! The archive of one pod's logs: what its guest carried here, kept until the environment is gone.
//!
//! A directory that only root reads: `names.json`, the names of containers by their numbers, and
//! one file for each that [`core::archive`](monopod_core::archive) keeps. A file's length is what
//! the guest is told; it is never told more, whenever this process ends. Names are written before
//! the first file that has their number.

use crate::files::{absent_is_fine, names, replace};
use monopod_core::archive::{Archive as Contents, FileName, Verdict};
use monopod_wire::{LogPiece, LogStored};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const NAMES: &str = "names.json";
/// Names of containers are short and few; a longer file is not ours.
const MAX_NAMES: u64 = 64 << 10;

/// The directory of an environment's archive.
pub(crate) fn directory(host: &Path, environment: &str) -> PathBuf {
    host.join("logs").join(environment)
}

/// An archive that is being written.
#[derive(Debug)]
pub(crate) struct Archive {
    directory: PathBuf,
    contents: Contents,
}

impl Archive {
    /// Goes on with what an earlier host process left, if it left anything.
    pub(crate) fn open(directory: PathBuf) -> io::Result<Self> {
        let (contents, delete) = read(&directory)?;
        for file in delete {
            remove(&directory.join(file.to_string()))?;
        }
        Ok(Self {
            directory,
            contents,
        })
    }

    /// Takes a piece and says what is there. An error says nothing: the guest asks again.
    pub(crate) fn store(&mut self, piece: LogPiece) -> io::Result<LogStored> {
        let decision = self
            .contents
            .offer(&piece.file, piece.offset, piece.bytes.len());
        if decision.new_name
            && let Err(error) = self.write_names()
        {
            // Forgets the name that is not on the disk.
            self.contents = read(&self.directory)?.0;
            return Err(error);
        }
        for file in decision.delete {
            remove(&self.directory.join(file.to_string()))?;
        }
        let length = match decision.verdict {
            Verdict::Append(file) => {
                let length = self.append(file, piece.offset, &piece.bytes)?;
                self.contents.stored(file, length);
                Some(length)
            }
            Verdict::Has(length) => Some(length),
            Verdict::Refused => None,
        };
        Ok(LogStored {
            file: piece.file,
            length,
        })
    }

    fn append(&self, file: FileName, offset: u64, bytes: &[u8]) -> io::Result<u64> {
        let path = self.directory.join(file.to_string());
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        // At its place: a piece of which a part was written before is written over.
        file.write_all_at(bytes, offset)?;
        Ok(offset + bytes.len() as u64)
    }

    fn write_names(&self) -> io::Result<()> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)?;
        let names = serde_json::to_vec(self.contents.names())?;
        replace(&self.directory.join(NAMES), &names)
    }
}

/// Opens the files of a container's last run, or of the one before. None if there was none.
pub(crate) fn open_run(
    directory: &Path,
    container: &str,
    previous: bool,
) -> io::Result<Option<Vec<File>>> {
    let (contents, _) = read(directory)?;
    let Some(files) = contents.run(container, previous) else {
        return Ok(None);
    };
    let mut opened = Vec::with_capacity(files.len());
    for file in files {
        match File::open(directory.join(file.to_string())) {
            Ok(file) => opened.push(file),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Some(opened))
}

/// Deletes an archive. It is fine if there is none.
pub(crate) fn delete(directory: &Path) -> io::Result<()> {
    absent_is_fine(std::fs::remove_dir_all(directory))
}

/// Names of all environments that have an archive.
pub(crate) fn list(host: &Path) -> io::Result<Vec<String>> {
    names(&host.join("logs"))
}

/// What is in a directory, and the files that do not belong there.
fn read(directory: &Path) -> io::Result<(Contents, Vec<FileName>)> {
    let path = directory.join(NAMES);
    let names = match std::fs::metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
        Ok(metadata) if metadata.len() > MAX_NAMES => {
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                format!("{} is not a list of names", path.display()),
            ));
        }
        Ok(_) => serde_json::from_slice(&std::fs::read(&path)?)?,
    };
    let mut files = Vec::new();
    match std::fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
        Ok(entries) => {
            for entry in entries {
                let entry = entry?;
                let name = entry.file_name();
                if let Some(file) = name.to_str().and_then(|name| name.parse().ok()) {
                    files.push((file, entry.metadata()?.len()));
                }
            }
        }
    }
    // In order, so that what is kept of too much does not depend on the directory's.
    files.sort();
    Ok(Contents::found(names, files))
}

fn remove(path: &Path) -> io::Result<()> {
    absent_is_fine(std::fs::remove_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use monopod_wire::LogFile;
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    fn piece(container: &str, attempt: u32, generation: u64, offset: u64, text: &str) -> LogPiece {
        LogPiece {
            file: LogFile {
                container: container.to_owned(),
                attempt,
                generation,
            },
            offset,
            bytes: text.as_bytes().to_vec(),
        }
    }

    fn text(directory: &Path, container: &str, previous: bool) -> Option<String> {
        let files = open_run(directory, container, previous).unwrap()?;
        let mut text = String::new();
        for mut file in files {
            file.read_to_string(&mut text).unwrap();
        }
        Some(text)
    }

    #[test]
    fn pieces_are_kept_over_a_restart_and_none_comes_twice() {
        let host = tempfile::tempdir().unwrap();
        let path = directory(host.path(), "env-1");
        let mut archive = Archive::open(path.clone()).unwrap();
        let store = |archive: &mut Archive, piece| archive.store(piece).unwrap().length;
        assert_eq!(
            store(&mut archive, piece("../evil", 0, 0, 0, "one ")),
            Some(4)
        );
        assert_eq!(
            store(&mut archive, piece("../evil", 0, 0, 0, "one ")),
            Some(4)
        );
        let mut archive = Archive::open(path.clone()).unwrap();
        assert_eq!(
            store(&mut archive, piece("../evil", 0, 0, 9, "lost")),
            Some(4)
        );
        assert_eq!(
            store(&mut archive, piece("../evil", 0, 0, 4, "two ")),
            Some(8)
        );
        assert_eq!(
            store(&mut archive, piece("../evil", 0, 1, 0, "three")),
            Some(5)
        );
        assert_eq!(
            text(&path, "../evil", false).as_deref(),
            Some("one two three")
        );
        for attempt in 1..3 {
            store(
                &mut archive,
                piece("../evil", attempt, 0, 0, &format!("run {attempt}")),
            );
        }
        assert_eq!(text(&path, "../evil", false).as_deref(), Some("run 2"));
        assert_eq!(text(&path, "../evil", true).as_deref(), Some("run 1"));
        assert_eq!(text(&path, "other", false), None);
        let mut names: Vec<_> = std::fs::read_dir(&path)
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                assert_eq!(
                    entry.metadata().unwrap().permissions().mode() & 0o777,
                    0o600
                );
                entry.file_name().into_string().unwrap()
            })
            .collect();
        names.sort();
        assert_eq!(names, ["0.1.0", "0.2.0", "names.json"]);
        assert_eq!(list(host.path()).unwrap(), ["env-1"]);
        delete(&path).unwrap();
        delete(&path).unwrap();
        assert!(list(host.path()).unwrap().is_empty());
    }

    /// The host process ended between two steps: the next one says what is really there.
    #[test]
    fn what_a_crash_left_is_told_as_it_is() {
        let host = tempfile::tempdir().unwrap();
        let path = directory(host.path(), "env-1");
        let mut archive = Archive::open(path.clone()).unwrap();
        archive.store(piece("c", 0, 0, 0, "0123456789")).unwrap();
        let file = OpenOptions::new()
            .write(true)
            .open(path.join("0.0.0"))
            .unwrap();
        file.set_len(7).unwrap();
        // A file of a container whose name was never written.
        std::fs::write(path.join("5.0.0"), "x").unwrap();
        let mut archive = Archive::open(path.clone()).unwrap();
        assert!(!path.join("5.0.0").exists());
        let stored = archive.store(piece("c", 0, 0, 10, "abc")).unwrap();
        assert_eq!(stored.length, Some(7));
    }
}
