//! The API server of a rehearsal: what a node asks for until its pod runs, and no more.
//!
//! It lives in the guest, for some seconds before the guest is anybody's, and stores nothing. The
//! answers are as short as the node's client takes them. When the pod's status says that its
//! container runs, the process ends well; if that takes too long, it does not.

use crate::internal;
use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use monopod_api::labels;
use monopod_kubelet::serve::{Body, pieces, text};
use monopod_kubelet::tls;
use monopod_wire::Rehearsal;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsAcceptor;

/// How long a rehearsal may take, on a machine that does much else.
const PATIENCE: Duration = Duration::from_secs(90);
/// Largest body that is read.
const BODY: usize = 1 << 20;

/// Runs this part until the node's pod runs.
pub(crate) fn main() -> Result<()> {
    internal::run("stand-in", async {
        let pid1 = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
        let plan: Rehearsal = internal::Receiver::new(pid1).next()?;
        match tokio::time::timeout(PATIENCE, serve(plan)).await {
            Ok(outcome) => outcome,
            Err(_) => bail!("the pod does not run after {} s", PATIENCE.as_secs()),
        }
    })
}

/// How far the node is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    #[default]
    Nothing,
    Registered,
    Running,
}

#[derive(Clone)]
struct Server {
    pod: Arc<Value>,
    progress: watch::Sender<Progress>,
}

async fn serve(plan: Rehearsal) -> Result<()> {
    let acceptor = TlsAcceptor::from(tls::config(&plan.credentials)?);
    let url: http::Uri = plan.go.task.api_server.parse()?;
    let port = url.port_u16().context("the API server's URL has no port")?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    let server = Server {
        pod: Arc::new(pod(&plan)),
        progress: watch::Sender::default(),
    };
    let mut progress = server.progress.subscribe();
    let connections = async {
        loop {
            let (stream, _) = listener.accept().await?;
            let (acceptor, server) = (acceptor.clone(), server.clone());
            tokio::spawn(async move {
                let stream = match acceptor.accept(stream).await {
                    Ok(stream) => stream,
                    Err(error) => return tracing::warn!(%error, "no handshake"),
                };
                let service = service_fn(|request| {
                    let server = server.clone();
                    async move { Ok::<_, Infallible>(server.answer(request).await) }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                if let Err(error) = connection.await {
                    tracing::debug!(%error, "a connection ended");
                }
            });
        }
    };
    tokio::select! {
        outcome = connections => outcome,
        running = progress.wait_for(|progress| *progress == Progress::Running) => Ok(running.map(drop)?),
    }
}

impl Server {
    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let (head, body) = request.into_parts();
        let body = match Limited::new(body, BODY).collect().await {
            Ok(body) => body.to_bytes(),
            Err(_) => return text(StatusCode::PAYLOAD_TOO_LARGE, "too large"),
        };
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let path = head.uri.path();
        let is_watch = head
            .uri
            .query()
            .is_some_and(|query| query.contains("watch=true"));
        match (head.method, path.rsplit('/').next().unwrap_or_default()) {
            (Method::GET, "pods") if is_watch => self.watch(),
            (Method::GET, kind @ ("pods" | "services")) => object(&list(kind)),
            (Method::GET, "kube-root-ca.crt") => object(&json!({
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kube-root-ca.crt"},
                "data": {"ca.crt": "for practice"},
            })),
            (Method::POST, "token") => object(&token(body)),
            (Method::POST, "nodes") => {
                self.reach(Progress::Registered);
                object(&stored(body))
            }
            (Method::PATCH, "status") if path.contains("/pods/") => {
                let running = "/status/containerStatuses/0/state/running";
                if body.pointer(running).is_some_and(Value::is_object) {
                    self.reach(Progress::Running);
                }
                object(&self.pod)
            }
            (Method::POST, _) => object(&stored(body)),
            (Method::PATCH, _) => object(&body),
            _ => absent(),
        }
    }

    fn reach(&self, progress: Progress) {
        self.progress.send_if_modified(|reached| {
            let further = progress > *reached;
            *reached = progress.max(*reached);
            further
        });
    }

    /// The pod, once its node is registered.
    fn watch(&self) -> Response<Body> {
        let (sender, receiver) = mpsc::channel(1);
        let (mut progress, pod) = (self.progress.subscribe(), Arc::clone(&self.pod));
        tokio::spawn(async move {
            let registered = progress.wait_for(|progress| *progress >= Progress::Registered);
            if registered.await.is_err() {
                return;
            }
            let line = format!("{}\n", json!({"type": "ADDED", "object": *pod}));
            if sender.send(Bytes::from(line)).await.is_ok() {
                sender.closed().await;
            }
        });
        pieces(receiver)
    }
}

fn object(value: &Value) -> Response<Body> {
    let mut response = text(StatusCode::OK, &value.to_string());
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    response
}

fn absent() -> Response<Body> {
    let mut response = object(&json!({
        "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
        "message": "not part of the rehearsal", "reason": "NotFound", "code": 404,
    }));
    *response.status_mut() = StatusCode::NOT_FOUND;
    response
}

fn list(kind: &str) -> Value {
    let kind = if kind == "pods" {
        "PodList"
    } else {
        "ServiceList"
    };
    json!({"apiVersion": "v1", "kind": kind, "metadata": {"resourceVersion": "1"}, "items": []})
}

fn stored(mut body: Value) -> Value {
    if let Some(metadata) = body.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.insert("uid".to_owned(), json!("rehearsal"));
        metadata.insert("resourceVersion".to_owned(), json!("1"));
    }
    body
}

fn token(mut body: Value) -> Value {
    let expires = jiff::Timestamp::now() + Duration::from_hours(1);
    body["status"] = json!({"token": "for-practice", "expirationTimestamp": expires.to_string()});
    body
}

/// As most pods are: one container, and the volume with the service account's token.
fn pod(plan: &Rehearsal) -> Value {
    let (task, identity) = (&plan.go.task, &plan.go.task.pod);
    let sources = json!([
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}]}},
    ]);
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": identity.namespace, "name": identity.name, "uid": identity.uid,
            "resourceVersion": "2", "creationTimestamp": jiff::Timestamp::now().to_string(),
        },
        "spec": {
            "schedulerName": labels::SCHEDULER_NAME, "nodeName": task.node,
            "serviceAccountName": "default", "restartPolicy": "Never", "dnsPolicy": "ClusterFirst",
            "terminationGracePeriodSeconds": 0, "enableServiceLinks": true, "securityContext": {},
            "volumes": [{"name": "token", "projected": {"defaultMode": 420, "sources": sources}}],
            "containers": [{
                "name": "rehearsal", "image": plan.image.reference, "imagePullPolicy": "IfNotPresent",
                "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "64Mi"}},
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
                "volumeMounts": [{
                    "name": "token", "readOnly": true,
                    "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
                }],
            }],
        },
        "status": {"phase": "Pending", "qosClass": "Burstable"},
    })
}
