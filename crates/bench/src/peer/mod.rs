//! An ordinary node in the measured cluster: kubelet, containerd, runc, CNI bridge.
//!
//! All that it makes lies in one directory, or carries one of the names in [`remains`], so that it
//! can be removed whatever happened to it. It refuses a machine that has a kubelet already.

mod files;
mod remains;

pub(crate) use remains::has_group;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use kube::{Api, Client};
use monopod_testkit::Cluster;
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Name of its node.
pub(super) const NODE: &str = "peer";
/// What it may take to be Ready; a few seconds on an idle machine.
const LIMIT: Duration = Duration::from_mins(2);

/// A running node, removed with all its traces when it is dropped.
#[derive(Debug)]
pub(crate) struct Peer {
    directory: PathBuf,
    children: Vec<Child>,
    // One at a time, as the names of what it makes are the same each time.
    _lock: File,
}

impl Peer {
    /// Starts it with the programs of a directory, and waits until pods can start on it.
    pub(crate) async fn join(
        programs: &Path,
        cluster: &Cluster,
        server: &str,
        client: &Client,
    ) -> Result<Self> {
        let lock = lock()?;
        remains::sweep()?;
        ensure!(
            !remains::foreign_kubelet(),
            "this machine has the control groups of another kubelet; run with --no-peer, or end that one first"
        );
        let directory = tempfile::Builder::new()
            .prefix(remains::PREFIX)
            .tempdir()?
            .keep();
        let mut peer = Self {
            directory,
            children: Vec::new(),
            _lock: lock,
        };
        remains::keep_settings(&peer.directory)?;
        files::write(&peer.directory, programs, cluster.data(), server)?;
        peer.containerd(programs).await?;
        peer.kubelet(programs)?;
        peer.await_ready(client).await?;
        Ok(peer)
    }

    /// Its own processes, as long as they live: containerd, then the kubelet.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let ids = self.children.iter().map(Child::id);
        ids.filter_map(|id| i32::try_from(id).ok()).collect()
    }

    /// What tells its processes on their command lines.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    async fn containerd(&mut self, programs: &Path) -> Result<()> {
        let config = self.directory.join("containerd.toml");
        let mut command = self.command(&programs.join("containerd"))?;
        // It finds its shim, and the shim finds runc, by this path.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", programs.display()));
        self.spawn(command.arg("--config").arg(config), "containerd")?;
        let deadline = Instant::now() + LIMIT;
        while !self.ctr(programs, &["version"])? {
            self.check(deadline, "containerd")?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        for image in ["pause.tar", "../images/busybox.tar"] {
            let archive = programs.join(image).display().to_string();
            let done = self.ctr(
                programs,
                &["--namespace", "k8s.io", "images", "import", &archive],
            )?;
            ensure!(
                done,
                "containerd does not take {archive}: {}",
                self.log("ctr")
            );
        }
        Ok(())
    }

    fn kubelet(&mut self, programs: &Path) -> Result<()> {
        let file = |name: &str| self.directory.join(name).display().to_string();
        let arguments = [
            format!("--config={}", file("kubelet.yaml")),
            format!("--kubeconfig={}", file("kubeconfig")),
            format!("--root-dir={}", file("kubelet")),
            format!("--cert-dir={}", file("kubelet-pki")),
            format!("--hostname-override={NODE}"),
            "--v=1".to_owned(),
        ];
        let mut command = self.command(&programs.join("kubelet"))?;
        self.spawn(command.args(arguments), "kubelet")
    }

    async fn await_ready(&mut self, client: &Client) -> Result<()> {
        let nodes: Api<Node> = Api::all(client.clone());
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "peers");
        let deadline = Instant::now() + LIMIT;
        loop {
            let account = accounts.get_opt("default").await?;
            let node = nodes.get_opt(NODE).await?;
            let open = node.as_ref().is_some_and(|node| {
                let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
                taints.is_none_or(Vec::is_empty)
            });
            let status = node.and_then(|node| node.status);
            let conditions = status.and_then(|status| status.conditions);
            let ready = conditions
                .iter()
                .flatten()
                .any(|c| c.type_ == "Ready" && c.status == "True");
            if ready && open && account.is_some() {
                return Ok(());
            }
            self.check(deadline, "kubelet")?;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Fails if one of the processes ended, or the time is over.
    fn check(&mut self, deadline: Instant, name: &str) -> Result<()> {
        for child in &mut self.children {
            if let Some(status) = child.try_wait()? {
                bail!(
                    "the ordinary node's {name} ended: {status}\n{}",
                    self.log(name)
                );
            }
        }
        ensure!(
            Instant::now() < deadline,
            "the ordinary node's {name} is not ready\n{}",
            self.log(name)
        );
        Ok(())
    }

    fn ctr(&self, programs: &Path, arguments: &[&str]) -> Result<bool> {
        let log = File::create(self.directory.join("ctr.log"))?;
        let status = Command::new(programs.join("ctr"))
            .arg("--address")
            .arg(self.directory.join("containerd.sock"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .status()
            .context("ctr does not start")?;
        Ok(status.success())
    }

    /// A program that is killed with this one, whatever ends it.
    fn command(&self, program: &Path) -> Result<Command> {
        ensure!(
            program.exists(),
            "{} is missing; run this by `cargo xtask bench`",
            program.display()
        );
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            // A Ctrl-C is this program's business.
            .process_group(0)
            .current_dir(&self.directory);
        Ok(command)
    }

    fn spawn(&mut self, command: &mut Command, name: &str) -> Result<()> {
        let log = File::create(self.directory.join(format!("{name}.log")))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("{name} does not start"))?;
        self.children.push(child);
        Ok(())
    }

    fn log(&self, name: &str) -> String {
        let path = self.directory.join(format!("{name}.log"));
        let text = fs::read_to_string(path).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The kubelet first: it would make anew what is removed.
        for child in self.children.iter_mut().rev() {
            let ended = child.kill().and_then(|()| child.wait());
            if let Err(error) = ended {
                eprintln!("a process of the ordinary node does not end: {error}");
            }
        }
        if let Err(error) = remains::remove(&self.directory) {
            eprintln!("the ordinary node left something behind: {error:#}");
        }
    }
}

fn lock() -> Result<File> {
    fs::create_dir_all("/run/monopod")?;
    let file = File::create("/run/monopod/peer.lock")?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)
        .context("another bench has its ordinary node on this machine; wait for its end")?;
    Ok(file)
}
