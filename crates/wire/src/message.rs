//! What host and guest say to each other.

use crate::log::{LogPiece, LogStored};
use crate::task::{ContainerImageConfig, Task};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// From the host to a guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub enum HostMessage {
    /// First on every connection.
    Hello(Hello),
    /// Tells the guest who it is. The same Go may come again after a reconnect.
    Go(Box<Go>),
    /// Instead of Go, at first: go through a pod's start for practice, forget it, and say Rehearsed.
    Rehearse(Box<Rehearsal>),
    /// The node's credentials, at first and after each renewal.
    Credentials(Box<Credentials>),
    /// State of one of the pod's images.
    Image(Image),
    /// How much of a log the host has; the answer to each [`LogPiece`].
    LogStored(LogStored),
    /// The host answers for the node's logs from now on; the answer to `LogsComplete`.
    LogsTaken,
    /// What time it is; the answer to each Report.
    Time(HostTime),
    /// End everything now; the grace period is over or was the node's own business.
    Stop,
    /// A message of a later version.
    #[serde(other)]
    Unknown,
}

/// From a guest to its host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub enum GuestMessage {
    /// First on every connection.
    Hello(Hello),
    /// Booted and waiting for Go. Nothing that must be unique was drawn yet.
    Ready,
    /// A rehearsal is over and forgotten: as Ready, but said once.
    Rehearsed,
    /// The guest reached a phase.
    Phase(GuestPhase),
    /// Figures for the host's metrics, a few times a minute.
    Report(Report),
    /// A piece of a container's log, for the archive.
    Log(Box<LogPiece>),
    /// Everything that the pod ever logged was stored, and nobody is being answered any more.
    LogsComplete,
    /// The guest is about to power off.
    Ended(Ended),
    /// A message of a later version.
    #[serde(other)]
    Unknown,
}

/// Opens a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    /// The protocol's version, see [`crate::VERSION`].
    pub version: u16,
    /// A number that the sender draws or counts up for each connection.
    pub epoch: u64,
    /// How far the guest is; the host repeats what it heard, or says `Boot`.
    pub stage: Stage,
}

/// How far a guest is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    /// Still booting.
    #[default]
    Boot,
    /// Waiting for Go.
    Ready,
    /// Go was received.
    Going,
}

/// Who the guest is, and everything that must differ between two guests.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Go {
    /// 32 random bytes in hexadecimal, credited to the kernel's entropy first of all.
    pub seed: String,
    /// The host's clock: nanoseconds since 1970.
    pub time_ns: u64,
    /// What to run.
    pub task: Task,
}

impl fmt::Debug for Go {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Go")
            .field("task", &self.task)
            .finish_non_exhaustive()
    }
}

/// The host's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostTime {
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// That of the report which this answers.
    pub number: u64,
}

/// A pod's start for practice, against an API server that the guest plays itself.
///
/// Under emulation code is translated when it runs first, which is most of a start. Nothing of a
/// rehearsal is anybody's: neither names nor keys, and it ends before the guest is told who it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rehearsal {
    /// As in a start. The task's API server is on the node's own `lo`.
    pub go: Go,
    /// Both for the node, and for the API server that it meets.
    pub credentials: Credentials,
    /// The image of the only container, which must be one that only waits.
    pub image: Image,
}

/// The node's identity: PEM text.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Credentials {
    /// The cluster's certificate authority.
    pub ca: String,
    /// Private key of both certificates.
    pub key: String,
    /// Client certificate: `system:node:<node>` in `system:nodes`.
    pub client_certificate: String,
    /// Serving certificate for the node's address.
    pub serving_certificate: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

/// State of one of the pod's images on the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Image {
    /// The reference as the pod's spec has it.
    pub reference: String,
    /// Whether it can be used.
    pub state: ImageState,
}

/// Whether an image can be used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "camelCase")]
pub enum ImageState {
    /// Being fetched.
    #[serde(rename_all = "camelCase")]
    Pulling {
        /// Bytes that were downloaded.
        #[serde(default)]
        done: u64,
        /// Bytes that are to be downloaded; 0 until they are known.
        #[serde(default)]
        total: u64,
    },
    /// Its flattened squashfs is behind a disk of the VM.
    #[serde(rename_all = "camelCase")]
    Attached {
        /// Name of the virtio disk's serial, under which the guest finds it: `image-<n>`.
        serial: String,
        /// `sha256:…` of the image's manifest.
        digest: String,
        /// `name@sha256:…` of what the reference means in its registry, which may be an index.
        #[serde(default)]
        id: String,
        /// Bytes of the squashfs.
        size: u64,
        /// How it was pulled; absent if it was there already.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pulled: Option<Pulled>,
        /// What the image says about how to run it.
        config: Box<ContainerImageConfig>,
    },
    /// Cannot be used now; the host tries again.
    #[serde(rename_all = "camelCase")]
    Failed {
        /// `ErrImagePull`, `ErrImageNeverPull` or `InvalidImageName`.
        reason: String,
        /// For people.
        message: String,
    },
}

/// How an image was pulled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pulled {
    /// Milliseconds of the pull itself.
    pub pull_ms: u64,
    /// Milliseconds with the wait for other pulls.
    pub total_ms: u64,
    /// Bytes of the image in its registry.
    pub size: u64,
}

/// A point that the guest reached.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GuestPhase {
    /// One of `go`, `network`, `disk`, `credentials`, `registered`, `pod-admitted`, `container-started`, `running`.
    pub name: String,
    /// The guest's clock: nanoseconds since 1970.
    pub time_ns: u64,
}

/// Figures of the guest. Names are from a closed set on the host's side; others are dropped there.
/// By the answer the guest finds whether its clock is right.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// For instance `memory_available_bytes`, `cpu_usage_usec`, `containers_running`.
    pub values: BTreeMap<String, u64>,
    /// Counts a guest's reports; 0 of one that does not ask for the time.
    #[serde(default)]
    pub number: u64,
}

/// Why a guest ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "camelCase")]
pub enum Ended {
    /// The pod finished by itself, or was deleted and its grace period was honoured.
    PodFinished,
    /// The host said Stop.
    Stopped,
    /// One of the guest's own processes failed.
    #[serde(rename_all = "camelCase")]
    Failed {
        /// For people.
        message: String,
    },
}
