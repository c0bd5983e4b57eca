//! The reduced kubelet: registers the node, runs its one pod, serves logs and exec.
//!
//! ```text
//! metadata endpoint --> task, credentials --> Node, Lease
//!                                               |
//!        pod watch --> admission --> pod task (core::pod::lifecycle) --> containers, status
//!                                               |
//!                       server on the node's own address, for the API server alone
//! ```
//!
//! Invariants: the only pod that ever runs is the task's; the server listens before the node exists;
//! credentials are never written to a file.

mod cluster;
mod events;
#[cfg(test)]
pub(crate) mod fake_api;
mod grpc_probe;
mod handlers;
mod hooks;
mod http_probe;
mod images;
mod launch;
mod logs;
mod names;
mod plan;
mod pod;
mod prepare;
mod probes;
mod register;
mod rootfs;
mod run;
mod server;
mod shared;
mod shipper;
mod sources;
mod status;
mod stdio;
mod subpath;
mod tools;
mod volumes;
mod watch;

use crate::container;
use crate::internal::{self, now_ns};
use crate::metadata::{Metadata, MetadataError, Numbered};
use anyhow::Context as _;
use cluster::{Cluster, bounded};
use events::Recorder;
use k8s_openapi::api::core::v1::Service;
use kube::api::{Api, ListParams};
use monopod_core::pod::node::{System, is_same_minor};
use monopod_wire::{Credentials, Ended, GuestPhase, Report, Task};
use pod::Input;
use rustix::mount::{MountFlags, mount};
use shared::Shared;
use shipper::Shipper;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch as latest};
use tools::Tools;

/// Between attempts while the metadata endpoint or the API server does not answer.
const RETRY: Duration = Duration::from_millis(200);
/// Between reports to the host.
const REPORT: Duration = Duration::from_secs(15);

/// Runs this part until the VM ends.
pub(crate) fn main() -> anyhow::Result<()> {
    internal::run("node", node())
}

async fn node() -> anyhow::Result<()> {
    let metadata = Metadata::well_known();
    let (task, first) = tokio::join!(until(|| metadata.task()), until(|| metadata.credentials(0)),);
    phase(metadata, "credentials");
    if !is_same_minor(&task.kubernetes_version) {
        let message = format!(
            "the control plane is {}, but this runtime is built for {}: use a runtime of the control plane's minor version",
            task.kubernetes_version,
            monopod_api::KUBERNETES_VERSION
        );
        tracing::error!(message);
        end(metadata, &Ended::Failed { message }).await;
        return std::future::pending().await;
    }
    let client = cluster::client(&task.api_server, &first.value)?;
    let (clients, current) = latest::channel(client);
    let (credentials, current_credentials) = latest::channel(first.value);
    tokio::spawn(renew(
        metadata,
        task.api_server.clone(),
        first.version,
        clients,
        credentials,
    ));
    let cluster = Cluster::new(current);
    let outcome = run(metadata, Arc::new(task), cluster, current_credentials).await;
    if let Err(error) = &outcome {
        // The exit code alone would say nothing.
        let message = format!("{error:#}");
        end(metadata, &Ended::Failed { message }).await;
    }
    outcome
}

/// Says that the VM is to end, until it was heard.
async fn end(metadata: Metadata, ended: &Ended) {
    until(|| async { metadata.ended(ended).await.map(Some) }).await;
}

async fn run(
    metadata: Metadata,
    task: Arc<Task>,
    cluster: Cluster,
    credentials: latest::Receiver<Credentials>,
) -> anyhow::Result<()> {
    let shared = Shared::default();
    let (services, listed) = latest::channel(None);
    let tools = Tools {
        recorder: Recorder::start(cluster.clone(), task.node.clone()),
        task: Arc::clone(&task),
        cluster: cluster.clone(),
        metadata,
        spare: launch::Spare::default(),
        shared: shared.clone(),
        shipper: Shipper::start(metadata),
        services: listed,
    };
    std::fs::create_dir_all(plan::SHARED_MEMORY)?;
    mount(
        "shm",
        plan::SHARED_MEMORY,
        "tmpfs",
        MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC,
        Some(c"mode=1777,size=65536k"),
    )
    .context("cannot mount the pod's shared memory")?;
    let cgroup = format!("{}{}", container::CGROUP_ROOT, container::CGROUP_PARENT);
    container::restrict(&cgroup).context("cannot restrict the devices of containers")?;
    server::start(credentials, shared.clone())
        .await
        .context("the server cannot listen")?;
    let (inputs, received) = pod::channel();
    tokio::spawn(poll_images(metadata, inputs.clone()));

    let system = system();
    let uid = register::register(&cluster, &task, &system).await?;
    tools.phase("registered");
    // Not before: every handshake takes long under emulation, and the later ones take up the session
    // of the first. A pod that was bound meanwhile is in the list with which the watch begins.
    let watched = tokio::spawn(watch::watch_pods(tools.clone(), inputs, received));
    tokio::spawn(list_services(
        cluster.clone(),
        task.pod.namespace.clone(),
        services,
    ));
    tools.spare.prepare();
    tokio::spawn(register::keep(
        cluster.clone(),
        Arc::clone(&task),
        system,
        uid,
    ));
    tokio::spawn(report(metadata, shared));
    watched.await?;
    // The VM ends by the word of the pod's task, or of the host.
    std::future::pending().await
}

