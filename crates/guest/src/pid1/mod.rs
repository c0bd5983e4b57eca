//! The VM's first process.
//!
//! ```text
//! boot: mounts, modules, namespaces, static network, platform, node  ->  waits for Go
//! go:   entropy, clock, names, interface, scratch                    ->  waits for an end
//! or:   the same for practice, then all of it is taken back          ->  waits for Go again
//! end:  kill everything, flush the scratch disk, power off
//! ```
//!
//! Nothing that must differ between two guests is drawn before Go: a VM may be a copy of another
//! one up to that point. The node waits too: `platform` gives it its task after all of Go is done. Each step that fails ends the VM; there is nobody to repair it.

mod children;
mod end;
mod filter;
mod identity;
mod links;
mod modules;
mod mounts;
mod namespaces;
mod network;
mod rehearsal;

use crate::internal::{self, ChannelError, Notice, Order};
use anyhow::{Context, Result};
use children::{Child, Exit};
use monopod_wire::{Ended, Go, GuestPhase};
use namespaces::Namespace;
use rehearsal::Rehearsal;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

/// Runs this part until the VM ends.
pub(crate) fn main() -> Result<()> {
    let ended = run().unwrap_or_else(|error| {
        // The console is the only way out before `platform` runs.
        mounts::console(&format!("pid1: {error:#}"));
        failed(&error)
    });
    end::power_off(&ended)
}

/// What may happen to a running guest.
#[derive(Debug)]
enum Event {
    Order(Box<Order>),
    PlatformLost(ChannelError),
    Exit(Exit),
}

fn run() -> Result<Ended> {
    mounts::leave_initramfs().context("leaving the initramfs")?;
    mounts::mount_all().context("mounting the system's file systems")?;
    mounts::redirect_output().context("opening the log pipe")?;
    internal::log("pid1");
    mounts::cgroups().context("laying out control groups")?;
    modules::load_all().context("loading kernel modules")?;
    namespaces::create_all().context("creating namespaces")?;
    network::prepare().context("setting up the static network")?;
    mounts::forget_boot_files()?;

    let (ours, theirs) = UnixStream::pair()?;
    let platform = children::start(Child::Platform, theirs.into())?;
    let (sender, events) = mpsc::channel();
    receive_orders(ours.try_clone()?, sender.clone());
    children::reap(sender);
    serve(&ours, platform, &events)
}

fn receive_orders(stream: UnixStream, events: mpsc::Sender<Event>) {
    std::thread::spawn(move || {
        let mut receiver = internal::Receiver::new(stream);
        loop {
            let (event, last) = match receiver.next() {
                Ok(order) => (Event::Order(Box::new(order)), false),
                Err(error) => (Event::PlatformLost(error), true),
            };
            if events.send(event).is_err() || last {
                return;
            }
        }
    });
}

/// Waits for Go, then for the first reason to end.
fn serve(
    platform: &UnixStream,
    platform_pid: rustix::process::Pid,
    events: &mpsc::Receiver<Event>,
) -> Result<Ended> {
    let mut node = Some(children::start(Child::Node, children::nothing()?)?);
    let mut rehearsal = None;
    let ended = loop {
        let done = match events.recv().context("all sources of events are gone")? {
            Event::Order(order) => match *order {
                Order::Go(go) => become_guest(&go, platform),
                Order::Rehearse(plan) => Rehearsal::begin(&plan, platform)
                    .map(|begun| rehearsal = Some(begun))
                    .context("rehearsing"),
                Order::Forgotten => children::nothing()
                    .and_then(|nothing| children::start(Child::Node, nothing))
                    .and_then(|started| {
                        node = Some(started);
                        Ok(internal::send(platform, &Notice::Rehearsed)?)
                    }),
                Order::End(ended) => break ended,
            },
            Event::PlatformLost(error) => Err(error.into()),
            Event::Exit(exit) if exit.pid == platform_pid => {
                Err(anyhow::anyhow!("platform {}", exit.how))
            }
            Event::Exit(exit) if Some(exit.pid) == node => {
                Err(anyhow::anyhow!("node {}", exit.how))
            }
            Event::Exit(exit) => match rehearsal.take_if(|begun| begun.is_over(&exit)) {
                Some(begun) => {
                    node = None;
                    begun.end(&exit, platform).context("rehearsing")
                }
                // A process of the pod whose parent was gone.
                None => Ok(()),
            },
        };
        if let Err(error) = done {
            break failed(&error);
        }
    };
    tracing::info!(?ended, "ending");
    end::kill_workload();
    if internal::send(platform, &Notice::Ended(ended.clone())).is_ok() {
        end::await_exit(platform_pid, events);
    }
    Ok(ended)
}

/// Everything that makes this guest differ from any other.
fn become_guest(go: &Go, platform: &UnixStream) -> Result<()> {
    identity::add_entropy(&go.seed).context("adding entropy")?;
    internal::set_clock(go.time_ns).context("setting the clock")?;
    phase(platform, "go")?;
    identity::set_hostname(&go.task.hostname).context("setting the host name")?;
    network::assign(&go.task.interface).context("setting up the interface")?;
    phase(platform, "network")?;
    mounts::scratch().context("mounting the scratch disk")?;
    phase(platform, "disk")?;
    Ok(internal::send(platform, &Notice::Became)?)
}

fn phase(platform: &UnixStream, name: &str) -> Result<()> {
    tracing::info!(phase = name, "phase");
    let phase = GuestPhase {
        name: name.into(),
        time_ns: internal::now_ns(),
    };
    Ok(internal::send(platform, &Notice::Phase(phase))?)
}

fn failed(error: &anyhow::Error) -> Ended {
    Ended::Failed {
        message: format!("{error:#}"),
    }
}

/// The namespace and the control group in which a part runs.
fn placement(child: Child) -> (Namespace, &'static str) {
    match child {
        Child::Platform => (Namespace::Platform, "/sys/fs/cgroup/system/platform"),
        Child::Node | Child::StandIn => (Namespace::Node, "/sys/fs/cgroup/system/node"),
    }
}
