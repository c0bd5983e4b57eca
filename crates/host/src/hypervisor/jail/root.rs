//! The root of a VM's process: the program, the libraries that it loads, and its data. Nothing else
//! of the machine's is in it: no other program, no shell, no device, nothing writable.
//!
//! Made once for each build of the program, at the same paths as outside, by hard links where the
//! file system allows: then it takes no room, on the disk or in memory. All VMs share it, each by a
//! read-only mount of its own.

use super::seccomp::Filters;
use crate::files::absent_is_fine;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::io::{Error, Result};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A program that can be jailed.
#[derive(Clone, Debug)]
pub(in crate::hypervisor) struct Program {
    /// Its root on this machine.
    pub(super) root: PathBuf,
    /// Its path within.
    pub(super) path: PathBuf,
    /// Where its libraries are, as the loader takes it.
    pub(super) library_path: String,
    /// What is refused to it.
    pub(super) filters: Filters,
}

impl Program {
    /// Brings a program and everything that it needs under `directory`; what is there already is
    /// used. Roots of former builds are removed: processes that run keep what they have open.
    ///
    /// `data` are files that the program opens by itself; those that do not exist are left out.
    pub(in crate::hypervisor) fn prepare(
        directory: &Path,
        path: &Path,
        data: &[PathBuf],
    ) -> Result<Self> {
        let data: Vec<&PathBuf> = data.iter().filter(|file| file.exists()).collect();
        let mut files = libraries(path)?;
        for module in data.iter().filter(|file| is_module(file)) {
            files.extend(libraries(module)?);
        }
        let directories: BTreeSet<_> = files.iter().filter_map(|file| file.parent()).collect();
        let directories = directories.iter().map(|path| path.display().to_string());
        let library_path = directories.collect::<Vec<_>>().join(":");
        files.insert(path.to_owned());
        files.extend(data.into_iter().cloned());
        let name = format!("root-{}", identity(&files)?);
        let root = directory.join(&name);
        if !root.exists() {
            std::fs::create_dir_all(directory)?;
            let new = tempfile::Builder::new()
                .prefix("new-")
                .permissions(PermissionsExt::from_mode(0o755))
                .tempdir_in(directory)?;
            fill(new.path(), &files)?;
            match std::fs::rename(new.path(), &root) {
                // The empty name that is left is none any more.
                Ok(()) => drop(new.keep()),
                Err(_) if root.exists() => {}
                Err(error) => return Err(error),
            }
        }
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            if entry.file_name() != *name {
                absent_is_fine(std::fs::remove_dir_all(entry.path()))?;
            }
        }
        Ok(Self {
            root,
            path: path.to_owned(),
            library_path,
            filters: Filters::compile()?,
        })
    }
}

fn is_module(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "so")
}

/// Tells one set of files from every other: their paths, and what would change with their content.
fn identity(files: &BTreeSet<PathBuf>) -> Result<String> {
    let mut hash = Sha256::new();
    for file in files {
        let is = file.metadata()?;
        let facts = [is.dev(), is.ino(), is.size()].map(|fact| fact.to_string());
        let changed = format!("{}.{}", is.mtime(), is.mtime_nsec());
        hash.update(format!(
            "{} {} {changed}\n",
            file.display(),
            facts.join(" ")
        ));
    }
    Ok(hex::encode(&hash.finalize()[..8]))
}

fn fill(root: &Path, files: &BTreeSet<PathBuf>) -> Result<()> {
    let mode = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode));
    for directory in ["proc", "dev"] {
        std::fs::create_dir(root.join(directory))?;
    }
    for file in files {
        let inside = root.join(file.strip_prefix("/").map_err(Error::other)?);
        if let Some(parent) = inside.parent() {
            std::fs::create_dir_all(parent)?;
        }
        // Links lead to files that are not here.
        let source = file.canonicalize()?;
        if std::fs::hard_link(&source, &inside).is_err() {
            std::fs::copy(&source, &inside)?;
            mode(&inside, 0o755)?;
        }
    }
    Ok(())
}

/// The libraries that a program or module is loaded with, and the loader itself, as the loader says.
pub(super) fn libraries(program: &Path) -> Result<BTreeSet<PathBuf>> {
    let loader = Command::new("ldd").arg(program).env_clear().output()?;
    if !loader.status.success() {
        let said = String::from_utf8_lossy(&loader.stderr);
        let said = format!("ldd {}: {}", program.display(), said.trim());
        return Err(Error::other(said));
    }
    parse(&String::from_utf8_lossy(&loader.stdout))
}

/// Lines are `name => /path (0x…)`, `/path (0x…)` or `vdso (0x…)`.
fn parse(listing: &str) -> Result<BTreeSet<PathBuf>> {
    let mut files = BTreeSet::new();
    for line in listing.lines() {
        let path = line
            .split_once(" => ")
            .map_or(line, |(_, path)| path)
            .trim();
        if path == "not found" {
            return Err(Error::other(format!(
                "a library is missing: {}",
                line.trim()
            )));
        }
        let path = path.rsplit_once(" (").map_or(path, |(path, _)| path);
        if path.starts_with('/') {
            files.insert(path.into());
        }
    }
    Ok(files)
}
