//! The host process: VMs, images and the VPC's data plane of one machine.
//!
//! It watches the environments that name it and gives each an [owner](owner) task, which holds
//! everything of one VM. It writes only status, of its own objects. If the API server is away,
//! everything goes on as it is.

mod archive;
mod credentials;
mod environments;
mod files;
mod finished;
mod garbage;
mod go;
pub mod hypervisor;
pub mod identity;
pub mod images;
mod lease;
mod machine;
mod metrics;
pub mod network;
mod owner;
mod policy;
pub mod proxy;
mod pull_credentials;
mod registration;
pub mod registry;
mod status;

use hypervisor::qemu::{Qemu, QemuConfig};
use hypervisor::{Hypervisor, HypervisorError};
use identity::{Identity, IdentityError};
use images::{ImageError, Store};
use kube::Client;
use monopod_core::image::endpoints::Registries;
use monopod_core::image::garbage::Limits;
use monopod_ops::admin::Readiness;
use network::{NetworkError, Vpc};
pub use owner::release_finalizer;
use prometheus_client::registry::Registry;
use registry::Puller;
use serde::Deserialize;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// How the host process is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// The VPC on this machine.
    pub network: Vpc,
    /// URL of the API server, as guests reach it.
    pub api_server: String,
    /// The same, as this machine reaches it.
    pub own_api_server: String,
    /// The cluster's certificate authority, PEM.
    pub cluster_ca: String,
    /// Address of the cluster's DNS service.
    pub cluster_dns: Ipv4Addr,
    /// Domain of the cluster's DNS.
    pub cluster_domain: String,
    /// Where `/healthz`, `/readyz` and `/metrics` are served.
    pub admin: SocketAddr,
    /// Images, VMs and credentials are kept here.
    pub directory: PathBuf,
    /// Directory of the guest image.
    pub guest: PathBuf,
    /// How kube-proxy is run.
    pub proxy: proxy::ProxyOptions,
    /// Name of the Host object.
    pub name: String,
    /// Region of this machine.
    pub region: String,
    /// Availability zone of this machine.
    pub zone: String,
    /// Most VMs that are kept ready before they are needed.
    pub pool: usize,
    /// Memory for VMs in MiB; none: three quarters of the machine's.
    pub vm_memory_mib: Option<u32>,
    /// Thousandths of a CPU for VMs; none: eight times what the machine has.
    pub vm_cpu_millis: Option<u32>,
    /// Mirrors, certificates and registries without TLS.
    pub registries: Registries,
    /// When unused images are removed.
    pub image_limits: Limits,
}

/// Why the host process ended.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The guest image cannot be used.
    #[error("guest image {path} cannot be used; build it with `cargo xtask build`")]
    GuestImage {
        /// Its `release.json`.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// This host is nobody to the API server.
    #[error("the API server cannot be asked as this host")]
    Identity(#[from] IdentityError),
    /// VMs cannot be run.
    #[error("virtual machines cannot be run")]
    Hypervisor(#[from] HypervisorError),
    /// The network cannot be used.
    #[error("the VPC's network cannot be used")]
    Network(#[from] NetworkError),
    /// The image store cannot be used.
    #[error("the image store cannot be used")]
    Images(#[from] ImageError),
    /// The admin server failed.
    #[error("the admin server failed")]
    Admin(#[source] std::io::Error),
    /// The directory cannot be used.
    #[error("{path} cannot be used")]
    Directory {
        /// Which one.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// What `release.json` of a guest image says.
#[derive(Debug, Clone, Deserialize)]
struct Release {
    kubernetes_version: String,
}

/// What all parts of the host process share.
pub(crate) struct Context<H> {
    pub(crate) client: Client,
    pub(crate) options: Options,
    pub(crate) hypervisor: H,
    pub(crate) images: Store,
    pub(crate) puller: Puller,
    pub(crate) pull_credentials: pull_credentials::Given,
    pub(crate) in_use: garbage::InUse,
    pub(crate) metrics: metrics::Metrics,
    pub(crate) runtime_version: String,
}

/// Runs until the token is cancelled. VMs go on after that; the next host process adopts them.
pub async fn run(
    identity: Identity,
    options: Options,
    shutdown: CancellationToken,
) -> Result<(), HostError> {
    let release = read_release(&options.guest)?;
    for directory in ["credentials", "images", "logs"].map(|name| options.directory.join(name)) {
        std::fs::create_dir_all(&directory).map_err(|source| HostError::Directory {
            path: directory,
            source,
        })?;
    }
    network::ensure(&options.network).await?;
    let (client, renewal) = identity::client(identity, &options.name).await?;
    let config = QemuConfig {
        directory: options.directory.clone(),
        guest_image: options.guest.clone(),
        network: options.network.clone(),
        pool: options.pool,
    };
    let hypervisor = Qemu::new(config).await?;
    if let Some(reason) = &hypervisor.limits().reason {
        tracing::warn!(reason, "VMs may take more of this machine than their size");
    }
    let images = Store::open(&options.directory.join("images"))?;
    let puller = Puller::new(images.clone(), options.registries.clone())?;
    let (pull_credentials, credentials) =
        pull_credentials::follow(client.clone(), &options.name, shutdown.clone());
    let mut registry = Registry::with_prefix("monopod_host");
    let metrics = metrics::Metrics::register(&mut registry);
    let readiness = Readiness::default();
    let admin = options.admin;
    let context = Arc::new(Context {
        client,
        options,
        hypervisor,
        images,
        puller,
        pull_credentials,
        in_use: garbage::InUse::default(),
        metrics,
        runtime_version: release.kubernetes_version,
    });
    let registration =
        registration::keep(Arc::clone(&context), readiness.clone(), shutdown.clone());
    let (view, policy) = policy::keep(&context, &readiness, &shutdown);
    let environments = environments::follow(
        Arc::clone(&context),
        view,
        readiness.clone(),
        shutdown.clone(),
    );
    let garbage = garbage::keep(Arc::clone(&context), readiness.clone(), shutdown.clone());
    let proxy = proxy::keep(Arc::clone(&context), shutdown.clone());
    let renewal = renewal.keep(shutdown.clone());
    let server = monopod_ops::admin::serve(admin, readiness, Arc::new(registry), shutdown.clone());
    tokio::select! {
        result = server => result.map_err(HostError::Admin)?,
        () = async { tokio::join!(registration, policy, environments, proxy, credentials, garbage, renewal); } => {}
    }
    Ok(())
}

fn read_release(guest: &Path) -> Result<Release, HostError> {
    let path = guest.join("release.json");
    std::fs::read(&path)
        .and_then(|text| Ok(serde_json::from_slice(&text)?))
        .map_err(|source| HostError::GuestImage { path, source })
}

/// Ends every VM of a host's directory, once its host process has ended.
pub async fn end_vms(directory: &Path) -> Result<(), HostError> {
    Ok(hypervisor::qemu::discard_all(directory).await?)
}
