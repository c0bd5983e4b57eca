//! Removes images that no VM and no environment of this host uses, by age and by space.

use crate::Context;
use crate::hypervisor::Hypervisor;
use crate::images::{ImageError, Store};
use jiff::{SignedDuration, Timestamp};
use monopod_core::image::garbage::{Limits, victims};
use monopod_ops::admin::Readiness;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How often it is looked: the kubelet's period.
const PERIOD: Duration = Duration::from_mins(5);
/// How often it is looked whether the environments are known, without which nothing is removed.
const PATIENCE: Duration = Duration::from_secs(1);
/// Images used within this time before the look are not removed, even if it took them for unused.
const MARGIN: SignedDuration = SignedDuration::from_mins(1);

/// What the environments of this host use. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct InUse(Arc<Mutex<BTreeMap<String, Uses>>>);

/// References and digests that are in use.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    pub(crate) references: BTreeSet<String>,
    pub(crate) digests: BTreeSet<String>,
}

impl InUse {
    /// The environment needs whatever these references mean.
    pub(crate) fn needs(&self, environment: &str, references: impl Iterator<Item = String>) {
        let mut uses = self.lock();
        let uses = uses.entry(environment.to_owned()).or_default();
        uses.references.extend(references);
    }

    /// The environment's VM has this file.
    pub(crate) fn has(&self, environment: &str, squashfs: &Path) {
        let name = squashfs.file_stem().and_then(|stem| stem.to_str());
        if let Some(hex) = name.and_then(|name| name.strip_prefix("sha256-")) {
            let mut uses = self.lock();
            let uses = uses.entry(environment.to_owned()).or_default();
            uses.digests.insert(format!("sha256:{hex}"));
        }
    }

    /// The environment's VM is gone.
    pub(crate) fn release(&self, environment: &str) {
        self.lock().remove(environment);
    }

    /// Of all environments together.
    fn all(&self) -> Uses {
        let mut all = Uses::default();
        for uses in self.lock().values() {
            all.references.extend(uses.references.iter().cloned());
            all.digests.extend(uses.digests.iter().cloned());
        }
        all
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Uses>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes what must go, again and again, until the token is cancelled.
pub(crate) async fn keep<H: Hypervisor>(
    context: Arc<Context<H>>,
    readiness: Readiness,
    shutdown: CancellationToken,
) {
    loop {
        // Before every environment is known, everything would seem unused.
        let known = readiness.pending().is_empty();
        if known {
            let context = Arc::clone(&context);
            let collected = tokio::task::spawn_blocking(move || collect(&context)).await;
            match collected {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "unused images stay"
                ),
                Err(error) => tracing::error!(%error, "the collection of unused images died"),
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(if known { PERIOD } else { PATIENCE }) => {}
        }
    }
}

fn collect<H: Hypervisor>(context: &Context<H>) -> Result<(), ImageError> {
    let store = &context.images;
    let now = Timestamp::now();
    remove(store, &context.in_use, &context.options.image_limits, now)?;
    context.puller.sweep().map_err(|source| ImageError::Io {
        what: "clear interrupted downloads".to_owned(),
        source,
    })
}

pub(crate) fn remove(
    store: &Store,
    in_use: &InUse,
    limits: &Limits,
    now: Timestamp,
) -> Result<(), ImageError> {
    let (stored, space) = store.inventory(&in_use.all())?;
    let victims = victims(&stored, space, limits, now);
    if victims.is_empty() {
        return Ok(());
    }
    tracing::info!(images = ?victims, "unused images are removed");
    store.discard(&victims, now - MARGIN)
}
