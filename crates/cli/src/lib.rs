//! The `monopod` command: brings a cluster up and down and looks into it.

#![expect(
    clippy::print_stdout,
    reason = "a command line tool talks to its user on standard output"
)]

pub mod cluster;
mod commands;
mod flags;
pub mod settings;

pub use commands::main;
