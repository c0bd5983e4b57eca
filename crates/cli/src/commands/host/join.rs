//! `monopod host join`: makes this machine a host of another machine's cluster.

use crate::cluster::invitation::{self, Invitation};
use crate::commands::{supervise, up};
use crate::flags;
use crate::settings::{HostSettings, Joined, Layout, Settings};
use clap::Args;
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Join {
    /// What `monopod host token` printed on the cluster's machine
    token: String,
    /// Availability zone of this machine; default: that of the cluster's machine
    #[arg(long, value_parser = flags::label)]
    zone: Option<String>,
    /// Prefix of the network namespace and interfaces on this machine; default: the cluster's
    #[arg(long, value_parser = flags::short_name)]
    name: Option<String>,
    /// First of ten ports on 127.0.0.1; default: the cluster's
    #[arg(long, value_parser = flags::base_port())]
    base_port: Option<u16>,
    /// Thousandths of a CPU for VMs; default: eight times what the machine has, as idle pods share
    #[arg(long, value_parser = flags::cpu_millis())]
    vm_cpu_millis: Option<u32>,
    /// Memory for VMs in MiB; default: three quarters of the machine's
    #[arg(long, value_parser = flags::memory_mib())]
    vm_memory_mib: Option<u32>,
    #[command(flatten)]
    host: HostSettings,
    /// Stay in the foreground and log to the terminal, for service managers
    #[arg(long)]
    foreground: bool,
}

impl Join {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let invitation = Invitation::decode(&self.token)?;
        let foreground = self.foreground;
        let settings = self.settings(&invitation)?;
        settings.check()?;
        if let Ok(stored) = layout.read_settings() {
            anyhow::ensure!(
                stored.joined == settings.joined && stored.host_name == settings.host_name,
                "{} has the data of another cluster or host; choose another --data, or remove it with `monopod down --purge`",
                layout.data.display()
            );
        }
        // Before the cluster knows of it, so that nothing is lost if this is interrupted.
        layout.write_settings(&settings)?;
        println!(
            "Joining as {} the cluster at {}.",
            settings.host_name, invitation.machine
        );
        invitation::accept(layout, &settings, &invitation).await?;
        up::start(layout, &settings, &supervise::programs()?, foreground).await
    }

    fn settings(self, invitation: &Invitation) -> anyhow::Result<Settings> {
        let of_cluster = invitation.settings.clone();
        anyhow::ensure!(
            self.host.underlay.is_some(),
            "--underlay is missing: the address of this machine, at which the cluster's other machines reach it"
        );
        Ok(Settings {
            name: self.name.unwrap_or(of_cluster.name),
            base_port: self.base_port.unwrap_or(of_cluster.base_port),
            zone: self.zone.unwrap_or(of_cluster.zone),
            host_name: invitation.host.clone(),
            vm_cpu_millis: self.vm_cpu_millis,
            vm_memory_mib: self.vm_memory_mib,
            host: self.host.with_absolute_paths()?,
            joined: Some(Joined {
                machine: invitation.machine,
            }),
            ..of_cluster
        })
    }
}
