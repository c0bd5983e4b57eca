//! An API server for tests: answers one by one, and remembers what was asked.

use super::cluster::Cluster;
use super::events::Recorder;
use super::launch::Spare;
use super::shared::Shared;
use super::tools::Tools;
use crate::metadata::Metadata;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use kube::Client;
use kube::client::Body;
use monopod_wire::Task;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Method and path, and body.
pub(crate) type Requests = Arc<Mutex<Vec<(String, Value)>>>;

/// An answer.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    status: u16,
    body: String,
}

impl Answer {
    /// 200 with this object.
    pub(crate) fn ok(object: &Value) -> Self {
        Self {
            status: 200,
            body: object.to_string(),
        }
    }

    /// 404.
    pub(crate) fn missing() -> Self {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
            "reason": "NotFound", "message": "it is not there", "code": 404});
        Self {
            status: 404,
            body: status.to_string(),
        }
    }

    /// 409, it exists.
    pub(crate) fn exists() -> Self {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
            "reason": "AlreadyExists", "message": "it exists", "code": 409});
        Self {
            status: 409,
            body: status.to_string(),
        }
    }
}

/// Starts with these answers; what is asked after the last one fails.
pub(crate) fn start(answers: Vec<Answer>) -> (Cluster, Requests) {
    let requests = Requests::default();
    let seen = Arc::clone(&requests);
    let answers = Arc::new(Mutex::new(VecDeque::from(answers)));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (seen, answers) = (Arc::clone(&seen), Arc::clone(&answers));
        async move {
            let (parts, body) = request.into_parts();
            let bytes = body.collect().await?.to_bytes();
            let line = format!("{} {}", parts.method, parts.uri.path());
            let value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
            seen.lock().unwrap().push((line, value));
            let answer = answers
                .lock()
                .unwrap()
                .pop_front()
                .ok_or("no answer is left")?;
            let response = Response::builder()
                .status(answer.status)
                .body(Body::from(answer.body.into_bytes()))?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(response)
        }
    });
    let (_, clients) = tokio::sync::watch::channel(Client::new(service, "default"));
    (Cluster::new(clients), requests)
}

/// The task of the pod `ns/p` with the uid `u`.
pub(crate) fn task() -> Task {
    serde_json::from_value(json!({
        "environment": "env-1", "pod": {"namespace": "ns", "name": "p", "uid": "u"},
        "node": "n", "hostname": "h", "region": "r", "zone": "z",
        "providerId": "monopod:///z/env-1", "apiServer": "https://127.0.0.1:1",
        "clusterDns": "10.96.0.10", "clusterDomain": "cluster.local",
        "kubernetesVersion": "v1.37.2", "cpuMillis": 250, "memoryMib": 512, "scratchBytes": 1,
        "interface": {"address": "10.0.0.2", "mac": "", "gateway": "10.0.0.1", "gatewayMac": "", "mtu": 1450},
    }))
    .unwrap()
}

/// Tools of the node of [`task`].
pub(crate) fn tools(cluster: Cluster) -> Tools {
    let (_, services) = tokio::sync::watch::channel(Some(Vec::new()));
    Tools {
        task: Arc::new(task()),
        recorder: Recorder::start(cluster.clone(), "n".to_owned()),
        cluster,
        metadata: Metadata::well_known(),
        spare: Spare::default(),
        shared: Shared::default(),
        shipper: super::shipper::Shipper::start(Metadata::well_known()),
        services,
    }
}
