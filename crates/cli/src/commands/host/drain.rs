//! `monopod host drain`: moves a machine's pods elsewhere, by eviction.

use super::cordon;
use crate::cluster::client;
use crate::settings::Layout;
use anyhow::{bail, ensure};
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use monopod_api::environment::{Environment, PodReference};
use monopod_ops::eviction::{Eviction, evict};
use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;
use tokio::time::Instant;

/// Time between looks.
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Args, Debug)]
#[command(
    after_help = "Cordons the host first, and evicts within disruption budgets: controllers make their pods anew on other hosts. \
It ends when no VM is left. Then the machine can be restarted, or taken out with `monopod host remove`."
)]
pub(crate) struct Drain {
    /// Name of the host
    host: String,
    /// Evict also pods that no controller makes anew
    #[arg(long)]
    force: bool,
    /// Give up after so many seconds; the host stays cordoned
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    timeout: u64,
}

impl Drain {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self {
            host,
            force,
            timeout,
        } = self;
        let deadline = Instant::now() + Duration::from_secs(timeout);
        let admin = client::connect(&layout.kubeconfig("admin")).await?;
        if !force {
            refuse_bare(&admin, &host).await?;
        }
        cordon::set(&admin, &host, true).await?;
        println!("host {host} is cordoned");
        let mut said = BTreeSet::new();
        loop {
            let left = environments(&admin, &host).await?;
            if left.is_empty() {
                println!("host {host} has no pods any more");
                return Ok(ExitCode::SUCCESS);
            }
            if Instant::now() >= deadline {
                let left: Vec<String> = left.iter().map(name).collect();
                bail!(
                    "after {timeout} s host {host} still has {}; see their disruption budgets (`monopod kubectl get pdb -A`) and finalizers, and drain it again",
                    left.join(", ")
                );
            }
            for environment in &left {
                if let Some(news) = move_on(&admin, &environment.spec.pod).await? {
                    let line = format!("{}: {news}", name(environment));
                    if said.insert(line.clone()) {
                        println!("{line}");
                    }
                }
            }
            tokio::time::sleep(PERIOD).await;
        }
    }
}

/// The environments that a host has, whatever became of their pods.
pub(super) async fn environments(admin: &Client, host: &str) -> anyhow::Result<Vec<Environment>> {
    let api: Api<Environment> = Api::all(admin.clone());
    let selected = ListParams::default().fields(&format!("spec.host={host}"));
    Ok(api.list(&selected).await?.items)
}

fn name(environment: &Environment) -> String {
    let pod = &environment.spec.pod;
    format!("{}/{}", pod.namespace, pod.name)
}

async fn pod_of(admin: &Client, reference: &PodReference) -> anyhow::Result<Option<Pod>> {
    let api: Api<Pod> = Api::namespaced(admin.clone(), &reference.namespace);
    let pod = api.get_opt(&reference.name).await?;
    Ok(pod.filter(|pod| pod.metadata.uid.as_ref() == Some(&reference.uid)))
}

/// Nobody would make them anew.
async fn refuse_bare(admin: &Client, host: &str) -> anyhow::Result<()> {
    let mut bare = Vec::new();
    for environment in environments(admin, host).await? {
        let pod = pod_of(admin, &environment.spec.pod).await?;
        let stays = |pod: &Pod| pod.metadata.deletion_timestamp.is_none();
        if pod.filter(stays).is_some_and(|pod| !has_controller(&pod)) {
            bare.push(name(&environment));
        }
    }
    ensure!(
        bare.is_empty(),
        "no controller makes {} anew; delete them yourself, or evict them too with --force",
        bare.join(", ")
    );
    Ok(())
}

fn has_controller(pod: &Pod) -> bool {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.controller == Some(true))
}

/// Asks for the pod's eviction, unless it is going already; gives what there is to say.
async fn move_on(admin: &Client, reference: &PodReference) -> anyhow::Result<Option<&'static str>> {
    let Some(pod) = pod_of(admin, reference).await? else {
        return Ok(None);
    };
    if pod.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let api: Api<Pod> = Api::namespaced(admin.clone(), &reference.namespace);
    let PodReference {
        namespace,
        name,
        uid,
    } = reference;
    Ok(Some(match evict(&api, namespace, name, uid).await? {
        Eviction::Done => "evicted",
        Eviction::Waits => "its disruption budget has no room; tried again",
    }))
}
