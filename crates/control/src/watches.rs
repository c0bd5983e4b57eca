//! Fills the index and says what to look at again.

use crate::identity::Unmarked;
use crate::index::{Index, Shared};
use crate::reconcile::Key;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{
    Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, ServiceAccount,
};
use kube::runtime::watcher::Config;
use kube::{Client, Resource, ResourceExt};
use monopod_api::environment::{Environment, ImagePhase};
use monopod_api::host::Host;
use monopod_api::network::{NetworkInterface, SecurityGroup, Subnet, Vpc};
use monopod_api::profile::{FargateProfile, PodExecutionRole};
use monopod_api::{labels, names};
use monopod_core::certificates::LIFETIME_SECONDS;
use monopod_core::irsa;
use monopod_core::lifecycle;
use monopod_core::placement::Heartbeat;
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
    watch.start(tasks, "networkinterfaces", Config::default(), |i, c| {
        interface(i, c, Timestamp::now())
    });
    watch.start(tasks, "fargateprofiles", Config::default(), profile);
    watch.start(tasks, "podexecutionroles", Config::default(), role);
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
            unmarked.into_iter().chain(launching(i)).collect()
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
            unmarked.into_iter().chain(launching(i)).collect()
        },
    );
    watch.start(tasks, "vpcs", Config::default(), |i, c: Change<Vpc>| {
        let unmarked = unmarked(
            &c,
            |s| s.status.as_ref().is_some_and(|s| s.id.is_some()),
            Unmarked::Vpc,
        );
        store(&mut i.vpcs, c);
        unmarked.into_iter().collect()
    });
    watch.start(tasks, "serviceaccounts", Config::default(), account);
    watch.start(tasks, "persistentvolumeclaims", Config::default(), claim);
    watch.start(tasks, "persistentvolumes", Config::default(), volume);
    watch.start(tasks, "namespaces", Config::default(), namespace);
    watch.start(tasks, "hosts", Config::default(), host);
    watch.start(
        tasks,
        "leases",
        Config::default().labels(labels::HOST),
        |i, c| lease(i, c, Timestamp::now()),
    );
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

/// Waiting pods for which where others are matters.
fn constrained(index: &Index) -> impl Iterator<Item = Key> {
    index.constrained().into_iter().map(Key::Pod)
}

fn waiting(index: &Index) -> Vec<Key> {
    index.waiting().into_iter().map(Key::Pod).collect()
}

/// An environment was not created after all: its place is free again, and its interface, which may be
/// there, has none. Neither is told by a watch.
pub(crate) fn given_up(index: &mut Index, environment: &str) -> Vec<Key> {
    let Some(given_up) = index.forget_assumed(environment) else {
        return Vec::new();
    };
    let mut keys = waiting(index);
    keys.push(Key::Interface(given_up.spec.network_interface));
    keys
}

/// An environment turned out not to be there. Mostly a watch tells that soon, but never if it was not told of the
/// environment either: control puts what it creates into the index, and a watch that broke since then does not know it.
pub(crate) fn vanished(index: &mut Index, gone: &Environment) -> Vec<Key> {
    let name = gone.name_any();
    let known = index.environments.get(&name);
    if known.is_none_or(|known| known.uid() != gone.uid()) {
        return Vec::new();
    }
    let namespace = String::new();
    environment(index, Change::Deleted { namespace, name })
}

