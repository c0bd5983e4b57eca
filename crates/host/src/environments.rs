//! Follows the environments of this host: each has one owner task, from its first sight to its end.

use crate::files::{self, absent_is_fine};
use crate::hypervisor::Hypervisor;
use crate::owner::{self, Owner};
use crate::policy::View;
use crate::{Context, archive, credentials, network};
use kube::ResourceExt;
use kube::runtime::watcher::Config;
use monopod_api::environment::Environment;
use monopod_ops::admin::Readiness;
use monopod_ops::watch::{Change, changes};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

/// Time between looks whether the taps of all VMs are there.
const CHECK: Duration = Duration::from_secs(5);

/// Runs until the token is cancelled. Owners are dropped then; their VMs go on.
pub(crate) async fn follow<H: Hypervisor>(
    context: Arc<Context<H>>,
    view: watch::Receiver<View>,
    readiness: Readiness,
    shutdown: CancellationToken,
) {
    readiness.expect("environments");
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let mine = Config::default().fields(&format!("spec.host={}", context.options.name));
    let watch = changes::<Environment>(
        context.client.clone(),
        mine,
        shutdown.clone(),
        move |change| {
            // The receiver lives as long as this watch.
            drop(sender.send(change));
        },
    );
    let work = async {
        let mut owners = Owners::default();
        let mut looks = tokio::time::interval(CHECK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some(ended) = owners.tasks.join_next(), if !owners.tasks.is_empty() => match ended {
                    Ok(name) => owners.over(&context, &view, &name),
                    Err(error) => tracing::error!(%error, "an owner task died"),
                },
                _ = looks.tick() => owners.check_taps(&context).await,
                change = receiver.recv() => match change {
                    Some(Change::Applied(environment)) => owners.apply(&context, &view, environment),
                    Some(Change::Deleted { name, .. }) => owners.gone(&name),
                    Some(Change::Synced) => {
                        sweep(&context, &owners.known()).await;
                        readiness.done("environments");
                    }
                    None => return,
                },
            }
        }
    };
    tokio::join!(watch, work);
}

/// The owners by their environments' names.
#[derive(Default)]
struct Owners {
    current: BTreeMap<String, Owner>,
    /// New environments of a name whose owner still ends the one before.
    next: BTreeMap<String, Environment>,
    tasks: JoinSet<String>,
}

impl Owners {
    fn known(&self) -> BTreeSet<String> {
        self.current.keys().cloned().collect()
    }

    fn apply<H: Hypervisor>(
        &mut self,
        context: &Arc<Context<H>>,
        view: &watch::Receiver<View>,
        environment: Environment,
    ) {
        let name = environment.name_any();
        if let Some(owner) = self.current.get(&name) {
            if owner.is_of(&environment) {
                owner.update(environment);
            } else {
                owner.gone();
                self.next.insert(name, environment);
            }
            return;
        }
        let released = !environment
            .finalizers()
            .iter()
            .any(|f| f == monopod_api::labels::HOST_FINALIZER);
        if released {
            return;
        }
        let (owner, run) = owner::new(Arc::clone(context), view.clone(), environment);
        self.current.insert(name.clone(), owner);
        self.tasks.spawn(async move {
            run.await;
            name
        });
    }

    fn gone(&mut self, name: &str) {
        self.next.remove(name);
        if let Some(owner) = self.current.get(name) {
            owner.gone();
        }
    }

    /// Tells owners whose VM has a tap no more.
    async fn check_taps<H: Hypervisor>(&self, context: &Context<H>) {
        // Before the list, so that no tap is missed that was made after it.
        let plugged = self.current.values();
        let plugged: Vec<_> = plugged
            .filter_map(|owner| Some((owner, owner.plugged()?)))
            .collect();
        if plugged.is_empty() {
            return;
        }
        match network::plugged(&context.options.network).await {
            Ok(there) => {
                for (owner, _) in plugged.iter().filter(|(_, tap)| !there.contains(tap)) {
                    owner.unplugged();
                }
            }
            Err(error) => tracing::error!(
                error = &error as &dyn std::error::Error,
                "taps cannot be compared with the VMs"
            ),
        }
    }

    /// An owner's task has ended.
    fn over<H: Hypervisor>(
        &mut self,
        context: &Arc<Context<H>>,
        view: &watch::Receiver<View>,
        name: &str,
    ) {
        self.current.remove(name);
        if let Some(next) = self.next.remove(name) {
            self.apply(context, view, next);
        }
    }
}

/// Removes what no environment has any more. An environment vanishes only after this host let it
/// go, so what is left here was left by a crash in between.
async fn sweep<H: Hypervisor>(context: &Context<H>, known: &BTreeSet<String>) {
    match context.hypervisor.list() {
        Ok(names) => {
            for name in names.into_iter().filter(|name| !known.contains(name)) {
                tracing::warn!(environment = %name, "leftover VM removed");
                if let Err(error) = context.hypervisor.discard(&name).await {
                    tracing::error!(environment = %name, error = &error as &dyn std::error::Error, "leftover VM stays");
                }
            }
        }
        Err(error) => tracing::error!(
            error = &error as &dyn std::error::Error,
            "VMs cannot be listed"
        ),
    }
    sweep_archives(context, known);
    if let Err(error) = sweep_credentials(context, known) {
        tracing::error!(%error, "leftover credentials stay");
    }
    if let Err(error) = sweep_taps(context, known).await {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "taps cannot be compared with the records"
        );
    }
}

fn sweep_archives<H: Hypervisor>(context: &Context<H>, known: &BTreeSet<String>) {
    let host = &context.options.directory;
    let names = match archive::list(host) {
        Ok(names) => names,
        Err(error) => return tracing::error!(%error, "archives of logs cannot be listed"),
    };
    for name in names.into_iter().filter(|name| !known.contains(name)) {
        tracing::warn!(environment = %name, "leftover archive of logs removed");
        if let Err(error) = archive::delete(&archive::directory(host, &name)) {
            tracing::error!(environment = %name, %error, "leftover archive of logs stays");
        }
    }
}

fn sweep_credentials<H: Hypervisor>(
    context: &Context<H>,
    known: &BTreeSet<String>,
) -> std::io::Result<()> {
    let host = &context.options.directory;
    for name in files::names(&credentials::directory(host))? {
        // One that is being written has a longer name.
        let environment = name.split('.').next().unwrap_or_default();
        if !known.contains(environment) {
            tracing::warn!(environment, "leftover credentials removed");
            absent_is_fine(std::fs::remove_file(credentials::file(host, &name)))?;
        }
    }
    Ok(())
}

async fn sweep_taps<H: Hypervisor>(
    context: &Context<H>,
    known: &BTreeSet<String>,
) -> Result<(), network::NetworkError> {
    // Taps of living VMs are told by their records: only without any VM is every tap a leftover.
    if !known.is_empty() {
        return Ok(());
    }
    for address in network::plugged(&context.options.network).await? {
        tracing::warn!(%address, "leftover tap removed");
        network::unplug(&context.options.network, address).await?;
    }
    Ok(())
}
