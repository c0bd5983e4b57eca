//! VMs that were saved when their guests were ready, to be cloned for each pod.
//!
//! A template is two files without a name: the memory, of which clones map private copies, and the
//! state of the devices. They are readable by this process alone, which gives clones descriptors
//! that can only be read. They lie on disk, not in memory: of a file in memory, each hole that a
//! clone reads would take memory for ever (`vm-disks.md`, 0.2).
//!
//! What must differ between clones is drawn after GO (`guest::pid1`). A template lives as long as
//! the host process that made it, which runs one build of QEMU (`jail::root`): a new release, QEMU,
//! kernel or processor means a new host process.

use super::launch::{Launcher, Source};
use super::{HypervisorError, Shape};
use crate::files::unnamed;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::OnceCell;

/// Largest state that is written, which is some 100 kB.
const STATE: u64 = 64 << 20;
/// Templates that are kept; the one that was not used for longest makes room.
const TEMPLATES: usize = 16;
/// How long a shape is booted each time after its template could not be made or used.
const DISTRUST: Duration = Duration::from_mins(5);

/// A saved VM.
#[derive(Debug)]
pub(super) struct Template {
    memory: File,
    state: File,
}

impl Template {
    /// Boots a VM of this shape, saves it and ends it.
    async fn make(
        launcher: &Launcher,
        directory: &Path,
        shape: Shape,
    ) -> Result<Self, HypervisorError> {
        let file = || {
            unnamed(directory).map_err(HypervisorError::io(format!(
                "make a template's file in {}",
                directory.display()
            )))
        };
        let (memory, state) = (file()?, file()?);
        memory
            .set_len(u64::from(shape.memory_mib) << 20)
            .map_err(HypervisorError::io("make room for a template's memory"))?;
        let (mut vm, _events) = launcher
            .launch(shape, STATE, Source::Boot(Some(&memory)))
            .await?;
        let saved = vm.save(&state).await;
        launcher.end(&vm).await;
        saved?;
        Ok(Self { memory, state })
    }

    /// The memory, for one clone.
    pub(super) fn memory(&self) -> Result<OwnedFd, HypervisorError> {
        read_only(&self.memory)
    }

    /// The devices' state, to be read once.
    pub(super) fn state(&self) -> Result<OwnedFd, HypervisorError> {
        read_only(&self.state)
    }
}

/// Opens a file again, for reading only and from its beginning.
fn read_only(file: &File) -> Result<OwnedFd, HypervisorError> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map(OwnedFd::from)
        .map_err(HypervisorError::io("open a template for reading"))
}

/// A template, or since when it is known to be unusable.
type Made = Arc<OnceCell<Result<Arc<Template>, Instant>>>;

#[derive(Debug)]
struct Entry {
    made: Made,
    used: Instant,
}

/// The templates of a machine, one per shape in use, made when they are needed first.
#[derive(Debug)]
pub(super) struct Templates {
    directory: PathBuf,
    entries: Mutex<BTreeMap<Shape, Entry>>,
}

impl Templates {
    /// Templates whose files are made in this directory.
    pub(super) fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            entries: Mutex::default(),
        }
    }

    /// The template of a shape; made once, for all who wait for it. None if it cannot be made,
    /// which the log says.
    pub(super) async fn get(&self, launcher: &Launcher, shape: Shape) -> Option<Arc<Template>> {
        let entry = self.entry(shape);
        let make = async || match Template::make(launcher, &self.directory, shape).await {
            Ok(template) => {
                tracing::info!(%shape, "template made");
                Ok(Arc::new(template))
            }
            Err(error) => Err(unusable(shape, &error)),
        };
        entry.get_or_init(make).await.clone().ok()
    }

    /// Does without the template of a shape for a while.
    pub(super) fn distrust(&self, shape: Shape, error: &HypervisorError) {
        let since = unusable(shape, error);
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.get_mut(&shape) {
            entry.made = Arc::new(OnceCell::new_with(Some(Err(since))));
        }
    }

    fn entry(&self, shape: Shape) -> Made {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let forgiven = |entry: &Entry| matches!(entry.made.get(), Some(Err(since)) if since.elapsed() > DISTRUST);
        entries.retain(|_, entry| !forgiven(entry));
        if entries.len() >= TEMPLATES && !entries.contains_key(&shape) {
            let oldest = entries.iter().min_by_key(|(_, entry)| entry.used);
            if let Some(oldest) = oldest.map(|(shape, _)| *shape) {
                entries.remove(&oldest);
            }
        }
        let entry = entries.entry(shape).or_insert_with(|| Entry {
            made: Arc::default(),
            used: Instant::now(),
        });
        entry.used = Instant::now();
        Arc::clone(&entry.made)
    }
}

/// Says that a template cannot be used, from now on.
fn unusable(shape: Shape, error: &HypervisorError) -> Instant {
    tracing::warn!(
        %shape,
        error = error as &dyn std::error::Error,
        "a template cannot be used; VMs of this shape are booted, which takes longer"
    );
    Instant::now()
}
