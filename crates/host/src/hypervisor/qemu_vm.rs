//! A VM that QEMU runs, and its connections.

use super::cgroup::Group;
use super::directory::{self, Home};
use super::process::Process;
use super::qmp::Qmp;
use super::record::Record;
use super::{
    EVENTS, Events, HypervisorError, IMAGE_SLOTS, SCRATCH, Usage, Vm, VmEvent, arguments, copy,
    link, slot_serial, usage,
};
use monopod_wire::HostMessage;
use serde_json::json;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Messages to the guest that wait for it to read.
const MESSAGES: usize = 256;
/// Name of the pipe for the error messages of a VM's process.
pub(super) const ERRORS: &str = "errors";
/// Longest wait for the last of these once the process is gone.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Longest wait for a state to be saved, which is some 100 kB.
const SAVE: Duration = Duration::from_secs(20);
/// Names of a VM's sockets.
pub(super) const SOCKETS: [&str; 4] = ["qmp", "control", "logs", "console"];

/// A VM run by QEMU.
#[derive(Debug)]
pub struct QemuVm {
    home: Home,
    record: Record,
    process: Process,
    qmp: Qmp,
    messages: mpsc::Sender<HostMessage>,
    _tasks: DropGuard,
}

impl QemuVm {
    /// Takes hold of a process that runs.
    pub(super) async fn new(
        directory: &Path,
        record: Record,
        process: Process,
        connections: Connections,
    ) -> Result<(Self, Events), HypervisorError> {
        let Connections {
            qmp,
            control,
            logs,
            console,
            errors,
        } = connections;
        let home = Home::open(directory)?;
        let at = |name: &str| home.at(&format!("{name}.sock"));
        let (messages, queued) = mpsc::channel(MESSAGES);
        let (events, receiver) = mpsc::channel(EVENTS);
        let cancel = CancellationToken::new();
        let tasks = cancel.clone().drop_guard();
        spawn(
            &cancel,
            copy::copy(Some(console), at("console"), home.at("console.log")),
        );
        spawn(
            &cancel,
            copy::copy(Some(logs), at("logs"), home.at("guest.log")),
        );
        let log = home.at("qemu.log");
        let mut said = {
            let log = log.clone();
            spawn(&cancel, async move {
                if let Err(error) = copy::drain(errors, &log).await {
                    tracing::warn!(%error, "error messages of a VM cannot be kept");
                }
            })
        };
        let greeted = tokio::select! {
            greeted = Qmp::connect(qmp) => greeted,
            _ = process.exited() => Err(HypervisorError::Gone),
        };
        let qmp = match greeted {
            Ok(qmp) => qmp,
            // A process that ends closes its sockets a moment before it is gone.
            Err(error) => {
                let exited = tokio::time::timeout(LAST_WORDS, process.exited()).await;
                if exited.is_err() {
                    return Err(error);
                }
                if tokio::time::timeout(LAST_WORDS, &mut said).await.is_err() {
                    tracing::warn!("a VM that did not start printed more than can be read");
                }
                return Err(failed_start(&home));
            }
        };
        let (watched, socket) = (process.clone(), at("control"));
        spawn(&cancel, async move {
            let gone = CancellationToken::new();
            let link = link::run(Some(control), socket, queued, events.clone(), gone.clone());
            let watch = async {
                if let Err(error) = watched.exited().await {
                    tracing::error!(%error, "the end of a VM cannot be awaited");
                }
                gone.cancel();
            };
            // The link ends after the last word that the guest left in the socket.
            tokio::join!(link, watch);
            if events.send(VmEvent::Exited).await.is_err() {
                tracing::debug!("nobody waits for the VM's end");
            }
        });
        let vm = Self {
            home,
            record,
            process,
            qmp,
            messages,
            _tasks: tasks,
        };
        Ok((vm, receiver))
    }

    /// Gives a clone that waits for it the state of its template, and lets it run.
    pub(super) async fn load(&mut self, state: &OwnedFd) -> Result<(), HypervisorError> {
        self.with_state("migrate-incoming", state.as_fd()).await
    }

