//! The archive of a pod's logs on its host: what of a guest's pieces is stored, and where.
//!
//! A guest is hostile. Whatever it says, an archive has at most [`MAX_CONTAINERS`] containers with
//! [`RUNS`] runs of [`FILES`] files each, none above [`MAX_FILE`] and all together within
//! [`POD_LIMIT`]; and its names never become paths: files are numbered.
//!
//! What the host says it has of a file is the file's length. A piece is appended only there, so
//! that a piece which comes twice, or late, or after a restart of either side, changes nothing.

use crate::pod::log::{FILES, MAX_FILE, POD_LIMIT, RUNS};
use monopod_wire::LogFile;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Containers that an archive takes; a pod with more keeps no logs of the rest.
pub const MAX_CONTAINERS: usize = 100;
/// Longest name of a container, as the API has it.
const MAX_NAME: usize = 63;

/// A file of an archive. Its name on the disk is made of numbers alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileName {
    /// Number of the container in the archive.
    pub container: usize,
    /// Number of the run.
    pub attempt: u32,
    /// How often the run's file was set aside before this one.
    pub generation: u64,
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.container, self.attempt, self.generation)
    }
}

/// The text is not the name of an archive's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the name of an archived log")]
pub struct NoFileName;

impl FromStr for FileName {
    type Err = NoFileName;

    fn from_str(text: &str) -> Result<Self, NoFileName> {
        let mut numbers = text.splitn(3, '.');
        let mut number = || numbers.next().ok_or(NoFileName);
        let name = Self {
            container: number()?.parse().map_err(|_invalid| NoFileName)?,
            attempt: number()?.parse().map_err(|_invalid| NoFileName)?,
            generation: number()?.parse().map_err(|_invalid| NoFileName)?,
        };
        // `+1` and `01` are numbers too, but no names.
        if name.to_string() == text {
            Ok(name)
        } else {
            Err(NoFileName)
        }
    }
}

/// What becomes of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes to the end of this file, which may have to be made; then [`Archive::stored`].
    Append(FileName),
    /// It does not continue the file, of which so many bytes are there.
    Has(u64),
    /// The archive takes nothing more of this file.
    Refused,
}

/// What to do with a piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The names of containers changed: they are to be written before anything else.
    pub new_name: bool,
    /// Files to delete then.
    pub delete: Vec<FileName>,
    /// What becomes of the piece itself.
    pub verdict: Verdict,
}

/// Lengths of files by generation.
type Run = BTreeMap<u64, u64>;

/// What an archive has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Archive {
    names: Vec<String>,
    runs: Vec<BTreeMap<u32, Run>>,
}

impl Archive {
    /// An archive as it was found: names of containers, and files with their lengths. Returns
    /// also the files that do not belong to it.
    pub fn found(
        names: Vec<String>,
        files: impl IntoIterator<Item = (FileName, u64)>,
    ) -> (Self, Vec<FileName>) {
        let mut archive = Self {
            runs: vec![BTreeMap::new(); names.len()],
            names,
        };
        let mut delete = Vec::new();
        for (file, length) in files {
            if archive.admit(file, &mut delete) {
                archive.stored(file, length);
            } else {
                delete.push(file);
            }
        }
        (archive, delete)
    }

    /// Names of the containers, each at its number.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Decides on a piece of so many bytes.
    pub fn offer(&mut self, file: &LogFile, offset: u64, length: usize) -> Decision {
        let mut decision = Decision {
            new_name: false,
            delete: Vec::new(),
            verdict: Verdict::Refused,
        };
        let known = self.names.iter().position(|name| *name == file.container);
        let container = match known {
            Some(container) => container,
            None if self.names.len() < MAX_CONTAINERS
                && (1..=MAX_NAME).contains(&file.container.len()) =>
            {
                self.names.push(file.container.clone());
                self.runs.push(BTreeMap::new());
                decision.new_name = true;
                self.names.len() - 1
            }
            None => return decision,
        };
        let name = FileName {
            container,
            attempt: file.attempt,
            generation: file.generation,
        };
        if !self.admit(name, &mut decision.delete) {
            return decision;
        }
        let has = self.length(name).unwrap_or(0);
        let length = length as u64;
        decision.verdict = if offset != has {
            Verdict::Has(has)
        } else if has.saturating_add(length) > MAX_FILE
            || self.total().saturating_add(length) > POD_LIMIT
        {
            Verdict::Refused
        } else {
            Verdict::Append(name)
        };
        decision
    }

    /// Makes room for a file. False if newer ones have taken its place.
    fn admit(&mut self, file: FileName, delete: &mut Vec<FileName>) -> bool {
        let Some(runs) = self.runs.get_mut(file.container) else {
            return false;
        };
        let container = file.container;
        let (new_run, full) = (!runs.contains_key(&file.attempt), runs.len() >= RUNS);
        if new_run
            && full
            && let Some((&oldest, _)) = runs.first_key_value()
        {
            if oldest > file.attempt {
                return false;
            }
            let gone = runs.remove(&oldest).unwrap_or_default();
            delete.extend(gone.into_keys().map(|generation| FileName {
                container,
                attempt: oldest,
                generation,
            }));
        }
        let run = runs.entry(file.attempt).or_default();
        let (new_file, full) = (!run.contains_key(&file.generation), run.len() >= FILES);
        if new_file
            && full
            && let Some((&oldest, _)) = run.first_key_value()
        {
            if oldest > file.generation {
                return false;
            }
            run.remove(&oldest);
            delete.push(FileName {
                generation: oldest,
                ..file
            });
        }
        run.entry(file.generation).or_insert(0);
        true
    }

    /// A file has this length now.
    pub fn stored(&mut self, file: FileName, length: u64) {
        if let Some(known) = self
            .runs
            .get_mut(file.container)
            .and_then(|runs| runs.get_mut(&file.attempt)?.get_mut(&file.generation))
        {
            *known = length;
        }
    }

    fn length(&self, file: FileName) -> Option<u64> {
        self.runs
            .get(file.container)?
            .get(&file.attempt)?
            .get(&file.generation)
            .copied()
    }

    /// Bytes of all files.
    pub fn total(&self) -> u64 {
        self.runs
            .iter()
            .flat_map(BTreeMap::values)
            .flat_map(Run::values)
            .fold(0, |sum, length| sum.saturating_add(*length))
    }

    /// Files of a container's last run, or of the one before, the oldest first. None if there was
    /// no such run.
    pub fn run(&self, container: &str, previous: bool) -> Option<Vec<FileName>> {
        let number = self.names.iter().position(|name| name == container)?;
        let mut runs = self.runs.get(number)?.iter().rev();
        let (&attempt, run) = if previous { runs.nth(1) } else { runs.next() }?;
        let name = |&generation| FileName {
            container: number,
            attempt,
            generation,
        };
        Some(run.keys().map(name).collect())
    }
}

#[cfg(test)]
#[path = "archive_tests.rs"]
mod tests;
