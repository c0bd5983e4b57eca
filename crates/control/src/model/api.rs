//! A simulated API server: uniqueness by name, uids, versions, finalizers, graceful deletion, and one
//! ordered log for each kind, from which each watch reads at its own pace.

use super::drain::Drained;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Resource;
use monopod_api::environment::Environment;
use monopod_api::host::Host;
use monopod_api::network::NetworkInterface;
use monopod_api::profile::{FargateProfile, PodExecutionRole};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Kinds that change while the model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Pod,
    Node,
    Environment,
    Interface,
    Host,
    Role,
    Lease,
    Profile,
}

pub(super) const KINDS: [Kind; 8] = [
    Kind::Pod,
    Kind::Node,
    Kind::Environment,
    Kind::Interface,
    Kind::Host,
    Kind::Role,
    Kind::Lease,
    Kind::Profile,
];

#[derive(Debug, Clone)]
pub(super) enum Object {
    Pod(Box<Pod>),
    Node(Box<Node>),
    Environment(Box<Environment>),
    Interface(Box<NetworkInterface>),
    Host(Box<Host>),
    Role(Box<PodExecutionRole>),
    Lease(Box<Lease>),
    Profile(Box<FargateProfile>),
}

/// A kind of object, as the store keeps it.
pub(super) trait Stored: Resource<DynamicType = ()> + Clone + 'static {
    const KIND: Kind;
    fn wrap(self) -> Object;
    fn unwrap(object: &Object) -> Option<&Self>;
}

macro_rules! stored {
    ($($type:ty => $kind:ident),* $(,)?) => {$(
        impl Stored for $type {
            const KIND: Kind = Kind::$kind;
            fn wrap(self) -> Object {
                Object::$kind(Box::new(self))
            }
            fn unwrap(object: &Object) -> Option<&Self> {
                if let Object::$kind(found) = object { Some(found) } else { None }
            }
        }
    )*};
}
stored!(
    Pod => Pod,
    Node => Node,
    Environment => Environment,
    NetworkInterface => Interface,
    Host => Host,
    PodExecutionRole => Role,
    Lease => Lease,
    FargateProfile => Profile,
);

/// Why a request was not carried out, or seems not to have been.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Refused {
    NotFound,
    Conflict,
    Unreachable,
    NoEnvironment,
}

/// What must hold of an object for a request to be about it.
#[derive(Debug, Clone, Default)]
pub(super) struct Only {
    pub(super) uid: Option<String>,
    pub(super) version: Option<String>,
}

impl Only {
    pub(super) fn uid(uid: Option<&String>) -> Self {
        Self {
            uid: uid.cloned(),
            version: None,
        }
    }

