//! Measures Monopod beside an ordinary node: `cargo xtask bench`.
//!
//! Both nodes belong to one cluster that is brought up for this run, and take turns, so that what
//! else the machine does hits both. What counts are ratios. Nothing here fails because it was slow.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "prints what it measured, and meanwhile what it does"
)]

mod burst;
mod churn;
mod counts;
mod growth;
mod machine;
mod memory;
mod peer;
mod pods;
mod process;
mod report;
mod site;
mod start;
mod webhook;

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use report::Report;
use std::path::PathBuf;
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// Measures Monopod beside an ordinary node (kubelet, containerd, runc) of the same cluster.
#[derive(Parser, Debug)]
#[command(name = "cargo xtask bench")]
struct Arguments {
    #[command(subcommand)]
    what: Bench,
    #[command(flatten)]
    common: Common,
}

#[derive(Args, Debug)]
struct Common {
    /// Output format
    #[arg(short, long, value_enum, default_value_t, global = true)]
    output: Output,
    /// Measure Monopod alone
    #[arg(long, global = true)]
    no_peer: bool,
    /// Directory of the ordinary node's programs and images
    #[arg(long, env = "MONOPOD_PEER", global = true, hide = true)]
    peer: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Output {
    #[default]
    Table,
    Json,
}

#[derive(Subcommand, Debug)]
enum Bench {
    /// From a pod's creation to Running, one pod at a time
    Start {
        /// Starts that count
        #[arg(short = 'n', long, default_value_t = 10)]
        count: usize,
    },
    /// Pods created at once, until the last one runs
    Burst {
        /// Pods
        #[arg(short = 'n', long, default_value_t = 30)]
        count: usize,
    },
    /// Unique memory of what each pod costs, and of the node's own processes
    Memory {
        /// Pods
        #[arg(short = 'n', long, default_value_t = 10)]
        count: usize,
    },
    /// What the webhook takes, and what it adds to the creation of a pod
    Webhook,
    /// Pods that come and go: failures, leaks, drift
    Churn {
        /// Pods
        #[arg(short = 'n', long, default_value_t = 500)]
        count: usize,
        /// Pods at a time
        #[arg(short, long, default_value_t = 4)]
        parallel: usize,
    },
    /// From creation to Running of the 1st to the last of many pods that go on running
    Growth {
        /// Pods
        #[arg(short = 'n', long, default_value_t = 50)]
        count: usize,
    },
}

fn main() -> ExitCode {
    let Arguments { what, common } = Arguments::parse();
    match run(&what, &common) {
        Ok(report) => {
            match common.output {
                Output::Table => print!("{report}"),
                Output::Json => println!("{:#}", serde_json::json!(report)),
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(what: &Bench, common: &Common) -> Result<Report> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    // Taken before anything is started: from here on a signal ends by cleaning up.
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        )
    };
    runtime.block_on(async {
        tokio::select! {
            report = measure(what, common) => report,
            _ = interrupt.recv() => bail!("interrupted"),
            _ = terminate.recv() => bail!("terminated"),
        }
    })
}

async fn measure(what: &Bench, common: &Common) -> Result<Report> {
    let peer = common.peer.as_deref().filter(|_| !common.no_peer);
    match *what {
        Bench::Start { count } => start::measure(peer, count).await,
        Bench::Burst { count } => burst::measure(peer, count).await,
        Bench::Memory { count } => memory::measure(peer, count).await,
        Bench::Webhook => webhook::measure().await,
        Bench::Churn { count, parallel } => churn::measure(peer, count, parallel).await,
        Bench::Growth { count } => growth::measure(peer, count).await,
    }
}
