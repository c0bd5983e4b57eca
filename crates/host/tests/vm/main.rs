//! Real VMs from the built guest image.
//!
//! Needs root and the guest image, whose directory `cargo xtask test` names in
//! `MONOPOD_GUEST_DIR`. Each test owns its directory, network namespaces and tap.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests are not marked as tests"
)]

mod clones;
mod disks;
mod fixture;
mod isolation;
mod jail;
mod lifecycle;
mod pool;
