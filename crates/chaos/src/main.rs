//! Breaks a real cluster of two machines in each phase of a pod's life: `cargo xtask chaos real`.
//!
//! For each fault and phase, some tries: a pod is brought to the phase, the fault happens, and
//! once the cluster is whole again the pod must be as it should be, pods that the fault did not
//! concern must not have noticed, and nothing may stay when the pod is deleted.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "prints what came of it, and meanwhile what it does"
)]

mod fault;
mod inventory;
mod scene;
mod vm;

use anyhow::{Result, ensure};
use clap::Parser;
use fault::{Fault, Phase};
use monopod_testkit::is_interrupted;
use scene::Scene;
use std::process::ExitCode;
use std::time::Duration;

/// Breaks a real cluster of two machines in each phase of a pod's life.
#[derive(Parser, Debug)]
#[command(name = "cargo xtask chaos real")]
struct Arguments {
    /// Tries for each fault and phase
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=4))]
    tries: u32,
    /// Only these faults
    #[arg(long, value_enum)]
    fault: Vec<Fault>,
    /// Only these phases
    #[arg(long, value_enum)]
    phase: Vec<Phase>,
}

/// What came of a fault in a phase.
struct Cell {
    fault: Fault,
    phase: Phase,
    tries: u32,
    lost: Vec<String>,
    left: Vec<String>,
    /// The longest time until nothing was left.
    cleaned: Duration,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(cells) => {
            print(&cells);
            if cells
                .iter()
                .all(|cell| cell.lost.is_empty() && cell.left.is_empty())
            {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            eprintln!("chaos: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<Vec<Cell>> {
    eprintln!("bringing up a cluster of two machines");
    let mut scene = Scene::new()?;
    let mut cells = Vec::new();
    for fault in Fault::ALL {
        for phase in fault.phases() {
            let asked = (arguments.fault.is_empty() || arguments.fault.contains(&fault))
                && (arguments.phase.is_empty() || arguments.phase.contains(phase));
            if !asked {
                continue;
            }
            let mut cell = Cell {
                fault,
                phase: *phase,
                tries: arguments.tries,
                lost: Vec::new(),
                left: Vec::new(),
                cleaned: Duration::ZERO,
            };
            for number in 1..=arguments.tries {
                let outcome = scene.play(fault, *phase)?;
                ensure!(!is_interrupted(), "interrupted");
                eprintln!(
                    "{fault} while {phase}, {number} of {}: {outcome}",
                    arguments.tries
                );
                cell.lost.extend(outcome.lost);
                cell.left.extend(outcome.left);
                cell.cleaned = cell.cleaned.max(outcome.cleaned);
            }
            cell.left.extend(scene.forgotten());
            cells.push(cell);
        }
    }
    Ok(cells)
}

fn print(cells: &[Cell]) {
    println!(
        "{:<38} {:<10} {:>5} {:>5} {:>5} {:>13}",
        "FAULT", "PHASE", "TRIES", "LOST", "LEFT", "CLEANED AFTER"
    );
    for Cell {
        fault,
        phase,
        tries,
        lost,
        left,
        cleaned,
    } in cells
    {
        println!(
            "{:<38} {:<10} {tries:>5} {:>5} {:>5} {:>11} s",
            fault.to_string(),
            phase.to_string(),
            lost.len(),
            left.len(),
            cleaned.as_secs()
        );
    }
    for cell in cells {
        for (what, list) in [("lost", &cell.lost), ("left", &cell.left)] {
            for text in list {
                println!("{what}: {} while {}: {text}", cell.fault, cell.phase);
            }
        }
    }
}