/// Asks again and again until there is an answer.
async fn until<T, F, A>(ask: F) -> T
where
    F: Fn() -> A,
    A: Future<Output = Result<Option<T>, MetadataError>>,
{
    loop {
        match ask().await {
            Ok(Some(answer)) => return answer,
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(error = %internal_chain(&error), "no answer from the platform");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// An error with its sources.
fn internal_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

fn phase(metadata: Metadata, name: &'static str) {
    let phase = GuestPhase {
        name: name.to_owned(),
        time_ns: now_ns(),
    };
    tokio::spawn(async move {
        if let Err(error) = metadata.phase(&phase).await {
            tracing::warn!(%error, name, "a phase was not told");
        }
    });
}

/// Follows the credentials, for ever.
async fn renew(
    metadata: Metadata,
    api_server: String,
    mut version: u64,
    clients: latest::Sender<kube::Client>,
    credentials: latest::Sender<Credentials>,
) {
    loop {
        let Numbered {
            version: newer,
            value,
        } = until(|| async { metadata.credentials(version).await }).await;
        version = newer;
        match cluster::client(&api_server, &value) {
            Ok(client) => {
                clients.send_replace(client);
                credentials.send_replace(value);
                tracing::info!(version, "credentials were renewed");
            }
            Err(error) => tracing::error!(%error, "renewed credentials cannot be used"),
        }
    }
}

/// Follows the images, for ever.
async fn poll_images(metadata: Metadata, inputs: mpsc::Sender<Input>) {
    let mut version = 0;
    loop {
        let images = until(|| async { metadata.images(version).await }).await;
        version = images.version;
        if inputs.send(Input::Images(images.value)).await.is_err() {
            return;
        }
    }
}

/// Lists the services once, as the kubelet must before any container starts.
async fn list_services(
    cluster: Cluster,
    namespace: String,
    services: latest::Sender<Option<Vec<Service>>>,
) {
    loop {
        let own: Api<Service> = Api::namespaced(cluster.client(), &namespace);
        let default: Api<Service> = Api::namespaced(cluster.client(), "default");
        let parameters = ListParams::default();
        let (list, kubernetes) = tokio::join!(
            bounded(own.list(&parameters)),
            bounded(default.get_opt("kubernetes"))
        );
        match (list, kubernetes) {
            (Ok(list), Ok(kubernetes)) => {
                let mut all = list.items;
                all.extend(kubernetes);
                services.send_replace(Some(all));
                return;
            }
            (Err(error), _) | (_, Err(error)) => {
                tracing::warn!(%error, "services cannot be listed");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// Gives the host figures, for ever.
async fn report(metadata: Metadata, shared: Shared) {
    loop {
        let values = BTreeMap::from([
            ("memory_available_bytes".to_owned(), memory_available()),
            ("cpu_usage_usec".to_owned(), cpu_usage()),
            ("containers_running".to_owned(), shared.running() as u64),
        ]);
        if let Err(error) = metadata.report(&Report { values, number: 0 }).await {
            tracing::warn!(%error, "figures were not told");
        }
        tokio::time::sleep(REPORT).await;
    }
}

fn memory_available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|number| number.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

fn cpu_usage() -> u64 {
    let text = std::fs::read_to_string("/sys/fs/cgroup/pod/cpu.stat").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("usage_usec "))
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

fn system() -> System {
    let text = |path: &str| {
        std::fs::read_to_string(path)
            .unwrap_or_default()
            .trim()
            .to_owned()
    };
    let boot_id = text("/proc/sys/kernel/random/boot_id");
    System {
        kernel: rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned(),
        machine_id: boot_id.replace('-', ""),
        boot_id,
    }
}
