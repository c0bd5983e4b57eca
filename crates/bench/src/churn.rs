//! `bench churn`: pods that come and go, some at a time; what fails, what stays, what slows down.

use crate::counts::{Counts, MEMORY, take};
use crate::pods::Side;
use crate::report::{Count, Report, median};
use crate::site::Site;
use anyhow::Result;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;
use tokio::task::JoinSet;

/// Starts of one row of figures.
const BLOCK: usize = 50;
/// After this, what is still there is a leak: addresses cool for some seconds, certificates' requests
/// and lists are looked at less often.
const SETTLE: Duration = Duration::from_secs(90);

/// What became of the pods of one node.
#[derive(Default)]
struct Churned {
    /// In the order in which the pods ran.
    times: Vec<f64>,
    failures: Vec<String>,
}

/// Lets pods come and go on each node, the other one idle.
pub(crate) async fn measure(peer: Option<&Path>, count: usize, parallel: usize) -> Result<Report> {
    let site = Site::up(peer, &[]).await?;
    let mut report = Report::new("churn", site.machine()?);
    // Fills caches and pools of both before anything is counted.
    for side in site.sides() {
        churn(side, "first", 2 * parallel, parallel).await;
    }
    let before = settled(&site, None).await?;
    let mut rates = Vec::new();
    for side in site.sides() {
        let begin = Instant::now();
        let churned = churn(side, "churn", count, parallel).await;
        #[expect(clippy::cast_precision_loss, reason = "a number of pods")]
        let rate = churned.times.len() as f64 / begin.elapsed().as_secs_f64();
        rates.push(report.figure("starts and ends", side.name, "pods/s", vec![rate]));
        tell(&mut report, side, count, churned);
        if side.name == site.monopod.name {
            let after = settled(&site, Some(&before)).await?;
            compare(&mut report, &before, &after);
        }
    }
    if let [ours, theirs] = rates[..] {
        report.ratio("rate, monopod to peer", ours, theirs, None);
    }
    report.machine.ended();
    Ok(report)
}

async fn churn(side: &Side, prefix: &'static str, count: usize, parallel: usize) -> Churned {
    let churned = Arc::new(Mutex::new(Churned::default()));
    let next = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..parallel {
        let (side, churned, next) = (side.clone(), Arc::clone(&churned), Arc::clone(&next));
        workers.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return;
                }
                let name = format!("{prefix}-{number}");
                let start = side.start(&name).await;
                let ended = side.end_all(std::slice::from_ref(&name)).await;
                let mut churned = churned.lock().await;
                match start.and_then(|start| ended.map(|()| start)) {
                    Ok(start) => churned.times.push(start.running),
                    Err(error) => {
                        eprintln!("{name} of {}: {error:#}", side.name);
                        churned.failures.push(format!("{name}: {error:#}"));
                    }
                }
                let done = churned.times.len() + churned.failures.len();
                if done.is_multiple_of(BLOCK) {
                    eprintln!("{done} of {count} pods came and went on {}", side.name);
                }
            }
        });
    }
    workers.join_all().await;
    std::mem::take(&mut *churned.lock().await)
}

fn tell(report: &mut Report, side: &Side, count: usize, churned: Churned) {
    let Churned { times, failures } = churned;
    let blocks: Vec<&[f64]> = times.chunks(BLOCK).filter(|b| b.len() == BLOCK).collect();
    for (at, block) in blocks.iter().enumerate() {
        let what = format!("starts {} to {}", at * BLOCK + 1, (at + 1) * BLOCK);
        report.figure(&what, side.name, "s", block.to_vec());
    }
    if let [first, .., last] = blocks[..] {
        let what = format!("start, {}, last {BLOCK} to first {BLOCK}", side.name);
        report.ratio(&what, median(last), median(first), None);
    }
    report.notes.push(format!(
        "{}: {} of {count} pods came and went, {} failed{}",
        side.name,
        times.len(),
        failures.len(),
        failures
            .first()
            .map_or_else(String::new, |first| format!("; the first: {first}"))
    ));
}

/// The counts when they are as before, or when they have had the time to be.
async fn settled(site: &Site, before: Option<&Counts>) -> Result<Counts> {
    let deadline = Instant::now() + SETTLE;
    let mut last = None;
    loop {
        let counts = take(site).await?;
        // At first nothing is known but that it should not go on changing.
        let done = match (before, &last) {
            (Some(before), _) => !has_grown(before, &counts),
            (None, Some(last)) => !has_grown(last, &counts) && !has_grown(&counts, last),
            (None, None) => false,
        };
        if done || Instant::now() >= deadline {
            return Ok(counts);
        }
        last = Some(counts);
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
}

/// Whether there is more of anything but memory.
fn has_grown(before: &Counts, after: &Counts) -> bool {
    let mut counts = after.iter().filter(|(name, _)| !MEMORY.contains(name));
    counts.any(|(name, count)| before.get(name).is_none_or(|old| count > old))
}

fn compare(report: &mut Report, before: &Counts, after: &Counts) {
    let counts = before.iter().map(|(what, before)| Count {
        what,
        before: *before,
        after: after.get(what).copied().unwrap_or_default(),
    });
    report.counts.extend(counts);
    let grown: Vec<&str> = report
        .counts
        .iter()
        .filter(|count| count.after > count.before && !MEMORY.contains(&count.what))
        .map(|count| count.what)
        .collect();
    report.notes.push(if grown.is_empty() {
        "nothing stayed: no count but memory has grown".to_owned()
    } else {
        format!("what has grown: {}", grown.join(", "))
    });
}
