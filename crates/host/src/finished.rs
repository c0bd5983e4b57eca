//! Answers at the node's address for a pod whose VM is gone: its logs, and nothing else.
//!
//! The API server reaches it where it reached the guest's node, and finds the node's certificate.
//! Whoever else may come is refused as the guest refuses them (`monopod-kubelet`).

use crate::archive;
use crate::credentials::Issued;
use crate::network::{self, Vpc};
use bytes::Bytes;
use jiff::Timestamp;
use monopod_api::environment::PodReference;
use monopod_api::labels::KUBELET_PORT;
use monopod_kubelet::log::{Sending, seek_tail};
use monopod_kubelet::request::{self, Asked, LogOptions, Refused, Target};
use monopod_kubelet::serve::{self, Body, Connections, text};
use monopod_kubelet::tls;
use std::io::BufReader;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};

/// Delay before something that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Pieces of a log that wait for a slow client.
const QUEUE: usize = 4;

/// The pod that is answered for.
#[derive(Clone, Debug)]
pub(crate) struct Finished {
    pub(crate) environment: String,
    pub(crate) pod: PodReference,
    pub(crate) address: Ipv4Addr,
    /// Its archive.
    pub(crate) directory: PathBuf,
    pub(crate) vpc: Vpc,
}

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Serves until it is dropped, with the newest credentials. Says once that it does.
pub(crate) async fn serve(
    finished: Finished,
    mut credentials: watch::Receiver<Option<Issued>>,
    ready: oneshot::Sender<()>,
) {
    let mut ready = Some(ready);
    loop {
        let outcome = serve_once(&finished, &mut credentials, &mut ready).await;
        let error = match outcome {
            Ok(()) => return,
            Err(error) => error,
        };
        tracing::warn!(environment = %finished.environment, error = &*error, "logs of a finished pod cannot be served; tried again");
        tokio::time::sleep(RETRY).await;
    }
}

/// Ends without an error only when nobody has credentials any more.
async fn serve_once(
    finished: &Finished,
    credentials: &mut watch::Receiver<Option<Issued>>,
    ready: &mut Option<oneshot::Sender<()>>,
) -> Result<(), Error> {
    let config = match credentials.wait_for(Option::is_some).await {
        Ok(issued) => match &*issued {
            Some(issued) => tls::config(&issued.credentials)?,
            None => return Ok(()),
        },
        Err(_) => return Ok(()),
    };
    let (configs, current) = watch::channel(config);
    network::claim(&finished.vpc, finished.address).await?;
    let listener = network::listen(&finished.vpc, finished.address, KUBELET_PORT).await?;
    tracing::info!(environment = %finished.environment, "answering for the logs of a finished pod");
    if let Some(ready) = ready.take() {
        // The owner may have gone on.
        let _told = ready.send(()).is_ok();
    }
    let pod = Arc::new(finished.clone());
    let answer = move |request: http::Request<hyper::body::Incoming>| {
        let pod = Arc::clone(&pod);
        async move {
            let (parts, _) = request.into_parts();
            answer(&pod, &parts.method, &parts.uri)
        }
    };
    let renewals = async {
        while credentials.changed().await.is_ok() {
            let config = credentials
                .borrow_and_update()
                .as_ref()
                .map(|issued| tls::config(&issued.credentials));
            match config {
                Some(Ok(config)) => {
                    configs.send_replace(config);
                }
                Some(Err(error)) => {
                    tracing::error!(%error, "renewed credentials cannot be served with");
                }
                None => {}
            }
        }
    };
    let served = serve::accept(listener, current, Connections::default(), answer);
    tokio::select! {
        () = served => Err("the listener ended".into()),
        () = renewals => Ok(()),
    }
}

fn answer(pod: &Finished, method: &http::Method, uri: &http::Uri) -> http::Response<Body> {
    let query = uri.query().unwrap_or_default();
    let outcome =
        request::read(method, uri.path(), query, Timestamp::now()).and_then(|asked| match asked {
            Asked::Health => Ok(text(http::StatusCode::OK, "ok")),
            Asked::Logs(target, options) => {
                check(pod, &target)?;
                logs(pod, &target, options)
            }
            Asked::Exec(target, _) | Asked::Attach(target, _) | Asked::Forward(target) => {
                check(pod, &target)?;
                let message = format!(
                    "pod \"{}\" has ended and its VM is gone: only its logs are left",
                    target.pod
                );
                Err((http::StatusCode::BAD_REQUEST, message))
            }
        });
    outcome.unwrap_or_else(|(status, message)| text(status, &message))
}

fn check(pod: &Finished, target: &Target) -> Result<(), Refused> {
    let is = target.namespace == pod.pod.namespace
        && target.pod == pod.pod.name
        && target.uid.as_ref().is_none_or(|uid| *uid == pod.pod.uid);
    is.then_some(())
        .ok_or_else(|| (http::StatusCode::NOT_FOUND, "pod does not exist".to_owned()))
}

