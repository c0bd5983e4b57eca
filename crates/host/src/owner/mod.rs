//! One environment's owner: the only task that starts, tells and ends its VM.
//!
//! ```text
//!  Requested ──▶ Booting ──READY──▶ Joining ──▶ Registered ──▶ Running ──▶ Finished
//!      │            │                  │            │             │   VM freed; lease and logs are kept
//!      └────────────┴───── Failed ◀────┴────────────┴─────────────┘   until the environment is deleted
//!  deleted, in any phase ──▶ kill VM, remove disks, tap, logs, credentials ──▶ give up the finalizer
//! ```
//!
//! A restarted host process adopts the VM and goes on. What the guest must know is sent after
//! every connection, so nothing depends on what was sent before.

mod background;
mod begin;
mod end;
mod images;
mod limit;
mod logs;
mod steps;
mod telling;

use crate::archive::Archive;
use crate::credentials::{self, Issued};
use crate::hypervisor::{Events, Hypervisor, HypervisorError, Vm, VmEvent};
use crate::metrics::VmFailure;
use crate::policy::View;
use crate::status::Status;
use crate::{Context, go, lease};
use background::{Found, keep_credentials};
pub use end::release_finalizer;
use images::{Wanted, keep_image};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use logs::Answering;
use monopod_api::environment::Environment;
use monopod_api::timeline::Step;
use monopod_wire::{Ended, GuestMessage, HostMessage, ImageState, Stage};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

/// Delay before something that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Time between looks whether the VM was halted.
const LOOKS: Duration = Duration::from_secs(5);
/// How long a VM may take to say so: its owner waits meanwhile.
const LOOK: Duration = Duration::from_secs(1);

/// A VM's tap, as far as the owner is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tap {
    /// There is none, or it may go.
    Idle,
    /// The VM has it as its interface.
    Plugged,
    /// The VM had it, and it is not there any more.
    Gone,
    /// The VM was killed for that.
    Removed,
}

/// Tells an owner task of its environment's changes.
#[derive(Debug)]
pub(crate) struct Owner {
    environment: watch::Sender<Environment>,
    tap: watch::Sender<Tap>,
}

impl Owner {
    pub(crate) fn update(&self, environment: Environment) {
        self.environment.send_replace(environment);
    }

    /// Whether this owner is of this very object, not of one that had its name before.
    pub(crate) fn is_of(&self, environment: &Environment) -> bool {
        self.environment.borrow().metadata.uid == environment.metadata.uid
    }

    /// The address of the interface, if its tap must be there.
    pub(crate) fn plugged(&self) -> Option<Ipv4Addr> {
        let plugged = *self.tap.borrow() == Tap::Plugged;
        let address = plugged.then(|| self.environment.borrow().spec.address.parse());
        address?.ok()
    }

    /// The tap was not there though it must be.
    pub(crate) fn unplugged(&self) {
        self.tap.send_if_modified(|tap| {
            let gone = *tap == Tap::Plugged;
            if gone {
                *tap = Tap::Gone;
            }
            gone
        });
    }

    /// The object is gone, whoever removed this host's finalizer from it: everything is freed.
    pub(crate) fn gone(&self) {
        self.environment.send_modify(|environment| {
            let metadata = &mut environment.metadata;
            metadata
                .deletion_timestamp
                .get_or_insert_with(|| Time(Timestamp::now()));
        });
    }
}

/// A new owner and the task to run, which ends when the environment is released.
pub(crate) fn new<H: Hypervisor>(
    context: Arc<Context<H>>,
    view: watch::Receiver<View>,
    environment: Environment,
) -> (Owner, impl Future<Output = ()> + Send) {
    let (sender, receiver) = watch::channel(environment.clone());
    // Before anything waits: from here on its images are not removed.
    let images = environment.spec.images.iter();
    context.in_use.needs(
        &environment.name_any(),
        images.map(|image| image.reference.clone()),
    );
    let tap = watch::Sender::new(Tap::Idle);
    let owner = Owner {
        environment: sender,
        tap: tap.clone(),
    };
    (owner, run(context, view, environment, receiver, tap))
}

