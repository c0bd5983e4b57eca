//! One run of a container, from its root to its exit.

use super::cluster::Cluster;
use super::handlers::Site;
use super::hooks;
use super::images::Mounted;
use super::launch::{Launched, Spare, launch};
use super::logs::Log;
use super::names::new_id;
use super::plan::{self, PlanError};
use super::pod::Input;
use super::rootfs::Rootfs;
use super::shared::Shared;
use super::shipper::Shipper;
use super::sources::sources;
use super::subpath::Subpaths;
use super::volumes::Ready;
use crate::container::{self, Handle, HandleError, Report};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, Service};
use monopod_core::pod::fields::Facts;
use monopod_core::pod::lifecycle::{Event, Exit, Observation, reason};
use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// How long a container that ended may have no output before its pipes are given up. They end
/// with its last process; only a command executed in it can hold them open.
const DRAIN: Duration = Duration::from_secs(2);
/// How long its last output may take in all: its pipes and their readers hold little.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);
/// The kubelet's limits of a termination message: of the file, and of the log's end.
const MESSAGE_BYTES: u64 = 4096;
const LOG_BYTES: usize = 2048;
const LOG_LINES: usize = 80;
/// `SIGKILL`.
const KILL: i32 = 9;

/// What the pod's task asks of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Run the preStop hook, at most so long, then send this signal.
    Stop {
        /// The signal.
        signal: i32,
        /// The grace period.
        grace: Duration,
        /// The signal waits for `Release`.
        held: bool,
    },
    /// Send the stop signal, once the hook is over.
    Release,
    /// Kill it.
    Kill,
}

/// Everything that a run needs.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    /// The API server.
    pub(crate) cluster: Cluster,
    /// The pod.
    pub(crate) pod: Arc<Pod>,
    /// The container.
    pub(crate) container: Container,
    /// How often it was started before.
    pub(crate) attempt: u32,
    /// Its image.
    pub(crate) image: Mounted,
    /// The pod's volumes.
    pub(crate) volumes: BTreeMap<String, Ready>,
    /// Services for its variables.
    pub(crate) services: Vec<Service>,
    /// What the pod can ask about itself.
    pub(crate) facts: Facts,
    /// The cluster's domain.
    pub(crate) domain: String,
    /// A child process that was started before it was needed.
    pub(crate) spare: Spare,
    /// Where the server finds it.
    pub(crate) shared: Shared,
    /// What carries its log to the host.
    pub(crate) shipper: Shipper,
    /// Whether the pod is ending.
    pub(crate) terminating: watch::Receiver<bool>,
    /// Where observations go.
    pub(crate) inputs: mpsc::Sender<Input>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("{0}")]
    Sources(String),
    #[error("cannot prepare the container: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Handle(#[from] HandleError),
    #[error("{0}")]
    Start(String),
}

/// Runs a container until it ends, obeying orders. Tells everything as observations.
pub(crate) async fn run(start: Start, mut orders: mpsc::Receiver<Order>) {
    let id = match new_id() {
        Ok(id) => id,
        Err(error) => {
            tracing::error!(%error, "no random numbers");
            String::new()
        }
    };
    let outcome = run_inner(&start, &id, &mut orders).await;
    let Err(error) = outcome else { return };
    let name = start.container.name.clone();
    tracing::warn!(container = name, %error, "a container did not start");
    let observation = match error {
        RunError::Plan(error) => Observation::CannotStart {
            container: name,
            reason: error.reason(),
            message: error.to_string(),
        },
        RunError::Sources(message) => Observation::CannotStart {
            container: name,
            reason: reason::CONFIG_ERROR,
            message,
        },
        RunError::Io(error) => Observation::CannotStart {
            container: name,
            reason: reason::CREATE_ERROR,
            message: error.to_string(),
        },
        RunError::Handle(error) => Observation::CannotStart {
            container: name,
            reason: reason::CREATE_ERROR,
            message: error.to_string(),
        },
        RunError::Start(message) => {
            event(&start, true, "Failed", format!("Error: {message}")).await;
            Observation::Exited {
                container: name,
                exit: Exit {
                    id,
                    code: 128,
                    signal: None,
                    reason: "StartError".to_owned(),
                    message: Some(message),
                    started_at: None,
                    finished_at: Timestamp::now(),
                },
            }
        }
    };
    tell(&start, Input::Observed(observation)).await;
}

async fn run_inner(
    start: &Start,
    id: &str,
    orders: &mut mpsc::Receiver<Order>,
) -> Result<(), RunError> {
    let sources = sources(start).await.map_err(RunError::Sources)?;
    let rootfs = Rootfs::create(&start.container.name, start.attempt, &start.image.root)?;
    let subpaths = Subpaths::new(&start.container.name, start.attempt);
    let outcome = match launch(start, id, &rootfs, &subpaths, &sources).await {
        Ok(launched) => watch_over(start, id, &rootfs, launched, orders).await,
        Err(error) => Err(error),
    };
    let remove = move || {
        subpaths.remove();
        rootfs.remove();
    };
    if let Err(error) = tokio::task::spawn_blocking(remove).await {
        tracing::warn!(%error, "a container's root was not removed");
    }
    outcome
}

