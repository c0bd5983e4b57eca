//! `monopod host forget`: an operator says that a machine is gone, and with it all its VMs.

use super::remove::erase;
use super::{cordon, drain};
use crate::cluster::client;
use crate::settings::Layout;
use anyhow::{bail, ensure};
use clap::Args;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use monopod_api::environment::Environment;
use monopod_api::host::Host;
use monopod_api::names;
use monopod_host::release_finalizer;
use monopod_ops::answer::absent_is_fine;
use std::process::ExitCode;
use std::time::Duration;

/// A host that is there renews its lease within this time, whatever its clock says.
const RENEWAL: Duration = Duration::from_secs(15);

#[derive(Args, Debug)]
#[command(
    after_help = "The addresses and pods of a silent host stay as they are, since its VMs may still run. \
Say that it is gone only when it has no power, or no network for good: if it runs, a pod may run twice until it is back."
)]
pub(crate) struct Forget {
    /// Name of the host
    host: String,
    /// The machine is off, and its VMs with it
    #[arg(long)]
    yes: bool,
}

impl Forget {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self { host, yes } = self;
        let admin = client::connect(&layout.kubeconfig("admin")).await?;
        let hosts: Api<Host> = Api::all(admin.clone());
        let environments: Api<Environment> = Api::all(admin.clone());
        let left = drain::environments(&admin, &host).await?.len();
        let is_there = hosts.get_opt(&host).await?.is_some();
        if !is_there && left == 0 {
            bail!(
                "no host {host}, and no environment on one of this name; see `monopod kubectl get hosts`"
            );
        }
        ensure!(
            yes,
            "host {host} has {left} environments, whose VMs are then taken to be gone; once the machine is off, repeat this with --yes"
        );
        ensure!(
            !renews(&admin, &host).await?,
            "host {host} renews its lease: it is there, and its VMs are; drain it with `monopod host drain {host}`, then remove it with `monopod host remove {host}`"
        );
        // Before the look, so that nothing is placed after it.
        if is_there {
            cordon::set(&admin, &host, true).await?;
        }
        erase(&admin, &host).await?;
        for environment in drain::environments(&admin, &host).await? {
            release(&environments, &environment).await?;
            let pod = &environment.spec.pod;
            println!(
                "{} of pod {}/{}: given up",
                environment.name_any(),
                pod.namespace,
                pod.name
            );
        }
        println!(
            "host {host} is forgotten; if the machine comes back, it takes part again after `monopod host token {host}`, and ends these VMs then at the latest"
        );
        Ok(ExitCode::SUCCESS)
    }
}

async fn renews(admin: &Client, host: &str) -> anyhow::Result<bool> {
    let leases: Api<Lease> = Api::namespaced(admin.clone(), &names::host_namespace(host));
    let Some(before) = leases.get_opt(host).await? else {
        return Ok(false);
    };
    tokio::time::sleep(RENEWAL).await;
    let after = leases.get_opt(host).await?;
    Ok(after.is_some_and(|after| after.resource_version() != before.resource_version()))
}

/// Deletes an environment in its host's place: control frees the rest.
async fn release(api: &Api<Environment>, environment: &Environment) -> anyhow::Result<()> {
    let name = environment.name_any();
    let only = DeleteParams::default().preconditions(Preconditions {
        uid: environment.uid(),
        resource_version: None,
    });
    absent_is_fine(api.delete(&name, &only).await)?;
    Ok(release_finalizer(api, environment).await?)
}
