//! One image of an environment: taken from the store or pulled, again until its VM has it.

use super::background::Found;
use super::chain;
use crate::Context;
use crate::hypervisor::Hypervisor;
use crate::images::{ImageError, StoredImage};
use crate::pull_credentials::Given;
use crate::registry::{PullError, Request};
use monopod_api::environment::EnvironmentImage;
use monopod_core::backoff::Backoff;
use monopod_core::image::access::{Plan, plan};
use monopod_core::image::keyring::Keyrings;
use monopod_core::image::reference::{Reference, normalise};
use monopod_wire::Pulled;
use rand::RngCore as _;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// How long an environment with credentials waits for them before it tries without: control
/// writes them a moment after the environment.
const CREDENTIALS: Duration = Duration::from_secs(10);
/// How often an image that only an operator can bring is looked for.
const LOCAL: Duration = Duration::from_secs(1);
/// How often the progress is told.
const PROGRESS: Duration = Duration::from_secs(1);

/// An image for the VM.
pub(super) struct Ready {
    pub(super) image: StoredImage,
    /// How it was pulled; none if it was there already.
    pub(super) pulled: Option<Pulled>,
    /// Told whether the VM has it.
    pub(super) attached: oneshot::Sender<bool>,
}

/// Why there is no image yet, as a waiting container shows it.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Self {
            reason: error.reason(),
            message: chain(&error),
        }
    }
}

impl From<PullError> for Failure {
    fn from(error: PullError) -> Self {
        Self {
            reason: "ErrImagePull",
            message: chain(&error),
        }
    }
}

/// What is looked after: an image, of an environment that may be given credentials.
pub(super) struct Wanted {
    pub(super) environment: String,
    pub(super) image: EnvironmentImage,
    pub(super) credentials: bool,
}

/// Brings an image to the owner. Ends when the VM has it, or when the reference is none.
pub(super) async fn keep_image<H: Hypervisor>(
    context: Arc<Context<H>>,
    wanted: Wanted,
    found: mpsc::Sender<Found>,
) {
    let text = wanted.image.reference.clone();
    let reference = match normalise(&text) {
        Ok(reference) => reference,
        Err(invalid) => {
            let failure = ImageError::from(invalid).into();
            // Nobody listens any more if the environment is released.
            let _told = found.send(Found::Missing(text, failure)).await.is_ok();
            return;
        }
    };
    let mut given = context.pull_credentials.clone();
    if wanted.credentials {
        let there = given.wait_for(|all| all.contains_key(&wanted.environment));
        if tokio::time::timeout(CREDENTIALS, there).await.is_err() {
            tracing::warn!(environment = %wanted.environment, "no registry credentials from control yet; images are tried without");
        }
    }
    let mut failures = 0u32;
    loop {
        let keyrings = current(&mut given, &wanted.environment);
        let failure = match attempt(&context, &wanted.image, &reference, &keyrings, &found).await {
            Ok((image, pulled)) => {
                let (attached, result) = oneshot::channel();
                let ready = Box::new(Ready {
                    image,
                    pulled,
                    attached,
                });
                if found.send(Found::Image(text.clone(), ready)).await.is_err() {
                    return;
                }
                match result.await {
                    Ok(true) | Err(_) => return,
                    // The owner told why.
                    Ok(false) => None,
                }
            }
            Err(failure) => Some(failure),
        };
        failures = failures.saturating_add(1);
        if let Some(failure) = failure
            && found
                .send(Found::Missing(text.clone(), failure))
                .await
                .is_err()
        {
            return;
        }
        let delay = if reference.is_local() {
            LOCAL
        } else {
            let delay = Backoff::PULLING.jittered(failures, rand::rng().next_u64());
            delay.unsigned_abs()
        };
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = renewed(&mut given, &wanted.environment, &keyrings) => failures = 0,
        }
    }
}

fn current(given: &mut Given, environment: &str) -> Arc<Keyrings> {
    let all = given.borrow_and_update();
    all.get(environment).cloned().unwrap_or_default()
}

/// Ends when the environment is given other credentials.
async fn renewed(given: &mut Given, environment: &str, before: &Arc<Keyrings>) {
    loop {
        if given.changed().await.is_err() {
            return std::future::pending().await;
        }
        if current(given, environment) != *before {
            return;
        }
    }
}

async fn attempt<H: Hypervisor>(
    context: &Arc<Context<H>>,
    image: &EnvironmentImage,
    reference: &Reference,
    keyrings: &Arc<Keyrings>,
    found: &mpsc::Sender<Found>,
) -> Result<(StoredImage, Option<Pulled>), Failure> {
    let offered = context.puller.fingerprints(reference, keyrings);
    let stored = context.images.find(reference)?;
    let decide = |stored: Option<&StoredImage>| {
        let access = stored.map(|stored| &stored.access);
        plan(image.pull_policy, reference, access, &offered)
    };
    let mut decision = decide(stored.as_ref());
    if decision == Plan::Use {
        // The first time the whole file is read.
        let (store, wanted) = (context.images.clone(), reference.clone());
        let taken = tokio::task::spawn_blocking(move || store.take(&wanted)).await;
        match taken.unwrap_or(Ok(None))? {
            Some(image) => return Ok((image, None)),
            None => decision = decide(None),
        }
    }
    match decision {
        Plan::Use | Plan::Ask => {}
        Plan::Refuse(refusal) => {
            let (reason, message) = refusal.explain(&image.reference);
            return Err(Failure { reason, message });
        }
    }
    let request = Request {
        reference: reference.clone(),
        keyrings: Arc::clone(keyrings),
    };
    let asked = Found::Progress(image.reference.clone(), 0, 0);
    // Nobody listens any more if the environment is released.
    let _told = found.send(asked).await.is_ok();
    let mut told: Option<Instant> = None;
    let acquired = context
        .puller
        .acquire(&request, |done, total| {
            if told.is_none_or(|told| told.elapsed() >= PROGRESS) {
                told = Some(Instant::now());
                let progress = Found::Progress(image.reference.clone(), done, total);
                // The next one tells more.
                let _told = found.try_send(progress).is_ok();
            }
        })
        .await;
    context.metrics.pulled(&acquired);
    let acquired = acquired?;
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let pulled = Pulled {
        pull_ms: milliseconds(acquired.pull),
        total_ms: milliseconds(acquired.total),
        size: acquired.size,
    };
    Ok((acquired.image, Some(pulled)))
}
