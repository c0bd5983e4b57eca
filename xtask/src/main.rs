//! Monopod's build, set-up and test commands: `cargo xtask help`.

#![expect(
    clippy::print_stdout,
    reason = "a build tool tells its user what it does"
)]

mod bench;
mod chaos;
mod checks;
mod dist;
mod go;
mod guest_image;
mod helm;
mod images;
mod kernel;
mod packages;
mod ruleset;
mod sdk;
mod test;
mod up;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// The Kubernetes version that everything is built for.
const KUBERNETES_VERSION: &str = include_str!("../../kubernetes/VERSION");

/// Builds, runs and tests Monopod on this machine. Needs root, Debian 12, Rust and Go.
#[derive(Debug, Parser)]
#[command(about)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Build everything, bring up a cluster, and run a first pod in a VM of its own
    Up,
    /// Build everything: control plane, Monopod, guest image, sample images
    Build {
        /// Also what only the tests use, to run a suite by hand
        #[arg(long)]
        tests: bool,
    },
    /// Run every check and test
    Test,
    /// Write deploy/crds.yaml, rbac.yaml and host.yaml from crates/api
    Generate,
    /// Look for an order of faults that breaks something
    #[command(subcommand)]
    Chaos(chaos::Chaos),
    /// Measure Monopod beside an ordinary node; `bench --help` says what
    #[command(disable_help_flag = true)]
    Bench {
        /// What to measure, and how
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Task::Up => up::first_pod(),
        Task::Build { tests: false } => dist::build().map(drop),
        Task::Build { tests: true } => dist::build().and_then(|dist| dist::build_for_tests(&dist)),
        Task::Test => test::run(),
        Task::Generate => checks::write_manifests(),
        Task::Chaos(chaos) => chaos.run(),
        Task::Bench { arguments } => bench::measure(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("\nxtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
