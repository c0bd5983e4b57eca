//! Virtual machines: start, talk to, attach images to, watch and kill.
//!
//! [`Hypervisor`] is the narrow border to whatever runs VMs; [`qemu::Qemu`] is the one
//! implementation so far. A VM belongs to its directory, which holds its record and sockets. It
//! outlives the host process: the next one adopts it by its directory's name.
//!
//! ```text
//! start(spec)                        ->  (Vm, events): the guest waits: send Go
//! adopt(environment)                 ->  (Vm, events)
//!    Connected(Ready | Going)        <-  a reconnect: send everything again, all of it is idempotent
//!    Guest(Phase | Report | Ended)
//!    Disconnected                    <-  reconnects by itself while the VM lives
//!    Exited                          <-  the last event; then discard(environment)
//! ```
//!
//! Whoever holds a [`Vm`] may drop it: the VM goes on. Only [`Vm::kill`] ends it.

mod accelerator;
mod arguments;
mod cgroup;
mod copy;
mod directory;
mod jail;
mod launch;
mod limits;
mod link;
mod pace;
mod pool;
mod probe;
mod process;
mod program;
pub mod qemu;
mod qemu_vm;
mod qmp;
mod record;
mod rehearsal;
mod scratch;
mod template;
mod tsc;
mod usage;

use monopod_api::size::Size;
use monopod_wire::{GuestMessage, HostMessage, Stage};
use std::fmt;
use std::future::Future;
use std::path::{Path, PathBuf};
use tokio::sync::mpsc;

pub use limits::Limits;
pub use usage::Usage;

/// Slots for read-only image disks of each VM (`vm-disks.md`: each costs some 2 ms of a start).
pub const IMAGE_SLOTS: u8 = 8;

/// Events of a VM that wait for its owner; the link waits while it is full.
pub(crate) const EVENTS: usize = 64;

/// What a VM is made from.
#[derive(Debug)]
pub struct VmSpec {
    /// Name of the environment; names the VM and its directory.
    pub environment: String,
    /// vCPUs and memory.
    pub size: Size,
    /// Size of the writable disk in bytes.
    pub scratch_bytes: u64,
}

/// What VMs of the pool are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Kind {
    /// Whose template they are clones of.
    pub(crate) shape: Shape,
    /// Size of the writable disk in bytes.
    pub(crate) scratch_bytes: u64,
}

/// What VMs may have in common: a template serves all of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape {
    /// Whole virtual CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
}

impl From<Size> for Shape {
    fn from(size: Size) -> Self {
        Self {
            vcpus: size.vcpus(),
            memory_mib: size.memory_mib,
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} vCPU, {} MiB", self.vcpus, self.memory_mib)
    }
}

/// What happens to a VM.
#[derive(Clone, Debug, PartialEq)]
pub enum VmEvent {
    /// The guest answered on a new connection. Everything it should know must be sent now, again.
    Connected(Stage),
    /// The guest speaks another version of the protocol, and so cannot be used.
    Incompatible {
        /// The guest's version.
        version: u16,
    },
    /// The guest says something; never a Hello.
    Guest(GuestMessage),
    /// The connection was lost. It is made again while the VM lives.
    Disconnected,
    /// The VM's process is gone. There is no later event.
    Exited,
}

/// A VM's events, in order.
pub type Events = mpsc::Receiver<VmEvent>;

/// Runs VMs.
pub trait Hypervisor: Send + Sync + 'static {
    /// A running VM.
    type Vm: Vm;

    /// How guests are run and why so, for people: `tcg: /dev/kvm cannot be opened …`. None until
    /// that is found out, for which starts wait.
    fn accelerator(&self) -> Option<String>;

    /// Waits until it is found out how guests are run.
    fn decided(&self) -> impl Future<Output = ()> + Send;

    /// What each VM's process is held to.
    fn limits(&self) -> &Limits;

    /// How many VMs were started before anybody asked for them.
    fn waiting(&self) -> usize;

    /// Starts a VM and waits until its guest can be told who it is. On failure nothing of it is left;
    /// nor soon after it is not waited for any more.
    fn start(
        &self,
        spec: VmSpec,
    ) -> impl Future<Output = Result<(Self::Vm, Events), HypervisorError>> + Send;

    /// Takes over a VM that a former host process started; none if it does not run any more.
    fn adopt(
        &self,
        environment: &str,
    ) -> impl Future<Output = Result<Option<(Self::Vm, Events)>, HypervisorError>> + Send;

    /// Whether an environment has something left here, running or not.
    fn has(&self, environment: &str) -> bool;

    /// Names of all environments that have something left here, running or not.
    fn list(&self) -> Result<Vec<String>, HypervisorError>;

    /// Kills what may still run and removes everything of the VM. Nothing to remove is fine.
    fn discard(
        &self,
        environment: &str,
    ) -> impl Future<Output = Result<(), HypervisorError>> + Send;
}

