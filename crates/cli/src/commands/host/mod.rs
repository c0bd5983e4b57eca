//! `monopod host`: the machines of a cluster.

mod cordon;
mod drain;
mod forget;
mod join;
mod remove;
mod run;
mod token;

use crate::settings::Layout;
use clap::{Args, Subcommand};
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Host {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Print a token with which one machine joins this cluster, once
    Token(token::Token),
    /// Make this machine a host of the cluster that a token is of, and start it
    Join(join::Join),
    /// Place no new pods on a machine; those that it has go on
    Cordon(cordon::Cordon),
    /// Place pods on a machine again
    Uncordon(cordon::Cordon),
    /// Evict a machine's pods, as their disruption budgets permit
    Drain(drain::Drain),
    /// Take a machine without pods out of the cluster
    Remove(remove::Remove),
    /// Give up a machine that will not come back, with all its VMs
    Forget(forget::Forget),
    /// Run the host process (the supervisor does)
    #[command(hide = true)]
    Run(run::Run),
}

impl Host {
    /// Whether it is the host process, which serves others.
    pub(crate) fn is_server(&self) -> bool {
        matches!(self.command, Command::Run(_))
    }

    pub(crate) fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Token(token) => super::single(token.run(layout)),
            Command::Join(join) => super::single(join.run(layout)),
            Command::Cordon(cordon) => super::single(cordon.run(layout, true)),
            Command::Uncordon(cordon) => super::single(cordon.run(layout, false)),
            Command::Drain(drain) => super::single(drain.run(layout)),
            Command::Remove(remove) => super::single(remove.run(layout)),
            Command::Forget(forget) => super::single(forget.run(layout)),
            Command::Run(run) => super::several(run.run(layout)),
        }
    }
}
