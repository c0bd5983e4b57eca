//! Keeps the node of a finished pod Ready: its lease is renewed with the node's own credentials.
//!
//! Without that, the node controller would find the node silent and delete the finished pod.

use crate::credentials::Issued;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Patch, PatchParams};
use kube::config::{
    AuthInfo, Cluster, Context, KubeConfigOptions, Kubeconfig, NamedAuthInfo, NamedCluster,
    NamedContext,
};
use kube::{Api, Client, Config};
use monopod_wire::Credentials;
use serde_json::json;
use std::time::Duration;
use tokio::sync::watch;

/// A quarter of the lease's 40 seconds, as the kubelet renews it.
const PERIOD: Duration = Duration::from_secs(10);

/// Renews the lease until it is dropped, with the newest credentials.
pub(crate) async fn keep(
    credentials: watch::Receiver<Option<Issued>>,
    node: String,
    api_server: String,
) {
    let mut current = None;
    loop {
        if let Err(error) = renew(&mut current, &credentials, &node, &api_server).await {
            tracing::warn!(%node, error = &*error as &dyn std::error::Error, "lease not renewed; tried again");
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// A client and the credentials that it was made of.
type Current = Option<(Credentials, Client)>;

async fn renew(
    current: &mut Current,
    credentials: &watch::Receiver<Option<Issued>>,
    node: &str,
    api_server: &str,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    // A new client, and with it a new connection, only for renewed credentials.
    let newest = credentials.borrow().clone();
    let issued = newest.ok_or("the node's credentials are not there yet")?;
    let client = match current {
        Some((of, client)) if *of == issued.credentials => client.clone(),
        Some(_) | None => {
            let client = client(&issued.credentials, api_server).await?;
            *current = Some((issued.credentials, client.clone()));
            client
        }
    };
    let api: Api<Lease> = Api::namespaced(client, "kube-node-lease");
    let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime(Timestamp::now());
    let renewal = json!({"spec": {"holderIdentity": node, "renewTime": now}});
    api.patch(node, &PatchParams::default(), &Patch::Merge(renewal))
        .await?;
    Ok(())
}

async fn client(
    credentials: &Credentials,
    api_server: &str,
) -> Result<Client, Box<dyn std::error::Error + Send + Sync>> {
    use base64::Engine;
    let encode = |text: &str| base64::prelude::BASE64_STANDARD.encode(text);
    let name = "node".to_owned();
    let kubeconfig = Kubeconfig {
        current_context: Some(name.clone()),
        clusters: vec![NamedCluster {
            name: name.clone(),
            cluster: Some(Cluster {
                server: Some(api_server.to_owned()),
                certificate_authority_data: Some(encode(&credentials.ca)),
                ..Default::default()
            }),
            ..Default::default()
        }],
        auth_infos: vec![NamedAuthInfo {
            name: name.clone(),
            auth_info: Some(AuthInfo {
                client_certificate_data: Some(encode(&credentials.client_certificate)),
                client_key_data: Some(encode(&credentials.key).into()),
                ..Default::default()
            }),
            ..Default::default()
        }],
        contexts: vec![NamedContext {
            name: name.clone(),
            context: Some(Context {
                cluster: name.clone(),
                user: Some(name),
                ..Default::default()
            }),
            ..Default::default()
        }],
        ..Default::default()
    };
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}
