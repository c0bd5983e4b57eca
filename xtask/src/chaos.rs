//! `cargo xtask chaos`: searches for an order of faults that breaks something, in a model and on real VMs.

use crate::dist::{build, cargo, with_dist};
use crate::kernel::run;
use anyhow::Result;
use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Chaos {
    /// Run control's real decisions in a simulated cluster under random faults; a schedule that breaks
    /// an invariant is printed, made short, and kept in `crates/control/src/model/regressions`
    Model {
        /// How many schedules, each drawn from its own seed
        #[arg(long, default_value_t = 100_000)]
        schedules: u64,
        /// The first seed
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Bring up a cluster of two machines, and kill, freeze or cut off its parts in each phase of a pod's
    /// life; prints what was lost and what stayed
    #[command(disable_help_flag = true)]
    Real {
        /// How often, and which faults
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

impl Chaos {
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Self::Real { arguments } => {
                let dist = build()?;
                let mut command = cargo(&["run", "--quiet", "--package", "monopod-chaos", "--"]);
                run(with_dist(command.args(arguments), &dist))
            }
            Self::Model { schedules, seed } => run(cargo(&[
                "test",
                "--release",
                "--package",
                "monopod-control",
                "--lib",
                "model::tests::no_schedule_breaks_an_invariant",
                "--",
                "--nocapture",
            ])
            .env("MONOPOD_SCHEDULES", schedules.to_string())
            .env("MONOPOD_SEED", seed.to_string())),
        }
    }
}
