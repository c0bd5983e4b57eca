//! `monopod host run`: the host process.

use crate::cluster::parts::HOST;
use crate::cluster::{pki, supervisor};
use crate::settings::{Layout, LocalPort};
use clap::Args;
use monopod_host::identity::Identity;
use monopod_host::proxy::ProxyOptions;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Run {
    /// Directory with the kernel and initial file system of guests
    #[arg(long)]
    guest: PathBuf,
    /// The multi-call binary with kube-proxy
    #[arg(long)]
    kubernetes: PathBuf,
}

impl Run {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self { guest, kubernetes } = self;
        monopod_ops::logs::init();
        let settings = layout.read_settings()?;
        let shutdown = monopod_ops::shutdown::on_signal()?;
        let options = monopod_host::Options {
            network: supervisor::network(&settings),
            api_server: settings.api_url(),
            own_api_server: settings.server(),
            cluster_ca: std::fs::read_to_string(pki::files(&layout.pki(), "ca").0)?,
            cluster_dns: settings.cluster_dns(),
            cluster_domain: settings.cluster_domain.clone(),
            admin: settings.local(LocalPort::HostAdmin),
            directory: layout.host(),
            guest,
            proxy: ProxyOptions {
                program: kubernetes,
                kubeconfig: layout.kubeconfig("kube-proxy"),
                log: layout.log("kube-proxy"),
            },
            name: settings.host_name.clone(),
            region: settings.region.clone(),
            zone: settings.zone.clone(),
            pool: settings.host.pool,
            vm_memory_mib: settings.vm_memory_mib,
            vm_cpu_millis: settings.vm_cpu_millis,
            registries: settings.host.read_registries()?,
            image_limits: settings.host.limits(),
        };
        let (certificate, key) = pki::files(&layout.pki(), HOST);
        let identity = Identity {
            kubeconfig: layout.kubeconfig(HOST),
            certificate,
            key,
        };
        monopod_host::run(identity, options, shutdown).await?;
        Ok(ExitCode::SUCCESS)
    }
}