/// What depends on what profiles name.
fn launching(index: &Index) -> Vec<Key> {
    [Key::Profiles].into_iter().chain(waiting(index)).collect()
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

pub(crate) fn role(index: &mut Index, change: Change<PodExecutionRole>) -> Vec<Key> {
    store(&mut index.roles, change);
    // Its secrets may be others now.
    let environments = index.environments.keys().cloned().map(Key::Credentials);
    environments.chain(launching(index)).collect()
}

pub(crate) fn host(index: &mut Index, change: Change<Host>) -> Vec<Key> {
    if let Change::Deleted { name, .. } = &change {
        index.heartbeats.remove(name);
    }
    store(&mut index.hosts, change);
    waiting(index)
}

/// A host's lease. Anybody may have one so labelled: only the one in the host's own namespace counts.
pub(crate) fn lease(index: &mut Index, change: Change<Lease>, now: Timestamp) -> Vec<Key> {
    let Change::Applied(lease) = change else {
        // A host whose lease was deleted falls silent as one that renews it no more.
        return Vec::new();
    };
    let host = lease.name_any();
    if lease.namespace() != Some(names::host_namespace(&host)) {
        return Vec::new();
    }
    let renewed = lease
        .spec
        .and_then(|spec| spec.renew_time)
        .map(|time| time.0);
    let before = index.heartbeats.get(&host).copied();
    let heartbeat = Heartbeat::seen(before, renewed, now);
    index.heartbeats.insert(host, heartbeat);
    if before.is_some_and(|before| before.answers(now)) {
        return Vec::new();
    }
    waiting(index)
}

pub(crate) fn pod(index: &mut Index, change: Change<Pod>) -> Vec<Key> {
    match change {
        Change::Applied(pod) => {
            let Some(uid) = pod.uid() else {
                return Vec::new();
            };
            // After a broken watch, a pod may have been replaced by one of its name without a word.
            let namespace = pod.namespace().unwrap_or_default();
            let mut gone = forget_pods(index, &namespace, &pod.name_any(), Some(&uid));
            let environment = names::environment(&uid);
            let was = index.pods.get(&uid).map(as_neighbour);
            if index.environments.contains_key(&environment)
                && was.is_some_and(|was| was != as_neighbour(&pod))
            {
                gone.extend(waiting(index));
            }
            index.pods.insert(uid.clone(), pod);
            gone.push(Key::Pod(uid));
            gone.extend(index.is_draining().then_some(Key::Profiles));
            gone
        }
        Change::Deleted { namespace, name } => {
            let mut gone = forget_pods(index, &namespace, &name, None);
            gone.extend(index.is_draining().then_some(Key::Profiles));
            gone
        }
        // What the list lacked may have an environment to release.
        Change::Synced => index
            .environments
            .values()
            .map(|e| Key::Pod(e.spec.pod.uid.clone()))
            .collect(),
    }
}

/// What of a pod that has an environment matters to those that want or avoid it.
fn as_neighbour(pod: &Pod) -> (Option<&BTreeMap<String, String>>, bool, bool) {
    let is_deleted = pod.metadata.deletion_timestamp.is_some();
    (
        pod.metadata.labels.as_ref(),
        is_deleted,
        lifecycle::is_terminal(pod),
    )
}

/// Removes the pods of a name, but not the one with this uid.
fn forget_pods(index: &mut Index, namespace: &str, name: &str, but: Option<&str>) -> Vec<Key> {
    let gone = index.pods.extract_if(.., |uid, pod| {
        pod.namespace().as_deref() == Some(namespace)
            && pod.name_any() == name
            && Some(uid.as_str()) != but
    });
    let gone: Vec<(String, Pod)> = gone.collect();
    let mut keys = Vec::new();
    for (uid, pod) in gone {
        index.attempts.remove(&uid);
        // It kept its node's address from others, if nothing else did.
        let is_last = !index.environments.contains_key(&names::environment(&uid));
        if is_last && lifecycle::node_of(&pod).is_some() {
            keys.extend(waiting(index));
        }
        keys.push(Key::Pod(uid));
    }
    keys
}

/// Nothing waits for an account: it is looked at when a pod is created.
fn account(index: &mut Index, change: Change<ServiceAccount>) -> Vec<Key> {
    match change {
        Change::Applied(account) => {
            let key = (account.namespace().unwrap_or_default(), account.name_any());
            index.accounts.insert(key, irsa::role(&account));
        }
        Change::Deleted { namespace, name } => {
            index.accounts.remove(&(namespace, name));
        }
        Change::Synced => {}
    }
    Vec::new()
}

/// Affinity may select namespaces by their labels.
fn namespace(index: &mut Index, change: Change<Namespace>) -> Vec<Key> {
    match change {
        Change::Applied(namespace) => {
            let labels = namespace.metadata.labels.clone().unwrap_or_default();
            let before = index
                .namespaces
                .insert(namespace.name_any(), labels.clone());
            if before.as_ref() == Some(&labels) {
                return Vec::new();
            }
        }
        Change::Deleted { name, .. } => {
            index.namespaces.remove(&name);
        }
        Change::Synced => return Vec::new(),
    }
    waiting(index)
}

fn claim(index: &mut Index, change: Change<PersistentVolumeClaim>) -> Vec<Key> {
    match change {
        Change::Applied(claim) => {
            let key = (claim.namespace().unwrap_or_default(), claim.name_any());
            index.volume_claims.insert(key, claim);
        }
        Change::Deleted { namespace, name } => {
            index.volume_claims.remove(&(namespace, name));
        }
        Change::Synced => {}
    }
    index.claims_changed();
    waiting(index)
}

fn volume(index: &mut Index, change: Change<PersistentVolume>) -> Vec<Key> {
    store(&mut index.volumes, change);
    index.claims_changed();
    waiting(index)
}

pub(crate) fn node(index: &mut Index, change: Change<Node>) -> Vec<Key> {
    let (name, made_by) = match &change {
        Change::Applied(node) => {
            let made_by = lifecycle::environment_of(node).map(str::to_owned);
            (node.name_any(), made_by)
        }
        Change::Deleted { name, .. } => (name.clone(), None),
        Change::Synced => return Vec::new(),
    };
    store(&mut index.nodes, change);
    let pod = index
        .environment_of_node(&name)
        .map(|e| Key::Pod(e.spec.pod.uid.clone()));
    let left = made_by.filter(|made_by| !index.has_node(made_by, &name));
    let left = left.map(|environment| Key::Remains {
        environment,
        node: name,
    });
    pod.into_iter().chain(left).collect()
}

pub(crate) fn environment(index: &mut Index, change: Change<Environment>) -> Vec<Key> {
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
            let over = |e: &Environment| e.status.as_ref().is_some_and(|s| s.phase.is_terminal());
            // Control put what it creates into the index already: a new one is known by not having begun.
            let is_new = environment.status.is_none() || known.is_none();
            let frees = over(&environment) && known.is_none_or(|old| !over(old));
            index.environments.insert(name, environment);
            if frees {
                // Its memory is another's to have.
                keys.extend(waiting(index));
            } else if is_new {
                keys.extend(constrained(index));
            }
            keys
        }
        Change::Deleted { name, .. } => {
            // Its capacity is free again, and its pod may need another one.
            let gone = index.environments.remove(&name);
            let mut keys = waiting(index);
            if let Some(gone) = gone {
                // Not by control: somebody took its finalizer off.
                let uid = gone.uid().unwrap_or_default();
                if !index.cleared.remove(&uid) {
                    keys.push(Key::Remains {
                        environment: name.clone(),
                        node: gone.spec.node.clone(),
                    });
                }
                keys.push(Key::Credentials(name));
                keys.push(Key::Pod(gone.spec.pod.uid));
                keys.push(Key::Interface(gone.spec.network_interface));
            }
            keys
        }
        Change::Synced => Vec::new(),
    }
}

