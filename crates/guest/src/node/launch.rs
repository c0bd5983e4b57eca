//! Starting a container: from its plan to its first process.

use super::handlers::Site;
use super::logs::{Log, Output};
use super::plan::{self, Parts};
use super::pod::Input;
use super::rootfs::Rootfs;
use super::run::{RunError, Start, event, tell};
use super::shared::Run;
use super::stdio::{Connected, Prepared};
use super::subpath::Subpaths;
use super::{hooks, probes};
use crate::container::{Action, Handle, HandleError, Report, Request};
use jiff::Timestamp;
use monopod_core::pod::environment::Sources;
use monopod_core::pod::lifecycle::Observation;
use monopod_core::pod::log::file_limit;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::{broadcast, mpsc, watch};

/// Where logs are, by container and attempt.
const LOGS: &str = "/run/scratch/logs";
/// Chunks of output that an attached client may lag behind.
const ATTACHED: usize = 64;

/// A child process for the first container, started while the pod is still being bound.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spare {
    handle: Arc<Mutex<Option<Handle>>>,
}

impl Spare {
    /// Starts it.
    pub(crate) fn prepare(&self) {
        match Handle::spawn() {
            Ok(handle) => {
                *self.handle.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
            }
            Err(error) => tracing::warn!(%error, "no child process was started in advance"),
        }
    }

    pub(crate) fn take(&self) -> Option<Handle> {
        self.handle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }
}

/// A container that runs.
pub(crate) struct Launched {
    pub(crate) site: Site,
    pub(crate) handle: Handle,
    pub(crate) started_at: Timestamp,
    pub(crate) log: Log,
    pub(crate) running: watch::Sender<bool>,
    pub(crate) copies: Vec<tokio::task::JoinHandle<()>>,
}

pub(crate) async fn launch(
    start: &Start,
    id: &str,
    rootfs: &Rootfs,
    subpaths: &Subpaths,
    sources: &Sources,
) -> Result<Launched, RunError> {
    let name = &start.container.name;
    let plan = plan::plan(&Parts {
        pod: &start.pod,
        container: &start.container,
        id,
        image: &start.image,
        rootfs,
        subpaths,
        volumes: &start.volumes,
        sources,
        facts: &start.facts,
        domain: &start.domain,
    })?;
    std::fs::write(rootfs.beside("config.json"), plan.config().to_string())?;
    let containers = start.pod.spec.as_ref().map_or(1, |spec| {
        spec.containers.len() + spec.init_containers.as_ref().map_or(0, Vec::len)
    });
    let log = Log::create(
        Path::new(LOGS)
            .join(name)
            .join(format!("{}.log", start.attempt)),
        file_limit(containers),
        start.shipper.bell(),
    )?;
    let reads = start.container.stdin == Some(true);
    let prepared = if plan.terminal {
        Prepared::terminal(id)?
    } else {
        Prepared::pipes(reads)?
    };
    event(start, false, "Created", "Container created".to_owned()).await;
    let request = Request {
        id: id.to_owned(),
        action: Action::Create(rootfs.bundle().to_owned()),
        stdio: prepared.request(),
        uid: plan.identity.uid,
    };
    let mut handle = match start.spare.take() {
        Some(handle) => handle,
        None => Handle::spawn()?,
    };
    handle.begin(&request).await?;
    match handle.report().await? {
        Report::Started { .. } => {}
        Report::Failed { message } => return Err(RunError::Start(message)),
        Report::Exited(_) => return Err(HandleError::Silent.into()),
    }
    let started_at = Timestamp::now();
    let connected = prepared.connect(reads).await?;
    let (output, _) = broadcast::channel(ATTACHED);
    let (running, is_running) = watch::channel(true);
    let (terminal, input, copies) = attach_streams(connected, &log, &output);
    let once = start.container.stdin_once == Some(true);
    let view = Run {
        id: id.to_owned(),
        log: log.clone(),
        process: plan.process(),
        uid: plan.identity.uid,
        output,
        input: input.map(|sender| (sender, once)),
        terminal,
        running: is_running,
    };
    let site = Site {
        run: view.clone(),
        container: start.container.clone(),
        address: start.facts.address.clone(),
    };
    start
        .shipper
        .add(name.clone(), start.attempt, log.clone())
        .await;
    start.shared.update(|pod| {
        let runs = pod.containers.entry(name.clone()).or_default();
        if let Some(oldest) = runs.previous.take() {
            oldest.log.delete();
        }
        runs.previous = runs.current.replace(view);
        runs.waiting = None;
    });
    event(start, false, "Started", "Container started".to_owned()).await;
    let observation = Observation::Started {
        container: name.clone(),
        id: id.to_owned(),
    };
    tell(start, Input::Observed(observation)).await;
    tokio::spawn(begin(start.clone(), site.clone(), started_at));
    Ok(Launched {
        site,
        handle,
        started_at,
        log,
        running,
        copies,
    })
}

/// The postStart hook, and then the probes: a container whose hook fails has none.
async fn begin(start: Start, site: Site, started_at: Timestamp) {
    let lifecycle = start.container.lifecycle.as_ref();
    if let Some(handler) = lifecycle.and_then(|lifecycle| lifecycle.post_start.as_ref())
        && !hooks::post_start(&start, &site, handler).await
    {
        return;
    }
    probes::start(&site, &start.inputs, started_at, &start.terminating);
}

type Streams = (
    Option<Arc<std::os::fd::OwnedFd>>,
    Option<mpsc::Sender<bytes::Bytes>>,
    Vec<tokio::task::JoinHandle<()>>,
);

fn attach_streams(connected: Connected, log: &Log, output: &broadcast::Sender<Output>) -> Streams {
    let mut copies = vec![tokio::spawn(log.clone().copy(
        connected.output,
        false,
        output.clone(),
    ))];
    if let Some(error) = connected.error {
        copies.push(tokio::spawn(log.clone().copy(error, true, output.clone())));
    }
    let input = connected.input.map(|mut writer| {
        let (sender, mut receiver) = mpsc::channel::<bytes::Bytes>(8);
        tokio::spawn(async move {
            while let Some(bytes) = receiver.recv().await {
                // No bytes are the end of the input.
                if bytes.is_empty() || writer.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        });
        sender
    });
    (connected.terminal, input, copies)
}
