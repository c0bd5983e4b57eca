//! Keeps the node of a finished pod Ready: its lease is renewed, and it says that it is fine when
//! that is not stored, both with the node's own credentials.
//!
//! Without that, the node controller would find the node silent and delete the finished pod.

use crate::credentials::Issued;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use kube::config::{
    AuthInfo, Cluster, Context, KubeConfigOptions, Kubeconfig, NamedAuthInfo, NamedCluster,
    NamedContext,
};
use kube::{Api, Client, Config};
use monopod_core::pod::node;
use monopod_wire::Credentials;
use serde_json::json;
use tokio::sync::watch;

/// Renews the lease, and keeps the node's status, until it is dropped, with the newest credentials.
pub(crate) async fn keep(
    credentials: watch::Receiver<Option<Issued>>,
    name: String,
    api_server: String,
) {
    let mut current = None;
    loop {
        let spoken = speak(&mut current, &credentials, &name, &api_server);
        let spoken = tokio::time::timeout(node::RENEW, spoken).await;
        if let Err(error) = spoken.unwrap_or_else(|late| Err(late.into())) {
            tracing::warn!(node = %name, error = &*error as &dyn std::error::Error, "node not kept ready; tried again");
        }
        tokio::time::sleep(node::RENEW).await;
    }
}

/// A client and the credentials that it was made of.
type Current = Option<(Credentials, Client)>;

async fn speak(
    current: &mut Current,
    credentials: &watch::Receiver<Option<Issued>>,
    name: &str,
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
    let nodes: Api<Node> = Api::all(client.clone());
    let leases: Api<Lease> = Api::namespaced(client, "kube-node-lease");
    let now = Timestamp::now();
    let renewal = json!({"spec": node::lease_spec(name, now)});
    let renewed = leases
        .patch(name, &PatchParams::default(), &Patch::Merge(renewal))
        .await;
    let Some(stored) = nodes.get_opt(name).await? else {
        // The pod that was on it goes too.
        return Ok(());
    };
    match renewed {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {
            let uid = stored.metadata.uid.as_deref().unwrap_or_default();
            let again = node::lease(name, uid, now);
            leases.create(&PostParams::default(), &again).await?;
        }
        Err(error) => return Err(error.into()),
    }
    if node::must_tell(&stored, now) {
        let status = json!({"status": {"conditions": node::conditions(Some(&stored), now)}});
        let patch = Patch::Strategic(status);
        nodes
            .patch_status(name, &PatchParams::default(), &patch)
            .await?;
    }
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
