//! The kubelet's server: logs, exec and attach, for the API server's certificate alone.
//!
//! There is no other handler: no debugging, profiling, running or configuration.

mod exec;
mod forward;
mod protocol;
mod session;
mod spdy;

#[cfg(test)]
mod tests;

use super::logs::Log;
use super::shared::{PodView, Run, Runs, Shared};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use monopod_api::labels::KUBELET_PORT;
use monopod_kubelet::request::{self, Asked, ExecOptions, LogOptions, Refused, Target};
use monopod_kubelet::serve::{self, Body, text};
use monopod_kubelet::tls;
use monopod_wire::Credentials;
use protocol::Protocol;
use std::net::Ipv4Addr;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;

/// The node's own address on the bridge to the workload; the pod's address at the kubelet's port
/// is translated to it.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// Chunks of a log that wait for a slow client.
const QUEUE: usize = 4;

pub(crate) use exec::execute;
pub(crate) use protocol::Outcome;

/// Listens, and serves from now on. Renewed credentials are used for new connections.
pub(crate) async fn start(
    mut credentials: watch::Receiver<Credentials>,
    shared: Shared,
) -> anyhow::Result<()> {
    let config = tls::config(&credentials.borrow_and_update())?;
    let listener = TcpListener::bind((ADDRESS, KUBELET_PORT)).await?;
    let (configs, current) = watch::channel(config);
    tokio::spawn(async move {
        while credentials.changed().await.is_ok() {
            match tls::config(&credentials.borrow_and_update()) {
                Ok(config) => {
                    configs.send_replace(config);
                }
                Err(error) => tracing::error!(%error, "renewed credentials cannot be served with"),
            }
        }
    });
    tokio::spawn(listen(listener, current, shared));
    Ok(())
}

async fn listen(
    listener: TcpListener,
    configs: watch::Receiver<std::sync::Arc<rustls::ServerConfig>>,
    shared: Shared,
) {
    let connections = shared.connections.clone();
    let answer = move |request| {
        let shared = shared.clone();
        async move { answer(request, &shared).await }
    };
    serve::accept(listener, configs, connections, answer).await;
}

async fn answer(request: Request<Incoming>, shared: &Shared) -> Response<Body> {
    let uri = request.uri();
    let asked = request::read(
        request.method(),
        uri.path(),
        uri.query().unwrap_or_default(),
        Timestamp::now(),
    );
    let outcome = match asked {
        Ok(Asked::Health) => Ok(text(StatusCode::OK, "ok")),
        Ok(Asked::Logs(target, options)) => logs(shared, &target, options),
        Ok(Asked::Exec(target, options)) => match upgrade(&request) {
            Ok(upgrade) => match running(shared, &target) {
                Ok(run) => Ok(start_exec(request, upgrade, run, options, shared).await),
                Err(refused) => Err(refused),
            },
            Err(refused) => Err(refused),
        },
        Ok(Asked::Attach(target, options)) => upgrade(&request).and_then(|upgrade| {
            let run = running(shared, &target)?;
            let streams = exec::attach(&run, &options);
            Ok(switch(request, &upgrade, streams, shared))
        }),
        Ok(Asked::Forward(target)) => read_tunnel(request.headers()).and_then(|accept| {
            find_pod(shared, &target)?;
            Ok(switch_to(request, &accept, forward::PROTOCOL, |upgraded| {
                forward::serve(upgraded, forward::WORKLOAD.into())
            }))
        }),
        Err(refused) => Err(refused),
    };
    outcome.unwrap_or_else(|(status, message)| text(status, &message))
}

fn find_pod(shared: &Shared, target: &Target) -> Result<PodView, Refused> {
    shared
        .find(&target.namespace, &target.pod)
        .filter(|pod| target.uid.as_ref().is_none_or(|uid| *uid == pod.uid))
        .ok_or_else(|| (StatusCode::NOT_FOUND, "pod does not exist".to_owned()))
}

fn find(shared: &Shared, target: &Target) -> Result<Runs, Refused> {
    find_pod(shared, target)?
        .containers
        .get(&target.container)
        .cloned()
        .ok_or_else(|| {
            let text = format!(
                "container \"{}\" not found in pod \"{}\"",
                target.container, target.pod
            );
            (StatusCode::NOT_FOUND, text)
        })
}

fn running(shared: &Shared, target: &Target) -> Result<Run, Refused> {
    find(shared, target)?
        .current
        .filter(|run| *run.running.borrow())
        .ok_or_else(|| {
            let text = format!(
                "container not found (\"{}\"): it is not running",
                target.container
            );
            (StatusCode::INTERNAL_SERVER_ERROR, text)
        })
}

fn logs(shared: &Shared, target: &Target, options: LogOptions) -> Result<Response<Body>, Refused> {
    let runs = find(shared, target)?;
    let log: Option<Log> = if options.previous {
        runs.previous.map(|run| run.log)
    } else {
        runs.current.map(|run| run.log)
    };
    let Some(log) = log else {
        let text = if options.previous {
            format!(
                "previous terminated container \"{}\" in pod \"{}\" not found",
                target.container, target.pod
            )
        } else {
            format!(
                "container \"{}\" in pod \"{}\" is waiting to start: {}",
                target.container,
                target.pod,
                runs.waiting.as_deref().unwrap_or("ContainerCreating")
            )
        };
        return Err((StatusCode::BAD_REQUEST, text));
    };
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        if let Err(error) = log.answer(options.query, options.follow, sender).await {
            tracing::warn!(%error, "a log cannot be read");
        }
    });
    Ok(serve::pieces(receiver))
}

