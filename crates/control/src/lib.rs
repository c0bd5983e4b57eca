//! The control process: admits pods, schedules them, and follows their environments to the end.
//!
//! Watches fill an [`index`](index::Index); a queue works on pods and interfaces; `core` decides from the index
//! what to do; [`execute`] does it. Nothing is kept but counts of failed attempts: a restarted control
//! goes on from what the API server holds. Of several replicas, all serve the webhook and keep an index;
//! the one that holds the lease acts.

mod authority;
mod certificates;
mod credentials;
mod events;
mod execute;
mod gauges;
mod identity;
mod index;
mod metrics;
#[cfg(test)]
mod model;
mod profiles;
mod reconcile;
mod watches;
mod webhook;

pub use monopod_ops::election::Candidate;
pub use webhook::WebhookOptions;

use jiff::SignedDuration;
use kube::{Api, Client};
use monopod_ops::admin::Readiness;
use monopod_ops::election;
use monopod_ops::queue::Queue;
use prometheus_client::registry::Registry;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Pods and interfaces worked on at the same time. Each costs a few requests to the API server.
const PARALLEL: usize = 16;
/// Owner of the fields that control applies.
const FIELD_MANAGER: &str = "monopod-control";

/// How the control process is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the webhook is served, and with which certificates.
    pub webhook: WebhookOptions,
    /// Where `/healthz`, `/readyz` and `/metrics` are served.
    pub admin: SocketAddr,
    /// The control plane's version.
    pub kubernetes_version: String,
    /// How this replica stands for election: all serve the webhook, one acts.
    pub candidate: Candidate,
    /// How many Fargate profiles the cluster may have.
    pub max_profiles: usize,
    /// How long an authority of the webhook lasts.
    pub certificate_lifetime: SignedDuration,
}

/// Why the control process ended.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// A server could not be started, or ended.
    #[error("the {server} server failed")]
    Server {
        /// Which one.
        server: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The webhook's certificates cannot be used.
    #[error("webhook certificates cannot be used")]
    Certificates(#[source] webhook::CertificateError),
}

/// Runs until the token is cancelled.
pub async fn run(
    client: Client,
    options: Options,
    shutdown: CancellationToken,
) -> Result<(), ControlError> {
    let readiness = Readiness::default();
    let mut registry = Registry::with_prefix("monopod_control");
    let index = index::Shared::default();
    index.lock().max_profiles = Some(options.max_profiles);
    let queue = Queue::default();
    let mut tasks = tokio::task::JoinSet::new();
    let leases = Api::namespaced(client.clone(), &options.candidate.namespace);
    let (leadership, election) = election::stand(leases, options.candidate, shutdown.clone());
    watches::spawn(&mut tasks, &client, &index, &queue, &readiness, &shutdown);
    certificates::spawn(
        &mut tasks,
        &client,
        &index,
        &leadership,
        &readiness,
        &shutdown,
    );
    let served = webhook::Served::default();
    registry.register_collector(Box::new(gauges::Gauges {
        index: index.clone(),
        leadership: leadership.clone(),
        served: served.clone(),
    }));
    let keeper = authority::Keeper {
        client: client.clone(),
        leadership: leadership.clone(),
        served: served.clone(),
        address: options.webhook.address.ip(),
        lifetime: options.certificate_lifetime,
    };
    tasks.spawn(keeper.keep(readiness.clone(), shutdown.clone()));
    let reconciler = reconcile::Reconciler::new(
        client,
        index.clone(),
        queue.clone(),
        options.kubernetes_version,
        leadership,
        metrics::Metrics::register(&mut registry),
    );
    let webhook = webhook::serve(
        &options.webhook,
        served,
        index,
        &mut registry,
        readiness.clone(),
        shutdown.clone(),
    )
    .map_err(ControlError::Certificates)?;
    let admin = monopod_ops::admin::serve(
        options.admin,
        readiness.clone(),
        Arc::new(registry),
        shutdown.clone(),
    );
    let work = async {
        tokio::join!(election, reconciler.run(PARALLEL, readiness, shutdown));
    };
    tokio::select! {
        result = webhook => result.map_err(|source| ControlError::Server { server: "webhook", source })?,
        result = admin => result.map_err(|source| ControlError::Server { server: "admin", source })?,
        () = work => {}
    }
    Ok(())
}
