//! The task metadata endpoint; the table of requests is in [`crate::metadata`].

use super::state::{Newest, Post, State};
use crate::metadata::LONG_POLL;
use anyhow::{Context, Result};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use monopod_wire::LogPiece;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 170, 2);
/// Largest body that is taken.
const BODY: usize = 64 << 10;
/// How long the host may take to answer; longer, and what was sent to it was lost.
const HOST: Duration = Duration::from_secs(3);
/// Connections served at once; the node needs a handful.
const CONNECTIONS: usize = 32;

type Answer = Response<Full<Bytes>>;

/// Opens the endpoint.
pub(super) async fn listen() -> Result<TcpListener> {
    TcpListener::bind(SocketAddr::from((ADDRESS, 80)))
        .await
        .context("opening the metadata endpoint")
}

/// Serves the endpoint.
pub(super) async fn serve(listener: TcpListener, state: Arc<State>, posts: mpsc::Sender<Post>) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a connection to the metadata endpoint failed");
                continue;
            }
        };
        let (state, posts) = (Arc::clone(&state), posts.clone());
        tokio::spawn(async move {
            let service = hyper::service::service_fn(|request| {
                let (state, posts) = (Arc::clone(&state), posts.clone());
                async move { Ok::<_, Infallible>(answer(request, &state, &posts).await) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to the metadata endpoint ended");
            }
            drop(slot);
        });
    }
}

async fn answer(request: Request<Incoming>, state: &State, posts: &mpsc::Sender<Post>) -> Answer {
    let path = request.uri().path().to_owned();
    match (request.method(), path.as_str()) {
        (&Method::GET, "/v1/task") => task(state).await,
        (&Method::GET, "/v1/credentials") => newer(&request, &state.credentials).await,
        (&Method::GET, "/v1/images") => newer(&request, &state.images).await,
        (&Method::POST, "/v1/phase") => post(request, posts, Post::Phase).await,
        (&Method::POST, "/v1/report") => post(request, posts, Post::Report).await,
        (&Method::POST, "/v1/logs") => carry(request, state, posts).await,
        (&Method::POST, "/v1/logs-complete") => complete(state, posts).await,
        (&Method::POST, "/v1/ended") => post(request, posts, Post::Ended).await,
        _ => empty(StatusCode::NOT_FOUND),
    }
}

/// The task, once this guest is the one that it is for.
async fn task(state: &State) -> Answer {
    match tokio::time::timeout(LONG_POLL, state.task()).await {
        Ok(Some(task)) => json(&task),
        Ok(None) | Err(_) => empty(StatusCode::NOT_MODIFIED),
    }
}

/// The value as soon as it is newer than the version asked for.
async fn newer<T: Clone + Serialize>(request: &Request<Incoming>, newest: &Newest<T>) -> Answer {
    let Some(after) = after(request.uri().query()) else {
        return empty(StatusCode::BAD_REQUEST);
    };
    let mut changes = newest.subscribe();
    let wait =
        changes.wait_for(|newest| newest.as_ref().is_some_and(|newest| newest.version > after));
    match tokio::time::timeout(LONG_POLL, wait).await {
        Ok(Ok(newest)) => json(&*newest),
        Ok(Err(_)) | Err(_) => empty(StatusCode::NOT_MODIFIED),
    }
}

fn after(query: Option<&str>) -> Option<u64> {
    match query {
        None | Some("") => Some(0),
        Some(query) => query.strip_prefix("after=")?.parse().ok(),
    }
}

async fn post<T: DeserializeOwned>(
    request: Request<Incoming>,
    posts: &mpsc::Sender<Post>,
    wrap: fn(T) -> Post,
) -> Answer {
    let value = match read(request).await {
        Ok(value) => value,
        Err(refused) => return empty(refused),
    };
    match posts.send(wrap(value)).await {
        Ok(()) => empty(StatusCode::NO_CONTENT),
        Err(_) => empty(StatusCode::SERVICE_UNAVAILABLE),
    }
}

async fn read<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, StatusCode> {
    let body = Limited::new(request.into_body(), BODY)
        .collect()
        .await
        .map_err(|_too_large| StatusCode::PAYLOAD_TOO_LARGE)?;
    serde_json::from_slice(&body.to_bytes()).map_err(|_malformed| StatusCode::BAD_REQUEST)
}

/// Sends the host a piece of a log and waits for its word, one piece at a time.
async fn carry(request: Request<Incoming>, state: &State, posts: &mpsc::Sender<Post>) -> Answer {
    let piece: LogPiece = match read(request).await {
        Ok(piece) => piece,
        Err(refused) => return empty(refused),
    };
    let _turn = state.carrying.lock().await;
    state.stored.send_replace(None);
    let mut stored = state.stored.subscribe();
    let file = piece.file.clone();
    if !state.is_connected() || posts.send(Post::Log(Box::new(piece))).await.is_err() {
        return empty(StatusCode::SERVICE_UNAVAILABLE);
    }
    // A late word about an earlier piece of the same file is as good: it says what is there.
    let word = stored.wait_for(|stored| stored.as_ref().is_some_and(|stored| stored.file == file));
    match tokio::time::timeout(HOST, word).await {
        Ok(Ok(stored)) => json(&*stored),
        Ok(Err(_)) | Err(_) => empty(StatusCode::SERVICE_UNAVAILABLE),
    }
}

/// Tells the host that it has all logs, and waits until it answers for them.
async fn complete(state: &State, posts: &mpsc::Sender<Post>) -> Answer {
    let mut taken = state.taken.subscribe();
    if !state.is_connected() || posts.send(Post::LogsComplete).await.is_err() {
        return empty(StatusCode::SERVICE_UNAVAILABLE);
    }
    match tokio::time::timeout(HOST, taken.wait_for(|taken| *taken)).await {
        Ok(Ok(_)) => empty(StatusCode::NO_CONTENT),
        Ok(Err(_)) | Err(_) => empty(StatusCode::SERVICE_UNAVAILABLE),
    }
}

fn json(value: &impl Serialize) -> Answer {
    match serde_json::to_vec(value) {
        Ok(body) => Response::new(Full::new(body.into())),
        Err(_) => empty(StatusCode::INTERNAL_SERVER_ERROR),
    }
}

fn empty(status: StatusCode) -> Answer {
    let mut answer = Response::new(Full::default());
    *answer.status_mut() = status;
    answer
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_version_asked_for() {
        assert_eq!(super::after(None), Some(0));
        assert_eq!(super::after(Some("after=7")), Some(7));
        for bad in ["after=", "after=-1", "later=7", "after=7&x=1"] {
            assert_eq!(super::after(Some(bad)), None, "{bad}");
        }
    }
}
