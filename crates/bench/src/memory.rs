//! `bench memory`: what the end of each pod, and of the node itself, would give back.

use crate::peer::Peer;
use crate::process::{Process, all, family, unique_mib};
use crate::report::{Goal, Report};
use crate::site::Site;
use anyhow::{Context, Result};
use monopod_api::names;
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// What a started pod may go on doing; the figures are of pods that idle.
const SETTLE: Duration = Duration::from_secs(10);
/// What a VM may cost beside its pod.
const GOAL_MIB: f64 = 32.0;

/// Starts pods on both nodes, and looks at the processes when they idle.
pub(crate) async fn measure(peer: Option<&Path>, count: usize) -> Result<Report> {
    // A VM that rehearsed has more code translated than its pod needs.
    let site = Site::up(peer, &["--pool", "0"]).await?;
    let mut report = Report::new("memory", site.machine()?);
    let pods: Vec<String> = (0..count).map(|at| format!("memory-{at}")).collect();
    let mut machines = Vec::new();
    for side in site.sides() {
        let started = side.start_all(&pods).await?;
        if side.name == site.monopod.name {
            machines.extend(started.into_values().map(|start| start.uid));
        }
    }
    eprintln!("waiting until {count} pods idle");
    tokio::time::sleep(SETTLE).await;
    let mut ours = Vec::new();
    for uid in &machines {
        ours.push(of_vm(&site, uid)?);
    }
    let vm = report.figure("a pod with its VM", "monopod", "MiB", ours);
    for part in ["host", "control"] {
        let used = unique_mib(site.part(part)?)?;
        report.figure(part, "monopod", "MiB", vec![used]);
    }
    if let Some((_, peer)) = &site.peer {
        let pod = of_peer(&mut report, peer)?;
        report.ratio(
            "a pod with all that is its own, monopod to peer",
            vm,
            pod,
            None,
        );
    }
    report.ratio(
        &format!("a pod with its VM to {GOAL_MIB} MiB"),
        vm,
        Some(GOAL_MIB),
        Some(Goal::AtMost(1.0)),
    );
    report.machine.ended();
    Ok(report)
}

/// The VM of a pod, with the processes that it needs.
fn of_vm(site: &Site, uid: &str) -> Result<f64> {
    let environment = names::environment(uid);
    let record = site.cluster.data().join("host/vms").join(environment);
    let record: Value = serde_json::from_slice(&std::fs::read(record.join("record.json"))?)?;
    let pid = record["process"]["pid"]
        .as_i64()
        .and_then(|pid| i32::try_from(pid).ok())
        .context("the VM's record has no process")?;
    sum(&family(&all()?, pid))
}

/// Each pod's shim, sandbox and container, and the node's own processes.
fn of_peer(report: &mut Report, peer: &Peer) -> Result<Option<f64>> {
    let processes = all()?;
    let directory = peer.directory().display().to_string();
    let is_shim = |p: &&Process| {
        p.command.contains("containerd-shim-runc-v2") && p.command.contains(&directory)
    };
    let (mut shims, mut pods) = (Vec::new(), Vec::new());
    for shim in processes.iter().filter(is_shim) {
        shims.push(unique_mib(shim.pid)?);
        pods.push(sum(&family(&processes, shim.pid))?);
    }
    let pod = report.figure("a pod with shim and sandbox", "peer", "MiB", pods);
    report.figure("its shim alone", "peer", "MiB", shims);
    for (name, pid) in ["containerd", "kubelet"].into_iter().zip(peer.processes()) {
        report.figure(name, "peer", "MiB", vec![unique_mib(pid)?]);
    }
    Ok(pod)
}

fn sum(pids: &[i32]) -> Result<f64> {
    pids.iter().map(|pid| unique_mib(*pid)).sum()
}