    /// Writes the state of the VM's devices, and stops it for good with that. It is saved as a VM
    /// that runs, so that clones run as soon as they have it.
    pub(super) async fn save(&mut self, state: &File) -> Result<(), HypervisorError> {
        const MIGRATE: &str = "migrate";
        self.with_state(MIGRATE, state.as_fd()).await?;
        let deadline = Instant::now() + SAVE;
        loop {
            let answer = self.qmp.execute("query-migrate", json!({}), None).await?;
            match answer["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("setup" | "active" | "device") if Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                status => {
                    return Err(HypervisorError::Refused {
                        command: MIGRATE,
                        message: format!("{status:?}: {}", answer["error-desc"]),
                    });
                }
            }
        }
    }

    /// Reads or writes a state without the memory, which is a file that the template and its clones
    /// map.
    async fn with_state(
        &mut self,
        command: &'static str,
        state: BorrowedFd<'_>,
    ) -> Result<(), HypervisorError> {
        let capability = json!({"capability": "x-ignore-shared", "state": true});
        let capabilities = json!({"capabilities": [capability]});
        self.qmp
            .execute("migrate-set-capabilities", capabilities, None)
            .await?;
        let name = json!({"fdname": "state"});
        self.qmp.execute("getfd", name, Some(state)).await?;
        let uri = json!({"uri": "fd:state"});
        self.qmp.execute(command, uri, None).await.map(drop)
    }

    /// Lets everything else that runs on this machine come first, or no more so.
    pub(super) fn stand_back(&self, back: bool) -> Result<(), HypervisorError> {
        let group = Group::new(self.record.groups.iter().cloned());
        let set = group.stand_back(back);
        set.map_err(HypervisorError::io("set the VM's priority"))
    }

    /// Stops the VM's processors until [`Self::resume`].
    pub(super) async fn pause(&mut self) -> Result<(), HypervisorError> {
        self.qmp.execute("stop", json!({}), None).await.map(drop)
    }

    /// Goes on after [`Self::pause`].
    pub(super) async fn resume(&mut self) -> Result<(), HypervisorError> {
        self.stand_back(false)?;
        self.qmp.execute("cont", json!({}), None).await.map(drop)
    }

    /// Makes this an environment's VM: gives it its disk, and its directory the environment's name.
    pub(super) async fn assign(&mut self, home: &Path, disk: File) -> Result<(), HypervisorError> {
        let bytes = disk
            .metadata()
            .map_err(HypervisorError::io("measure the scratch disk"))?
            .len();
        let lent = self.lend(SCRATCH, &disk, false).await?;
        let size = json!({"node-name": lent.node, "size": bytes});
        self.qmp.execute("block_resize", size, None).await?;
        self.home.rename(home)
    }

    /// Puts a file behind a disk of the VM.
    pub(super) async fn lend(
        &mut self,
        disk: &str,
        file: &File,
        read_only: bool,
    ) -> Result<Lent, HypervisorError> {
        let set = self
            .qmp
            .execute("add-fd", json!({}), Some(file.as_fd()))
            .await?["fdset-id"]
            .as_u64()
            .ok_or_else(|| HypervisorError::Refused {
                command: "add-fd",
                message: "it named no descriptor set".into(),
            })?;
        // Named after the set: a former, failed attempt may have left its own behind.
        let node = format!("node-{set}");
        let discard = if read_only { "ignore" } else { "unmap" };
        let block = json!({
            "driver": "raw", "node-name": node, "read-only": read_only, "discard": discard,
            "file": {
                "driver": "file", "filename": format!("/dev/fdset/{set}"),
                "read-only": read_only, "discard": discard,
            },
        });
        self.qmp.execute("blockdev-add", block, None).await?;
        self.put_behind(disk, &node).await?;
        Ok(Lent { set, node })
    }

    /// Makes a disk as empty as it was. The guest must not use it.
    pub(super) async fn take_back(
        &mut self,
        disk: &str,
        lent: Lent,
    ) -> Result<(), HypervisorError> {
        self.put_behind(disk, &arguments::empty_node(disk)).await?;
        let node = json!({"node-name": lent.node});
        self.qmp.execute("blockdev-del", node, None).await?;
        let set = json!({"fdset-id": lent.set});
        self.qmp.execute("remove-fd", set, None).await.map(drop)
    }

    async fn put_behind(&mut self, disk: &str, node: &str) -> Result<(), HypervisorError> {
        let device = json!({
            "path": format!("/machine/peripheral/{disk}"), "property": "drive", "value": node,
        });
        self.qmp.execute("qom-set", device, None).await.map(drop)
    }

    /// Why the process ended before it could be used.
    pub(super) fn failed_start(&self) -> HypervisorError {
        failed_start(&self.home)
    }
}

