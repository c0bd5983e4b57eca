//! `monopod size`: the size that a pod gets, and the sum that leads to it.

use super::manifest::read_pod;
use super::status::Output;
use anyhow::Context;
use clap::Args;
use monopod_api::profile::Sizing;
use monopod_core::sizing::{Amount, explain};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Size {
    /// A file with a pod, or with what makes pods; - is standard input
    #[arg(short, long)]
    file: PathBuf,
    /// The size under a profile with `sizing: Exact`, not the next one of the table
    #[arg(long)]
    exact: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Size {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let pod = read_pod(&self.file)?;
        let (steps, required) = explain(
            &pod.spec.context("the pod has no spec")?,
            if self.exact {
                Sizing::Exact
            } else {
                Sizing::Table
            },
        );
        match self.output {
            Output::Json => {
                let lines: Vec<_> = steps
                    .iter()
                    .map(|step| {
                        json!({"what": step.what, "cpuMillis": step.amount.cpu_millis,
                            "memoryBytes": step.amount.memory_bytes, "storageBytes": step.amount.storage_bytes})
                    })
                    .collect();
                let size = required.as_ref().ok().map(|r| {
                    json!({"capacityProvisioned": r.size.to_string(), "cpuMillis": r.size.cpu_millis,
                        "memoryMib": r.size.memory_mib, "scratchGib": r.scratch_gib})
                });
                let report = json!({"steps": lines, "size": size});
                println!("{}", serde_json::to_string_pretty(&report)?);
            }
            Output::Table => {
                let width = steps.iter().map(|s| s.what.len()).max().unwrap_or(0);
                println!(
                    "{:<width$}   {:>7}   {:>10}   {:>10}",
                    "", "VCPU-M", "MEMORY", "STORAGE"
                );
                for step in &steps {
                    let Amount {
                        cpu_millis,
                        memory_bytes,
                        storage_bytes,
                    } = step.amount;
                    println!(
                        "{:<width$}   {cpu_millis:>7}   {:>6} MiB   {:>6} MiB",
                        step.what,
                        memory_bytes.div_ceil(1 << 20),
                        storage_bytes.div_ceil(1 << 20)
                    );
                }
                if let Ok(required) = &required {
                    println!(
                        "\nCapacityProvisioned: {}, and {} GiB of ephemeral storage",
                        required.size, required.scratch_gib
                    );
                }
            }
        }
        required?;
        Ok(ExitCode::SUCCESS)
    }
}