struct State<H: Hypervisor> {
    context: Arc<Context<H>>,
    environment: Environment,
    name: String,
    address: Ipv4Addr,
    status: Status,
    vm: Option<H::Vm>,
    /// The guest takes messages: it has said Ready or is going.
    listening: bool,
    /// The node's credentials, also for those who answer and renew in its place.
    issued: watch::Sender<Option<Issued>>,
    /// The pod's logs, once its guest sent any.
    archive: Option<Archive>,
    /// Whether this host answers for the logs.
    answering: Answering,
    images: BTreeMap<String, ImageState>,
    /// The guest has no more logs, and answers nobody any more.
    logs_complete: bool,
    /// Why the guest said it ends, if it did.
    ended: Option<Ended>,
    gateway: Option<Ipv4Addr>,
    tap: watch::Sender<Tap>,
    /// When the VM is killed, if it has not ended by itself.
    kill_at: Option<Instant>,
    /// When the VM is held to its share of the CPUs; none once it is.
    limit_at: Option<Instant>,
    /// It had whole CPUs for its end.
    hastened: bool,
}

async fn run<H: Hypervisor>(
    context: Arc<Context<H>>,
    view: watch::Receiver<View>,
    environment: Environment,
    mut updates: watch::Receiver<Environment>,
    tap: watch::Sender<Tap>,
) {
    let name = environment.name_any();
    let Ok(address) = environment.spec.address.parse::<Ipv4Addr>() else {
        tracing::error!(environment = %name, "spec.address is no IPv4 address; nothing is started");
        return;
    };
    let stored = environment.status.clone().unwrap_or_default();
    let status = Status::new(
        context.client.clone(),
        name.clone(),
        environment.uid().unwrap_or_default(),
        stored,
    );
    let issued = credentials::load(&credentials::file(&context.options.directory, &name));
    let mut state = State {
        context,
        environment,
        name,
        address,
        status,
        vm: None,
        listening: false,
        issued: watch::Sender::new(issued),
        archive: None,
        answering: Answering::Not,
        images: BTreeMap::new(),
        logs_complete: false,
        ended: None,
        gateway: None,
        tap,
        kill_at: None,
        limit_at: None,
        hastened: false,
    };
    // Certificates and images come meanwhile.
    let background = state.background();
    let mut events = if state.is_deleted() {
        None
    } else {
        state.requested();
        state.begin(view, &mut updates).await
    };
    state.live(&mut events, &mut updates, background).await;
    state.release().await;
}

/// What goes on beside the VM, and what it finds.
struct Background {
    tasks: JoinSet<()>,
    sender: mpsc::Sender<Found>,
    found: mpsc::Receiver<Found>,
}

impl<H: Hypervisor> State<H> {
    fn is_deleted(&self) -> bool {
        is_deleted(&self.environment)
    }

    /// Begins what the VM's start does not wait for.
    fn background(&self) -> Background {
        let (sender, found) = mpsc::channel(8);
        let mut tasks = JoinSet::new();
        if self.is_deleted() {
            return Background {
                tasks,
                sender,
                found,
            };
        }
        tasks.spawn(keep_credentials(
            Arc::clone(&self.context),
            self.environment.clone(),
            self.issued.borrow().clone(),
            sender.clone(),
        ));
        if !self.status.phase().is_terminal() {
            for image in &self.environment.spec.images {
                let wanted = Wanted {
                    environment: self.name.clone(),
                    image: image.clone(),
                    credentials: self.environment.spec.pull_credentials,
                };
                tasks.spawn(keep_image(
                    Arc::clone(&self.context),
                    wanted,
                    sender.clone(),
                ));
            }
        }
        Background {
            tasks,
            sender,
            found,
        }
    }