/// What a client asked for by its upgrade headers.
struct Upgrade {
    protocol: Protocol,
    accept: String,
}

fn upgrade(request: &Request<Incoming>) -> Result<Upgrade, Refused> {
    read_upgrade(request.headers())
}

fn read_upgrade(headers: &HeaderMap) -> Result<Upgrade, Refused> {
    let accept = read_websocket(headers)?;
    let protocol = Protocol::choose(offered(headers)).ok_or_else(|| {
        let text = "none of the subprotocols is supported, use v5.channel.k8s.io";
        (StatusCode::BAD_REQUEST, text.to_owned())
    })?;
    Ok(Upgrade { protocol, accept })
}

/// Like [`read_upgrade`], for the one subprotocol of port-forward.
fn read_tunnel(headers: &HeaderMap) -> Result<String, Refused> {
    let accept = read_websocket(headers)?;
    offered(headers)
        .flat_map(|list| list.split(','))
        .any(|name| name.trim() == forward::PROTOCOL)
        .then_some(accept)
        .ok_or_else(|| {
            let text = format!("port-forward needs the subprotocol {}", forward::PROTOCOL);
            (StatusCode::BAD_REQUEST, text)
        })
}

fn offered(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    headers
        .get_all(header::SEC_WEBSOCKET_PROTOCOL)
        .iter()
        .filter_map(|value| value.to_str().ok())
}

/// The value of `Sec-WebSocket-Accept`, if an upgrade to WebSocket is asked for.
fn read_websocket(headers: &HeaderMap) -> Result<String, Refused> {
    let bad = |text: &str| (StatusCode::BAD_REQUEST, text.to_owned());
    let has = |name: header::HeaderName, token: &str| {
        headers
            .get_all(name)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .any(|value| value.trim().eq_ignore_ascii_case(token))
    };
    if !has(header::UPGRADE, "websocket") || !has(header::CONNECTION, "upgrade") {
        return Err(bad("an upgrade to WebSocket is needed"));
    }
    let key = headers
        .get(header::SEC_WEBSOCKET_KEY)
        .ok_or_else(|| bad("the header Sec-WebSocket-Key is missing"))?;
    Ok(derive_accept_key(key.as_bytes()))
}

async fn start_exec(
    request: Request<Incoming>,
    upgrade: Upgrade,
    run: Run,
    options: ExecOptions,
    shared: &Shared,
) -> Response<Body> {
    let streams = match execute(&run, &options).await {
        Ok(running) => running.streams,
        Err(error) => {
            tracing::warn!(%error, "a command was not executed");
            failed(&options, error.to_string())
        }
    };
    switch(request, &upgrade, streams, shared)
}

/// A session that only says why there is none.
fn failed(options: &ExecOptions, message: String) -> session::Streams {
    let (sender, from) = mpsc::channel(1);
    let ended = session::FromProcess::Ended(Outcome::Failed(message));
    // The channel has room for one.
    let _sent = sender.try_send(ended).is_ok();
    session::Streams {
        from,
        stdin: None,
        terminal: None,
        writes: exec::writes(options),
    }
}

fn switch(
    request: Request<Incoming>,
    upgrade: &Upgrade,
    streams: session::Streams,
    shared: &Shared,
) -> Response<Body> {
    let protocol = upgrade.protocol;
    // It ends with its process, and waits until the client has taken the last of it.
    let open = shared.connections.open();
    switch_to(
        request,
        &upgrade.accept,
        protocol.name,
        async move |upgraded| {
            session::serve(upgraded, protocol, streams).await;
            drop(open);
        },
    )
}

/// Answers that the protocol is switched, and serves the connection from then on.
fn switch_to<F>(
    request: Request<Incoming>,
    accept: &str,
    protocol: &'static str,
    serve: impl FnOnce(TokioIo<hyper::upgrade::Upgraded>) -> F + Send + 'static,
) -> Response<Body>
where
    F: Future<Output = ()> + Send,
{
    tokio::spawn(async move {
        match hyper::upgrade::on(request).await {
            Ok(upgraded) => serve(TokioIo::new(upgraded)).await,
            Err(error) => tracing::debug!(%error, "a client did not upgrade"),
        }
    });
    let mut response = text(StatusCode::SWITCHING_PROTOCOLS, "");
    let headers = response.headers_mut();
    headers.clear();
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    if let Ok(accept) = HeaderValue::from_str(accept) {
        headers.insert(header::SEC_WEBSOCKET_ACCEPT, accept);
    }
    if !protocol.is_empty() {
        headers.insert(
            header::SEC_WEBSOCKET_PROTOCOL,
            HeaderValue::from_static(protocol),
        );
    }
    response
}
