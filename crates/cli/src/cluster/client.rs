//! Kubeconfigs of an embedded cluster, and clients made from them.

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

/// Writes the kubeconfigs of all users.
pub fn write_kubeconfigs(layout: &Layout, settings: &Settings) -> anyhow::Result<()> {
    for (name, _, _) in pki::users(&settings.host_name) {
        let config = kubeconfig(layout, &settings.api_url(), &name)?;
        write(
            &layout.kubeconfig(&name),
            &serde_json::to_vec_pretty(&config)?,
        )?;
    }
    Ok(())
}

fn kubeconfig(layout: &Layout, server: &str, user: &str) -> anyhow::Result<Value> {
    let dir = layout.pki();
    let (certificate, key) = pki::files(&dir, user);
    let encoded = |path: &Path| -> anyhow::Result<String> {
        Ok(BASE64_STANDARD
            .encode(fs::read(path).with_context(|| format!("cannot read {}", path.display()))?))
    };
    Ok(json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "monopod",
        "clusters": [{"name": "monopod", "cluster": {
            "server": server, "certificate-authority-data": encoded(&pki::files(&dir, "ca").0)?,
        }}],
        "users": [{"name": user, "user": {
            "client-certificate-data": encoded(&certificate)?, "client-key-data": encoded(&key)?,
        }}],
        "contexts": [{"name": "monopod", "context": {"cluster": "monopod", "user": user}}],
    }))
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
