//! `bench start`: from a pod's creation to Running, one pod at a time.

use crate::report::{Goal, Report};
use crate::site::Site;
use anyhow::{Context, Result, ensure};
use kube::Api;
use monopod_api::environment::Environment;
use monopod_api::names;
use monopod_api::timeline::Step;
use monopod_testkit::cpu_time;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long after the start its timeline may be written.
const WRITTEN: Duration = Duration::from_secs(10);

/// A pass with the pool off, and one with it, each with the ratio that it is to reach.
const PASSES: [(&str, &[&str], f64); 2] = [
    ("without the pool", &["--pool", "0"], 1.0),
    ("with the pool", &[], 0.6),
];
/// How long a VM may take to be ready before it is needed.
const READY: Duration = Duration::from_mins(2);
/// A VM that waits takes no CPU time for this long.
const PAUSED: Duration = Duration::from_millis(300);

/// Starts on each node in turn, without the pool and with it.
pub(crate) async fn measure(peer: Option<&Path>, count: usize) -> Result<Report> {
    let mut report: Option<Report> = None;
    for (title, flags, goal) in PASSES {
        let site = Site::up(peer, flags).await?;
        let report = match &mut report {
            Some(report) => report,
            None => report.insert(Report::new("start", site.machine()?)),
        };
        eprintln!("{title}");
        let pass = Pass {
            title,
            goal,
            pool: flags.is_empty(),
        };
        pass.measure(&site, count, report).await?;
    }
    let mut report = report.context("nothing was measured")?;
    report.machine.ended();
    Ok(report)
}

struct Pass {
    title: &'static str,
    goal: f64,
    pool: bool,
}

impl Pass {
    async fn measure(&self, site: &Site, count: usize, report: &mut Report) -> Result<()> {
        let mut running = [Vec::new(), Vec::new()];
        let mut bound = [Vec::new(), Vec::new()];
        let mut steps: BTreeMap<Step, Vec<f64>> = BTreeMap::new();
        for run in 0..=count {
            for (at, side) in site.sides().into_iter().enumerate() {
                let ours = side.name == site.monopod.name;
                if ours && self.pool && run > 0 {
                    pool_is_ready(site).await?;
                }
                let name = format!("start-{run}");
                let start = side.start(&name).await?;
                let took = if ours {
                    timeline(site, &start.uid).await?
                } else {
                    Vec::new()
                };
                side.end_all(&[name]).await?;
                eprintln!(
                    "start {run} of {count}: {} {:.3} s",
                    side.name, start.running
                );
                // The first fills caches of both.
                if run > 0 {
                    running[at].push(start.running);
                    bound[at].push(start.bound);
                    for (step, milliseconds) in took {
                        steps.entry(step).or_default().push(milliseconds);
                    }
                }
            }
        }
        let [ours, theirs] = running;
        let [our_bound, their_bound] = bound;
        let named = |what: &str| format!("{what} {}", self.title);
        let ours = report.figure(&named("Running"), "monopod", "s", ours);
        let theirs = report.figure(&named("Running"), "peer", "s", theirs);
        report.figure(&named("bound"), "monopod", "s", our_bound);
        report.figure(&named("bound"), "peer", "s", their_bound);
        for (step, milliseconds) in steps {
            report.figure(&named(step.name()), "monopod", "ms", milliseconds);
        }
        let goal = Some(Goal::AtMost(self.goal));
        report.ratio(&named("start, monopod to peer"), ours, theirs, goal);
        Ok(())
    }
}

/// Waits until a VM waits: it is there, and uses no CPU time.
async fn pool_is_ready(site: &Site) -> Result<()> {
    let deadline = Instant::now() + READY;
    let spare = site.cluster.data().join("host/spare");
    loop {
        for entry in std::fs::read_dir(&spare)? {
            let record = std::fs::read(entry?.path().join("record.json")).unwrap_or_default();
            let record: Value = serde_json::from_slice(&record).unwrap_or_default();
            let pid = record["process"]["pid"].as_i64();
            let Some(pid) = pid.and_then(|pid| i32::try_from(pid).ok()) else {
                continue;
            };
            let before = cpu_time(pid);
            tokio::time::sleep(PAUSED).await;
            if before.is_some() && before == cpu_time(pid) {
                return Ok(());
            }
        }
        ensure!(Instant::now() < deadline, "the pool stays empty");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What each step took, once the start's timeline is complete.
async fn timeline(site: &Site, uid: &str) -> Result<Vec<(Step, f64)>> {
    let environments: Api<Environment> = Api::all(site.client.clone());
    let deadline = Instant::now() + WRITTEN;
    loop {
        let environment = environments.get(&names::environment(uid)).await?;
        let timeline = environment.status.context("it has no status")?.timeline;
        if timeline.iter().any(|entry| entry.step == Step::Running) {
            let took = timeline.iter().map(|entry| {
                let took = entry.done.0.duration_since(entry.began.0);
                (entry.step, took.as_secs_f64() * 1000.0)
            });
            return Ok(took.collect());
        }
        ensure!(
            Instant::now() < deadline,
            "the start's timeline is not complete"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
