//! Keeps the processes of an embedded cluster running, and stops them in order.
//!
//! It runs detached from the command that started it, holds a lock for as long as it lives, and
//! writes what it has reached to a file that `up` and `status` read. A part that dies is started
//! again after a short delay. If the supervisor itself dies, its parts die with it; VMs do not.

use super::parts::{self, Part, Programs, Ready};
use super::{bootstrap, client, pki};
use crate::settings::{Joined, Layout, LocalPort, Settings};
use anyhow::Context;
use monopod_host::network::{Api, Underlay, Vpc};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// How long a part may take to become ready on a busy small machine.
const READY_LIMIT: Duration = Duration::from_mins(2);
/// Delay before a part that died is started again; long enough not to spin.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// What the supervisor has reached.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Progress {
    /// Phases in order.
    pub phases: Vec<Phase>,
    /// Whether everything is up.
    pub ready: bool,
    /// Why it gave up.
    pub error: Option<String>,
}

impl Progress {
    /// As it was written last; nothing yet if it was not.
    pub fn read(layout: &Layout) -> Self {
        fs::read(layout.progress())
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default()
    }
}

/// A phase of bringing the cluster up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Phase {
    /// What is being done.
    pub name: String,
    /// How long it took, once it is done.
    pub seconds: Option<f64>,
    /// How often the part was started again.
    #[serde(default)]
    pub restarts: u32,
    /// The process, if it is one and runs.
    #[serde(default)]
    pub pid: Option<i32>,
}

/// Tells a supervisor to end without ending VMs and the network, for the next one.
pub const HAND_OVER: Signal = Signal::USR1;

/// Runs until SIGTERM or [`HAND_OVER`]; the caller holds the lock.
pub async fn run(layout: Layout, settings: Settings, programs: Programs) -> anyhow::Result<()> {
    let shutdown = monopod_ops::shutdown::on_signal()?;
    let handed_over = Arc::new(AtomicBool::new(false));
    let mut asked = signal(SignalKind::from_raw(HAND_OVER.as_raw()))?;
    let (flag, token) = (Arc::clone(&handed_over), shutdown.clone());
    let _waits = AbortOnDropHandle::new(tokio::spawn(async move {
        if asked.recv().await.is_some() {
            flag.store(true, Ordering::Relaxed);
            token.cancel();
        }
    }));
    let mut supervisor = Supervisor {
        layout,
        settings,
        programs,
        progress: Progress::default(),
        running: Vec::new(),
        handed_over,
    };
    supervisor.report();
    let has_vms = !supervisor.layout.environments().is_empty();
    if let Err(error) = supervisor.bring_up(&shutdown).await {
        if !shutdown.is_cancelled() {
            supervisor.progress.error = Some(format!("{error:#}"));
            // They ran before, and pods do not notice an upgrade that fails.
            supervisor.handed_over.store(has_vms, Ordering::Relaxed);
        }
        supervisor.report();
        supervisor.stop().await;
        return Err(error);
    }
    supervisor.progress.ready = true;
    supervisor.report();
    supervisor.watch(&shutdown).await;
    supervisor.stop().await;
    Ok(())
}

struct Running {
    part: Part,
    child: Child,
    phase: usize,
}

struct Supervisor {
    layout: Layout,
    settings: Settings,
    programs: Programs,
    progress: Progress,
    running: Vec<Running>,
    /// VMs and the network are left to the next supervisor.
    handed_over: Arc<AtomicBool>,
}

impl Supervisor {
    async fn bring_up(&mut self, shutdown: &CancellationToken) -> anyhow::Result<()> {
        let started = self.begin("keys");
        self.keys()?;
        self.done(started);
        let started = self.begin("network");
        monopod_host::network::ensure(&network(&self.settings))
            .await
            .context("cannot set up the VPC's network namespace")?;
        self.done(started);
        if self.settings.joined.is_some() {
            let host = parts::host(&self.layout, &self.programs);
            return self.start(host, shutdown).await;
        }
        for part in parts::api(&self.layout, &self.settings, &self.programs) {
            self.start(part, shutdown).await?;
        }
        let started = self.begin("definitions");
        let admin = client::connect(&self.layout.kubeconfig("admin")).await?;
        bootstrap::apply(&admin, &self.settings).await?;
        self.done(started);
        for part in parts::controllers(&self.layout, &self.settings, &self.programs) {
            self.start(part, shutdown).await?;
        }
        let started = self.begin("service account");
        bootstrap::await_service_account(&admin, READY_LIMIT).await?;
        self.done(started);
        Ok(())
    }

