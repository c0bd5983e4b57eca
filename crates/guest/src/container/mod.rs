//! One child process per container, in which libcontainer runs.
//!
//! libcontainer forks, changes namespaces and waits, none of which a process with threads should
//! do. So the node starts `monopod-guest container` for each container and for each command that
//! is executed in one. Its standard input and output are the conversation, one line of JSON each:
//!
//! ```text
//! node                      child
//!  |  ----- Request ------>   |   create a container, or join one
//!  |  <---- Started --------  |   or Failed, and the child ends
//!  |  ----- Command ------->  |   signals, any time
//!  |  <---- Exited ---------  |   and the child ends
//! ```
//!
//! The child never holds a secret of the node. Invariant: it ends after its process did.
//!
//! * [`spec`] decides what the container sees, as a value without effects.
//! * [`child`] is the process; [`handle`] is the node's end of the conversation.

mod child;
mod devices;
mod group;
mod handle;
mod pause;
mod spec;

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

pub(crate) use child::main;
pub(crate) use devices::restrict;
pub(crate) use group::limit;
pub(crate) use handle::{Handle, HandleError, descriptor_path, receive_console};
pub(crate) use pause::{SHARED_PIDS, pause, pause_first, share_pids};
pub(crate) use spec::{Mount, Plan, Privileges, capabilities};

/// Where libcontainer keeps its own files, and the cgroup in which containers are.
pub(crate) const STATE_ROOT: &str = "/run/monopod/containers";
/// The parent of all containers' cgroups, below the root of the hierarchy.
pub(crate) const CGROUP_PARENT: &str = "/pod";
/// Where the hierarchy is mounted.
pub(crate) const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// What the child is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Request {
    /// The container's id.
    pub(crate) id: String,
    /// Create it, or join it.
    pub(crate) action: Action,
    /// What the process reads and writes.
    pub(crate) stdio: Stdio,
    /// Owner that the pipes get, so that the process can open `/dev/stdout` again.
    pub(crate) uid: u32,
}

/// Create a container, or join one.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Action {
    /// From the bundle in this directory.
    Create(PathBuf),
    /// Running the process in this file.
    Join(PathBuf),
}

/// What the process reads and writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Stdio {
    /// Files, which the child opens: `/dev/null`, or pipes of the node under `/proc/<pid>/fd`.
    Files {
        /// Standard input.
        stdin: PathBuf,
        /// Standard output.
        stdout: PathBuf,
        /// Standard error.
        stderr: PathBuf,
    },
    /// A terminal, whose other end is sent to this socket.
    Terminal(PathBuf),
}

/// Told to the child while the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Command {
    /// Send this signal.
    Signal(i32),
}

/// Told by the child.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Report {
    /// The process runs.
    Started {
        /// Its number in the node's PID namespace.
        pid: i32,
    },
    /// The process could not be started.
    Failed {
        /// For people.
        message: String,
    },
    /// The process ended.
    Exited(Exit),
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Exit {
    /// Exit code; 128 and the number for a signal.
    pub(crate) code: i32,
    /// The signal that ended it.
    pub(crate) signal: Option<i32>,
    /// Whether the kernel killed a process of the container because memory ran out.
    pub(crate) out_of_memory: bool,
}
