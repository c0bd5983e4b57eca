//! Carries the log files of all containers to the host's archive, piece by piece.
//!
//! It reads the files, never a container's pipes, so a host that is slow or away holds back
//! nobody. While the pod runs it carries at most one piece of each log in a while; at the pod's end
//! it carries the rest as fast as the host takes it.

use super::logs::Log;
use crate::metadata::{Metadata, MetadataError};
use monopod_core::pod::log::{Carried, Next};
use monopod_wire::{LogFile, LogPiece, MAX_PIECE};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

/// Between rounds while the pod runs: 320 KiB each second of each log, at most.
const PAUSE: Duration = Duration::from_millis(100);
/// Between attempts while the host does not answer.
const RETRY: Duration = Duration::from_millis(500);
/// How long the end of the pod waits for a host that takes nothing.
const PATIENCE: Duration = Duration::from_secs(10);
/// Logs that wait to be taken in.
const QUEUE: usize = 16;

/// Takes logs in. Clones reach the same task.
#[derive(Clone, Debug)]
pub(crate) struct Shipper {
    items: mpsc::Sender<Item>,
    bell: Arc<Notify>,
}

#[derive(Debug)]
enum Item {
    Add(Box<Run>),
    /// Answered when everything was carried, or with false when that was given up.
    Finish(oneshot::Sender<bool>),
}

#[derive(Debug)]
struct Run {
    container: String,
    attempt: u32,
    log: Log,
    carried: Carried,
}

impl Shipper {
    /// Starts carrying.
    pub(crate) fn start(metadata: Metadata) -> Self {
        let (items, received) = mpsc::channel(QUEUE);
        let bell = Arc::new(Notify::new());
        tokio::spawn(carry(metadata, received, Arc::clone(&bell)));
        Self { items, bell }
    }

    /// Rung by a log when there is more of it.
    pub(crate) fn bell(&self) -> Arc<Notify> {
        Arc::clone(&self.bell)
    }

    /// Carries the log of a run from now on.
    pub(crate) async fn add(&self, container: String, attempt: u32, log: Log) {
        let run = Run {
            container,
            attempt,
            log,
            carried: Carried::default(),
        };
        self.tell(Item::Add(Box::new(run))).await;
    }

    /// Carries all that is left, of logs that are closed. Whether the host has everything.
    pub(crate) async fn finish(&self) -> bool {
        let (done, finished) = oneshot::channel();
        self.tell(Item::Finish(done)).await;
        finished.await.unwrap_or(false)
    }

    async fn tell(&self, item: Item) {
        if self.items.send(item).await.is_err() {
            tracing::error!("logs are not carried any more");
        }
    }
}

async fn carry(metadata: Metadata, mut items: mpsc::Receiver<Item>, bell: Arc<Notify>) {
    let mut runs: Vec<Run> = Vec::new();
    let mut finishing: Option<(oneshot::Sender<bool>, Instant)> = None;
    loop {
        while let Ok(item) = items.try_recv() {
            take(item, &mut runs, &mut finishing);
        }
        let pause = match round(metadata, &mut runs).await {
            Ok(0) => {
                if let Some((done, _)) = finishing.take() {
                    // Whoever asked may be gone.
                    let _asked = done.send(true).is_ok();
                }
                tokio::select! {
                    () = bell.notified() => {}
                    item = items.recv() => match item {
                        Some(item) => take(item, &mut runs, &mut finishing),
                        None => return,
                    },
                }
                continue;
            }
            Ok(_) => {
                if let Some((_, progress)) = &mut finishing {
                    *progress = Instant::now();
                }
                PAUSE
            }
            Err(error) => {
                tracing::debug!(%error, "the host takes no logs");
                RETRY
            }
        };
        match finishing.take() {
            Some((done, progress)) if progress.elapsed() > PATIENCE => {
                let _asked = done.send(false).is_ok();
            }
            Some((done, progress)) => {
                finishing = Some((done, progress));
                if pause == RETRY {
                    tokio::time::sleep(RETRY).await;
                }
            }
            None => {
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    Some(item) = items.recv() => take(item, &mut runs, &mut finishing),
                }
            }
        }
    }
}

fn take(item: Item, runs: &mut Vec<Run>, finishing: &mut Option<(oneshot::Sender<bool>, Instant)>) {
    match item {
        Item::Add(run) => runs.push(*run),
        Item::Finish(done) => *finishing = Some((done, Instant::now())),
    }
}

/// Carries at most one piece of each log. Returns how many there were.
async fn round(metadata: Metadata, runs: &mut Vec<Run>) -> Result<usize, MetadataError> {
    let mut pieces = 0;
    let mut at = 0;
    while let Some(run) = runs.get_mut(at) {
        match run.carried.next(&run.log.progress()) {
            Next::Done => {
                runs.remove(at);
                continue;
            }
            Next::Idle => {}
            Next::Piece {
                generation,
                offset,
                length,
            } => {
                let length = usize::try_from(length).unwrap_or(MAX_PIECE).min(MAX_PIECE);
                match run.log.read(generation, offset, length) {
                    Ok(Some(bytes)) => {
                        carry_piece(metadata, run, generation, offset, bytes).await?;
                        pieces += 1;
                    }
                    // Deleted, as the container has run twice since.
                    Ok(None) => {
                        runs.remove(at);
                        continue;
                    }
                    Err(error) => {
                        tracing::warn!(container = run.container, %error, "a log cannot be read");
                        run.carried.refused(generation);
                    }
                }
            }
        }
        at += 1;
    }
    Ok(pieces)
}

async fn carry_piece(
    metadata: Metadata,
    run: &mut Run,
    generation: u64,
    offset: u64,
    bytes: Vec<u8>,
) -> Result<(), MetadataError> {
    let file = LogFile {
        container: run.container.clone(),
        attempt: run.attempt,
        generation,
    };
    let piece = LogPiece {
        file,
        offset,
        bytes,
    };
    if let Some(length) = metadata.log(&piece).await?.length {
        run.carried.stored(generation, length);
    } else {
        tracing::warn!(container = run.container, "the host's archive is full");
        run.carried.refused(generation);
    }
    Ok(())
}