impl Vm for QemuVm {
    fn id(&self) -> &str {
        &self.record.id
    }

    fn send(&self, message: HostMessage) -> Result<(), HypervisorError> {
        use mpsc::error::TrySendError;
        self.messages
            .try_send(message)
            .map_err(|error| match error {
                TrySendError::Full(_) => HypervisorError::Busy,
                TrySendError::Closed(_) => HypervisorError::Gone,
            })
    }

    async fn attach(&mut self, slot: u8, image: &Path) -> Result<String, HypervisorError> {
        let serial = slot_serial(slot);
        match self.record.images.get(&slot) {
            Some(attached) if attached == image => return Ok(serial),
            Some(_) => return Err(HypervisorError::Slot { slot }),
            None if slot >= IMAGE_SLOTS => return Err(HypervisorError::Slot { slot }),
            None => {}
        }
        let cannot_open = || HypervisorError::io(format!("open the image {}", image.display()));
        let file = File::open(image).map_err(cannot_open())?;
        let bytes = file.metadata().map_err(cannot_open())?.len();
        if bytes > arguments::SLOT_BYTES {
            return Err(HypervisorError::ImageSize {
                bytes,
                limit: arguments::SLOT_BYTES,
            });
        }
        self.lend(&serial, &file, true).await?;
        self.record.images.insert(slot, image.to_owned());
        self.record.write(&self.home.path())?;
        Ok(serial)
    }

    fn attached(&self) -> Vec<(u8, PathBuf)> {
        let images = self.record.images.iter();
        images.map(|(&slot, image)| (slot, image.clone())).collect()
    }

    fn limit_cpu(&self, millis: u32) -> Result<(), HypervisorError> {
        let group = Group::new(self.record.groups.iter().cloned());
        let limited = group.limit_cpu(millis);
        limited.map_err(HypervisorError::io("limit the VM's share of the CPUs"))
    }

    async fn unhalt(&mut self) -> Result<bool, HypervisorError> {
        // QEMU's `werror=enospc`, its default, halts the guest instead of failing its write.
        let state = self.qmp.execute("query-status", json!({}), None).await?;
        let halted = state["status"] == "io-error";
        if halted {
            self.qmp.execute("cont", json!({}), None).await?;
        }
        Ok(halted)
    }

    async fn end(&self) -> Result<(), HypervisorError> {
        let group = Group::new(self.record.groups.iter().cloned());
        directory::end(Some(&self.process), &group).await
    }

    fn usage(&self) -> Result<Usage, HypervisorError> {
        usage::read(self.process.id.pid).map_err(HypervisorError::io("read the VM's memory use"))
    }
}

fn spawn(
    cancel: &CancellationToken,
    task: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<Option<()>> {
    let cancel = cancel.clone();
    tokio::spawn(async move { cancel.run_until_cancelled(task).await })
}

/// A file behind a disk: the number of its descriptor set, and the name of its node.
#[derive(Debug)]
pub(super) struct Lent {
    set: u64,
    node: String,
}

/// The host's ends of a VM's sockets and its pipe.
pub(super) struct Connections {
    qmp: UnixStream,
    control: UnixStream,
    logs: UnixStream,
    console: UnixStream,
    errors: pipe::Receiver,
}

impl Connections {
    /// Connects to all of them.
    pub(super) fn open(directory: &Path) -> Result<Self, HypervisorError> {
        let connect = |name: &str| {
            let stream = StdStream::connect(directory.join(format!("{name}.sock")))?;
            stream.set_nonblocking(true)?;
            UnixStream::from_std(stream)
        };
        let connect = |name| {
            connect(name).map_err(HypervisorError::io(format!("connect to the VM's {name}")))
        };
        let [qmp, control, logs, console] = SOCKETS.map(connect);
        Ok(Self {
            qmp: qmp?,
            control: control?,
            logs: logs?,
            console: console?,
            errors: pipe::OpenOptions::new()
                .open_receiver(directory.join(ERRORS))
                .map_err(HypervisorError::io("open the VM's pipe for errors"))?,
        })
    }
}

/// Why the process ended before it could be used.
fn failed_start(home: &Home) -> HypervisorError {
    let log = std::fs::read_to_string(home.at("qemu.log")).unwrap_or_default();
    HypervisorError::Program {
        program: "qemu-system-x86_64",
        message: log.trim().to_owned(),
    }
}
