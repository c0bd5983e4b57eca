//! VMs by QEMU's machine `microvm`, each a clone of a template of its shape.

use super::accelerator::Choice;
use super::cgroup::Cgroups;
use super::directory::{self, directory};
use super::launch::{Launcher, Source, next_number, turns};
use super::pool::Pool;
use super::qemu_vm::Connections;
use super::scratch::Disks;
use super::template::Templates;
use super::{Events, Hypervisor, HypervisorError, Kind, Limits, Vm, VmSpec, program};
use crate::network::Vpc;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;
use tokio_util::task::AbortOnDropHandle;

pub use super::qemu_vm::QemuVm;

/// Where things are.
#[derive(Clone, Debug)]
pub struct QemuConfig {
    /// VMs have directories in here, and files without a name: their disks and templates. So has
    /// what their processes see of this machine.
    pub directory: PathBuf,
    /// The guest image: `vmlinux`, `initramfs.cpio` and `preload.so`.
    pub guest_image: PathBuf,
    /// Where taps are made.
    pub network: Vpc,
    /// Most VMs that are kept ready before they are needed.
    pub pool: usize,
}

/// Starts VMs with QEMU.
#[derive(Debug)]
pub struct Qemu {
    vms: PathBuf,
    machine: Arc<Machine>,
    _keeper: AbortOnDropHandle<()>,
}

/// What starts VMs that belong to no environment.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) launcher: Launcher,
    pub(super) templates: Templates,
    pub(super) disks: Disks,
    pool: Pool,
}

/// VMs of environments, and VMs that belong to none.
fn parents(directory: &Path) -> [PathBuf; 2] {
    ["vms", "spare"].map(|name| directory.join(name))
}

/// What the processes of VMs see of this machine.
fn jail(directory: &Path) -> PathBuf {
    directory.join("jail")
}

impl Qemu {
    /// Begins to find out how guests can be run here, and to fill the pool. What a former process had started and not given to an environment is ended.
    pub async fn new(config: QemuConfig) -> Result<Self, HypervisorError> {
        let [vms, spare] = parents(&config.directory);
        for directory in [&vms, &spare] {
            std::fs::create_dir_all(directory).map_err(HypervisorError::io(format!(
                "create {}",
                directory.display()
            )))?;
        }
        let next = next_number(&[&vms, &spare])?.into();
        directory::discard_all(&spare).await?;
        let jail = jail(&config.directory);
        let program = program::prepare(&jail)?;
        let cgroups = Cgroups::find();
        directory::end_unrecorded(&vms, &jail).await?;
        let accelerator = Choice::begin(program.clone(), config.guest_image.clone());
        let machine = Arc::new(Machine {
            launcher: Launcher {
                spare,
                guest_image: config.guest_image,
                network: config.network,
                program,
                cgroups,
                accelerator,
                next,
                turns: turns(),
                stuck: Mutex::default(),
            },
            templates: Templates::new(config.directory.clone()),
            disks: Disks::new(config.directory),
            pool: Pool::new(config.pool),
        });
        let kept = Arc::clone(&machine);
        let keeper = tokio::spawn(async move {
            kept.pool.keep(&kept).await;
        });
        Ok(Self {
            vms,
            machine,
            _keeper: AbortOnDropHandle::new(keeper),
        })
    }
}

impl Machine {
    /// Starts an environment's VM, whose directory gets this name.
    async fn start(&self, home: &Path, spec: &VmSpec) -> Result<(QemuVm, Events), HypervisorError> {
        let kind = Kind {
            shape: spec.size.into(),
            scratch_bytes: spec.scratch_bytes,
        };
        let (disk, vm) = tokio::join!(self.disks.make(spec.scratch_bytes), self.spare(kind));
        let (mut vm, events) = vm?;
        let assigned = match disk {
            Ok(disk) => vm.assign(home, disk).await,
            Err(error) => Err(error),
        };
        match assigned {
            Ok(()) => Ok((vm, events)),
            Err(error) => {
                self.launcher.end(&vm).await;
                Err(error)
            }
        }
    }

    /// A VM that belongs to no environment.
    async fn spare(&self, kind: Kind) -> Result<(QemuVm, Events), HypervisorError> {
        if let Some(started) = self.pool.take(&self.launcher, kind).await {
            return Ok(started);
        }
        let (launcher, bytes) = (&self.launcher, kind.scratch_bytes);
        if let Some(template) = self.templates.get(launcher, kind.shape).await {
            let clone = launcher.launch(kind.shape, bytes, Source::Clone(&template));
            match clone.await {
                Ok(started) => return Ok(started),
                Err(error) => self.templates.distrust(kind.shape, &error),
            }
        }
        launcher.launch(kind.shape, bytes, Source::Boot(None)).await
    }
}

impl Hypervisor for Qemu {
    type Vm = QemuVm;

    fn accelerator(&self) -> Option<String> {
        self.machine.launcher.accelerator.reason()
    }

    async fn decided(&self) {
        self.machine.launcher.accelerator.known().await;
    }

    fn limits(&self) -> &Limits {
        self.machine.launcher.cgroups.limits()
    }

    fn waiting(&self) -> usize {
        self.machine.pool.waiting()
    }

    async fn start(&self, spec: VmSpec) -> Result<(QemuVm, Events), HypervisorError> {
        let home = directory(&self.vms, &spec.environment)?;
        if self.has(&spec.environment) {
            return Err(HypervisorError::Exists {
                environment: spec.environment,
            });
        }
        // By a task of its own: what was begun is ended in order even if nobody waits for it any more.
        let (sender, started) = oneshot::channel();
        let (machine, vms) = (Arc::clone(&self.machine), self.vms.clone());
        tokio::spawn(async move {
            let outcome = machine.start(&home, &spec).await;
            if let Err(Ok((vm, _events))) = sender.send(outcome) {
                tracing::info!(vm = vm.id(), environment = %spec.environment, "a VM is not needed any more");
                if let Err(error) = directory::discard(&vms, &spec.environment).await {
                    tracing::error!(environment = %spec.environment, error = &error as &dyn std::error::Error, "its VM stays until the next host process");
                }
            }
        });
        started.await.map_err(|_died| HypervisorError::Gone)?
    }

    async fn adopt(&self, environment: &str) -> Result<Option<(QemuVm, Events)>, HypervisorError> {
        let directory = directory(&self.vms, environment)?;
        let Some((record, process)) = directory::find(&directory)? else {
            return Ok(None);
        };
        let connections = Connections::open(&directory)?;
        QemuVm::new(&directory, record, process, connections)
            .await
            .map(Some)
    }

    fn has(&self, environment: &str) -> bool {
        directory(&self.vms, environment).is_ok_and(|home| home.exists())
    }

    fn list(&self) -> Result<Vec<String>, HypervisorError> {
        directory::list(&self.vms)
    }

    async fn discard(&self, environment: &str) -> Result<(), HypervisorError> {
        directory::discard(&self.vms, environment).await
    }
}

/// Ends every VM of a host's directory, also those that nothing there names any more. No directory is fine.
pub async fn discard_all(directory: &Path) -> Result<(), HypervisorError> {
    let [vms, spare] = parents(directory);
    for parent in [&vms, &spare] {
        directory::discard_all(parent).await?;
    }
    directory::end_unrecorded(&vms, &jail(directory)).await
}
