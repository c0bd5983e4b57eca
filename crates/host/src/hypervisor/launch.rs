//! Starts a VM that belongs to no environment yet, and waits until its guest can be told who it is.
//!
//! Directory of a VM, all of it readable by root only:
//!
//! ```text
//! record.json  {qmp,control,logs,console}.sock  errors  {qemu,console,guest}.log
//! ```
//!
//! It is made in `spare/` under the VM's id and moved to `vms/` under its environment's name, at
//! once and for good: so a name is also a lock. The scratch disk has no name; it ends with the VM.

use super::accelerator::{Accelerator, Choice};
use super::arguments::{self, Descriptors, Origin};
use super::cgroup::{Bounds, Cgroups};
use super::jail::{self, Jail, Program};
use super::process::Process;
use super::qemu_vm::{Connections, ERRORS, QemuVm, SOCKETS};
use super::record::Record;
use super::template::Template;
use super::{Events, HypervisorError, Shape, Vm, VmEvent, directory};
use crate::network::{self, Vpc};
use monopod_wire::GuestMessage;
use rustix::fs::{CWD, FileType, Mode};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::num::NonZero;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Memory that a VM's process may take beside its guest's: the translated code
/// ([`arguments::CODE_MIB`]) and as much for page tables, queues and QEMU itself.
const OVERHEAD_MIB: u32 = 2 * arguments::CODE_MIB;
/// Threads beside the vCPUs': 64 for disks at most (QEMU's `thread-pool-max`), and a few of its own.
const THREADS: u64 = 80;
/// How the names of VMs begin.
const ID_PREFIX: &str = "vm-";
/// User ids of VM processes: this, and the VM's number.
const UID_BASE: u32 = 1 << 30;
/// VMs that can be told apart; a number is used again after so many.
const NUMBERS: u32 = 1 << 24;
/// Longest wait for a guest that boots, on a machine that does much else.
const BOOT: Duration = Duration::from_mins(2);
/// Longest wait for a clone, which has booted already.
const CLONE: Duration = Duration::from_secs(30);
/// VMs that are started at once, for each CPU. More would only make all of them late.
const STARTS_PER_CPU: usize = 2;

/// What the VMs of a machine have in common.
#[derive(Debug)]
pub(super) struct Launcher {
    /// Where directories of VMs without an environment are made.
    pub(super) spare: PathBuf,
    /// The guest image: `vmlinux`, `initramfs.cpio` and `preload.so`.
    pub(super) guest_image: PathBuf,
    /// Where taps are made.
    pub(super) network: Vpc,
    pub(super) program: Program,
    pub(super) cgroups: Cgroups,
    pub(super) accelerator: Choice,
    /// Number of the next VM.
    pub(super) next: AtomicU32,
    /// Held while a VM is started.
    pub(super) turns: Semaphore,
    /// VMs that are not needed any more and could not be removed.
    pub(super) stuck: Mutex<Vec<String>>,
}

/// Turns for all VMs that are started at once on this machine.
pub(super) fn turns() -> Semaphore {
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    Semaphore::new(STARTS_PER_CPU * cpus)
}

