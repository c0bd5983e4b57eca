//! Kubeconfigs of an embedded cluster, and clients made from them.

use super::parts::HOST;
use super::pki;
use crate::settings::{Layout, Settings};
use anyhow::Context;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What tells kube-proxy of a node (`kubernetes/node.go`).
const NODE_PLUGIN: &str = "monopod-host-node";

/// Writes the kubeconfigs of all users that this machine has.
pub fn write_kubeconfigs(layout: &Layout, settings: &Settings) -> anyhow::Result<()> {
    let users = match settings.joined {
        Some(_) => vec![HOST.to_owned()],
        None => pki::users(&settings.host_name)
            .into_iter()
            .map(|(name, _, _)| name)
            .collect(),
    };
    for name in users {
        let credentials = credentials(layout, &name)?;
        write_kubeconfig(layout, &name, &settings.server(), &name, &credentials)?;
    }
    // It is the host's own, asks from within the VPC, and is told of a node by its program.
    let mut proxy = credentials(layout, HOST)?;
    proxy["auth-provider"] = json!({"name": NODE_PLUGIN, "config": {"zone": settings.zone}});
    write_kubeconfig(layout, "kube-proxy", &settings.api_url(), HOST, &proxy)
}

fn credentials(layout: &Layout, user: &str) -> anyhow::Result<Value> {
    let (certificate, key) = pki::files(&layout.pki(), user);
    // The host's is renewed, and read again by who has such a file.
    Ok(if user == HOST {
        json!({"client-certificate": certificate, "client-key": key})
    } else {
        json!({
            "client-certificate-data": encoded(&certificate)?, "client-key-data": encoded(&key)?,
        })
    })
}

fn write_kubeconfig(
    layout: &Layout,
    file: &str,
    server: &str,
    user: &str,
    credentials: &Value,
) -> anyhow::Result<()> {
    let config = kubeconfig(layout, server, user, credentials)?;
    write(
        &layout.kubeconfig(file),
        &serde_json::to_vec_pretty(&config)?,
    )
}

/// A kubeconfig of who has a bootstrap token.
pub fn invited(layout: &Layout, server: &str, token: &str) -> anyhow::Result<Value> {
    kubeconfig(layout, server, "invited", &json!({"token": token}))
}

fn kubeconfig(
    layout: &Layout,
    server: &str,
    user: &str,
    credentials: &Value,
) -> anyhow::Result<Value> {
    let authority = encoded(&pki::files(&layout.pki(), "ca").0)?;
    Ok(json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "monopod",
        "clusters": [{"name": "monopod", "cluster": {
            "server": server, "certificate-authority-data": authority,
        }}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "monopod", "context": {"cluster": "monopod", "user": user}}],
    }))
}

fn encoded(path: &Path) -> anyhow::Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(BASE64_STANDARD.encode(bytes))
}

/// Writes a file that only root reads; JSON is YAML, so every Kubernetes tool reads it.
pub fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    use std::io::Write;
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(bytes)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// A client for the user of a kubeconfig.
pub async fn connect(kubeconfig: &Path) -> anyhow::Result<Client> {
    let read = Kubeconfig::read_from(kubeconfig).with_context(|| {
        format!(
            "cannot read {}: is the cluster up? (`monopod up`)",
            kubeconfig.display()
        )
    })?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}
