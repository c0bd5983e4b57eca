//! Directories whose files change all at once, in the layout of upstream's atomic writer.
//!
//! ```text
//! volume/..2026_11_30_12_00_00.1/file     the files
//! volume/..data -> ..2026_11_30_…         replaced by rename: the moment of change
//! volume/file -> ..data/file              what users see
//! ```

use rustix::fs::{AtFlags, CWD, Gid, Mode, chmodat};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _, symlink};
use std::path::{Component, Path, PathBuf};

const DATA: &str = "..data";

/// A file of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct File {
    /// Content.
    pub(crate) bytes: Vec<u8>,
    /// Permissions.
    pub(crate) mode: u32,
    /// Owner, if it is not root.
    pub(crate) uid: Option<u32>,
}

/// The files of a volume by relative path.
pub(crate) type Payload = BTreeMap<PathBuf, File>;

/// Whether a path stays in its volume and does not look like our own names.
pub(crate) fn is_safe(path: &Path) -> bool {
    let mut names = path.components();
    let first_is_ours = path
        .components()
        .next()
        .is_some_and(|first| first.as_os_str().to_string_lossy().starts_with(".."));
    !first_is_ours
        && path.components().next().is_some()
        && names.all(|part| matches!(part, Component::Normal(_)))
}

/// Makes the volume have exactly these files. `generation` must differ each time.
///
/// Paths that are not [`is_safe`] are an error before anything is written.
pub(crate) fn write(
    volume: &Path,
    payload: &Payload,
    generation: u64,
    group: Option<u32>,
) -> io::Result<()> {
    if let Some(path) = payload.keys().find(|path| !is_safe(path)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} is not a path inside the volume", path.display()),
        ));
    }
    fs::create_dir_all(volume)?;
    let name = format!("..{generation:020}");
    let fresh = volume.join(&name);
    fs::create_dir(&fresh)?;
    for (path, file) in payload {
        let target = fresh.join(path);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        let mut out = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&target)?;
        out.write_all(&file.bytes)?;
        own(&target, file.uid, group)?;
        // A group that may own the volume may read it.
        let mode = if group.is_some() {
            file.mode | 0o040
        } else {
            file.mode
        };
        chmodat(
            CWD,
            &target,
            Mode::from_raw_mode(mode & 0o777),
            AtFlags::empty(),
        )?;
    }
    open_directories(&fresh, group)?;

    let old = fs::read_link(volume.join(DATA)).ok();
    let staged = volume.join("..data_tmp");
    if staged.symlink_metadata().is_ok() {
        fs::remove_file(&staged)?;
    }
    symlink(&name, &staged)?;
    fs::rename(&staged, volume.join(DATA))?;

    let tops: std::collections::BTreeSet<_> = payload
        .keys()
        .filter_map(|path| path.components().next())
        .map(|first| first.as_os_str().to_owned())
        .collect();
    for top in &tops {
        let link = volume.join(top);
        if link.symlink_metadata().is_err() {
            symlink(Path::new(DATA).join(top), &link)?;
        }
    }
    for entry in fs::read_dir(volume)? {
        let name = entry?.file_name();
        if !name.to_string_lossy().starts_with("..") && !tops.contains(&name) {
            fs::remove_file(volume.join(name))?;
        }
    }
    if let Some(old) = old {
        fs::remove_dir_all(volume.join(old))?;
    }
    Ok(())
}

fn open_directories(directory: &Path, group: Option<u32>) -> io::Result<()> {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
    own(directory, None, group)?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_directories(&entry.path(), group)?;
        }
    }
    Ok(())
}

fn own(path: &Path, uid: Option<u32>, group: Option<u32>) -> io::Result<()> {
    if uid.is_none() && group.is_none() {
        return Ok(());
    }
    let uid = uid.map(rustix::fs::Uid::from_raw);
    Ok(rustix::fs::chown(path, uid, group.map(Gid::from_raw))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(files: &[(&str, &str)]) -> Payload {
        files
            .iter()
            .map(|(path, text)| {
                let file = File {
                    bytes: text.as_bytes().to_vec(),
                    mode: 0o644,
                    uid: None,
                };
                (PathBuf::from(path), file)
            })
            .collect()
    }

    #[test]
    fn files_change_at_once_and_old_ones_go() {
        let directory = tempfile::tempdir().unwrap();
        let volume = directory.path().join("v");
        write(&volume, &payload(&[("a", "1"), ("sub/b", "2")]), 1, None).unwrap();
        assert_eq!(fs::read_to_string(volume.join("a")).unwrap(), "1");
        assert_eq!(fs::read_to_string(volume.join("sub/b")).unwrap(), "2");
        assert_eq!(
            fs::read_link(volume.join("a")).unwrap(),
            Path::new("..data/a")
        );

        write(&volume, &payload(&[("a", "3"), ("c", "4")]), 2, None).unwrap();
        assert_eq!(fs::read_to_string(volume.join("a")).unwrap(), "3");
        assert_eq!(fs::read_to_string(volume.join("c")).unwrap(), "4");
        assert!(volume.join("sub").symlink_metadata().is_err());
        let ours = fs::read_dir(&volume).unwrap().count();
        assert_eq!(ours, 4, "two links, ..data and one directory");
    }

    #[test]
    fn paths_that_leave_the_volume_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        for path in ["../x", "/etc/x", "..data", "..x/y", "a/../../b", ""] {
            assert!(!is_safe(Path::new(path)), "{path}");
            assert!(write(directory.path(), &payload(&[(path, "")]), 1, None).is_err());
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        assert!(is_safe(Path::new("a/..b/c")));
    }
}