/// Where a VM's first state comes from.
#[derive(Debug)]
pub(super) enum Source<'a> {
    /// A boot, which takes seconds under emulation; for a template with the memory in this file.
    Boot(Option<&'a File>),
    /// The state that a template was saved in.
    Clone(&'a Template),
}

impl Launcher {
    /// Starts a VM and waits for its guest. On failure it is discarded. No file that it can
    /// write to can become larger than `file_bytes` by its doing.
    pub(super) async fn launch(
        &self,
        shape: Shape,
        file_bytes: u64,
        source: Source<'_>,
    ) -> Result<(QemuVm, Events), HypervisorError> {
        // Never closed.
        let _turn = self.turns.acquire().await;
        let number = self.next.fetch_add(1, Ordering::Relaxed) % NUMBERS;
        let id = self.id(number);
        let started = self.start(number, &id, shape, file_bytes, source).await;
        if started.is_err() {
            self.discard(&id).await;
        }
        started
    }

    /// Ends a VM without an environment and removes what it left.
    pub(super) async fn end(&self, vm: &QemuVm) {
        if let Err(error) = vm.end().await {
            tracing::warn!(
                vm = vm.id(),
                error = &error as &dyn std::error::Error,
                "a VM that is not needed any more cannot be ended"
            );
        }
        self.discard(vm.id()).await;
    }

    /// Ends a VM of which there may be only a directory. What cannot be removed now is tried again.
    async fn discard(&self, id: &str) {
        if let Err(error) = directory::discard(&self.spare, id).await {
            tracing::warn!(
                vm = id,
                error = &error as &dyn std::error::Error,
                "a VM that is not needed any more cannot be removed yet"
            );
            self.stuck().push(id.to_owned());
        }
    }

    /// Tries again to discard the VMs that could not be.
    pub(super) async fn discard_stuck(&self) {
        let stuck = std::mem::take(&mut *self.stuck());
        for id in stuck {
            self.discard(&id).await;
        }
    }

    fn stuck(&self) -> MutexGuard<'_, Vec<String>> {
        self.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn start(
        &self,
        number: u32,
        id: &str,
        shape: Shape,
        file_bytes: u64,
        source: Source<'_>,
    ) -> Result<(QemuVm, Events), HypervisorError> {
        let accelerator = self.accelerator.known().await;
        let accelerator = accelerator.ok_or(HypervisorError::NoAccelerator)?;
        let directory = directory::create(&self.spare, id)?;
        let mut record = Record::new(id);
        let group = self.cgroups.group(id);
        record.groups = group.directories().to_vec();
        record.write(&directory)?;
        let groups = group
            .open(bounds(shape))
            .map_err(HypervisorError::io("make the VM's control groups"))?;
        let sockets = listen(&directory)?;
        let errors = directory.join(ERRORS);
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(CWD, &errors, FileType::Fifo, mode, 0)
            .map_err(|error| HypervisorError::io("make the VM's pipe for errors")(error.into()))?;
        // Connections wait in the sockets' queues until QEMU serves them: nothing is missed.
        let connections = Connections::open(&directory)?;
        let tap = network::spare(&self.network, id)
            .await
            .map_err(|error| HypervisorError::Tap(Box::new(error)))?;
        let patience = match source {
            Source::Boot(_) => BOOT,
            Source::Clone(_) => CLONE,
        };
        let mut inherited = Inherited::default();
        let origin = match &source {
            Source::Boot(memory) => Origin::Boot {
                kernel: inherited.add(self.image("vmlinux")?),
                initramfs: inherited.add(self.image("initramfs.cpio")?),
                memory: match memory {
                    Some(file) => Some(inherited.add(copy(file)?)),
                    None => None,
                },
            },
            Source::Clone(template) => Origin::Clone {
                memory: inherited.add(template.memory()?),
            },
        };
        // Memory in a file is opened by the library.
        let preload = match origin.memory() {
            Some(_) => Some(inherited.add(self.image("preload.so")?)),
            None => None,
        };
        let tap = inherited.add(tap);
        let [qmp, control, logs, console] = sockets.map(|socket| inherited.add(socket));
        let fds = Descriptors {
            tap,
            qmp,
            control,
            logs,
            console,
        };
        // There is a reader, or this would wait for one.
        let output = File::options()
            .write(true)
            .open(&errors)
            .map_err(HypervisorError::io("open the VM's pipe for errors"))?;
        let child = jail::start(&Jail {
            program: &self.program,
            arguments: &arguments::arguments(id, shape, accelerator, origin, fds),
            uid: UID_BASE | number,
            inherited: &inherited.0,
            preload,
            groups: &groups,
            file_bytes,
            kvm: accelerator == Accelerator::Kvm,
            output: output.into(),
        })
        .map_err(HypervisorError::io("start qemu"))?;
        let process = i32::try_from(child.id())
            .ok()
            .map_or(Ok(None), Process::with_pid)
            .map_err(HypervisorError::io("watch the VM's process"))?
            .ok_or(HypervisorError::Gone)?;
        record.process = Some(process.id);
        record.write(&directory)?;
        let (mut vm, mut events) = QemuVm::new(&directory, record, process, connections).await?;
        if let Source::Clone(template) = source {
            vm.load(&template.state()?).await?;
        }
        match tokio::time::timeout(patience, said(&mut events, &GuestMessage::Ready)).await {
            Ok(Ok(())) => Ok((vm, events)),
            Ok(Err(HypervisorError::Gone)) => Err(vm.failed_start()),
            Ok(Err(error)) => Err(error),
            Err(_elapsed) => Err(HypervisorError::NotReady { patience }),
        }
    }

    /// Numbers are unique to a host's directory only, of which a machine may have several. A tap's
    /// name has room for 15 characters.
    fn id(&self, number: u32) -> String {
        let hash = Sha256::digest(self.spare.as_os_str().as_bytes());
        format!("{ID_PREFIX}{}{number:06x}", hex::encode(&hash[..2]))
    }

    fn image(&self, name: &str) -> Result<OwnedFd, HypervisorError> {
        let path = self.guest_image.join(name);
        let file = File::open(&path).map_err(HypervisorError::io(format!(
            "open {} of the guest image; build it with `cargo xtask build`",
            path.display()
        )))?;
        Ok(file.into())
    }
}

/// What a VM's process may take. Its guest's memory and QEMU's own stay well below, so that this
/// only ends what went wrong.
fn bounds(shape: Shape) -> Bounds {
    Bounds {
        memory_bytes: u64::from(shape.memory_mib + OVERHEAD_MIB) << 20,
        threads: u64::from(shape.vcpus) + THREADS,
    }
}

/// Waits until the guest says this, passing over all else.
pub(super) async fn said(
    events: &mut Events,
    wanted: &GuestMessage,
) -> Result<(), HypervisorError> {
    loop {
        match events.recv().await.ok_or(HypervisorError::Gone)? {
            VmEvent::Guest(said) if said == *wanted => return Ok(()),
            VmEvent::Guest(GuestMessage::Ended(ended)) => {
                return Err(HypervisorError::Ended { ended });
            }
            VmEvent::Incompatible { version } => {
                return Err(HypervisorError::Incompatible { version });
            }
            VmEvent::Exited => return Err(HypervisorError::Gone),
            VmEvent::Guest(_) | VmEvent::Connected(_) | VmEvent::Disconnected => {}
        }
    }
}

/// Descriptors that a process inherits.
#[derive(Default)]
struct Inherited(Vec<OwnedFd>);

impl Inherited {
    fn add(&mut self, descriptor: OwnedFd) -> RawFd {
        let number = descriptor.as_raw_fd();
        self.0.push(descriptor);
        number
    }
}

fn copy(file: &File) -> Result<OwnedFd, HypervisorError> {
    file.try_clone()
        .map(OwnedFd::from)
        .map_err(HypervisorError::io("copy a descriptor"))
}

fn listen(directory: &Path) -> Result<[OwnedFd; 4], HypervisorError> {
    let listen = |name: &str| -> Result<OwnedFd, HypervisorError> {
        UnixListener::bind(directory.join(format!("{name}.sock")))
            .map(OwnedFd::from)
            .map_err(HypervisorError::io(format!("listen on the VM's {name}")))
    };
    let [qmp, control, logs, console] = SOCKETS.map(listen);
    Ok([qmp?, control?, logs?, console?])
}

/// The number after the highest that a VM on this machine has, so that none is given twice. The
/// first is 1: 0 is the probe's user.
pub(super) fn next_number(vms: &[&Path]) -> Result<u32, HypervisorError> {
    let mut next = 1;
    for parent in vms {
        for name in directory::list(parent)? {
            let record = Record::read(&parent.join(&name))?;
            let number = record.and_then(|record| number(&record.id));
            next = next.max(number.map_or(0, |number| number + 1));
        }
    }
    Ok(next)
}

fn number(id: &str) -> Option<u32> {
    let digits = id.strip_prefix(ID_PREFIX)?;
    u32::from_str_radix(digits.get(digits.len().checked_sub(6)?..)?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_never_given_twice() {
        let spare = tempfile::tempdir().unwrap();
        assert_eq!(next_number(&[spare.path()]).unwrap(), 1);
        for (id, next) in [("vm-1f2e000001", 2), ("vm-ffff00002a", 43), ("other", 43)] {
            let directory = directory::create(spare.path(), id).unwrap();
            Record::new(id).write(&directory).unwrap();
            assert_eq!(next_number(&[spare.path()]).unwrap(), next, "{id}");
        }
    }
}
