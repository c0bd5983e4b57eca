//! `monopod control`: the control process.

use crate::cluster::{client, pki};
use crate::settings::{Layout, LocalPort};
use clap::Args;
use monopod_api::labels;
use monopod_control::{Candidate, Options, WebhookOptions};
use std::net::SocketAddr;
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Control {
    /// Name of this replica: one acts, and each needs a name of its own
    #[arg(long)]
    identity: Option<String>,
    /// Where it serves `/readyz` and `/metrics`, instead of the cluster's port for it
    #[arg(long)]
    admin_address: Option<SocketAddr>,
}

impl Control {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self {
            identity,
            admin_address,
        } = self;
        monopod_ops::logs::init();
        let settings = layout.read_settings()?;
        let shutdown = monopod_ops::shutdown::on_signal()?;
        let options = Options {
            webhook: WebhookOptions {
                address: settings.local(LocalPort::Webhook),
                client_ca: pki::files(&layout.pki(), "webhook-ca").0,
                region: settings.region.clone(),
            },
            admin: admin_address.unwrap_or_else(|| settings.local(LocalPort::ControlAdmin)),
            kubernetes_version: monopod_api::KUBERNETES_VERSION.to_owned(),
            candidate: Candidate {
                namespace: "kube-system".to_owned(),
                name: labels::CONTROL_LEASE.to_owned(),
                identity: identity.unwrap_or_else(|| settings.host_name.clone()),
            },
            max_profiles: settings.max_profiles,
            certificate_lifetime: settings.certificate_lifetime,
        };
        let client = client::connect(&layout.kubeconfig("control")).await?;
        monopod_control::run(client, options, shutdown).await?;
        Ok(ExitCode::SUCCESS)
    }
}
