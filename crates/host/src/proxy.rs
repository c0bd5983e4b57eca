//! kube-proxy of this host: the services of all pods here.
//!
//! It runs in the VPC's namespace and turns a service's address into a pod's before the security
//! groups judge, so they see real pods. Its rules stay while it is started again.

use crate::Context;
use crate::hypervisor::Hypervisor;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

/// Delay before it is started again.
const RESTART: Duration = Duration::from_secs(2);
/// A larger log is set aside at the next start.
const LOG: u64 = 8 << 20;

/// How kube-proxy is run.
#[derive(Debug, Clone)]
pub struct ProxyOptions {
    /// The multi-call binary of the upstream control plane.
    pub program: PathBuf,
    /// The kubeconfig of `system:kube-proxy`.
    pub kubeconfig: PathBuf,
    /// What it prints.
    pub log: PathBuf,
}

/// Keeps it running until the token is cancelled, and ends it then.
pub(crate) async fn keep<H: Hypervisor>(context: Arc<Context<H>>, shutdown: CancellationToken) {
    loop {
        match start(&context) {
            Ok(mut child) => {
                context.metrics.proxy_starts.inc();
                tokio::select! {
                    () = shutdown.cancelled() => {
                        if let Err(error) = child.kill().await {
                            tracing::error!(%error, "kube-proxy cannot be ended");
                        }
                        return;
                    }
                    ended = child.wait() => tracing::error!(?ended, log = %context.options.proxy.log.display(), "kube-proxy ended; started again"),
                }
            }
            Err(error) => tracing::error!(%error, "kube-proxy cannot be started; tried again"),
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(RESTART) => {}
        }
    }
}

fn start<H: Hypervisor>(context: &Context<H>) -> io::Result<Child> {
    let (options, vpc) = (&context.options.proxy, &context.options.network);
    let log = open_log(&options.log)?;
    // setpriv and nsenter become the next program, so that kube-proxy is this process' child and
    // ends with it.
    Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "nsenter"])
        .arg(format!("--net={}", vpc.namespace_path().display()))
        .arg(&options.program)
        .arg("kube-proxy")
        .arg(format!("--kubeconfig={}", options.kubeconfig.display()))
        .arg(format!("--cluster-cidr={}", vpc.cidr))
        .arg(format!("--hostname-override={}", context.options.name))
        .args([
            "--proxy-mode=nftables",
            "--detect-local-mode=ClusterCIDR",
            // Pods have no node's ports: a machine is not a node.
            "--nodeport-addresses=127.0.0.0/8",
            "--healthz-bind-address=127.0.0.1:10256",
            // The namespace's own settings are the host's business.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .kill_on_drop(true)
        .spawn()
}

fn open_log(path: &Path) -> io::Result<std::fs::File> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    if path.metadata().is_ok_and(|log| log.len() > LOG) {
        std::fs::rename(path, path.with_extension("log.1"))?;
    }
    OpenOptions::new().create(true).append(true).open(path)
}
