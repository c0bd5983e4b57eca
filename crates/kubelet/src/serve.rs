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
use socket2::{SockFilter, SockRef};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, SetOnce, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// How long a client may take for its handshake and its headers.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections served at once. The API server has one for each session and some to spare.
const CONNECTIONS: usize = 256;
/// How long a connection that began may take to get to its first request, and its answer to arrive,
/// once nobody else comes.
const ARRIVAL: Duration = Duration::from_secs(2);
/// A handshake of TCP within one machine that was under way when the door was closed.
const ROUND_TRIP: Duration = Duration::from_millis(100);
/// Pause after a connection that was not accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// The body of an answer.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The API server's connections to one server on which it asked something, so that no answer is cut
/// off. Clones are the same ones.
#[derive(Clone, Debug, Default)]
pub struct Connections {
    ending: CancellationToken,
    open: TaskTracker,
    door: Door,
}

/// Who comes in.
#[derive(Clone, Debug, Default)]
struct Door {
    closing: CancellationToken,
    closed: CancellationToken,
    /// Connections without a request yet, whosever they are.
    arriving: TaskTracker,
}

impl Connections {
    /// Counts one until what it gives is dropped. One that changes its protocol is not counted any
    /// more by itself.
    pub fn open(&self) -> TaskTrackerToken {
        self.open.token()
    }

    /// Ends each with the answer that is being given on it, and waits until the API server has
    /// taken all of that; but not longer than this. Gives how many were still open then.
    pub async fn end(&self, limit: Duration) -> usize {
        self.ending.cancel();
        self.open.close();
        // If not, the count says so.
        let _in_time = tokio::time::timeout(limit, self.open.wait()).await.is_ok();
        self.open.len()
    }

    /// As `end`, for a server whose address another takes soon. Who comes late is not answered and
    /// not refused, but tries again by itself, as TCP does, until the other is there. Takes some
    /// seconds longer than the limit at most.
    pub async fn hand_over(&self, limit: Duration) -> usize {
        let deadline = Instant::now() + limit;
        // Until then, newcomers need not wait.
        self.end(limit).await;
        self.door.closing.cancel();
        self.door.arriving.close();
        let settled = async {
            self.door.closed.cancelled().await;
            self.door.arriving.wait().await;
        };
        if tokio::time::timeout(ARRIVAL, settled).await.is_err() {
            tracing::debug!("some that came last have not asked anything");
        }
        let left = deadline.saturating_duration_since(Instant::now());
        self.end(left.max(ARRIVAL)).await
    }
}

/// Serves connections until it is dropped, and they with it. Each uses the newest certificates.
///
/// Whoever is not the API server is refused before `answer` sees anything.
pub async fn accept<F, A>(
    listener: TcpListener,
    configs: watch::Receiver<Arc<ServerConfig>>,
    connections: Connections,
    answer: F,
) where
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    let door = connections.door.clone();
    let mut reception = Reception {
        slots: Arc::new(Semaphore::new(CONNECTIONS)),
        tasks: JoinSet::new(),
        listener,
        configs,
        connections,
        answer,
    };
    tokio::select! {
        () = reception.receive() => return,
        () = door.closing.cancelled() => {}
    }
    if let Err(error) = drop_newcomers(&reception.listener) {
        tracing::warn!(%error, "connections still come in");
    }
    // Those who were half in.
    let _always = tokio::time::timeout(ROUND_TRIP, reception.receive()).await;
    door.closed.cancel();
    // Whoever is served already still is.
    std::future::pending::<()>().await;
}

struct Reception<F> {
    slots: Arc<Semaphore>,
    tasks: JoinSet<()>,
    listener: TcpListener,
    configs: watch::Receiver<Arc<ServerConfig>>,
    connections: Connections,
    answer: F,
}

impl<F, A> Reception<F>
where
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    async fn receive(&mut self) {
        loop {
            let Ok(slot) = Arc::clone(&self.slots).acquire_owned().await else {
                return;
            };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let config = Arc::clone(&self.configs.borrow());
                    let (connections, answer) = (self.connections.clone(), self.answer.clone());
                    let arriving = connections.door.arriving.token();
                    self.tasks.spawn(async move {
                        serve(stream, config, connections, arriving, answer).await;
                        drop(slot);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            }
            while self.tasks.try_join_next().is_some() {}
        }
    }
}

/// From now on the system drops the packet with which a connection begins, without a word.
fn drop_newcomers(listener: &TcpListener) -> std::io::Result<()> {
    // A filter sees TCP's header; its byte 13 has the flags SYN (2) and ACK (16): RFC 9293, 3.1.
    // The instructions are classic BPF's: linux/bpf_common.h.
    const LOAD_BYTE: u16 = 0x30;
    const AND: u16 = 0x54;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const KEEP_BYTES: u16 = 0x06;
    SockRef::from(listener).attach_filter(&[
        SockFilter::new(LOAD_BYTE, 0, 0, 13),
        SockFilter::new(AND, 0, 0, 2 | 16),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, 2),
        SockFilter::new(KEEP_BYTES, 0, 0, 0),
        SockFilter::new(KEEP_BYTES, 0, 0, u32::MAX),
    ])
}

async fn serve<F, A>(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    connections: Connections,
    arriving: TaskTrackerToken,
    answer: F,
) where
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
    // Set with the first request.
    let asked = Arc::new(SetOnce::new());
    let service = {
        let (asked, connections) = (Arc::clone(&asked), connections.clone());
        service_fn(move |request| {
            if allowed && !asked.initialized() {
                // Requests come one after the other.
                let _first = asked.set(connections.open()).is_ok();
            }
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
        })
    };
    let mut connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let (served, ending) = tokio::select! {
        served = &mut connection => (served, false),
        // Who comes late is answered as well.
        () = async { asked.wait().await; drop(arriving); connections.ending.cancelled().await } => {
            Pin::new(&mut connection).graceful_shutdown();
            ((&mut connection).await, true)
        }
    };
    match served {
        Err(error) => tracing::debug!(%error, "a connection broke off"),
        Ok(()) if ending => {
            // None of one that changed its protocol.
            if let Some(parts) = connection.into_parts() {
                taken(parts.io.into_inner()).await;
            }
        }
        Ok(()) => {}
    }
}

/// Waits until the client has read everything up to the end, upon which it ends its side, too.
/// That the last bytes were written says nothing of their arrival.
async fn taken(mut stream: impl AsyncRead + Unpin) {
    let mut rest = [0; 256];
    while matches!(stream.read(&mut rest).await, Ok(1..)) {}
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

/// An answer that comes piece by piece.
pub fn pieces(receiver: mpsc::Receiver<Bytes>) -> Response<Body> {
    let pieces = stream::unfold(receiver, |mut receiver| async move {
        let bytes = receiver.recv().await?;
        Some((Ok::<_, Infallible>(Frame::data(bytes)), receiver))
    });
    let mut response = Response::new(StreamBody::new(pieces).boxed_unsync());
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}