/// A running VM, for its one owner.
pub trait Vm: Send + Sync + 'static {
    /// The VM's own name, which its tap has until [`crate::network::plug`].
    fn id(&self) -> &str;

    /// Sends a message, without waiting. It is dropped if the connection is lost meanwhile: whatever
    /// the guest must know is sent again after [`VmEvent::Connected`].
    fn send(&self, message: HostMessage) -> Result<(), HypervisorError>;

    /// Puts an image file behind a slot and gives the disk's serial. The same image in the same
    /// slot is fine; another one is refused, as the guest may have mounted the first.
    fn attach(
        &mut self,
        slot: u8,
        image: &Path,
    ) -> impl Future<Output = Result<String, HypervisorError>> + Send;

    /// The images that are attached, by slot.
    fn attached(&self) -> Vec<(u8, PathBuf)>;

    /// Holds the VM to its size's share of the CPUs, in thousandths of one. Until then it may use
    /// whole ones, so that it starts as fast as it can.
    fn limit_cpu(&self, millis: u32) -> Result<(), HypervisorError>;

    /// Lets the VM go on if its processors were halted, as they are when a disk of it cannot be written
    /// because this machine has no room. True if they were; they are halted anew if there is none still.
    fn unhalt(&mut self) -> impl Future<Output = Result<bool, HypervisorError>> + Send;

    /// Ends the VM at once, also if somebody removed its directory, by which others find it. [`VmEvent::Exited`]
    /// follows. Its directory is for [`Hypervisor::discard`].
    fn end(&self) -> impl Future<Output = Result<(), HypervisorError>> + Send;

    /// What the VM costs the host now.
    fn usage(&self) -> Result<Usage, HypervisorError>;
}

/// The serial of the writable disk.
pub(crate) const SCRATCH: &str = "scratch";

/// The serial of the disk in an image slot.
pub(crate) fn slot_serial(slot: u8) -> String {
    format!("image-{slot}")
}

/// Why something about a VM failed.
#[derive(Debug, thiserror::Error)]
pub enum HypervisorError {
    /// The name would not be safe as a file name.
    #[error("{name:?} is no environment's name")]
    Name {
        /// The name.
        name: String,
    },
    /// A file, socket or process could not be used.
    #[error("cannot {what}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// A helper program failed.
    #[error("{program} failed: {message}")]
    Program {
        /// Which one.
        program: &'static str,
        /// What it printed.
        message: String,
    },
    /// QEMU did not do what it was told.
    #[error("qemu refused {command}: {message}")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's words.
        message: String,
    },
    /// QEMU's answer was none, or did not come in time.
    #[error("qemu does not answer {command}; see qemu.log in the VM's directory")]
    NoAnswer {
        /// The command.
        command: &'static str,
    },
    /// The guest did not become ready.
    #[error("the guest did not get ready within {} s; see guest.log in the VM's directory", patience.as_secs())]
    NotReady {
        /// How long it was waited for.
        patience: std::time::Duration,
    },
    /// The guest image is of another release.
    #[error(
        "the guest speaks version {version} of the link's protocol and this host {}; use a guest image of this release",
        monopod_wire::VERSION
    )]
    Incompatible {
        /// The guest's version.
        version: u16,
    },
    /// The guest ended before it was anybody's.
    #[error("the guest ended: {ended:?}")]
    Ended {
        /// Why.
        ended: monopod_wire::Ended,
    },
    /// No tap could be made.
    #[error("no tap can be made for the VM")]
    Tap(#[source] Box<crate::network::NetworkError>),
    /// The record of a VM cannot be read.
    #[error("the record {path} is damaged; remove its directory once the VM does not run")]
    Record {
        /// Where it is.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// There is no such slot, or it holds another image.
    #[error("image slot {slot} is not free")]
    Slot {
        /// The slot.
        slot: u8,
    },
    /// The image does not fit behind a slot.
    #[error("image of {bytes} bytes is larger than the {limit} that a slot takes")]
    ImageSize {
        /// The image's size.
        bytes: u64,
        /// The slot's.
        limit: u64,
    },
    /// The VM runs already.
    #[error("environment {environment} has a VM already; adopt or discard it")]
    Exists {
        /// Which one.
        environment: String,
    },
    /// The guest does not read what it is sent.
    #[error("the guest does not read its link")]
    Busy,
    /// It could not be found out how VMs are run here.
    #[error("it cannot be found out whether KVM works; see the host's log, and restart it")]
    NoAccelerator,
    /// The VM is gone.
    #[error("the VM is gone")]
    Gone,
}

impl HypervisorError {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
