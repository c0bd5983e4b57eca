//! What runs inside a VM: one static binary, several processes.
//!
//! * `pid1` (when started as `/init`): mounts, namespaces, reaps, powers off.
//! * `platform`: in the network namespace `platform`; the link to the host and the metadata endpoint.
//! * `node`: in the network namespace `node`; the reduced kubelet.
//! * `stand-in`: the API server of a rehearsal, before the VM is anybody's.
//! * `container`: one short-lived or waiting child per container, in which libcontainer runs.
//! * `pause`: keeps a PID namespace that the containers of a pod share.

mod container;
mod internal;
mod metadata;
mod node;
mod pid1;
mod platform;
mod stand_in;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    part: Part,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// First process of the VM; the kernel starts it as /init
    Pid1,
    /// Link to the host and metadata endpoint
    Platform,
    /// The reduced kubelet
    Node,
    /// API server of a rehearsal, told on standard input
    StandIn,
    /// Runs one container, told on standard input
    Container,
    /// Makes a PID namespace that containers share
    Pause,
    /// First process of that namespace
    PauseFirst,
}

fn main() -> anyhow::Result<()> {
    if std::env::args_os()
        .next()
        .is_some_and(|name| name == "/init")
    {
        return pid1::main();
    }
    match Arguments::parse().part {
        Part::Pid1 => pid1::main(),
        Part::Platform => platform::main(),
        Part::Node => node::main(),
        Part::StandIn => stand_in::main(),
        Part::Container => container::main(),
        Part::Pause => container::pause(),
        Part::PauseFirst => container::pause_first(),
    }
}
