//! `monopod doctor`: what is wrong with this machine and its cluster, and what to do about it.

use super::status::Output;
use crate::cluster::client;
use crate::commands::up::running;
use crate::settings::{Layout, Settings};
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::ListParams;
use kube::{Api, Client, Resource, ResourceExt};
use monopod_api::network::{SecurityGroup, Vpc};
use monopod_api::profile::PodExecutionRole;
use monopod_core::doctor::{Cluster, Finding, Machine, cluster, machine, strays};
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

/// Programs that a host runs, and the Debian packages that bring them.
const PROGRAMS: [(&str, &str); 7] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("nft", "nftables"),
    ("sqfstar", "squashfs-tools"),
    ("mkfs.ext4", "e2fsprogs"),
    ("ip", "iproute2"),
    ("nsenter", "util-linux"),
    ("sysctl", "procps"),
];
/// How long the API server may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Args, Debug)]
#[command(after_help = "Exits with 1 if it finds something.")]
pub(crate) struct Doctor {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Doctor {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let settings = layout.read_settings().ok();
        let here = this_machine(layout, settings.as_ref());
        let mut findings = machine(&here);
        match &settings {
            None => findings.push(Finding {
                subject: "this machine".to_owned(),
                problem: format!("no cluster in {}", layout.data.display()),
                remedy: "run `monopod up`, or name its --data directory".to_owned(),
            }),
            Some(_) if !running(layout)? => findings.push(Finding {
                subject: "this cluster".to_owned(),
                problem: "it does not run".to_owned(),
                remedy: "run `monopod up`".to_owned(),
            }),
            Some(settings) => match whole_cluster(layout, settings).await {
                Ok(all) => {
                    findings.extend(cluster(&all, Timestamp::now()));
                    findings.extend(strays(&here, &all));
                }
                Err(error) => findings.push(Finding {
                    subject: "API server".to_owned(),
                    problem: format!("it does not answer: {error:#}"),
                    remedy:
                        "see `monopod status` and logs/kube-apiserver.log in the data directory"
                            .to_owned(),
                }),
            },
        }
        findings.sort();
        match self.output {
            Output::Json => println!("{}", serde_json::to_string_pretty(&findings)?),
            Output::Table => print(&findings),
        }
        Ok(if findings.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

fn print(findings: &[Finding]) {
    if findings.is_empty() {
        println!("Nothing is wrong.");
    }
    for Finding {
        subject,
        problem,
        remedy,
    } in findings
    {
        println!("{subject}: {problem}\n    {remedy}");
    }
}

fn this_machine(layout: &Layout, settings: Option<&Settings>) -> Machine {
    Machine {
        missing_programs: PROGRAMS
            .into_iter()
            .filter(|(program, _package)| !is_installed(program))
            .collect(),
        missing_features: missing_features(),
        disk: disk(&layout.data),
        vms: layout.environments().into_iter().collect(),
        host: settings.map(|s| s.host_name.clone()).unwrap_or_default(),
        joined: settings.is_some_and(|s| s.joined.is_some()),
    }
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// What the kernel cannot do, found out by doing it where nothing else shows it.
fn missing_features() -> Vec<(&'static str, &'static str)> {
    let mut missing = Vec::new();
    if !Path::new("/dev/net/tun").exists() {
        missing.push(("tap devices", "CONFIG_TUN"));
    }
    if !Path::new("/proc/self/ns/net").exists() {
        missing.push(("network namespaces", "CONFIG_NET_NS"));
    }
    // Lists nothing, but asks the kernel.
    let nft = Command::new("nft")
        .args(["list", "tables"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if nft.is_ok_and(|status| !status.success()) {
        missing.push(("nftables", "CONFIG_NF_TABLES"));
    }
    missing
}

/// Free and all bytes of the disk that a directory is on, or will be.
fn disk(data: &Path) -> Option<(u64, u64)> {
    let there = data.ancestors().find(|path| path.exists())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    Some((
        disk.f_bavail.saturating_mul(disk.f_frsize),
        disk.f_blocks.saturating_mul(disk.f_frsize),
    ))
}

/// A machine that joined sees only what its host may.
async fn whole_cluster(layout: &Layout, settings: &Settings) -> anyhow::Result<Cluster> {
    let client = client::connect(&layout.kubeconfig(settings.user())).await?;
    let mut all = Cluster::default();
    tokio::time::timeout(PATIENCE, gather(&client, settings, &mut all)).await??;
    Ok(all)
}

async fn gather(client: &Client, settings: &Settings, all: &mut Cluster) -> anyhow::Result<()> {
    let undefined = &mut all.undefined;
    all.subnets = list(client, undefined).await?;
    all.interfaces = list(client, undefined).await?;
    all.hosts = list(client, undefined).await?;
    all.environments = list(client, undefined).await?;
    if settings.joined.is_some() {
        let pods = all.environments.iter().map(|e| e.spec.pod.uid.clone());
        all.pods = pods.collect();
        return Ok(());
    }
    list::<Vpc>(client, undefined).await?;
    list::<SecurityGroup>(client, undefined).await?;
    list::<PodExecutionRole>(client, undefined).await?;
    all.profiles = Some(list(client, undefined).await?);
    all.leases = list(client, undefined).await?;
    all.daemon_sets = list(client, undefined).await?;
    let nodes: Vec<Node> = list(client, undefined).await?;
    all.nodes = nodes.iter().map(ResourceExt::name_any).collect();
    let mut pods: Vec<Pod> = list(client, undefined).await?;
    all.pods = pods.iter().filter_map(ResourceExt::uid).collect();
    let has_node = |pod: &Pod| pod.spec.as_ref().is_some_and(|s| s.node_name.is_some());
    pods.retain(|pod| !has_node(pod));
    all.waiting = pods;
    Ok(())
}

/// All objects of a kind, or none and the name of its definition if that is gone.
async fn list<K>(client: &Client, undefined: &mut BTreeSet<String>) -> anyhow::Result<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let api: Api<K> = Api::all(client.clone());
    match api.list(&ListParams::default()).await {
        Ok(list) => Ok(list.items),
        Err(kube::Error::Api(status)) if status.code == 404 => {
            undefined.insert(format!("{}.{}", K::plural(&()), K::group(&())));
            Ok(Vec::new())
        }
        Err(error) => Err(error.into()),
    }
}
