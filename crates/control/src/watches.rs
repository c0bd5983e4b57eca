//! Fills the index and says what to look at again.

use crate::identity::Unmarked;
use crate::index::{Index, Shared};
use crate::reconcile::Key;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::runtime::watcher::Config;
use kube::{Client, Resource, ResourceExt};
use monopod_api::environment::{Environment, ImagePhase};
use monopod_api::host::Host;
use monopod_api::network::{NetworkInterface, SecurityGroup, Subnet, Vpc};
use monopod_api::profile::{FargateProfile, PodExecutionRole, ProfileState};
use monopod_api::{labels, names};
use monopod_ops::admin::Readiness;
use monopod_ops::queue::Queue;
use monopod_ops::watch::{Change, changes};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Starts all watches. Readiness knows each by its kind.
pub(crate) fn spawn(
    tasks: &mut JoinSet<()>,
    client: &Client,
    index: &Shared,
    queue: &Queue<Key>,
    readiness: &Readiness,
    shutdown: &CancellationToken,
) {
    let watch = Watch {
        client,
        index,
        queue,
        readiness,
        shutdown,
    };
    let ours = Config::default().fields(&format!("spec.schedulerName={}", labels::SCHEDULER_NAME));
    let fargate = format!("{}={}", labels::COMPUTE_TYPE, labels::COMPUTE_TYPE_FARGATE);
    watch.start(tasks, "pods", ours, pod);
    watch.start(tasks, "nodes", Config::default().labels(&fargate), node);
    watch.start(tasks, "environments", Config::default(), environment);
    watch.start(tasks, "networkinterfaces", Config::default(), interface);
    watch.start(tasks, "fargateprofiles", Config::default(), profile);
    watch.start(
        tasks,
        "podexecutionroles",
        Config::default(),
        |i, c: Change<PodExecutionRole>| {
            store(&mut i.roles, c);
            // Its secrets may be others now.
            let environments = i.environments.keys().cloned().map(Key::Credentials);
            environments.chain(waiting(i)).collect()
        },
    );
    watch.start(
        tasks,
        "subnets",
        Config::default(),
        |i, c: Change<Subnet>| {
            let unmarked = unmarked(
                &c,
                |s| s.status.as_ref().is_some_and(|s| s.id.is_some()),
                Unmarked::Subnet,
            );
            store(&mut i.subnets, c);
            unmarked.into_iter().chain(waiting(i)).collect()
        },
    );
    watch.start(
        tasks,
        "securitygroups",
        Config::default(),
        |i, c: Change<SecurityGroup>| {
            let unmarked = unmarked(
                &c,
                |s| s.status.as_ref().is_some_and(|s| s.id.is_some()),
                Unmarked::Group,
            );
            store(&mut i.groups, c);
            unmarked.into_iter().chain(waiting(i)).collect()
        },
    );
    watch.start(tasks, "vpcs", Config::default(), |_, c: Change<Vpc>| {
        unmarked(
            &c,
            |s| s.status.as_ref().is_some_and(|s| s.id.is_some()),
            Unmarked::Vpc,
        )
        .into_iter()
        .collect()
    });
    watch.start(tasks, "hosts", Config::default(), |i, c: Change<Host>| {
        store(&mut i.hosts, c);
        waiting(i)
    });
}

struct Watch<'a> {
    client: &'a Client,
    index: &'a Shared,
    queue: &'a Queue<Key>,
    readiness: &'a Readiness,
    shutdown: &'a CancellationToken,
}

impl Watch<'_> {
    fn start<K>(
        &self,
        tasks: &mut JoinSet<()>,
        part: &'static str,
        config: Config,
        on: fn(&mut Index, Change<K>) -> Vec<Key>,
    ) where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        self.readiness.expect(part);
        let (index, queue, readiness) = (
            self.index.clone(),
            self.queue.clone(),
            self.readiness.clone(),
        );
        tasks.spawn(changes(
            self.client.clone(),
            config,
            self.shutdown.clone(),
            move |change| {
                let synced = matches!(change, Change::Synced);
                let keys = on(&mut index.lock(), change);
                for key in keys {
                    queue.add(key);
                }
                if synced {
                    readiness.done(part);
                }
            },
        ));
    }
}

/// Keeps an object by its name.
fn store<K: ResourceExt>(map: &mut BTreeMap<String, K>, change: Change<K>) {
    match change {
        Change::Applied(object) => {
            map.insert(object.name_any(), object);
        }
        Change::Deleted { name, .. } => {
            map.remove(&name);
        }
        Change::Synced => {}
    }
}