    fn keys(&self) -> anyhow::Result<()> {
        if self.settings.joined.is_some() {
            return client::write_kubeconfigs(&self.layout, &self.settings);
        }
        let api_addresses = [
            self.settings.api_address(),
            self.settings.kubernetes_service(),
            Ipv4Addr::LOCALHOST,
        ];
        let names = pki::Names {
            api_addresses: api_addresses
                .into_iter()
                .chain(self.settings.host.underlay)
                .map(IpAddr::V4)
                .collect(),
            cluster_domain: self.settings.cluster_domain.clone(),
            host: self.settings.host_name.clone(),
        };
        pki::ensure(&self.layout.pki(), &names)?;
        client::write_kubeconfigs(&self.layout, &self.settings)?;
        let webhook =
            serde_json::to_vec_pretty(&parts::webhook_kubeconfig(&self.layout, &self.settings))?;
        client::write(&self.layout.kubeconfig("apiserver-webhook"), &webhook)?;
        let authentication = serde_json::to_vec_pretty(&parts::authentication_configuration())?;
        client::write(
            &self.layout.data.join("authentication.json"),
            &authentication,
        )?;
        let admission = serde_json::to_vec_pretty(&parts::admission_configuration(&self.layout))?;
        client::write(&self.layout.data.join("admission.json"), &admission)
    }

    async fn start(&mut self, part: Part, shutdown: &CancellationToken) -> anyhow::Result<()> {
        let started = self.begin(part.name);
        let child = spawn(&self.layout, &self.programs, &part)?;
        let phase = self.progress.phases.len() - 1;
        self.progress.phases[phase].pid = child.id().and_then(|pid| pid.try_into().ok());
        let log = self.layout.log(part.name);
        self.running.push(Running { part, child, phase });
        let deadline = Instant::now() + READY_LIMIT;
        loop {
            let (settings, layout) = (self.settings.clone(), self.layout.clone());
            let Some(last) = self.running.last_mut() else {
                return Ok(());
            };
            if let Some(status) = last.child.try_wait()? {
                anyhow::bail!(
                    "{} ended with {status}; see {}",
                    last.part.name,
                    log.display()
                );
            }
            if is_ready(&layout, &settings, &last.part.ready).await {
                break;
            }
            if Instant::now() >= deadline {
                anyhow::bail!(
                    "{} was not ready after {READY_LIMIT:?}; see {}",
                    last.part.name,
                    log.display()
                );
            }
            tokio::select! {
                () = shutdown.cancelled() => anyhow::bail!("stopped while starting {}", last.part.name),
                () = tokio::time::sleep(Duration::from_millis(50)) => {}
            }
        }
        self.done(started);
        Ok(())
    }

    /// Starts again what dies, until the token is cancelled.
    async fn watch(&mut self, shutdown: &CancellationToken) {
        loop {
            let waits = self.running.iter_mut().map(|r| Box::pin(r.child.wait()));
            let (status, index) = tokio::select! {
                () = shutdown.cancelled() => return,
                (status, index, _) = futures::future::select_all(waits) => (status, index),
            };
            let name = self.running[index].part.name;
            tracing::warn!(part = name, ?status, "a part died; it is started again");
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(RESTART_DELAY) => {}
            }
            match spawn(&self.layout, &self.programs, &self.running[index].part) {
                Ok(child) => {
                    let phase = &mut self.progress.phases[self.running[index].phase];
                    phase.restarts += 1;
                    phase.pid = child.id().and_then(|pid| pid.try_into().ok());
                    self.running[index].child = child;
                }
                Err(error) => {
                    tracing::error!(
                        part = name,
                        error = format!("{error:#}"),
                        "cannot be started again; tried once more soon"
                    );
                }
            }
            self.report();
        }
    }

    /// Stops the parts in reverse order, VMs after their host, and removes the network; these two are
    /// kept if another supervisor takes over.
    async fn stop(&mut self) {
        let keep = self.handed_over.load(Ordering::Relaxed);
        self.progress.ready = false;
        while let Some(mut running) = self.running.pop() {
            let Some(pid) = running
                .child
                .id()
                .and_then(|pid| i32::try_from(pid).ok())
                .and_then(Pid::from_raw)
            else {
                continue;
            };
            if let Err(error) = rustix::process::kill_process(pid, Signal::TERM) {
                tracing::debug!(part = running.part.name, %error, "already gone");
            }
            let grace = Duration::from_secs(running.part.grace_seconds);
            if tokio::time::timeout(grace, running.child.wait())
                .await
                .is_err()
            {
                tracing::warn!(part = running.part.name, "did not stop in time; killed");
                if let Err(error) = running.child.kill().await {
                    tracing::error!(part = running.part.name, %error, "cannot be killed");
                }
            }
            // Before the API server stops, which waits for those who watch it.
            if running.part.name == parts::HOST
                && !keep
                && let Err(error) = monopod_host::end_vms(&self.layout.host()).await
            {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    "VMs could not be ended"
                );
            }
        }
        if !keep && let Err(error) = monopod_host::network::remove(&network(&self.settings)).await {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "the network stays"
            );
        }
        self.report();
    }

    fn begin(&mut self, name: &str) -> Instant {
        self.progress.phases.push(Phase {
            name: name.to_owned(),
            seconds: None,
            restarts: 0,
            pid: None,
        });
        self.report();
        Instant::now()
    }

    fn done(&mut self, started: Instant) {
        if let Some(phase) = self.progress.phases.last_mut() {
            phase.seconds = Some(started.elapsed().as_secs_f64());
        }
        self.report();
    }

    fn report(&self) {
        let path = self.layout.progress();
        let partial = path.with_extension("partial");
        let written = serde_json::to_vec(&self.progress)
            .map_err(std::io::Error::from)
            .and_then(|text| fs::write(&partial, text))
            .and_then(|()| fs::rename(&partial, &path));
        if let Err(error) = written {
            tracing::warn!(%error, "progress could not be written");
        }
    }
}

