//! A WebSocket session: streams of a process on one side, a client on the other.

use super::protocol::{Incoming, Outcome, Outgoing, Protocol, STATUS};
use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{self, Message};

/// Largest message of a client; clients send some 32 KiB at once.
const MAX_MESSAGE: usize = 1 << 20;
/// How long a client may take to answer our Close.
const CLOSING: Duration = Duration::from_secs(2);

/// Something of the process.
#[derive(Debug)]
pub(crate) enum FromProcess {
    /// Bytes on a channel.
    Bytes(u8, Bytes),
    /// The end, after all bytes.
    Ended(Outcome),
}

/// The process' side of a session.
pub(crate) struct Streams {
    /// What it writes, and how it ends.
    pub(crate) from: mpsc::Receiver<FromProcess>,
    /// What it reads; dropped at the end of the client's input.
    pub(crate) stdin: Option<mpsc::Sender<Bytes>>,
    /// Its terminal.
    pub(crate) terminal: Option<std::sync::Arc<std::os::fd::OwnedFd>>,
    /// The channels that it writes to, lowest first.
    pub(crate) writes: Vec<u8>,
}

/// Speaks with a client until the process ended or the client left.
pub(crate) async fn serve<S>(stream: S, protocol: Protocol, mut streams: Streams)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE));
    let mut socket = WebSocketStream::from_raw_socket(stream, Role::Server, Some(config)).await;
    if let Err(error) = converse(&mut socket, protocol, &mut streams).await {
        tracing::debug!(%error, "a client left");
    }
}

async fn converse<S>(
    socket: &mut WebSocketStream<S>,
    protocol: Protocol,
    streams: &mut Streams,
) -> Result<(), tungstenite::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    // Clients wait for a first, empty message on the lowest channel.
    let lowest = streams.writes.iter().copied().min().unwrap_or(STATUS);
    socket.send(message(protocol.encode(lowest, b""))).await?;
    // Input that the process has not taken yet; until it does, the client is not read.
    let mut pending: Option<Bytes> = None;
    loop {
        let taker = streams.stdin.clone().filter(|_| pending.is_some());
        let deliver = async {
            match taker {
                Some(stdin) => stdin.reserve_owned().await.ok(),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            permit = deliver => match (permit, pending.take()) {
                (Some(permit), Some(bytes)) => drop(permit.send(bytes)),
                // The process reads no more.
                (None, _) | (_, None) => streams.stdin = None,
            },
            received = socket.next(), if pending.is_none() => {
                let bytes = match received {
                    Some(Ok(Message::Binary(bytes))) => bytes,
                    Some(Ok(Message::Text(text))) => Bytes::from(text),
                    Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {
                        // The answer to a ping is written when something is flushed.
                        socket.flush().await?;
                        continue;
                    }
                    Some(Ok(Message::Close(_))) | None => return Ok(()),
                    Some(Err(error)) => return Err(error),
                };
                match protocol.decode(&bytes) {
                    Incoming::Stdin(bytes) if streams.stdin.is_some() => pending = Some(bytes),
                    Incoming::EndOfStdin => streams.stdin = None,
                    Incoming::Resize(columns, rows) => resize(streams, columns, rows),
                    Incoming::Stdin(_) | Incoming::Nothing => {}
                }
            },
            from = streams.from.recv() => match from {
                Some(FromProcess::Bytes(channel, bytes)) => {
                    if streams.writes.contains(&channel) {
                        socket.send(message(protocol.encode(channel, &bytes))).await?;
                    }
                }
                Some(FromProcess::Ended(outcome)) => {
                    return finish(socket, protocol, &outcome).await;
                }
                None => {
                    let outcome = Outcome::Failed("the process was lost".to_owned());
                    return finish(socket, protocol, &outcome).await;
                }
            },
        }
    }
}

fn resize(streams: &Streams, columns: u16, rows: u16) {
    if let Some(terminal) = &streams.terminal
        && let Err(error) = crate::node::stdio::resize(terminal, columns, rows)
    {
        tracing::debug!(%error, "a terminal was not resized");
    }
}

