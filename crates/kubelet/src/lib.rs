//! The kubelet's server, as far as two share it: a guest's node while its pod runs, and the host
//! once the VM is gone and only the logs remain.
//!
//! * [`tls`]: with which certificates it is served, and who may speak to it
//! * [`request`]: what is asked for
//! * [`serve`]: connections, and answers as text
//! * [`log`]: lines of log files, sent to a client
//!
//! There is one port, [`monopod_api::labels::KUBELET_PORT`], and no handler but those of
//! [`request::Asked`].

pub mod log;
pub mod pem;
pub mod request;
pub mod serve;
pub mod tls;
