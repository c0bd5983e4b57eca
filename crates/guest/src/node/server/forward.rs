//! Port-forward: SPDY streams in a WebSocket on one side, connections in the pod on the other.
//!
//! A client opens two streams for each connection, `error` and `data`, with the same request id.
//! The connection is made in the workload's network namespace, so that what listens on the pod's
//! loopback is reached as well.

use super::spdy::{Decoder, Encoder, Frame, data, ping, reset};
use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role};
use tokio_tungstenite::tungstenite::{self, Message};

/// The subprotocol of the tunnel, the only form in which clients forward ports by WebSocket.
pub(crate) const PROTOCOL: &str = "SPDY/3.1+portforward.k8s.io";
/// Network namespace of the pod's containers.
pub(crate) const WORKLOAD: &str = "/run/netns/workload";
/// Bytes read of a connection at once.
const READ: usize = 32 * 1024;
/// Chunks that wait for a slow connection or client.
const QUEUE: usize = 32;
/// Connections of one session at a time.
const MAX_CONNECTIONS: usize = 256;

/// The streams of one connection while they are being opened.
#[derive(Debug, Default)]
struct Pair {
    error: Option<u32>,
    data: Option<u32>,
}

/// Serves a client until it leaves. Connections are made in the namespace at this path.
pub(crate) async fn serve<S>(stream: S, namespace: PathBuf)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut socket = WebSocketStream::from_raw_socket(stream, Role::Server, None).await;
    if let Err(error) = converse(&mut socket, namespace).await {
        tracing::debug!(%error, "a port-forward client left");
    }
}

async fn converse<S>(
    socket: &mut WebSocketStream<S>,
    namespace: PathBuf,
) -> Result<(), tungstenite::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut decoder = Decoder::new();
    let (out, mut frames) = mpsc::channel::<Vec<u8>>(QUEUE);
    let mut session = Session {
        encoder: Encoder::default(),
        pairs: BTreeMap::new(),
        writers: BTreeMap::new(),
        out,
        namespace,
    };
    loop {
        tokio::select! {
            Some(frame) = frames.recv() => socket.send(Message::Binary(frame.into())).await?,
            received = socket.next() => {
                match received {
                    Some(Ok(Message::Binary(bytes))) => decoder.push(&bytes),
                    Some(Ok(Message::Close(_))) | None => return Ok(()),
                    Some(Ok(_)) => socket.flush().await?,
                    Some(Err(error)) => return Err(error),
                }
                loop {
                    match decoder.next_frame() {
                        Ok(Some(Frame::GoAway)) => return close(socket, CloseCode::Normal).await,
                        Ok(Some(frame)) => match session.take(frame) {
                            Step::Answer(answer) => {
                                socket.send(Message::Binary(answer.into())).await?;
                            }
                            Step::Deliver(writer, bytes) => {
                                deliver(socket, &mut frames, writer, bytes).await?;
                            }
                            Step::Nothing => {}
                        },
                        Ok(None) => break,
                        Err(error) => {
                            tracing::debug!(%error, "a port-forward client cannot be understood");
                            return close(socket, CloseCode::Protocol).await;
                        }
                    }
                }
            }
        }
    }
}

/// Gives bytes to a connection that may be slow. There is no flow control, so the client is not
/// read meanwhile; what the pod sends goes on, else both could wait for each other.
async fn deliver<S>(
    socket: &mut WebSocketStream<S>,
    frames: &mut mpsc::Receiver<Vec<u8>>,
    writer: mpsc::Sender<Bytes>,
    bytes: Bytes,
) -> Result<(), tungstenite::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut permit = std::pin::pin!(writer.reserve_owned());
    loop {
        tokio::select! {
            permit = &mut permit => {
                if let Ok(permit) = permit {
                    drop(permit.send(bytes));
                }
                return Ok(());
            }
            Some(frame) = frames.recv() => socket.send(Message::Binary(frame.into())).await?,
        }
    }
}

async fn close<S>(
    socket: &mut WebSocketStream<S>,
    code: CloseCode,
) -> Result<(), tungstenite::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let reason = "".into();
    socket.close(Some(CloseFrame { code, reason })).await
}

/// What follows from a frame.
enum Step {
    /// This frame is sent.
    Answer(Vec<u8>),
    /// A connection is given these bytes.
    Deliver(mpsc::Sender<Bytes>, Bytes),
    /// Nothing.
    Nothing,
}

struct Session {
    encoder: Encoder,
    pairs: BTreeMap<String, Pair>,
    /// Towards connections, by the number of their data stream.
    writers: BTreeMap<u32, mpsc::Sender<Bytes>>,
    out: mpsc::Sender<Vec<u8>>,
    namespace: PathBuf,
}

impl Session {
    /// Takes in a frame.
    fn take(&mut self, frame: Frame) -> Step {
        self.writers.retain(|_, writer| !writer.is_closed());
        match frame {
            Frame::Open { stream, headers } => Step::Answer(self.open(stream, &headers)),
            Frame::Data {
                stream,
                bytes,
                last,
            } => {
                // The last clone that is dropped ends what the connection is sent.
                let writer = if last {
                    self.writers.remove(&stream)
                } else {
                    self.writers.get(&stream).cloned()
                };
                match writer {
                    Some(writer) if !bytes.is_empty() => Step::Deliver(writer, bytes),
                    Some(_) | None => Step::Nothing,
                }
            }
            Frame::Reset { stream } => {
                self.writers.remove(&stream);
                Step::Nothing
            }
            // Those with an odd number are the client's.
            Frame::Ping(number) if number % 2 == 1 => Step::Answer(ping(number)),
            Frame::Ping(_) | Frame::GoAway => Step::Nothing,
        }
    }

