//! Images from registries: whose credentials, where to ask, who may use what is stored, and what
//! is removed.
//!
//! ```text
//!  secrets ─▶ keyring ─▶ candidates ─┐                      ┌─▶ Use      as it is stored
//!  registries.yaml ─▶ endpoints ─────┼─▶ access::plan ──────┼─▶ Ask      a registry, by these credentials
//!  what is stored ─▶ proofs ─────────┘                      └─▶ Refuse   never to be pulled
//! ```

pub mod access;
pub mod credentials;
pub mod endpoints;
pub mod garbage;
pub mod keyring;
pub mod reference;
