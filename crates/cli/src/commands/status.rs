//! `monopod status`: parts, hosts and environments at a glance.

use super::up::running;
use crate::cluster::supervisor::Progress;
use crate::cluster::{client, supervisor};
use crate::settings::Layout;
use anyhow::Context;
use clap::{Args, ValueEnum};
use jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use monopod_api::environment::{Environment, ImagePhase, ImageStatus};
use monopod_api::host::Host;
use serde::Serialize;
use std::process::ExitCode;

/// How long the API server may take to answer.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);

#[derive(Args, Debug)]
pub(crate) struct Status {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(crate) enum Output {
    #[default]
    Table,
    Json,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    running: bool,
    /// Environments whose VMs go on without the cluster, after `down --keep-pods`.
    kept: Vec<String>,
    parts: Vec<PartLine>,
    hosts: Vec<HostLine>,
    environments: Vec<EnvironmentLine>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct PartLine {
    name: String,
    pid: Option<i32>,
    ready: bool,
    restarts: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct HostLine {
    name: String,
    ready: bool,
    cordoned: bool,
    message: Option<String>,
    zone: String,
    memory_mib: u32,
    accelerator: Option<String>,
    accelerator_reason: Option<String>,
    vm_limits: Vec<String>,
    vm_limits_reason: Option<String>,
    images: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct EnvironmentLine {
    name: String,
    pod: String,
    phase: String,
    host: String,
    address: String,
    size: String,
    age_seconds: i64,
    reason: Option<String>,
    images: Vec<ImageStatus>,
}

impl Status {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let report = report(layout).await?;
        match self.output {
            Output::Json => println!("{}", serde_json::to_string_pretty(&report)?),
            Output::Table => print(&report),
        }
        let healthy = report.running && report.parts.iter().all(|part| part.ready);
        Ok(if healthy {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

async fn report(layout: &Layout) -> anyhow::Result<Report> {
    let settings = layout.read_settings()?;
    let mut report = Report {
        running: running(layout)?,
        kept: Vec::new(),
        parts: Vec::new(),
        hosts: Vec::new(),
        environments: Vec::new(),
    };
    if !report.running {
        report.kept = layout.environments();
        return Ok(report);
    }
    for phase in Progress::read(layout)
        .phases
        .into_iter()
        .filter(|phase| phase.pid.is_some())
    {
        let ready = supervisor::health(&settings, &phase.name, layout).await;
        report.parts.push(PartLine {
            name: phase.name,
            pid: phase.pid,
            ready,
            restarts: phase.restarts,
        });
    }
    let list = objects(layout, settings.user(), &mut report);
    tokio::time::timeout(PATIENCE, list)
        .await
        .context("the API server does not answer; see logs/kube-apiserver.log and logs/etcd.log in the data directory")??;
    Ok(report)
}

/// Adds what the API server knows.
async fn objects(layout: &Layout, user: &str, report: &mut Report) -> anyhow::Result<()> {
    let client = client::connect(&layout.kubeconfig(user)).await?;
    let hosts: Api<Host> = Api::all(client.clone());
    for host in hosts.list(&ListParams::default()).await? {
        let status = host.status.clone().unwrap_or_default();
        report.hosts.push(HostLine {
            name: host.name_any(),
            ready: status.ready,
            cordoned: host.spec.unschedulable,
            message: status.message,
            zone: host.spec.zone,
            memory_mib: host.spec.memory_mib,
            accelerator: status.accelerator,
            accelerator_reason: status.accelerator_reason,
            vm_limits: status.vm_limits,
            vm_limits_reason: status.vm_limits_reason,
            images: status.images.len(),
        });
    }
    let environments: Api<Environment> = Api::all(client);
    let now = Timestamp::now();
    for environment in environments.list(&ListParams::default()).await? {
        let status = environment.status.clone().unwrap_or_default();
        let age = environment
            .creation_timestamp()
            .map_or(0, |created| now.duration_since(created.0).as_secs());
        report.environments.push(EnvironmentLine {
            name: environment.name_any(),
            pod: format!(
                "{}/{}",
                environment.spec.pod.namespace, environment.spec.pod.name
            ),
            phase: format!("{:?}", status.phase),
            host: environment.spec.host,
            address: environment.spec.address,
            size: environment.spec.size.to_string(),
            age_seconds: age,
            reason: status.reason,
            images: status.images,
        });
    }
    Ok(())
}

fn print(report: &Report) {
    if !report.running {
        println!("The cluster is stopped. Start it with `monopod up`.");
        if !report.kept.is_empty() {
            println!(
                "VMs may go on without it ({}): `monopod up` takes them over, `monopod down` ends them.",
                report.kept.len()
            );
        }
        return;
    }
    let yes_no = |yes: bool| if yes { "yes" } else { "NO" }.to_owned();
    table(
        &["PART", "READY", "PID", "RESTARTS"],
        report.parts.iter().map(|p| {
            vec![
                p.name.clone(),
                yes_no(p.ready),
                p.pid.map_or_else(String::new, |pid| pid.to_string()),
                p.restarts.to_string(),
            ]
        }),
    );
    println!();
    table(
        &[
            "HOST",
            "READY",
            "ZONE",
            "MEMORY",
            "IMAGES",
            "ACCELERATOR",
            "VM LIMITS",
        ],
        report.hosts.iter().map(|h| {
            vec![
                h.name.clone(),
                if h.cordoned {
                    format!("{}, cordoned", yes_no(h.ready))
                } else {
                    yes_no(h.ready)
                },
                h.zone.clone(),
                format!("{}Mi", h.memory_mib),
                h.images.to_string(),
                h.accelerator.clone().unwrap_or_default(),
                h.vm_limits.join(","),
            ]
        }),
    );
    for host in &report.hosts {
        if let Some(message) = &host.message {
            println!("{}: {message}", host.name);
        }
        // KVM and all limits need no words.
        if let Some(reason) = host.accelerator_reason.as_deref().filter(|r| !r.is_empty()) {
            println!("{}: VMs are emulated: {reason}", host.name);
        }
        if let Some(reason) = &host.vm_limits_reason {
            println!("{}: {reason}", host.name);
        }
    }
    println!();
    table(
        &[
            "ENVIRONMENT",
            "POD",
            "PHASE",
            "AGE",
            "IP",
            "SIZE",
            "HOST",
            "REASON",
        ],
        report.environments.iter().map(|e| {
            vec![
                e.name.clone(),
                e.pod.clone(),
                e.phase.clone(),
                age(e.age_seconds),
                e.address.clone(),
                e.size.clone(),
                e.host.clone(),
                e.reason.clone().unwrap_or_default(),
            ]
        }),
    );
    print_missing(&report.environments);
}

/// Images that are not there yet, and how far they are.
fn print_missing(environments: &[EnvironmentLine]) {
    let rows: Vec<Vec<String>> = environments
        .iter()
        .flat_map(|e| e.images.iter().map(move |image| (e, image)))
        .filter(|(_, image)| image.state != ImagePhase::Present)
        .map(|(e, image)| {
            vec![
                image.reference.clone(),
                e.pod.clone(),
                progress(image),
                image.message.clone().unwrap_or_default(),
            ]
        })
        .collect();
    if !rows.is_empty() {
        println!();
        table(&["IMAGE", "POD", "STATE", "MESSAGE"], rows.into_iter());
    }
}

fn progress(image: &ImageStatus) -> String {
    let mib = |bytes: u64| bytes >> 20;
    match (image.state, image.done_bytes, image.total_bytes) {
        (ImagePhase::Pulling, Some(done), Some(total)) if total > 0 => format!(
            "pulling {}% of {} MiB",
            u128::from(done.min(total)) * 100 / u128::from(total),
            mib(total)
        ),
        (ImagePhase::Pulling, _, _) => "pulling".to_owned(),
        (ImagePhase::Present, _, _) => "present".to_owned(),
        (ImagePhase::Failed, _, _) => "failed".to_owned(),
    }
}

/// As kubectl shows it: the two largest units at most.
fn age(seconds: i64) -> String {
    match seconds {
        ..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86400),
    }
}

fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    let rows: Vec<Vec<String>> = std::iter::once(header.iter().map(|h| (*h).to_owned()).collect())
        .chain(rows)
        .collect();
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    };
    for row in &rows {
        let cells: Vec<String> = row
            .iter()
            .enumerate()
            .map(|(i, cell)| format!("{cell:<width$}", width = width(i)))
            .collect();
        println!("{}", cells.join("   ").trim_end());
    }
}
