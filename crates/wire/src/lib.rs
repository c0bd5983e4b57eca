//! Messages between a host and its guests, and the frames that carry them.
//!
//! The link is a byte stream: the virtio-serial port [`CONTROL_PORT`]. Each frame is a length in
//! four bytes, big-endian, and that many bytes of JSON. After each reconnect both sides drop what
//! they had read of a frame and say Hello first. A second port, [`LOGS_PORT`], carries plain lines
//! from the guest's own processes to the host.
//!
//! ```text
//! host                         guest
//!  |  <---- Hello ----------    |   which versions, how far it is
//!  |  ----- Hello --------->    |
//!  |  <---- Ready ----------    |   once, before it was told anything
//!  |  ----- Go ------------>    |   who it is; idempotent
//!  |  ----- Image, Credentials  |   in any order, again when they change
//!  |  <---- Phase, Report       |
//!  |  ----- Time ---------->    |   the answer to each Report
//!  |  <---- Log ------------    |   one piece at a time;
//!  |  ----- LogStored ----->    |   how much is stored
//!  |  <---- LogsComplete ---    |   the pod finished;
//!  |  ----- LogsTaken ----->    |   the host answers for its logs
//!  |  ----- Stop ---------->    |
//!  |  <---- Ended ----------    |   then it powers off
//! ```
//!
//! Bytes of a guest are hostile: decoding never panics, and no frame is larger than [`MAX_FRAME`].

mod frame;
mod log;
mod message;
mod task;

pub use frame::{Decoder, FrameError, MAX_FRAME, encode};
pub use log::{LogFile, LogPiece, LogStored, MAX_PIECE};
pub use message::{
    Credentials, Ended, Go, GuestMessage, GuestPhase, Hello, HostMessage, HostTime, Image,
    ImageState, Pulled, Rehearsal, Report, Stage,
};
pub use task::{ContainerImageConfig, Interface, PodIdentity, Task};

/// The version of this protocol. Both sides name it in their Hello; they must be equal.
pub const VERSION: u16 = 1;
/// Name of the virtio-serial port that carries frames.
pub const CONTROL_PORT: &str = "monopod.control";
/// Name of the virtio-serial port that carries the guest's own log lines.
pub const LOGS_PORT: &str = "monopod.logs";
