//! What each Monopod process needs once: logs, an admin server, shutdown, watches, a work queue, an
//! election, evictions.

pub mod admin;
pub mod answer;
pub mod certificate;
pub mod election;
pub mod eviction;
pub mod logs;
pub mod queue;
pub mod shutdown;
pub mod watch;