async fn watch_over(
    start: &Start,
    id: &str,
    rootfs: &Rootfs,
    mut launched: Launched,
    orders: &mut mpsc::Receiver<Order>,
) -> Result<(), RunError> {
    let name = &start.container.name;
    let exit = match wait(start, &launched.site, &mut launched.handle, orders).await {
        Ok(exit) => exit,
        // Whatever it was, the container is no longer ours to watch: that is an exit.
        Err(error) => {
            tracing::error!(container = name, %error, "a container was lost");
            container::Exit {
                code: 137,
                signal: None,
                out_of_memory: false,
            }
        }
    };
    let finished_at = Timestamp::now();
    if !drain(&launched.log, launched.copies).await {
        tracing::warn!(container = name, "its output did not end");
    }
    launched.log.close();
    launched.running.send_replace(false);
    let exit = Exit {
        id: id.to_owned(),
        code: exit.code,
        // As containerd: the code says it.
        signal: None,
        reason: reason_of(exit).to_owned(),
        message: last_words(start, rootfs, &launched.log, exit.code),
        started_at: Some(launched.started_at),
        finished_at,
    };
    let observation = Observation::Exited {
        container: name.clone(),
        exit,
    };
    tell(start, Input::Observed(observation)).await;
    Ok(())
}

/// Waits until everything that a container wrote is in its log. False if that did not end.
async fn drain(log: &Log, copies: Vec<tokio::task::JoinHandle<()>>) -> bool {
    let deadline = tokio::time::Instant::now() + DRAIN_LIMIT;
    let mut drained = futures::future::join_all(copies);
    let mut seen = log.progress();
    loop {
        if tokio::time::timeout(DRAIN, &mut drained).await.is_ok() {
            return true;
        }
        let now = log.progress();
        if now == seen || tokio::time::Instant::now() >= deadline {
            return false;
        }
        seen = now;
    }
}

fn reason_of(exit: container::Exit) -> &'static str {
    if exit.out_of_memory {
        "OOMKilled"
    } else if exit.code == 0 {
        "Completed"
    } else {
        "Error"
    }
}

async fn wait(
    start: &Start,
    site: &Site,
    handle: &mut Handle,
    orders: &mut mpsc::Receiver<Order>,
) -> Result<container::Exit, RunError> {
    let mut hooks = FuturesUnordered::new();
    // The stop signal, once it is known; held back until its turn, and until the hook is over.
    let (mut signal, mut held) = (None, false);
    loop {
        tokio::select! {
            report = handle.report() => match report? {
                Report::Exited(exit) => return Ok(exit),
                Report::Started { .. } | Report::Failed { .. } => {}
            },
            Some(order) = orders.recv() => match order {
                Order::Stop { signal: number, grace, held: waits } => {
                    signal = Some(number);
                    held = waits;
                    hooks.push(hooks::pre_stop(start, site, grace));
                }
                Order::Release => held = false,
                Order::Kill => handle.signal(KILL).await?,
            },
            Some(()) = hooks.next() => {}
        }
        if !held
            && hooks.is_empty()
            && let Some(number) = signal.take()
        {
            handle.signal(number).await?;
            let container = start.container.name.clone();
            tell(start, Input::Observed(Observation::Signalled { container })).await;
        }
    }
}

fn last_words(start: &Start, rootfs: &Rootfs, log: &Log, code: i32) -> Option<String> {
    let mut text = Vec::new();
    let read = std::fs::File::open(plan::termination_log(rootfs))
        .and_then(|file| file.take(MESSAGE_BYTES).read_to_end(&mut text));
    if read.is_ok() && !text.is_empty() {
        return Some(String::from_utf8_lossy(&text).into_owned());
    }
    let from_log = start.container.termination_message_policy.as_deref()
        == Some("FallbackToLogsOnError")
        && code != 0;
    if !from_log {
        return None;
    }
    log.tail(LOG_LINES, LOG_BYTES)
        .ok()
        .filter(|text| !text.is_empty())
}

pub(crate) async fn event(start: &Start, warning: bool, reason: &'static str, message: String) {
    let event = Event {
        warning,
        reason,
        message,
        container: Some(start.container.name.clone()),
    };
    tell(start, Input::Event(event)).await;
}

pub(crate) async fn tell(start: &Start, input: Input) {
    if start.inputs.send(input).await.is_err() {
        tracing::debug!("the pod's task ended before this run");
    }
}
