//! What must be known of a VM to find it again: `record.json` in its directory.
//!
//! Written before the process exists and again once its id is known, so that a crash in between
//! leaves a record to start the search from.

use super::HypervisorError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Version of the format.
const VERSION: u32 = 1;

/// A VM's record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Record {
    version: u32,
    /// The VM's own name, which its process and its tap have too.
    pub(super) id: String,
    /// The process, once it is known.
    pub(super) process: Option<ProcessId>,
    /// Images by slot.
    pub(super) images: BTreeMap<u8, PathBuf>,
    /// Its control groups, which may not exist yet.
    #[serde(default)]
    pub(super) groups: Vec<PathBuf>,
}

/// A process, told apart from a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ProcessId {
    /// The process's number.
    pub(super) pid: i32,
    /// When it began, in ticks since the machine's start (`/proc/<pid>/stat`, field 22).
    pub(super) start_time: u64,
}

impl Record {
    pub(super) fn new(id: &str) -> Self {
        Self {
            version: VERSION,
            id: id.into(),
            process: None,
            images: BTreeMap::new(),
            groups: Vec::new(),
        }
    }

    /// Replaces the record, all or nothing.
    pub(super) fn write(&self, directory: &Path) -> Result<(), HypervisorError> {
        let text = serde_json::to_vec(self).map_err(|source| HypervisorError::Record {
            path: directory.to_owned(),
            source,
        })?;
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(directory)?;
            file.write_all(&text)?;
            file.as_file().sync_data()?;
            file.persist(path(directory))?;
            Ok(())
        };
        write().map_err(HypervisorError::io("write the VM's record"))
    }

    /// Reads the record; none if there is none.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>, HypervisorError> {
        let path = path(directory);
        match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .map_err(|source| HypervisorError::Record { path, source }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(HypervisorError::io("read the VM's record")(error)),
        }
    }
}

fn path(directory: &Path) -> PathBuf {
    directory.join("record.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record that an earlier release wrote must stay readable: its VM runs.
    #[test]
    fn version_1_is_read() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(
            path(directory.path()),
            r#"{"version":1,"id":"vm-1f2e000007","process":{"pid":7,"startTime":8},"images":{"2":"/images/a"}}"#,
        )
        .unwrap();
        let record = Record::read(directory.path()).unwrap().unwrap();
        assert_eq!(
            record.process,
            Some(ProcessId {
                pid: 7,
                start_time: 8
            })
        );
        assert_eq!(record.images[&2], Path::new("/images/a"));
        record.write(directory.path()).unwrap();
        assert_eq!(Record::read(directory.path()).unwrap(), Some(record));
    }
}
