//! `cargo xtask chaos`: searches for an order of faults that breaks something.

use crate::dist::cargo;
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
}

impl Chaos {
    pub(crate) fn run(self) -> Result<()> {
        match self {
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
