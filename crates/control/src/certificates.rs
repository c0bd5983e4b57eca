//! Approves the certificate requests that hosts make for their nodes and for themselves, and invited
//! machines for themselves, and denies all others. Requests for an environment go with it.

use crate::index::Shared;
use jiff::Timestamp;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::runtime::watcher::Config;
use kube::{Api, Client, ResourceExt};
use monopod_api::{labels, names};
use monopod_core::certificates::{
    Invitation, Requested, Verdict, invited, judge, judge_host, judge_renewal, renewing,
};
use monopod_ops::admin::Readiness;
use monopod_ops::election::Leadership;
use monopod_ops::queue::Queue;
use monopod_ops::watch::{Change, changes};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;

type Pending = Arc<Mutex<BTreeMap<String, CertificateSigningRequest>>>;

/// How long a request may wait for its environment or host to show in the index.
const PATIENCE: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(200);

pub(crate) fn spawn(
    tasks: &mut JoinSet<()>,
    client: &Client,
    index: &Shared,
    leadership: &Leadership,
    readiness: &Readiness,
    shutdown: &CancellationToken,
) {
    readiness.expect("certificatesigningrequests");
    let (pending, queue): (Pending, Queue<String>) = (Pending::default(), Queue::default());
    let (seen, todo, ready) = (Arc::clone(&pending), queue.clone(), readiness.clone());
    tasks.spawn(changes(
        client.clone(),
        Config::default(),
        shutdown.clone(),
        move |change| {
            let mut pending = seen.lock().unwrap_or_else(PoisonError::into_inner);
            match change {
                Change::Applied(request) if undecided(&request) => {
                    let name = request.name_any();
                    pending.insert(name.clone(), request);
                    todo.add(name);
                }
                Change::Applied(request) => {
                    pending.remove(&request.name_any());
                }
                Change::Deleted { name, .. } => {
                    pending.remove(&name);
                }
                Change::Synced => ready.done("certificatesigningrequests"),
            }
        },
    ));
    let (mut begins, todo, waiting) = (leadership.clone(), queue.clone(), Arc::clone(&pending));
    tasks.spawn(async move {
        while begins.begins().await {
            for name in waiting
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .keys()
            {
                todo.add(name.clone());
            }
        }
    });
    let (client, index, shutdown) = (client.clone(), index.clone(), shutdown.clone());
    let (leadership, readiness) = (leadership.clone(), readiness.clone());
    tasks.spawn(async move {
        // What is not in the index yet must not count as missing.
        if !readiness.all(&shutdown).await {
            return;
        }
        let again = queue.clone();
        queue
            .run(8, shutdown, move |name| {
                let (client, index, again) = (client.clone(), index.clone(), again.clone());
                let acts = leadership.holds();
                let request = pending
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get(&name)
                    .cloned();
                async move {
                    let Some(request) = request.filter(|_| acts) else {
                        return;
                    };
                    if !decide(&client, &index, &request).await {
                        again.add_after(name, RETRY);
                    }
                }
            })
            .await;
    });
}

fn undecided(request: &CertificateSigningRequest) -> bool {
    request
        .status
        .as_ref()
        .is_none_or(|s| s.conditions.as_ref().is_none_or(Vec::is_empty))
}

/// Whether the request needs no further look.
async fn decide(client: &Client, index: &Shared, request: &CertificateSigningRequest) -> bool {
    let Some(requested) = parse(&request.spec.request.0) else {
        return true;
    };
    if let Some(token) = invited(&request.spec) {
        return decide_host(client, request, &requested, token).await;
    }
    let young = request
        .creation_timestamp()
        .is_some_and(|t| Timestamp::now().duration_since(t.0).unsigned_abs() < PATIENCE);
    if let Some(host) = renewing(&request.spec) {
        let namespace = names::host_namespace(host);
        let is_member = index.lock().namespaces.contains_key(&namespace);
        if !is_member && young {
            return false;
        }
        let verdict = judge_renewal(host, is_member, &request.spec, &requested);
        let approved = ("HostItself", "requested by the host itself");
        return answer(client, request, verdict, approved, "NotTheHostItself").await;
    }
    let node = requested
        .common_names
        .first()
        .and_then(|cn| cn.strip_prefix("system:node:"))
        .unwrap_or_default();
    let environment = index.lock().environment_of_node(node).cloned();
    let verdict = judge(&request.spec, &requested, environment.as_ref());
    if let (Verdict::Deny(why), None) = (&verdict, &environment) {
        if young {
            return false;
        }
        // A host that was cut off asks for what was given up meanwhile: nothing else would take the request away.
        let named = request.labels().get(labels::ENVIRONMENT);
        if named.is_some_and(|name| !index.lock().environments.contains_key(name)) {
            let name = request.name_any();
            tracing::warn!(request = %name, %why, "certificate request deleted");
            return match delete(client, &name).await {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(request = %name, error = &error as &dyn std::error::Error, "it will be deleted later");
                    false
                }
            };
        }
    }
    let approved = (
        "EnvironmentHost",
        "requested by the host of the node's environment",
    );
    answer(client, request, verdict, approved, "NotTheEnvironmentsHost").await
}

