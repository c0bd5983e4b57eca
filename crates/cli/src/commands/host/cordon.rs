//! `monopod host cordon` and `uncordon`: whether a machine takes new VMs.

use crate::cluster::client;
use crate::settings::Layout;
use clap::Args;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use monopod_api::host::Host;
use serde_json::json;
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Cordon {
    /// Name of the host
    host: String,
}

impl Cordon {
    pub(crate) async fn run(self, layout: &Layout, cordoned: bool) -> anyhow::Result<ExitCode> {
        let admin = client::connect(&layout.kubeconfig("admin")).await?;
        set(&admin, &self.host, cordoned).await?;
        let what = if cordoned {
            "cordoned: it takes no new pods, and keeps those that it has"
        } else {
            "takes pods again"
        };
        println!("host {} {what}", self.host);
        Ok(ExitCode::SUCCESS)
    }
}

/// Says whether a host takes new VMs.
pub(super) async fn set(admin: &Client, host: &str, cordoned: bool) -> anyhow::Result<()> {
    let api: Api<Host> = Api::all(admin.clone());
    let patch = json!({"spec": {"unschedulable": cordoned}});
    match api
        .patch(host, &PatchParams::default(), &Patch::Merge(patch))
        .await
    {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => {
            anyhow::bail!("no host {host}; see `monopod kubectl get hosts`")
        }
        Err(error) => Err(error.into()),
    }
}
