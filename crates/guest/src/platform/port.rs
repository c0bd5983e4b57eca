//! The virtio-serial ports.
//!
//! A port is a character device. Reading it waits for the host while the host is connected, and
//! gives end of file while it is not; that it came back is only told by the device's wait queue,
//! hence the edge-triggered epoll.

use anyhow::{Context, Result, bail};
use monopod_wire::{Decoder, FrameError, GuestMessage, HostMessage};
use rustix::event::epoll;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How long the kernel may take to show the ports after it loaded their driver.
const APPEARS_WITHIN: Duration = Duration::from_secs(10);
/// Messages that wait for a slow host. More are dropped: the host gets the whole state by a Hello.
const QUEUE: usize = 64;
/// Waiting messages that are none to speak of. One may still be counted after the host read it.
const CLEAR: usize = 4;
const PORTS: &str = "/sys/class/virtio-ports";

/// Opens a port by the name that the host gave it.
pub(super) fn open(name: &str) -> Result<File> {
    let deadline = Instant::now() + APPEARS_WITHIN;
    loop {
        if let Some(file) = find(name)? {
            return Ok(file);
        }
        if Instant::now() > deadline {
            bail!("no virtio-serial port is named {name}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn find(name: &str) -> Result<Option<File>> {
    let Ok(entries) = std::fs::read_dir(PORTS) else {
        return Ok(None);
    };
    for entry in entries {
        let entry = entry?;
        // The name comes a moment after the port.
        let found = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if found.trim() == name {
            let device = Path::new("/dev").join(entry.file_name());
            return match File::options().read(true).write(true).open(&device) {
                Ok(file) => Ok(Some(file)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error).with_context(|| format!("opening {}", device.display())),
            };
        }
    }
    Ok(None)
}

/// What came from the host.
#[derive(Debug)]
pub(super) enum Incoming {
    /// A message.
    Message(HostMessage),
    /// Bytes that are no message; what was read of the frame is forgotten.
    Garbled(FrameError),
    /// The host closed its end.
    Disconnected,
}

/// Sends messages to the host.
#[derive(Debug)]
pub(super) struct Outgoing {
    queue: Option<mpsc::SyncSender<Vec<u8>>>,
    /// Messages that the host has not read.
    waiting: Arc<AtomicUsize>,
    writer: Option<std::thread::JoinHandle<()>>,
}

impl Outgoing {
    /// Sends a message, or drops it if the host has not read for long.
    pub(super) fn send(&self, message: &GuestMessage) {
        let frame = match monopod_wire::encode(message) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::warn!(%error, "a message to the host was not sent");
                return;
            }
        };
        let Some(queue) = &self.queue else { return };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = queue.try_send(frame) {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            tracing::warn!(%error, "a message to the host was dropped");
        }
    }

    /// Sends a message that will be sent again if it is lost, unless several wait for the host: then
    /// it is dropped, so that it is never in their way.
    pub(super) fn send_if_clear(&self, message: &GuestMessage) {
        if self.waiting.load(Ordering::Relaxed) < CLEAR {
            self.send(message);
        }
    }

    /// Waits until everything is sent.
    pub(super) fn finish(&mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::warn!("the link's writer failed");
        }
    }
}

/// Starts reading and writing a port, each in a thread.
pub(super) fn start(port: File) -> (tokio::sync::mpsc::Receiver<Incoming>, Outgoing) {
    let port = Arc::new(port);
    let (sender, receiver) = tokio::sync::mpsc::channel(super::QUEUE);
    let (queue, frames) = mpsc::sync_channel::<Vec<u8>>(QUEUE);
    let waiting = Arc::new(AtomicUsize::new(0));
    let (reading, written) = (Arc::clone(&port), Arc::clone(&waiting));
    std::thread::spawn(move || {
        if let Err(error) = read(&reading, &sender) {
            tracing::error!(%error, "the link cannot be read");
        }
    });
    let writer = std::thread::spawn(move || {
        for frame in frames {
            if let Err(error) = (&*port).write_all(&frame) {
                tracing::warn!(%error, "the link cannot be written to");
            }
            written.fetch_sub(1, Ordering::Relaxed);
        }
    });
    let outgoing = Outgoing {
        queue: Some(queue),
        waiting,
        writer: Some(writer),
    };
    (receiver, outgoing)
}

fn read(mut port: &File, events: &tokio::sync::mpsc::Sender<Incoming>) -> Result<()> {
    let changes = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let flags = epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ET;
    epoll::add(&changes, port, epoll::EventData::new_u64(0), flags)?;
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 << 10];
    let mut connected = false;
    loop {
        let length = port.read(&mut buffer)?;
        if length == 0 {
            decoder = Decoder::default();
            if std::mem::take(&mut connected)
                && events.blocking_send(Incoming::Disconnected).is_err()
            {
                return Ok(());
            }
            let mut woken = Vec::with_capacity(1);
            match epoll::wait(&changes, rustix::buffer::spare_capacity(&mut woken), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
        }
        connected = true;
        decoder.push(&buffer[..length]);
        loop {
            let event = match decoder.next() {
                Ok(Some(message)) => Incoming::Message(message),
                Ok(None) => break,
                Err(error) => {
                    decoder = Decoder::default();
                    Incoming::Garbled(error)
                }
            };
            if events.blocking_send(event).is_err() {
                return Ok(());
            }
        }
    }
}