    pub(super) fn as_read<K: Stored>(object: &K) -> Self {
        Self {
            uid: object.meta().uid.clone(),
            version: object.meta().resource_version.clone(),
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Api {
    pub(super) now: Timestamp,
    /// Answers nobody until then.
    pub(super) away_until: Timestamp,
    version: u64,
    objects: BTreeMap<(Kind, String), Object>,
    log: BTreeMap<Kind, Vec<(String, Option<Object>)>>,
    /// When each node's lease was renewed.
    pub(super) leases: BTreeMap<String, Timestamp>,
    /// Environments that certificate requests are labelled with.
    pub(super) requests: BTreeSet<String>,
    pub(super) drained: Drained,
}

impl Api {
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            now,
            away_until: now,
            version: 0,
            objects: BTreeMap::new(),
            log: BTreeMap::new(),
            leases: BTreeMap::new(),
            requests: BTreeSet::new(),
            drained: Drained::default(),
        }
    }

    pub(super) fn answers(&self) -> Result<(), Refused> {
        if self.now < self.away_until {
            return Err(Refused::Unreachable);
        }
        Ok(())
    }

    pub(super) fn get<K: Stored>(&self, name: &str) -> Option<&K> {
        K::unwrap(self.objects.get(&(K::KIND, name.to_owned()))?)
    }

    pub(super) fn list<K: Stored>(&self) -> impl Iterator<Item = &K> {
        self.objects.values().filter_map(K::unwrap)
    }

    pub(super) fn create<K: Stored>(&mut self, mut object: K) -> Result<K, Refused> {
        let name = object.meta().name.clone().unwrap_or_default();
        if self.objects.contains_key(&(K::KIND, name.clone())) {
            return Err(Refused::Conflict);
        }
        self.version += 1;
        let now = self.stamp(SignedDuration::ZERO);
        let meta = object.meta_mut();
        meta.uid = Some(format!("uid-{}", self.version));
        meta.creation_timestamp = Some(now);
        meta.resource_version = Some(self.version.to_string());
        self.store(name, object.clone());
        Ok(object)
    }

    /// Changes an object, as long as it is the one that is meant.
    pub(super) fn update<K: Stored>(
        &mut self,
        name: &str,
        only: &Only,
        change: impl FnOnce(&mut K),
    ) -> Result<(), Refused> {
        let mut object = self.meant::<K>(name, only)?.clone();
        change(&mut object);
        self.version += 1;
        object.meta_mut().resource_version = Some(self.version.to_string());
        let meta = object.meta();
        let held = meta.finalizers.iter().flatten().next().is_some();
        if K::KIND != Kind::Pod && meta.deletion_timestamp.is_some() && !held {
            self.remove(K::KIND, name);
        } else {
            self.store(name.to_owned(), object);
        }
        Ok(())
    }

    pub(super) fn delete<K: Stored>(&mut self, name: &str, only: &Only) -> Result<(), Refused> {
        let meta = self.meant::<K>(name, only)?.meta().clone();
        if meta.finalizers.iter().flatten().next().is_none() {
            self.remove(K::KIND, name);
            return Ok(());
        }
        let now = self.stamp(SignedDuration::ZERO);
        if meta.deletion_timestamp.is_none() {
            self.update::<K>(name, only, |object| {
                object.meta_mut().deletion_timestamp = Some(now);
            })?;
        }
        Ok(())
    }

    /// A pod's deletion: at once if it runs nowhere or has ended, else at the end of its grace period.
    pub(super) fn delete_pod(
        &mut self,
        name: &str,
        only: &Only,
        grace_seconds: i64,
    ) -> Result<(), Refused> {
        let pod: &Pod = self.meant(name, only)?;
        let bound = pod.spec.as_ref().is_some_and(|s| s.node_name.is_some());
        let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
        let ended = matches!(phase, Some("Succeeded" | "Failed"));
        if !bound || ended || grace_seconds == 0 {
            self.remove(Kind::Pod, name);
            return Ok(());
        }
        if pod.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let end = self.stamp(SignedDuration::from_secs(grace_seconds));
        self.update::<Pod>(name, only, |pod| {
            pod.metadata.deletion_timestamp = Some(end);
        })
    }

    fn meant<K: Stored>(&self, name: &str, only: &Only) -> Result<&K, Refused> {
        let object = self.get::<K>(name).ok_or(Refused::NotFound)?;
        let meta = object.meta();
        let other_uid = only.uid.is_some() && only.uid != meta.uid;
        let other_version = only.version.is_some() && only.version != meta.resource_version;
        if other_uid || other_version {
            return Err(Refused::Conflict);
        }
        Ok(object)
    }

    fn store<K: Stored>(&mut self, name: String, object: K) {
        let object = object.wrap();
        self.log
            .entry(K::KIND)
            .or_default()
            .push((name.clone(), Some(object.clone())));
        self.objects.insert((K::KIND, name), object);
    }

    fn remove(&mut self, kind: Kind, name: &str) {
        self.objects.remove(&(kind, name.to_owned()));
        self.log
            .entry(kind)
            .or_default()
            .push((name.to_owned(), None));
    }

    /// The API server's times of objects are whole seconds.
    pub(super) fn stamp(&self, later: SignedDuration) -> Time {
        let seconds = (self.now + later).as_second();
        Time(Timestamp::from_second(seconds).expect("a time of our days"))
    }
}

/// What a watch tells.
#[derive(Debug, Clone)]
pub(super) enum Seen {
    Applied(Object),
    Deleted(Kind, String),
    Synced(Kind),
}

/// A process's watches, one for each kind. They are not in step with each other.
#[derive(Debug, Clone, Default)]
pub(super) struct Watches {
    listed: BTreeSet<Kind>,
    read: BTreeMap<Kind, usize>,
    known: BTreeMap<Kind, BTreeSet<String>>,
    /// What a list has still to tell, with names.
    pending: BTreeMap<Kind, VecDeque<(String, Seen)>>,
}

impl Watches {
    /// What there is of a kind is known.
    pub(super) fn caught_up(&mut self, api: &Api, kind: Kind) {
        self.list(api, kind);
        for (name, _) in self.pending.remove(&kind).into_iter().flatten() {
            self.known.entry(kind).or_default().insert(name);
        }
        self.listed.insert(kind);
    }

    /// The connection broke: everything is listed again.
    pub(super) fn broken(&mut self, kind: Kind) {
        self.listed.remove(&kind);
        self.pending.remove(&kind);
    }

    pub(super) fn has_next(&self, api: &Api, kind: Kind) -> bool {
        let read = self.read.get(&kind).copied().unwrap_or(0);
        !self.listed.contains(&kind)
            || self.pending.get(&kind).is_some_and(|p| !p.is_empty())
            || api.log.get(&kind).is_some_and(|log| log.len() > read)
    }

    pub(super) fn next(&mut self, api: &Api, kind: Kind) -> Option<Seen> {
        if self.listed.insert(kind) {
            self.list(api, kind);
        }
        let listed = self.pending.entry(kind).or_default().pop_front();
        let (name, seen) = if let Some(listed) = listed {
            listed
        } else {
            let read = self.read.entry(kind).or_default();
            let (name, object) = api.log.get(&kind)?.get(*read)?.clone();
            *read += 1;
            let gone = Seen::Deleted(kind, name.clone());
            (name, object.map_or(gone, Seen::Applied))
        };
        // What is gone is known until it was told: a list that breaks is read again from its beginning.
        let known = self.known.entry(kind).or_default();
        match &seen {
            Seen::Applied(_) => _ = known.insert(name),
            Seen::Deleted(..) => _ = known.remove(&name),
            Seen::Synced(_) => {}
        }
        Some(seen)
    }

    /// As `ops::watch` does: what is there, then what is missing from what was known.
    fn list(&mut self, api: &Api, kind: Kind) {
        let mut listed = BTreeSet::new();
        let pending = self.pending.entry(kind).or_default();
        for ((of, name), object) in &api.objects {
            if *of == kind {
                listed.insert(name.clone());
                pending.push_back((name.clone(), Seen::Applied(object.clone())));
            }
        }
        let known = self.known.entry(kind).or_default();
        let gone = known.difference(&listed);
        pending.extend(gone.map(|name| (name.clone(), Seen::Deleted(kind, name.clone()))));
        pending.push_back((String::new(), Seen::Synced(kind)));
        let end = api.log.get(&kind).map_or(0, Vec::len);
        self.read.insert(kind, end);
    }
}