async fn finish<S>(
    socket: &mut WebSocketStream<S>,
    protocol: Protocol,
    outcome: &Outcome,
) -> Result<(), tungstenite::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    if let Some(status) = protocol.status(outcome) {
        socket
            .send(message(protocol.encode(STATUS, &status)))
            .await?;
    }
    // Clients take any other code for an error.
    let close = CloseFrame {
        code: CloseCode::Normal,
        reason: "".into(),
    };
    socket.close(Some(close)).await?;
    let drained = async { while let Some(Ok(_)) = socket.next().await {} };
    if tokio::time::timeout(CLOSING, drained).await.is_err() {
        tracing::debug!("a client did not answer the close");
    }
    Ok(())
}

fn message(outgoing: Outgoing) -> Message {
    match outgoing {
        Outgoing::Binary(bytes) => Message::Binary(bytes.into()),
        Outgoing::Text(text) => Message::Text(text.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::{STDERR, STDOUT};
    use super::*;

    struct Scene {
        client: WebSocketStream<tokio::io::DuplexStream>,
        process: mpsc::Sender<FromProcess>,
        stdin: mpsc::Receiver<Bytes>,
    }

    async fn scene(name: &'static str) -> Scene {
        let protocol = Protocol::choose([name].into_iter()).unwrap();
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (process, from) = mpsc::channel(4);
        let (input, stdin) = mpsc::channel(1);
        let streams = Streams {
            from,
            stdin: Some(input),
            terminal: None,
            writes: vec![STDOUT, STDERR],
        };
        tokio::spawn(serve(ours, protocol, streams));
        let client = WebSocketStream::from_raw_socket(theirs, Role::Client, None).await;
        Scene {
            client,
            process,
            stdin,
        }
    }

    async fn next(client: &mut WebSocketStream<tokio::io::DuplexStream>) -> Message {
        client.next().await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn a_session_from_the_empty_message_to_the_close() {
        let mut scene = scene("v5.channel.k8s.io").await;
        assert_eq!(
            next(&mut scene.client).await,
            Message::Binary(vec![1].into())
        );
        scene
            .client
            .send(Message::Binary(b"\0in".to_vec().into()))
            .await
            .unwrap();
        assert_eq!(scene.stdin.recv().await.unwrap(), "in");
        scene
            .client
            .send(Message::Binary(vec![255, 0].into()))
            .await
            .unwrap();
        assert_eq!(scene.stdin.recv().await, None, "the input ends");
        scene
            .process
            .send(FromProcess::Bytes(STDERR, "err".into()))
            .await
            .unwrap();
        scene
            .process
            .send(FromProcess::Ended(Outcome::Exited(3)))
            .await
            .unwrap();
        assert_eq!(
            next(&mut scene.client).await,
            Message::Binary(b"\x02err".to_vec().into())
        );
        let Message::Binary(status) = next(&mut scene.client).await else {
            panic!("no status")
        };
        assert!(status.starts_with(b"\x03{"));
        let Message::Close(Some(close)) = next(&mut scene.client).await else {
            panic!("no close")
        };
        assert_eq!(close.code, CloseCode::Normal);
    }

    #[tokio::test]
    async fn the_oldest_protocol_has_no_status_of_success() {
        let mut scene = scene("channel.k8s.io").await;
        assert_eq!(
            next(&mut scene.client).await,
            Message::Binary(vec![1].into())
        );
        scene
            .process
            .send(FromProcess::Ended(Outcome::Exited(0)))
            .await
            .unwrap();
        assert!(matches!(
            next(&mut scene.client).await,
            Message::Close(Some(_))
        ));
    }

    #[tokio::test]
    async fn pings_are_answered_and_output_flows_while_input_waits() {
        let mut scene = scene("v5.channel.k8s.io").await;
        next(&mut scene.client).await;
        scene.client.send(Message::Ping("x".into())).await.unwrap();
        assert_eq!(next(&mut scene.client).await, Message::Pong("x".into()));
        for _ in 0..3 {
            scene
                .client
                .send(Message::Binary(b"\0in".to_vec().into()))
                .await
                .unwrap();
        }
        scene
            .process
            .send(FromProcess::Bytes(STDOUT, "out".into()))
            .await
            .unwrap();
        assert_eq!(
            next(&mut scene.client).await,
            Message::Binary(b"\x01out".to_vec().into())
        );
    }
}
