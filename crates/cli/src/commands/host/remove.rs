//! `monopod host remove`: takes a machine without pods out of the cluster.

use super::{cordon, drain};
use crate::cluster::client;
use crate::settings::Layout;
use anyhow::ensure;
use clap::Args;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::DeleteParams;
use kube::{Api, Client};
use monopod_api::host::Host;
use monopod_api::names;
use std::process::ExitCode;

#[derive(Args, Debug)]
#[command(
    after_help = "The machine gets no pods and comes back only after `monopod host token NAME`. Stop it there with `monopod down`."
)]
pub(crate) struct Remove {
    /// Name of the host
    host: String,
}

impl Remove {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self { host } = self;
        let own = layout.read_settings()?.host_name;
        ensure!(
            host != own,
            "host {host} is the cluster's own machine; `monopod down` ends both"
        );
        let admin = client::connect(&layout.kubeconfig("admin")).await?;
        // Before the look, so that nothing is placed after it.
        cordon::set(&admin, &host, true).await?;
        let left = drain::environments(&admin, &host).await?.len();
        ensure!(
            left == 0,
            "host {host} has {left} environments; drain it first with `monopod host drain {host}`, or if its machine is gone for good, `monopod host forget {host}`"
        );
        erase(&admin, &host).await?;
        println!("host {host} is removed");
        Ok(ExitCode::SUCCESS)
    }
}

/// Removes a host's object and its namespace, without which its process takes no part in the cluster.
pub(super) async fn erase(admin: &Client, host: &str) -> anyhow::Result<()> {
    let namespaces: Api<Namespace> = Api::all(admin.clone());
    let hosts: Api<Host> = Api::all(admin.clone());
    let parameters = DeleteParams::default();
    // The right to register goes first, or the host would do so again.
    absent_is_fine(
        namespaces
            .delete(&names::host_namespace(host), &parameters)
            .await,
    )?;
    absent_is_fine(hosts.delete(host, &parameters).await)
}

pub(super) fn absent_is_fine<T>(result: Result<T, kube::Error>) -> anyhow::Result<()> {
    match result {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error.into()),
    }
}