fn logs(
    pod: &Finished,
    target: &Target,
    options: LogOptions,
) -> Result<http::Response<Body>, Refused> {
    let files = archive::open_run(&pod.directory, &target.container, options.previous);
    let mut files = match files {
        Ok(Some(files)) => files,
        Ok(None) if options.previous => {
            let message = format!(
                "previous terminated container \"{}\" in pod \"{}\" not found",
                target.container, target.pod
            );
            return Err((http::StatusCode::BAD_REQUEST, message));
        }
        Ok(None) => {
            let message = format!(
                "container \"{}\" in pod \"{}\" has no logs: it was not started",
                target.container, target.pod
            );
            return Err((http::StatusCode::BAD_REQUEST, message));
        }
        Err(error) => {
            tracing::error!(environment = %pod.environment, %error, "an archive cannot be read");
            let message = "the archive cannot be read; the host's log says why".to_owned();
            return Err((http::StatusCode::INTERNAL_SERVER_ERROR, message));
        }
    };
    let (sender, receiver) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        if let Err(error) = send(&mut files, options, sender).await {
            tracing::warn!(%error, "an archived log cannot be read");
        }
    });
    // Nothing follows any more, so a follower is at the end at once.
    Ok(serve::pieces(receiver))
}

async fn send(
    files: &mut Vec<std::fs::File>,
    options: LogOptions,
    out: mpsc::Sender<Bytes>,
) -> std::io::Result<()> {
    if let Some(tail) = options.query.tail {
        seek_tail(files, tail)?;
    }
    let mut sending = Sending::new(options.query, out);
    for file in files.drain(..) {
        if !sending.lines(&mut BufReader::new(file)).await? {
            return Ok(());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::Archive;
    use http_body_util::BodyExt as _;
    use monopod_wire::{LogFile, LogPiece};

    fn finished(host: &std::path::Path) -> Finished {
        Finished {
            environment: "env-1".to_owned(),
            pod: PodReference {
                namespace: "ns".to_owned(),
                name: "p".to_owned(),
                uid: "u".to_owned(),
            },
            address: Ipv4Addr::LOCALHOST,
            directory: archive::directory(host, "env-1"),
            vpc: Vpc {
                name: "none".to_owned(),
                api: network::Api::Link {
                    address: Ipv4Addr::LOCALHOST,
                    inner: Ipv4Addr::LOCALHOST,
                },
                underlay: None,
                api_port: 6443,
                cidr: "10.0.0.0/16".parse().unwrap(),
                services: "10.96.0.0/16".parse().unwrap(),
            },
        }
    }

    async fn ask(pod: &Finished, uri: &str) -> (u16, String) {
        let response = answer(pod, &http::Method::GET, &uri.parse().unwrap());
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn logs_are_answered_for_and_nothing_else() {
        let host = tempfile::tempdir().unwrap();
        let pod = finished(host.path());
        let mut archive = Archive::open(pod.directory.clone()).unwrap();
        for (attempt, words) in [(0, ["zero"].as_slice()), (1, &["one", "two", "three"])] {
            let mut offset = 0;
            for (generation, word) in words.iter().enumerate() {
                // The last two lines are in a file of their own.
                let generation = u64::from(generation > 0);
                offset = if *word == "two" { 0 } else { offset };
                let line = format!("2026-01-01T00:00:0{}.5Z stdout F {word}\n", offset % 10);
                let stored = archive.store(LogPiece {
                    file: LogFile {
                        container: "c".to_owned(),
                        attempt,
                        generation,
                    },
                    offset,
                    bytes: line.into_bytes(),
                });
                offset = stored.unwrap().length.unwrap();
            }
        }
        let logs = |query: &str| format!("/containerLogs/ns/p/c{query}");
        let text = async |query| {
            let (status, text) = ask(&pod, &logs(query)).await;
            assert_eq!(status, 200, "{text}");
            text
        };
        assert_eq!(text("").await, "one\ntwo\nthree\n");
        assert_eq!(text("?follow=true&tailLines=2").await, "two\nthree\n");
        assert_eq!(text("?tailLines=0").await, "");
        assert_eq!(text("?previous=true&tailLines=9").await, "zero\n");
        assert_eq!(text("?limitBytes=5").await, "one\nt");
        assert_eq!(
            text("?tailLines=1&timestamps=true")
                .await
                .split_once(' ')
                .unwrap()
                .1,
            "three\n"
        );
        assert_eq!(text("?sinceTime=2027-01-01T00:00:00Z").await, "");
        for (path, status) in [
            ("/containerLogs/ns/p/other", 400),
            ("/containerLogs/ns/other/c", 404),
            ("/containerLogs/other/p/c", 404),
            ("/containerLogs/ns/p/c?tailLines=x", 422),
            ("/exec/ns/p/c?command=sh&output=1", 400),
            ("/exec/ns/p/other-uid/c?command=sh&output=1", 404),
            ("/attach/ns/p/c?output=1", 400),
            ("/portForward/ns/p", 400),
            ("/pods", 404),
            ("/metrics", 404),
            ("/run/ns/p/c", 404),
        ] {
            assert_eq!(ask(&pod, path).await.0, status, "{path}");
        }
        let (_, refusal) = ask(&pod, "/exec/ns/p/c?command=sh&output=1").await;
        assert!(refusal.contains("has ended"), "{refusal}");
        assert_eq!(ask(&pod, "/healthz").await.0, 200);
    }
}
