//! `monopod control`: the control process.

use crate::cluster::{client, pki};
use crate::settings::{Layout, LocalPort};
use clap::Args;
use monopod_control::{Options, WebhookOptions};
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Control {}

impl Control {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self {} = self;
        monopod_ops::logs::init();
        let settings = layout.read_settings()?;
        let shutdown = monopod_ops::shutdown::on_signal()?;
        let (certificate, key) = pki::files(&layout.pki(), "webhook");
        let options = Options {
            webhook: WebhookOptions {
                address: settings.local(LocalPort::Webhook),
                certificate,
                key,
                client_ca: pki::files(&layout.pki(), "webhook-ca").0,
            },
            admin: settings.local(LocalPort::ControlAdmin),
            kubernetes_version: monopod_api::KUBERNETES_VERSION.to_owned(),
        };
        let client = client::connect(&layout.kubeconfig("control")).await?;
        monopod_control::run(client, options, shutdown).await?;
        Ok(ExitCode::SUCCESS)
    }
}
