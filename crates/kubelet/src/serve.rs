//! Connections from the API server, and answers to it.

use crate::tls;
use bytes::Bytes;
use futures::stream;
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

/// How long a client may take for its handshake and its headers.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections served at once. The API server has one for each session and some to spare.
const CONNECTIONS: usize = 256;
/// Pause after a connection that was not accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// The body of an answer.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Serves connections until it is dropped, and they with it. Each uses the newest certificates.
///
/// Whoever is not the API server is refused before `answer` sees anything.
pub async fn accept<F, A>(
    listener: TcpListener,
    configs: watch::Receiver<Arc<ServerConfig>>,
    answer: F,
) where
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let config = Arc::clone(&configs.borrow());
                let answer = answer.clone();
                connections.spawn(async move {
                    serve(stream, config, answer).await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

async fn serve<F, A>(stream: TcpStream, config: Arc<ServerConfig>, answer: F)
where
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    let handshake = TlsAcceptor::from(config).accept(stream);
    let stream = match tokio::time::timeout(PATIENCE, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "a client failed its handshake"),
        Err(_) => return tracing::debug!("a client was too slow"),
    };
    let allowed = tls::is_api_server(stream.get_ref().1.peer_certificates());
    let service = service_fn(move |request| {
        let answer = answer.clone();
        async move {
            Ok::<_, Infallible>(if allowed {
                answer(request).await
            } else {
                text(
                    StatusCode::FORBIDDEN,
                    "only the API server may use the kubelet",
                )
            })
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a connection broke off");
    }
}

/// An answer of text.
pub fn text(status: StatusCode, message: &str) -> Response<Body> {
    let body = Full::new(Bytes::from(message.to_owned())).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

/// An answer that comes piece by piece. What is held is dropped once it was written, or broke off.
pub fn pieces<H: Send + 'static>(receiver: mpsc::Receiver<Bytes>, held: H) -> Response<Body> {
    let pieces = stream::unfold((receiver, held), |(mut receiver, held)| async move {
        let bytes = receiver.recv().await?;
        Some((Ok::<_, Infallible>(Frame::data(bytes)), (receiver, held)))
    });
    let mut response = Response::new(StreamBody::new(pieces).boxed_unsync());
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}
