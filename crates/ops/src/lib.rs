//! What each Monopod process needs once: logs, an admin server, shutdown, watches and a work queue.

pub mod admin;
pub mod election;
pub mod logs;
pub mod queue;
pub mod shutdown;
pub mod watch;