    /// Accepts a stream, or refuses it. Returns the answer.
    fn open(&mut self, stream: u32, headers: &BTreeMap<String, String>) -> Vec<u8> {
        let get = |name: &str| headers.get(name).map(String::as_str).unwrap_or_default();
        let port = get("port").parse::<u16>().ok().filter(|&port| port > 0);
        let full = self.writers.len() + self.pairs.len() >= MAX_CONNECTIONS;
        let (Some(port), false) = (port, full) else {
            return reset(stream);
        };
        let id = get("requestid").to_owned();
        let pair = self.pairs.entry(id.clone()).or_default();
        match get("streamtype") {
            "error" => pair.error = Some(stream),
            "data" => pair.data = Some(stream),
            _ => return reset(stream),
        }
        if let (Some(error), Some(data)) = (pair.error, pair.data) {
            self.pairs.remove(&id);
            let (writer, bytes) = mpsc::channel(QUEUE);
            self.writers.insert(data, writer);
            let connection = Connection {
                error,
                data,
                port,
                out: self.out.clone(),
            };
            tokio::spawn(connection.run(self.namespace.clone(), bytes));
        }
        self.encoder.reply(stream)
    }
}

/// One forwarded connection.
struct Connection {
    error: u32,
    data: u32,
    port: u16,
    out: mpsc::Sender<Vec<u8>>,
}

impl Connection {
    async fn run(self, namespace: PathBuf, mut bytes: mpsc::Receiver<Bytes>) {
        let port = self.port;
        let stream = match connect(namespace, port).await {
            Ok(stream) => stream,
            Err(error) => {
                let text = format!("error forwarding port {port} to the pod: {error}");
                self.send(data(self.error, text.as_bytes(), true)).await;
                self.send(reset(self.data)).await;
                return;
            }
        };
        let (mut reader, mut writer) = stream.into_split();
        let to_pod = async {
            while let Some(bytes) = bytes.recv().await {
                if writer.write_all(&bytes).await.is_err() {
                    return;
                }
            }
            let _closed_already = writer.shutdown().await.is_err();
        };
        let from_pod = async {
            let mut buffer = vec![0; READ];
            loop {
                let length = reader.read(&mut buffer).await.unwrap_or(0);
                self.send(data(self.data, &buffer[..length], length == 0))
                    .await;
                if length == 0 || self.out.is_closed() {
                    return;
                }
            }
        };
        // The pod's end is the end: clients do not wait for theirs.
        tokio::pin!(to_pod, from_pod);
        tokio::select! {
            () = &mut from_pod => {}
            () = &mut to_pod => from_pod.await,
        }
        self.send(data(self.error, b"", true)).await;
    }

    async fn send(&self, frame: Vec<u8>) {
        if self.out.send(frame).await.is_err() {
            tracing::trace!("a port-forward client has left");
        }
    }
}

/// Connects to a port on the loopback of a network namespace. A thread changes its namespace for
/// that and ends; the connection stays there.
async fn connect(namespace: PathBuf, port: u16) -> io::Result<TcpStream> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("forward".to_owned())
        .spawn(move || {
            let connect = || -> io::Result<std::net::TcpStream> {
                let file = std::fs::File::open(&namespace)?;
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
                let addresses = [
                    (IpAddr::V4(Ipv4Addr::LOCALHOST), port).into(),
                    (IpAddr::V6(Ipv6Addr::LOCALHOST), port).into(),
                ];
                let stream = std::net::TcpStream::connect(&addresses[..])?;
                stream.set_nonblocking(true)?;
                Ok(stream)
            };
            let _client_left = sender.send(connect()).is_err();
        })?;
    match receiver.await {
        Ok(stream) => TcpStream::from_std(stream?),
        Err(_) => Err(io::Error::other("the connecting thread ended")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::spdy::tests::first_pair;
    use super::*;

    fn session() -> (Session, mpsc::Receiver<Vec<u8>>) {
        let (out, frames) = mpsc::channel(8);
        let session = Session {
            encoder: Encoder::default(),
            pairs: BTreeMap::new(),
            writers: BTreeMap::new(),
            out,
            namespace: "/nonexistent".into(),
        };
        (session, frames)
    }

    #[tokio::test]
    async fn a_pair_is_accepted_and_a_failure_is_told_on_its_error_stream() {
        let (mut session, mut frames) = session();
        let mut decoder = Decoder::new();
        decoder.push(&first_pair());
        while let Some(frame) = decoder.next_frame().unwrap() {
            assert!(matches!(session.take(frame), Step::Answer(_)));
        }
        assert!(session.pairs.is_empty());
        let mut answers = Decoder::new();
        answers.push(&frames.recv().await.unwrap());
        let Frame::Data {
            stream,
            bytes,
            last,
        } = answers.next_frame().unwrap().unwrap()
        else {
            panic!("no text")
        };
        assert!(stream == 1 && last);
        assert!(bytes.starts_with(b"error forwarding port 80"));
        answers.push(&frames.recv().await.unwrap());
        assert_eq!(
            answers.next_frame().unwrap(),
            Some(Frame::Reset { stream: 3 })
        );
    }

    #[tokio::test]
    async fn streams_that_make_no_sense_are_reset() {
        let (mut session, _frames) = session();
        for headers in [
            [("streamtype", "data"), ("port", "0"), ("requestid", "1")],
            [
                ("streamtype", "data"),
                ("port", "70000"),
                ("requestid", "1"),
            ],
            [("streamtype", "other"), ("port", "80"), ("requestid", "1")],
        ] {
            let headers = headers.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
            assert_eq!(session.open(5, &headers), reset(5));
        }
        let stray = Frame::Data {
            stream: 9,
            bytes: "x".into(),
            last: false,
        };
        assert!(matches!(session.take(stray), Step::Nothing));
    }
}
