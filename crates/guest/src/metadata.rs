//! The task metadata endpoint: what `platform` serves and `node` asks.
//!
//! Plain HTTP at `169.254.170.2:80`, reachable only over the veth pair between the network
//! namespaces `platform` and `node`; from `workload` there is no route to it and a drop rule.
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/task` | [`monopod_wire::Task`], once there is one |
//! | `GET /v1/credentials?after=N` | [`Numbered`] of [`monopod_wire::Credentials`], newer than N |
//! | `GET /v1/images?after=N` | [`Numbered`] of a list of [`monopod_wire::Image`], newer than N |
//! | `POST /v1/phase` with [`monopod_wire::GuestPhase`] | 204 |
//! | `POST /v1/report` with [`monopod_wire::Report`] | 204 |
//! | `POST /v1/logs` with [`monopod_wire::LogPiece`] | [`monopod_wire::LogStored`], or 503 if the host did not answer |
//! | `POST /v1/logs-complete` | 204 once the host answers for the logs, or 503 |
//! | `POST /v1/ended` with [`monopod_wire::Ended`] | 204, then the VM powers off |
//!
//! A `GET` waits up to [`LONG_POLL`] for something newer, then answers 304. `after=0`,
//! or none, is answered by whatever there is.

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, StatusCode, body::Bytes};
use hyper_util::rt::TokioIo;
use monopod_wire::{Credentials, Ended, GuestPhase, Image, LogPiece, LogStored, Report, Task};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::TcpStream;

/// How long a question for something newer may wait.
pub(crate) const LONG_POLL: Duration = Duration::from_secs(30);

/// A value with the number of its version, which counts up from 1.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Numbered<T> {
    /// Number of this version.
    pub(crate) version: u64,
    /// The value.
    pub(crate) value: T,
}

/// Largest answer that is read; the image list is the largest there is.
const MAX_ANSWER: usize = 16 << 20;
/// How long any answer may take: the longest poll and some more.
const PATIENCE: Duration = Duration::from_secs(40);

/// Why the endpoint gave no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MetadataError {
    /// It cannot be reached, or the connection broke.
    #[error("the metadata endpoint cannot be reached")]
    Io(#[from] std::io::Error),
    /// It broke off.
    #[error("the metadata endpoint broke off")]
    Http(#[from] hyper::Error),
    /// It took too long.
    #[error("the metadata endpoint did not answer in time")]
    Timeout,
    /// It refused.
    #[error("the metadata endpoint answered {0}")]
    Refused(StatusCode),
    /// The answer is too large.
    #[error("the metadata endpoint's answer cannot be read")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The answer is something else.
    #[error("the metadata endpoint's answer is not what was asked for")]
    Malformed(#[from] serde_json::Error),
}

/// Asks the endpoint. Each question has a connection of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Metadata {
    address: SocketAddr,
}

impl Metadata {
    /// The endpoint at its well-known address.
    pub(crate) fn well_known() -> Self {
        Self {
            address: (monopod_api::labels::METADATA_ADDRESS, 80).into(),
        }
    }

    /// What the node is for; none if there was nothing for a while.
    pub(crate) async fn task(self) -> Result<Option<Task>, MetadataError> {
        self.newer("/v1/task".to_owned()).await
    }

    /// Credentials that are newer than a version; none if there were none for a while.
    pub(crate) async fn credentials(
        self,
        after: u64,
    ) -> Result<Option<Numbered<Credentials>>, MetadataError> {
        self.newer(format!("/v1/credentials?after={after}")).await
    }

    /// States of images that are newer than a version; none if there were none for a while.
    pub(crate) async fn images(
        self,
        after: u64,
    ) -> Result<Option<Numbered<Vec<Image>>>, MetadataError> {
        self.newer(format!("/v1/images?after={after}")).await
    }

    /// Says that a phase was reached.
    pub(crate) async fn phase(self, phase: &GuestPhase) -> Result<(), MetadataError> {
        self.post("/v1/phase", phase).await
    }

    /// Gives figures.
    pub(crate) async fn report(self, report: &Report) -> Result<(), MetadataError> {
        self.post("/v1/report", report).await
    }

    /// Gives the host a piece of a log. Answers what it has.
    pub(crate) async fn log(self, piece: &LogPiece) -> Result<LogStored, MetadataError> {
        let body = serde_json::to_vec(piece)?;
        let (_, answer) = self.ask("POST", "/v1/logs".to_owned(), Some(body)).await?;
        Ok(serde_json::from_slice(&answer)?)
    }

    /// Says that the host has all logs and is to answer for them; waits until it does.
    pub(crate) async fn logs_complete(self) -> Result<(), MetadataError> {
        self.post("/v1/logs-complete", &()).await
    }

    /// Says that the guest is to end.
    pub(crate) async fn ended(self, ended: &Ended) -> Result<(), MetadataError> {
        self.post("/v1/ended", ended).await
    }

    async fn newer<T: DeserializeOwned>(self, path: String) -> Result<Option<T>, MetadataError> {
        let (status, body) = self.ask("GET", path, None).await?;
        if status == StatusCode::NOT_MODIFIED {
            return Ok(None);
        }
        Ok(Some(serde_json::from_slice(&body)?))
    }

    async fn post<T: Serialize>(self, path: &str, value: &T) -> Result<(), MetadataError> {
        let body = serde_json::to_vec(value)?;
        self.ask("POST", path.to_owned(), Some(body)).await?;
        Ok(())
    }

    async fn ask(
        self,
        method: &str,
        path: String,
        body: Option<Vec<u8>>,
    ) -> Result<(StatusCode, Bytes), MetadataError> {
        match tokio::time::timeout(PATIENCE, self.exchange(method, path, body)).await {
            Ok(answer) => answer,
            Err(_) => Err(MetadataError::Timeout),
        }
    }

    async fn exchange(
        self,
        method: &str,
        path: String,
        body: Option<Vec<u8>>,
    ) -> Result<(StatusCode, Bytes), MetadataError> {
        let stream = TcpStream::connect(self.address).await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", self.address.to_string())
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .expect("method, path and headers are our own constants");
        let exchange = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER)
                .collect()
                .await
                .map_err(MetadataError::Body)?
                .to_bytes();
            if status.is_success() || status == StatusCode::NOT_MODIFIED {
                Ok((status, body))
            } else {
                Err(MetadataError::Refused(status))
            }
        };
        tokio::pin!(exchange);
        tokio::pin!(connection);
        // The connection ends when the exchange did, or breaks it off.
        tokio::select! {
            answer = &mut exchange => answer,
            outcome = &mut connection => {
                outcome?;
                exchange.await
            }
        }
    }
}
