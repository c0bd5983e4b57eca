//! The admin server of a process: `/healthz`, `/readyz` and `/metrics`, on loopback.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use prometheus_client::registry::Registry;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What a process waits for before it is ready; shared by the parts that report.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    pending: Arc<watch::Sender<BTreeSet<&'static str>>>,
}

impl Readiness {
    /// Adds a part without which the process is not ready.
    pub fn expect(&self, part: &'static str) {
        self.pending.send_modify(|pending| {
            pending.insert(part);
        });
    }

    /// Reports a part as ready.
    pub fn done(&self, part: &'static str) {
        if self
            .pending
            .send_if_modified(|pending| pending.remove(part))
        {
            tracing::info!(part, "ready");
        }
    }

    /// The parts that are not ready.
    pub fn pending(&self) -> Vec<&'static str> {
        self.pending.borrow().iter().copied().collect()
    }

    /// Waits until all parts are ready, or the token is cancelled. Whether they are.
    pub async fn all(&self, shutdown: &CancellationToken) -> bool {
        let ready = self.wait(BTreeSet::is_empty);
        shutdown.run_until_cancelled(ready).await.is_some()
    }

    /// Waits until all parts but this one are ready.
    pub async fn others(&self, part: &'static str) {
        self.wait(|pending| pending.iter().all(|other| *other == part))
            .await;
    }

    async fn wait(&self, is_enough: impl Fn(&BTreeSet<&'static str>) -> bool) {
        // An error says that nobody can report any more, which `self` can.
        drop(self.pending.subscribe().wait_for(is_enough).await);
    }
}

#[derive(Clone)]
struct Shared {
    readiness: Readiness,
    registry: Arc<Registry>,
}

/// Serves until the token is cancelled.
pub async fn serve(
    address: SocketAddr,
    readiness: Readiness,
    registry: Arc<Registry>,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(Shared {
            readiness,
            registry,
        });
    let listener = TcpListener::bind(address).await?;
    axum::serve(listener, router)
        .with_graceful_shutdown(shutdown.cancelled_owned())
        .await
}

async fn ready(State(shared): State<Shared>) -> (StatusCode, String) {
    let pending = shared.readiness.pending();
    if pending.is_empty() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("waiting for: {}\n", pending.join(", ")),
        )
    }
}

async fn metrics(State(shared): State<Shared>) -> Result<String, StatusCode> {
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &shared.registry)
        .map_err(|_cannot_format| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(text)
}
