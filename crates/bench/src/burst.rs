//! `bench burst`: pods created at once, until the last one runs.

use crate::report::{Goal, Report};
use crate::site::Site;
use anyhow::Result;
use std::path::Path;

/// One burst on each node, the other one idle.
pub(crate) async fn measure(peer: Option<&Path>, count: usize) -> Result<Report> {
    let site = Site::up(peer, &[]).await?;
    let mut report = Report::new("burst", site.machine()?);
    let names: Vec<String> = (0..count).map(|at| format!("burst-{at}")).collect();
    let mut rates = [None, None];
    for (at, side) in site.sides().into_iter().enumerate() {
        // The first fills caches.
        let first = ["first".to_owned()];
        side.start_all(&first).await?;
        side.end_all(&first).await?;
        let started = side.start_all(&names).await?;
        side.end_all(&names).await?;
        let mut times: Vec<f64> = started.values().map(|start| start.running).collect();
        times.sort_by(f64::total_cmp);
        let last = times.last().copied().unwrap_or(f64::NAN);
        eprintln!("{count} pods at once: {} {last:.3} s", side.name);
        report.figure("creation of all to Running", side.name, "s", times);
        #[expect(clippy::cast_precision_loss, reason = "a number of pods")]
        let rate = count as f64 / last;
        rates[at] = report.figure("rate", side.name, "pods/s", vec![rate]);
    }
    let [ours, theirs] = rates;
    report.ratio(
        "rate of a burst, monopod to peer",
        ours,
        theirs,
        Some(Goal::AtLeast(1.0)),
    );
    report.machine.ended();
    Ok(report)
}