/// The same for a machine that joins. The token is marked before anything is approved, so that it
/// is worth one certificate even if two requests arrive together.
async fn decide_host(
    client: &Client,
    request: &CertificateSigningRequest,
    requested: &Requested,
    token: &str,
) -> bool {
    let uid = request.uid().unwrap_or_default();
    let api: Api<Secret> = Api::namespaced(client.clone(), labels::BOOTSTRAP_NAMESPACE);
    let name = format!("{}{token}", labels::BOOTSTRAP_SECRET_PREFIX);
    let secret = match api.get_opt(&name).await {
        Ok(secret) => secret,
        Err(error) => {
            tracing::warn!(
                token,
                error = &error as &dyn std::error::Error,
                "the token cannot be read; tried again"
            );
            return false;
        }
    };
    let invitation = secret.as_ref().and_then(|secret| {
        Some(Invitation {
            host: secret.annotations().get(labels::INVITED_HOST)?.clone(),
            used_by: secret.annotations().get(labels::INVITATION_USED).cloned(),
        })
    });
    let verdict = judge_host(&uid, &request.spec, requested, invitation.as_ref());
    if let (Verdict::Approve, Some(secret)) = (&verdict, &secret) {
        let mark = json!({"metadata": {
            "resourceVersion": secret.resource_version(), "annotations": {labels::INVITATION_USED: uid},
        }});
        if let Err(error) = api
            .patch(&name, &PatchParams::default(), &Patch::Merge(mark))
            .await
        {
            tracing::warn!(
                token,
                error = &error as &dyn std::error::Error,
                "the token cannot be marked as used; tried again"
            );
            return false;
        }
    }
    let approved = ("InvitedHost", "requested with a token for this host");
    answer(client, request, verdict, approved, "NotInvited").await
}

/// Writes a verdict. Whether the request needs no further look.
async fn answer(
    client: &Client,
    request: &CertificateSigningRequest,
    verdict: Verdict,
    (reason, message): (&str, &str),
    denied: &str,
) -> bool {
    let name = request.name_any();
    let (kind, reason, message) = match verdict {
        Verdict::NotOurs => return true,
        Verdict::Approve => ("Approved", reason, message.to_owned()),
        Verdict::Deny(why) => {
            tracing::warn!(request = %name, requestor = ?request.spec.username, %why, "certificate request denied");
            ("Denied", denied, why)
        }
    };
    let now = Timestamp::now().to_string();
    let condition = json!({"type": kind, "status": "True", "reason": reason, "message": message, "lastUpdateTime": now});
    let patch = json!({"metadata": {"uid": request.uid()}, "status": {"conditions": [condition]}});
    let api: Api<CertificateSigningRequest> = Api::all(client.clone());
    match api
        .patch_approval(&name, &PatchParams::default(), &Patch::Strategic(patch))
        .await
    {
        Ok(_) => true,
        Err(kube::Error::Api(status)) if status.code == 404 => true,
        Err(error) => {
            tracing::warn!(request = %name, error = &error as &dyn std::error::Error, "approval will be tried again");
            false
        }
    }
}

/// The names of the requests for an environment. Each attempt and renewal has one of its own; the label finds them all.
pub(crate) async fn of(client: &Client, environment: &str) -> Result<Vec<String>, kube::Error> {
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let found = requests.list_metadata(&labelled(environment)).await?;
    Ok(found.iter().map(ResourceExt::name_any).collect())
}

/// Deletes the requests for an environment.
pub(crate) async fn forget(client: &Client, environment: &str) -> Result<(), kube::Error> {
    delete_all(client, &labelled(environment)).await
}

/// Deletes one request. Control has the right to delete those that it selects.
pub(crate) async fn delete(client: &Client, name: &str) -> Result<(), kube::Error> {
    let only = ListParams::default().fields(&format!("metadata.name={name}"));
    delete_all(client, &only).await
}

fn labelled(environment: &str) -> ListParams {
    ListParams::default().labels(&format!("{}={environment}", labels::ENVIRONMENT))
}

async fn delete_all(client: &Client, selected: &ListParams) -> Result<(), kube::Error> {
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    requests
        .delete_collection(&DeleteParams::default(), selected)
        .await?;
    Ok(())
}

/// What a PEM-encoded PKCS #10 request asks for; none if it is none.
fn parse(pem: &[u8]) -> Option<Requested> {
    let (_, pem) = x509_parser::pem::parse_x509_pem(pem).ok()?;
    let (_, request) = X509CertificationRequest::from_der(&pem.contents).ok()?;
    let subject = &request.certification_request_info.subject;
    let texts = |attributes: Vec<&x509_parser::x509::AttributeTypeAndValue<'_>>| {
        attributes
            .into_iter()
            .map(|a| a.as_str().unwrap_or("\u{fffd}").to_owned())
            .collect::<Vec<_>>()
    };
    let mut requested = Requested {
        common_names: texts(subject.iter_common_name().collect()),
        organizations: texts(subject.iter_organization().collect()),
        ..Default::default()
    };
    for extension in request.requested_extensions().into_iter().flatten() {
        let ParsedExtension::SubjectAlternativeName(names) = extension else {
            continue;
        };
        for name in &names.general_names {
            match name {
                GeneralName::IPAddress(bytes) => match address(bytes) {
                    Some(address) => requested.addresses.push(address),
                    None => requested.other_names += 1,
                },
                _other => requested.other_names += 1,
            }
        }
    }
    Some(requested)
}

fn address(bytes: &[u8]) -> Option<std::net::IpAddr> {
    <[u8; 4]>::try_from(bytes)
        .map(std::net::IpAddr::from)
        .or_else(|_not_v4| <[u8; 16]>::try_from(bytes).map(std::net::IpAddr::from))
        .ok()
}
