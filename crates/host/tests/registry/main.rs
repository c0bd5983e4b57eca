//! Pulls from Debian's own registry (the package `docker-registry`), and from servers that are
//! worse than any registry.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod authentication;
mod fixture;
mod hostile;
mod image;
mod pulls;
mod server;
