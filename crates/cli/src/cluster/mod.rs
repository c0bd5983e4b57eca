//! An embedded cluster: keys, processes, and what is applied to a new API server.

pub mod bootstrap;
pub mod client;
pub mod earlier;
pub mod invitation;
pub mod parts;
pub mod pki;
pub mod supervisor;