    /// Follows the VM until the environment is deleted.
    async fn live(
        &mut self,
        events: &mut Option<Events>,
        updates: &mut watch::Receiver<Environment>,
        background: Background,
    ) {
        let Background {
            mut tasks,
            sender,
            found: mut background,
        } = background;
        let mut keeps_lease = false;
        let mut tap = self.tap.subscribe();
        // Not at once, which is a VM's start.
        let mut looks = tokio::time::interval_at(Instant::now() + LOOKS, LOOKS);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.is_deleted() {
            if self.status.phase().is_terminal() && !keeps_lease {
                keeps_lease = true;
                tasks.spawn(lease::keep(
                    self.issued.subscribe(),
                    self.environment.spec.node.clone(),
                    self.context.options.own_api_server.clone(),
                ));
                self.answer_for_logs(&mut tasks, &sender);
            }
            if self.logs_complete {
                self.answer_for_logs(&mut tasks, &sender);
            }
            tokio::select! {
                event = next(events) => match event {
                    Some(event) => self.event(event).await,
                    None => *events = None,
                },
                () = limit::due(self.limit_at) => self.limit_cpu(),
                () = is_gone(&mut tap) => self.tap_gone(),
                () = limit::due(self.kill_at) => self.kill_unplugged().await,
                _ = looks.tick() => self.unhalt().await,
                changed = updates.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.environment = updates.borrow_and_update().clone();
                }
                Some(found) = background.recv() => match found {
                    Found::Issued(issued) => self.accept(*issued),
                    Found::Answering => self.answers(),
                    Found::Image(reference, ready) => self.image(reference, *ready).await,
                    Found::Missing(reference, failure) => self.image_missing(reference, failure),
                    Found::Progress(reference, done, total) => {
                        self.image_state(reference, ImageState::Pulling { done, total });
                    }
                },
            }
        }
    }

    async fn event(&mut self, event: VmEvent) {
        match event {
            VmEvent::Connected(Stage::Ready | Stage::Going)
            | VmEvent::Guest(GuestMessage::Ready) => {
                self.listening = true;
                self.tell_everything();
            }
            VmEvent::Guest(GuestMessage::Phase(phase)) => self.guest_phase(&phase),
            VmEvent::Guest(GuestMessage::Report(report)) => {
                for (figure, value) in &report.values {
                    self.context.metrics.guest(&self.name, figure, *value);
                }
                self.tell(HostMessage::Time(go::time(report.number)));
            }
            VmEvent::Guest(GuestMessage::Log(piece)) => self.log(*piece),
            VmEvent::Guest(GuestMessage::LogsComplete) => {
                self.logs_complete = true;
                self.hasten_end();
            }
            VmEvent::Guest(GuestMessage::Ended(ended)) => {
                if self.ended.is_none() {
                    tracing::info!(environment = %self.name, ?ended, "guest ends");
                }
                self.ended = Some(ended);
            }
            VmEvent::Guest(
                GuestMessage::Hello(_) | GuestMessage::Rehearsed | GuestMessage::Unknown,
            ) => {}
            VmEvent::Incompatible { version } => {
                let error = HypervisorError::Incompatible { version };
                self.fail(VmFailure::Incompatible, &chain(&error)).await;
            }
            VmEvent::Connected(Stage::Boot) | VmEvent::Disconnected => self.listening = false,
            VmEvent::Exited => self.exited().await,
        }
    }

    /// Lets a VM go on for which this machine had no room.
    async fn unhalt(&mut self) {
        let Some(vm) = self.vm.as_mut() else {
            return;
        };
        match tokio::time::timeout(LOOK, vm.unhalt()).await {
            Ok(Ok(false)) => {}
            Ok(Ok(true)) => tracing::error!(
                environment = %self.name, pod = %self.environment.spec.pod.uid,
                "the VM was halted, as its disk had no room on this machine; it goes on once there is some"
            ),
            Ok(Err(error)) => {
                tracing::debug!(environment = %self.name, %error, "the VM does not say whether it runs");
            }
            Err(_late) => {
                tracing::debug!(environment = %self.name, "the VM does not say in time whether it runs");
            }
        }
    }

    fn accept(&mut self, issued: Issued) {
        let path = credentials::file(&self.context.options.directory, &self.name);
        if let Err(error) = credentials::store(&path, &issued) {
            tracing::error!(environment = %self.name, %error, "credentials cannot be kept for a later host process");
        }
        self.tell(HostMessage::Credentials(Box::new(
            issued.credentials.clone(),
        )));
        self.issued.send_replace(Some(issued));
        self.step(Step::Certificates, None);
    }
}

fn is_deleted(environment: &Environment) -> bool {
    environment.metadata.deletion_timestamp.is_some()
}

/// Waits until somebody removed the tap.
async fn is_gone(tap: &mut watch::Receiver<Tap>) {
    if tap.wait_for(|tap| *tap == Tap::Gone).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The next event of a VM; never, if there is none.
async fn next(events: &mut Option<Events>) -> Option<VmEvent> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}

pub(crate) fn until(time: Timestamp) -> Duration {
    time.duration_since(Timestamp::now())
        .try_into()
        .unwrap_or_default()
}

/// An error with all its sources, on one line of bounded length.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    bounded(text)
}

/// Guests and programs may say much; a status holds a kilobyte of it.
fn bounded(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(1024));
    text
}
