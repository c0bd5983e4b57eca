//! Every decision of Monopod, as synchronous functions of `(state, event, now)`.
//!
//! No I/O, no clock, no randomness: effects are data, which the processes' shells carry out.

pub mod addresses;
pub mod admission;
pub mod affinity;
pub mod archive;
pub mod backoff;
pub mod certificates;
pub mod contract;
pub mod doctor;
pub mod explain;
pub mod image;
pub mod irsa;
pub mod lifecycle;
pub mod owner;
pub mod placement;
pub mod pod;
pub mod pool;
pub mod profiles;
pub mod quantity;
pub mod rotation;
pub mod selector;
pub mod sizing;
pub mod taints;
#[cfg(test)]
mod testing;
pub mod timeline;
pub mod vpc;
pub mod wildcard;