/// The VPC of this machine.
pub fn network(settings: &Settings) -> Vpc {
    let address = settings.api_address();
    Vpc {
        name: settings.name.clone(),
        api: match settings.joined {
            Some(Joined { machine }) => Api::Through { address, machine },
            None => Api::Link {
                address,
                inner: settings.vpc_address(),
            },
        },
        api_port: settings.api_port,
        underlay: settings.host.underlay.map(|address| Underlay {
            address,
            network: settings.network,
        }),
        cidr: settings.vpc_cidr,
        services: settings.service_cidr,
    }
}

fn spawn(layout: &Layout, programs: &Programs, part: &Part) -> anyhow::Result<Child> {
    let path = layout.log(part.name);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let log = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)?;
    // By way of `run-part`, which ties the part's life to ours before it becomes the part.
    // Its path is that of the start: the file may have been replaced by a newer one since.
    Command::new(&programs.monopod)
        .arg("run-part")
        .arg(&part.program)
        .args(&part.arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {}", part.name))
}

/// Becomes a part that gets SIGTERM when its supervisor dies.
pub fn run_part(program: &std::path::Path, arguments: &[String]) -> anyhow::Error {
    use std::os::unix::process::CommandExt;
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::TERM)) {
        return error.into();
    }
    let error = std::process::Command::new(program).args(arguments).exec();
    anyhow::Error::new(error).context(format!("cannot start {}", program.display()))
}

async fn is_ready(layout: &Layout, settings: &Settings, ready: &Ready) -> bool {
    match ready {
        Ready::Port(port) => TcpStream::connect(settings.local(*port)).await.is_ok(),
        Ready::Admin(port) => http_ok(settings.local(*port)).await,
        Ready::ApiServer => {
            let Ok(admin) = client::connect(&layout.kubeconfig("admin")).await else {
                return false;
            };
            let Ok(request) = http::Request::get("/readyz").body(Vec::new()) else {
                return false;
            };
            match tokio::time::timeout(Duration::from_secs(2), admin.request_text(request)).await {
                Ok(Ok(_)) => true,
                Ok(Err(error)) => {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        "API server is not ready"
                    );
                    false
                }
                Err(_elapsed) => false,
            }
        }
    }
}

/// Whether an admin server answers `/readyz` with 200.
pub async fn http_ok(address: SocketAddr) -> bool {
    let ask = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"GET /readyz HTTP/1.0\r\n\r\n").await?;
        let mut answer = [0u8; 12];
        stream.read_exact(&mut answer).await?;
        Ok::<_, std::io::Error>(answer.ends_with(b" 200"))
    };
    tokio::time::timeout(Duration::from_secs(2), ask)
        .await
        .is_ok_and(|answer| answer.unwrap_or(false))
}

/// Whether each part of a running cluster answers.
pub async fn health(settings: &Settings, name: &str, layout: &Layout) -> bool {
    let ready = match name {
        "etcd" => Ready::Port(LocalPort::Etcd),
        "kube-apiserver" => Ready::ApiServer,
        "kube-controller-manager" => Ready::Port(LocalPort::ControllerManager),
        "kube-scheduler" => Ready::Port(LocalPort::Scheduler),
        "control" => Ready::Admin(LocalPort::ControlAdmin),
        "host" => Ready::Admin(LocalPort::HostAdmin),
        _phase_without_process => return true,
    };
    is_ready(layout, settings, &ready).await
}
