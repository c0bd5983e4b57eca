//! The directories of VMs: one each, in `vms/` named by the environment, in `spare/` by the VM.

use super::cgroup::Group;
use super::process::Process;
use super::record::Record;
use super::{HypervisorError, arguments};
use crate::files::absent_is_fine;
use rustix::fs::{CWD, Mode, OFlags};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Makes a VM's directory, of which everyone but root is kept out.
pub(super) fn create(parent: &Path, name: &str) -> Result<PathBuf, HypervisorError> {
    let path = directory(parent, name)?;
    std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700)
        .create(&path)
        .map_err(HypervisorError::io("create the VM's directory"))?;
    Ok(path)
}

/// Ends every VM that has a directory in here and removes what it left.
pub(super) async fn discard_all(parent: &Path) -> Result<(), HypervisorError> {
    for name in list(parent)? {
        discard(parent, &name).await?;
    }
    Ok(())
}

/// Ends a VM and removes what it left.
pub(super) async fn discard(parent: &Path, name: &str) -> Result<(), HypervisorError> {
    let directory = directory(parent, name)?;
    if let Some(record) = Record::read(&directory)? {
        end(running(&record)?.as_ref(), &Group::new(record.groups)).await?;
    }
    absent_is_fine(std::fs::remove_dir_all(&directory))
        .map_err(HypervisorError::io("remove the VM's directory"))
}

/// Ends what a VM is beside its directory.
pub(super) async fn end(process: Option<&Process>, group: &Group) -> Result<(), HypervisorError> {
    if let Some(process) = process {
        process.kill().map_err(HypervisorError::io("kill the VM"))?;
        let exited = process.exited().await;
        exited.map_err(HypervisorError::io("wait for the VM's end"))?;
    }
    let removed = group.remove().await;
    removed.map_err(HypervisorError::io("remove the VM's control groups"))
}

/// Ends the VMs whose directory somebody removed: processes in one of the `roots` of which there is no
/// record in `vms`.
pub(super) async fn end_unrecorded(vms: &Path, roots: &Path) -> Result<(), HypervisorError> {
    let mut recorded = Vec::new();
    for name in list(vms)? {
        if let Some((_, process)) = find(&directory(vms, &name)?)? {
            recorded.push(process.id);
        }
    }
    let running = Process::rooted_in(super::program::PATH, roots);
    let running = running.map_err(HypervisorError::io("look for VMs without a directory"))?;
    for (process, words) in running.iter().filter(|(p, _)| !recorded.contains(&p.id)) {
        let id = words.iter().find_map(|word| arguments::named_by(word));
        tracing::warn!(
            id,
            pid = process.id.pid,
            "a VM without a directory is ended"
        );
        // Before its end: a process that has ended is in none.
        let group = match id.map(|id| Group::of_process(process.id.pid, id)) {
            Some(Ok(group)) => group,
            Some(Err(error)) => {
                tracing::warn!(id, %error, "its control groups are not known");
                Group::default()
            }
            None => Group::default(),
        };
        end(Some(process), &group).await?;
    }
    Ok(())
}

/// Names of the VMs that have a directory in here, which need not be there.
pub(super) fn list(parent: &Path) -> Result<Vec<String>, HypervisorError> {
    let entries = match std::fs::read_dir(parent) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(HypervisorError::io("list the VMs' directories"))?,
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| directory(parent, name).is_ok())
        .collect();
    names.sort();
    Ok(names)
}

/// A VM's directory, whose name must not lead elsewhere.
pub(super) fn directory(parent: &Path, name: &str) -> Result<PathBuf, HypervisorError> {
    let safe = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if name.is_empty() || name.len() > 63 || !name.bytes().all(safe) {
        return Err(HypervisorError::Name { name: name.into() });
    }
    Ok(parent.join(name))
}

/// The VM's record and process, if it runs.
pub(super) fn find(directory: &Path) -> Result<Option<(Record, Process)>, HypervisorError> {
    let Some(mut record) = Record::read(directory)? else {
        return Ok(None);
    };
    Ok(running(&record)?.map(|process| {
        record.process = Some(process.id);
        (record, process)
    }))
}

/// The recorded VM's process, if it runs. Looks for it if its number was not recorded.
fn running(record: &Record) -> Result<Option<Process>, HypervisorError> {
    let found = match record.process {
        Some(id) => Process::recorded(id),
        None => Process::with_argument(super::program::PATH, &arguments::process_name(&record.id)),
    };
    found.map_err(HypervisorError::io("look for the VM's process"))
}

/// A VM's directory, held open, as it may be given another name.
#[derive(Clone, Debug)]
pub(super) struct Home(Arc<OwnedFd>);

impl Home {
    pub(super) fn open(path: &Path) -> Result<Self, HypervisorError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptor = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| {
            HypervisorError::io(format!("open {}", path.display()))(error.into())
        })?;
        Ok(Self(Arc::new(descriptor)))
    }

    /// A path to it that no renaming changes.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Its name on this machine.
    fn name(&self) -> Result<PathBuf, HypervisorError> {
        std::fs::read_link(self.path()).map_err(HypervisorError::io("find the VM's directory"))
    }

    /// Gives it a name that nothing else has, for good.
    pub(super) fn rename(&self, to: &Path) -> Result<(), HypervisorError> {
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        rustix::fs::renameat_with(CWD, self.name()?, CWD, to, flags).map_err(|error| match error {
            rustix::io::Errno::EXIST => HypervisorError::Exists {
                environment: to.display().to_string(),
            },
            error => HypervisorError::io("name the VM's directory")(error.into()),
        })
    }
}