fn waiting(index: &Index) -> Vec<Key> {
    index.waiting().into_iter().map(Key::Pod).collect()
}

fn unmarked<K: ResourceExt>(
    change: &Change<K>,
    marked: fn(&K) -> bool,
    kind: fn(String) -> Unmarked,
) -> Option<Key> {
    match change {
        Change::Applied(object) if !marked(object) => Some(Key::Unmarked(kind(object.name_any()))),
        Change::Applied(_) | Change::Deleted { .. } | Change::Synced => None,
    }
}

fn pod(index: &mut Index, change: Change<Pod>) -> Vec<Key> {
    match change {
        Change::Applied(pod) => {
            let Some(uid) = pod.uid() else {
                return Vec::new();
            };
            index.pods.insert(uid.clone(), pod);
            vec![Key::Pod(uid)]
        }
        Change::Deleted { namespace, name } => {
            let same =
                |pod: &Pod| pod.namespace().as_ref() == Some(&namespace) && pod.name_any() == name;
            let gone: Vec<String> = index
                .pods
                .iter()
                .filter(|(_, p)| same(p))
                .map(|(uid, _)| uid.clone())
                .collect();
            for uid in &gone {
                index.pods.remove(uid);
                index.attempts.remove(uid);
            }
            gone.into_iter().map(Key::Pod).collect()
        }
        // What the list lacked may have an environment to release.
        Change::Synced => index
            .environments
            .values()
            .map(|e| Key::Pod(e.spec.pod.uid.clone()))
            .collect(),
    }
}

fn node(index: &mut Index, change: Change<Node>) -> Vec<Key> {
    let name = match &change {
        Change::Applied(node) => node.name_any(),
        Change::Deleted { name, .. } => name.clone(),
        Change::Synced => return Vec::new(),
    };
    store(&mut index.nodes, change);
    index
        .environment_of_node(&name)
        .map(|e| Key::Pod(e.spec.pod.uid.clone()))
        .into_iter()
        .collect()
}

fn environment(index: &mut Index, change: Change<Environment>) -> Vec<Key> {
    match change {
        Change::Applied(environment) => {
            let name = environment.name_any();
            let mut keys = vec![Key::Pod(environment.spec.pod.uid.clone())];
            let known = index.environments.get(&name);
            let missing = |e: &Environment| {
                let images = e.status.iter().flat_map(|status| &status.images);
                images
                    .filter(|image| image.state == ImagePhase::Failed)
                    .count()
            };
            // New ones, and those of which more images fail than before: not each progress.
            if known.is_none_or(|old| missing(old) < missing(&environment)) {
                keys.push(Key::Credentials(name.clone()));
            }
            index.environments.insert(name, environment);
            keys
        }
        Change::Deleted { name, .. } => {
            // Its capacity is free again, and its pod may need another one.
            let gone = index.environments.remove(&name);
            let mut keys = waiting(index);
            if let Some(gone) = gone {
                keys.push(Key::Credentials(name));
                keys.push(Key::Pod(gone.spec.pod.uid));
                keys.push(Key::Interface(gone.spec.network_interface));
            }
            keys
        }
        Change::Synced => Vec::new(),
    }
}

fn interface(index: &mut Index, change: Change<NetworkInterface>) -> Vec<Key> {
    match change {
        Change::Applied(interface) => {
            let name = interface.name_any();
            let marked = interface.status.as_ref().is_some_and(|s| s.id.is_some());
            let mut keys = vec![Key::Interface(name.clone())];
            if !marked && interface.metadata.deletion_timestamp.is_none() {
                keys.push(Key::Unmarked(Unmarked::Interface(name.clone())));
            }
            if let Some(uid) = interface
                .spec
                .environment
                .name
                .strip_prefix(&names::environment(""))
            {
                keys.push(Key::Pod(uid.to_owned()));
            }
            index.interfaces.insert(name, interface);
            keys
        }
        Change::Deleted { name, .. } => {
            index.interfaces.remove(&name);
            waiting(index)
        }
        Change::Synced => Vec::new(),
    }
}

fn profile(index: &mut Index, change: Change<FargateProfile>) -> Vec<Key> {
    let active = |p: &FargateProfile| {
        p.status
            .as_ref()
            .is_some_and(|s| s.status == ProfileState::Active)
    };
    let unmarked = unmarked(&change, active, Unmarked::Profile);
    store(&mut index.profiles, change);
    index.profiles_changed();
    unmarked.into_iter().chain(waiting(index)).collect()
}