pub(crate) fn interface(
    index: &mut Index,
    change: Change<NetworkInterface>,
    now: Timestamp,
) -> Vec<Key> {
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
            let gone = index.interfaces.remove(&name);
            if let Some(address) = gone.and_then(|gone| gone.spec.address.parse().ok()) {
                index.recent.retain(|_, until| now < *until);
                let life = SignedDuration::from_secs(LIFETIME_SECONDS.into());
                index.recent.insert(address, now + life);
            }
            waiting(index)
        }
        Change::Synced => Vec::new(),
    }
}

pub(crate) fn profile(index: &mut Index, change: Change<FargateProfile>) -> Vec<Key> {
    if matches!(change, Change::Synced) {
        index.profiles_are_known();
    }
    store(&mut index.profiles, change);
    index.profiles_changed();
    launching(index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(uid: &str, node: Option<&str>) -> Pod {
        let pod = json!({
            "metadata": {"namespace": "default", "name": uid, "uid": uid},
            "spec": {"containers": [], "nodeName": node},
        });
        serde_json::from_value(pod).expect("a pod")
    }

    /// No environment and no interface tells who waits that the address is free now.
    #[test]
    fn the_address_of_a_bound_pod_is_taken_until_its_object_goes() {
        let address = "10.0.1.23".parse().expect("an address");
        let node = names::node(address, "local-1");
        let mut index = Index::default();
        for pod in [pod("bound", Some(&node)), pod("waits", None)] {
            super::pod(&mut index, Change::Applied(pod));
        }
        let is_taken = |index: &Index| {
            let snapshot = index.snapshot(Timestamp::UNIX_EPOCH);
            snapshot.network.taken.contains(&address)
        };
        assert!(is_taken(&index));

        let gone = Change::Deleted {
            namespace: "default".to_owned(),
            name: "bound".to_owned(),
        };
        let keys = super::pod(&mut index, gone);
        assert!(keys.contains(&Key::Pod("waits".to_owned())), "{keys:?}");
        assert!(!is_taken(&index));
    }
}
