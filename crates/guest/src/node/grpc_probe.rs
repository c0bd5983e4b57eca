//! The gRPC health check (`grpc.health.v1.Health/Check`) over HTTP/2 without TLS.
//!
//! One call with one message each way, so the messages are written and read by hand.

use super::handlers::Outcome;
use super::http_probe::user_agent;
use bytes::Bytes;
use h2::RecvStream;
use http::{HeaderMap, Request};
use k8s_openapi::api::core::v1::GRPCAction;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Between attempts to connect, within the probe's time.
const PAUSE: Duration = Duration::from_millis(100);
/// Largest answer that is read; a health answer has two bytes.
const MAX_ANSWER: usize = 4 << 10;
/// `SERVING`, of `HealthCheckResponse.ServingStatus`.
const SERVING: u64 = 1;

/// Checks a service's health.
pub(crate) async fn probe(address: &str, action: &GRPCAction, timeout: Duration) -> Outcome {
    let Ok(port) = u16::try_from(action.port) else {
        return Outcome::Unknown(format!("port {} is none", action.port));
    };
    let seconds = timeout.as_secs();
    let deadline = Instant::now() + timeout;
    let connect = async {
        loop {
            // The server may be about to listen.
            match TcpStream::connect((address, port)).await {
                Ok(stream) => match h2::client::handshake(stream).await {
                    Ok(connected) => return connected,
                    Err(error) => tracing::debug!(%error, "no HTTP/2"),
                },
                Err(error) => tracing::debug!(%error, "no connection"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    let Ok((requests, connection)) = tokio::time::timeout_at(deadline, connect).await else {
        return Outcome::Failure(format!(
            "timeout: failed to connect service \"{address}:{port}\" within {seconds}s: context deadline exceeded"
        ));
    };
    let connection = tokio::spawn(connection);
    let service = action.service.as_deref().unwrap_or_default();
    let authority = format!("{address}:{port}");
    let check = check(requests, &authority, service);
    let outcome = match tokio::time::timeout_at(deadline, check).await {
        Ok(Ok(answer)) => judge(&answer),
        Ok(Err(error)) => Outcome::Failure(format!(
            "error: health rpc probe failed: rpc error: code = Unavailable desc = {error}"
        )),
        Err(_) => Outcome::Failure(format!(
            "timeout: health rpc did not complete within {seconds}s"
        )),
    };
    connection.abort();
    outcome
}

/// What a server answered.
#[derive(Debug, Default, PartialEq, Eq)]
struct Answer {
    http_status: u16,
    /// `grpc-status`, if there was one.
    status: Option<u32>,
    message: String,
    body: Vec<u8>,
}

async fn check(
    requests: h2::client::SendRequest<Bytes>,
    authority: &str,
    service: &str,
) -> Result<Answer, h2::Error> {
    let request = Request::builder()
        .method("POST")
        .version(http::Version::HTTP_2)
        .uri(format!("http://{authority}/grpc.health.v1.Health/Check"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header(
            "user-agent",
            format!("{} grpc-monopod", user_agent("probe")),
        )
        .body(())
        .map_err(|_invalid| h2::Error::from(h2::Reason::PROTOCOL_ERROR))?;
    let mut requests = requests.ready().await?;
    let (response, mut body) = requests.send_request(request, false)?;
    body.send_data(message(service), true)?;
    let response = response.await?;
    let mut answer = Answer {
        http_status: response.status().as_u16(),
        ..Answer::default()
    };
    // A server that has only an error to say says it in its headers.
    answer.read_status(response.headers());
    let mut body = response.into_body();
    answer.read(&mut body).await?;
    Ok(answer)
}

impl Answer {
    async fn read(&mut self, body: &mut RecvStream) -> Result<(), h2::Error> {
        while let Some(piece) = body.data().await {
            let piece = piece?;
            body.flow_control().release_capacity(piece.len())?;
            let room = MAX_ANSWER.saturating_sub(self.body.len());
            self.body.extend_from_slice(&piece[..piece.len().min(room)]);
        }
        if let Some(trailers) = body.trailers().await? {
            self.read_status(&trailers);
        }
        Ok(())
    }

    fn read_status(&mut self, headers: &HeaderMap) {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        if let Some(status) = text("grpc-status").and_then(|text| text.parse().ok()) {
            self.status = Some(status);
            text("grpc-message")
                .unwrap_or_default()
                .clone_into(&mut self.message);
        }
    }
}

/// In the kubelet's words.
fn judge(answer: &Answer) -> Outcome {
    let rpc_error = |code: &str, message: &str| {
        Outcome::Failure(format!(
            "error: health rpc probe failed: rpc error: code = {code} desc = {message}"
        ))
    };
    match answer.status {
        None if answer.http_status != 200 => {
            let message = format!(
                "unexpected HTTP status code received from server: {}",
                answer.http_status
            );
            rpc_error("Unknown", &message)
        }
        None => rpc_error(
            "Internal",
            "server closed the stream without sending trailers",
        ),
        Some(0) => match serving_status(&answer.body) {
            Some(SERVING) => Outcome::Success,
            Some(status) => Outcome::Failure(format!(
                "service unhealthy (responded with \"{}\")",
                status_name(status)
            )),
            None => rpc_error("Internal", "the answer is no HealthCheckResponse"),
        },
        Some(12) => Outcome::Failure(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            answer.message
        )),
        Some(code) => rpc_error(code_name(code), &answer.message),
    }
}

/// The message `HealthCheckRequest`, in its frame.
fn message(service: &str) -> Bytes {
    let mut field = Vec::new();
    if !service.is_empty() {
        field.push(0x0a);
        push_varint(&mut field, service.len() as u64);
        field.extend_from_slice(service.as_bytes());
    }
    let length = u32::try_from(field.len()).unwrap_or(u32::MAX);
    let mut frame = vec![0];
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(&field);
    Bytes::from(frame)
}

fn push_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(u8::try_from(number & 0x7f).unwrap_or(0) | 0x80);
        number >>= 7;
    }
    out.push(u8::try_from(number).unwrap_or(0));
}

fn read_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// The status in a framed `HealthCheckResponse`; 0, `UNKNOWN`, is the one that is left out.
fn serving_status(frame: &[u8]) -> Option<u64> {
    let (head, body) = frame.split_first_chunk::<5>()?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    let mut message = body.get(..usize::try_from(length).ok()?)?;
    if head[0] != 0 {
        // Nobody offered compression.
        return None;
    }
    let mut status = 0;
    while !message.is_empty() {
        let key = read_varint(&mut message)?;
        match key & 7 {
            0 => {
                let value = read_varint(&mut message)?;
                if key >> 3 == 1 {
                    status = value;
                }
            }
            2 => {
                let length = usize::try_from(read_varint(&mut message)?).ok()?;
                message = message.get(length..)?;
            }
            _ => return None,
        }
    }
    Some(status)
}

fn status_name(status: u64) -> String {
    match status {
        0 => "UNKNOWN".to_owned(),
        1 => "SERVING".to_owned(),
        2 => "NOT_SERVING".to_owned(),
        3 => "SERVICE_UNKNOWN".to_owned(),
        other => other.to_string(),
    }
}

fn code_name(code: u32) -> &'static str {
    const NAMES: [&str; 17] = [
        "OK",
        "Canceled",
        "Unknown",
        "InvalidArgument",
        "DeadlineExceeded",
        "NotFound",
        "AlreadyExists",
        "PermissionDenied",
        "ResourceExhausted",
        "FailedPrecondition",
        "Aborted",
        "OutOfRange",
        "Unimplemented",
        "Internal",
        "Unavailable",
        "DataLoss",
        "Unauthenticated",
    ];
    usize::try_from(code)
        .ok()
        .and_then(|code| NAMES.get(code))
        .unwrap_or(&"Unknown")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::net::TcpListener;

    /// A server that answers every call alike: status of the body, `grpc-status`, and its message.
    async fn server(serving: Option<u8>, code: &'static str, text: &'static str) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    assert_eq!(request.uri().path(), "/grpc.health.v1.Health/Check");
                    assert_eq!(request.headers()["te"], "trailers");
                    let headers =
                        http::Response::builder().header("content-type", "application/grpc");
                    let trailers = |code: &str| {
                        let mut map = HeaderMap::new();
                        map.insert("grpc-status", code.parse().unwrap());
                        map.insert("grpc-message", text.parse().unwrap());
                        map
                    };
                    if let Some(status) = serving {
                        let mut stream = respond
                            .send_response(headers.body(()).unwrap(), false)
                            .unwrap();
                        stream
                            .send_data(Bytes::from(vec![0, 0, 0, 0, 2, 8, status]), false)
                            .unwrap();
                        stream.send_trailers(trailers(code)).unwrap();
                    } else {
                        let mut response = headers.body(()).unwrap();
                        *response.headers_mut() = trailers(code);
                        respond.send_response(response, true).unwrap();
                    }
                }
            }
        });
        port
    }

    async fn ask(port: u16) -> Outcome {
        let action = GRPCAction {
            port: port.into(),
            service: Some("some.service".to_owned()),
            mode: None,
        };
        probe("127.0.0.1", &action, Duration::from_secs(2)).await
    }

    #[tokio::test]
    async fn health_is_judged_in_the_kubelets_words() {
        assert_eq!(ask(server(Some(1), "0", "").await).await, Outcome::Success);
        let failure = |text: &str| Outcome::Failure(text.to_owned());
        assert_eq!(
            ask(server(Some(2), "0", "").await).await,
            failure("service unhealthy (responded with \"NOT_SERVING\")")
        );
        assert_eq!(
            ask(server(None, "5", "unknown service").await).await,
            failure(
                "error: health rpc probe failed: rpc error: code = NotFound desc = unknown service"
            )
        );
        assert_eq!(
            ask(server(None, "12", "no").await).await,
            failure(
                "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): no"
            )
        );
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = closed.local_addr().unwrap().port();
        drop(closed);
        assert_eq!(
            ask(port).await,
            failure(&format!(
                "timeout: failed to connect service \"127.0.0.1:{port}\" within 2s: context deadline exceeded"
            ))
        );
    }

    proptest! {
        /// Whatever a container answers, it is judged without a panic.
        #[test]
        fn garbage_is_not_serving(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let _status = serving_status(&bytes);
            let mut rest = &bytes[..];
            let _number = read_varint(&mut rest);
        }

        #[test]
        fn numbers_come_back(number: u64) {
            let mut bytes = Vec::new();
            push_varint(&mut bytes, number);
            prop_assert_eq!(read_varint(&mut &bytes[..]), Some(number));
        }
    }
}
