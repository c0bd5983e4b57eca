//! `monopod host token`: lets one machine join.

use crate::cluster::{bootstrap, client, invitation};
use crate::flags;
use crate::settings::Layout;
use anyhow::Context;
use clap::Args;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Args, Debug)]
#[command(after_help = "Then on that machine: `monopod host join TOKEN --underlay ITS-ADDRESS`.")]
pub(crate) struct Token {
    /// Name of the machine as a Host: small letters, digits, dashes and dots
    #[arg(value_parser = flags::name)]
    host: String,
    /// Minutes after which the token is worth nothing
    #[arg(long, default_value_t = 60, value_name = "MINUTES", value_parser = clap::value_parser!(u32).range(1..=1440))]
    ttl: u32,
}

impl Token {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self { host, ttl } = self;
        let settings = layout.read_settings()?;
        let machine = settings.host.underlay.context(
            "this machine has no address for other hosts: give it with `monopod up --underlay ADDRESS` (after `monopod down`)",
        )?;
        let admin = client::connect(&layout.kubeconfig("admin")).await?;
        bootstrap::apply_host(&admin, &host).await?;
        let life = Duration::from_secs(60 * u64::from(ttl));
        let invitation = invitation::invite(&admin, layout, settings, machine, &host, life).await?;
        println!("{}", invitation.encode()?);
        Ok(ExitCode::SUCCESS)
    }
}
