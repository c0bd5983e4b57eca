//! The hooks of a container: `postStart` and `preStop`.

use super::handlers::{self, Site};
use super::pod::Input;
use super::run::{Start, event, tell};
use k8s_openapi::api::core::v1::LifecycleHandler;
use monopod_core::pod::lifecycle::{Observation, Unhealthy};
use std::time::Duration;

/// Runs the preStop hook, at most so long. Without a grace period it does not run.
pub(crate) async fn pre_stop(start: &Start, site: &Site, grace: Duration) {
    let lifecycle = start.container.lifecycle.as_ref();
    let Some(handler) = lifecycle.and_then(|lifecycle| lifecycle.pre_stop.as_ref()) else {
        return;
    };
    let hook = run(
        start,
        site,
        handler,
        "FailedPreStopHook",
        "PreStopHook failed",
    );
    if !grace.is_zero() && tokio::time::timeout(grace, hook).await.is_err() {
        tracing::info!(
            container = start.container.name,
            "the preStop hook took the whole grace period"
        );
    }
}

/// Runs the postStart hook. If it fails, the container is stopped, to be started again. Whether it
/// succeeded.
pub(crate) async fn post_start(start: &Start, site: &Site, handler: &LifecycleHandler) -> bool {
    let mut running = site.run.running.clone();
    let hook = run(
        start,
        site,
        handler,
        "FailedPostStartHook",
        "PostStartHook failed",
    );
    let succeeded = tokio::select! {
        succeeded = hook => succeeded,
        _ended = running.wait_for(|running| !running) => return false,
    };
    let container = start.container.name.clone();
    let observation = if succeeded {
        Observation::PostStarted { container }
    } else {
        let why = Unhealthy::PostStart;
        Observation::Unhealthy { container, why }
    };
    tell(start, Input::Observed(observation)).await;
    succeeded
}

/// Whether the hook succeeded; an event tells if it did not.
async fn run(
    start: &Start,
    site: &Site,
    handler: &LifecycleHandler,
    reason: &'static str,
    message: &str,
) -> bool {
    match handlers::hook(site, handler).await {
        Ok(None) => true,
        Ok(Some((reason, message))) => {
            event(start, true, reason, message).await;
            true
        }
        Err(error) => {
            tracing::info!(container = start.container.name, %error, "a hook failed");
            event(start, true, reason, message.to_owned()).await;
            false
        }
    }
}
