//! `bench growth`: start times from the first to the last of many pods that go on running.

use crate::report::{Report, median};
use crate::site::Site;
use anyhow::Result;
use std::path::Path;

/// Starts of one row of figures.
const BLOCK: usize = 10;

/// Starts on each node in turn, and ends nothing.
pub(crate) async fn measure(peer: Option<&Path>, count: usize) -> Result<Report> {
    let site = Site::up(peer, &[]).await?;
    let mut report = Report::new("growth", site.machine()?);
    let sides = site.sides();
    let mut times = vec![Vec::new(); sides.len()];
    for side in &sides {
        // Fills caches, and is not counted.
        let first = ["first".to_owned()];
        side.start_all(&first).await?;
        side.end_all(&first).await?;
    }
    for run in 1..=count {
        for (side, times) in sides.iter().zip(&mut times) {
            let start = side.start(&format!("growth-{run}")).await?;
            eprintln!("pod {run} of {count}: {} {:.3} s", side.name, start.running);
            times.push(start.running);
        }
    }
    for (side, times) in sides.iter().zip(times) {
        let blocks: Vec<&[f64]> = times.chunks(BLOCK).collect();
        for (at, block) in blocks.iter().enumerate() {
            let what = format!("pods {} to {}", at * BLOCK + 1, at * BLOCK + block.len());
            report.figure(&what, side.name, "s", block.to_vec());
        }
        let of = |block: Option<&&[f64]>| block.and_then(|block| median(block));
        report.ratio(
            &format!("{}, last {BLOCK} to first {BLOCK}", side.name),
            of(blocks.last()),
            of(blocks.first()),
            None,
        );
    }
    report.machine.ended();
    Ok(report)
}
