//! A simulated control process: the real index, watch handlers and decisions, and the requests that
//! the executor makes for each effect, one at a time.

use super::api::{Api, KINDS, Kind, Object, Only, Refused, Seen, Watches};
use super::drain;
use super::schedule::{Fate, Sabotage};
use crate::execute::Subject;
use crate::index::Index;
use crate::reconcile::{self, Key, RETRY};
use crate::watches;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use monopod_api::environment::Environment;
use monopod_api::network::{InterfacePhase, NetworkInterface};
use monopod_api::{KUBERNETES_VERSION, labels, names};
use monopod_core::lifecycle::{self, COOLING, Effect, InterfaceEffect, lost_status};
use monopod_core::profiles;
use monopod_ops::watch::Change;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What one key's work has left to do.
#[derive(Clone)]
struct Work {
    subject: Subject,
    effects: VecDeque<Step>,
    wake: Option<Timestamp>,
}

/// One request, or what stands for it.
#[derive(Debug, Clone)]
pub(super) enum Step {
    Pod(Effect),
    Profile(profiles::Effect),
    Cool(Box<NetworkInterface>),
    Free(Box<NetworkInterface>),
    Clear { environment: String, node: String },
}

/// A request that arrives after its sender gave up on it.
#[derive(Clone)]
pub(super) struct Late {
    pub(super) due: Timestamp,
    subject: Subject,
    step: Step,
}

/// What a control process can do next.
#[derive(Debug, Clone)]
pub(super) enum Option_ {
    Watch(Kind),
    Take(Key),
    Request(Key),
}

pub(super) struct Control {
    pub(super) index: Index,
    watches: Watches,
    synced: BTreeSet<Kind>,
    queue: BTreeMap<Key, Timestamp>,
    running: BTreeMap<Key, Work>,
    pub(super) skew: SignedDuration,
    sabotage: Sabotage,
}

impl Control {
    /// A process that has just started: nothing is kept from the one before. It has read the profile.
    pub(super) fn new(api: &Api, index: Index, skew: SignedDuration, sabotage: Sabotage) -> Self {
        let mut watches = Watches::default();
        watches.caught_up(api, Kind::Profile);
        Self {
            index,
            watches,
            synced: BTreeSet::from([Kind::Profile]),
            queue: BTreeMap::new(),
            running: BTreeMap::new(),
            skew,
            sabotage,
        }
    }

    fn now(&self, api: &Api) -> Timestamp {
        api.now + self.skew
    }

    pub(super) fn broken(&mut self, kind: Kind) {
        self.watches.broken(kind);
    }

    /// It acts no more, or was frozen for so long that it must not go on.
    pub(super) fn stops(&mut self) {
        for key in std::mem::take(&mut self.running).into_keys() {
            if let Key::Pod(uid) = key {
                self.index.forget_assumed(&names::environment(&uid));
            }
        }
    }

    /// It acts from now on.
    pub(super) fn begins(&mut self, api: &Api) {
        let now = self.now(api);
        for key in self.index.everything() {
            self.add_if_life(key, now);
        }
    }

    pub(super) fn options(&self, api: &Api, acts: bool) -> Vec<Option_> {
        let mut options = Vec::new();
        if api.answers().is_ok() {
            let next = KINDS
                .into_iter()
                .filter(|kind| self.watches.has_next(api, *kind));
            options.extend(next.map(Option_::Watch));
        }
        if self.synced.len() < KINDS.len() || !acts {
            return options;
        }
        options.extend(self.running.keys().cloned().map(Option_::Request));
        let now = self.now(api);
        let due = self
            .queue
            .iter()
            .filter(|(key, at)| **at <= now && !self.running.contains_key(*key));
        options.extend(due.map(|(key, _)| Option_::Take(key.clone())));
        options
    }

    /// When it has something to do by itself, by the API server's clock.
    pub(super) fn wakes(&self) -> Option<Timestamp> {
        self.queue.values().min().map(|at| *at - self.skew)
    }

    pub(super) fn act(&mut self, api: &mut Api, option: Option_, fate: Fate, late: &mut Vec<Late>) {
        match option {
            Option_::Watch(kind) => {
                if let Some(seen) = self.watches.next(api, kind) {
                    self.see(api, seen);
                }
            }
            Option_::Take(key) => self.take(api, &key),
            Option_::Request(key) => self.request(api, &key, fate, late),
        }
    }

    fn see(&mut self, api: &Api, seen: Seen) {
        if let Seen::Synced(kind) = seen {
            self.synced.insert(kind);
        }
        let now = self.now(api);
        let index = &mut self.index;
        let keys = match (kind_of(&seen), seen) {
            (Kind::Pod, seen) => watches::pod(index, change(seen)),
            (Kind::Node, seen) => watches::node(index, change(seen)),
            (Kind::Environment, seen) => watches::environment(index, change(seen)),
            (Kind::Interface, seen) => watches::interface(index, change(seen), now),
            (Kind::Host, seen) => watches::host(index, change(seen)),
            (Kind::Role, seen) => watches::role(index, change(seen)),
            (Kind::Lease, seen) => watches::lease(index, change(seen), now),
            (Kind::Profile, seen) => watches::profile(index, change(seen)),
        };
        for key in keys {
            self.add_if_life(key, now);
        }
    }

    /// Ids, registry credentials and what is said of profiles are no part of an environment's life.
    fn add_if_life(&mut self, key: Key, at: Timestamp) {
        let is_life = match key {
            Key::Pod(_) | Key::Interface(_) | Key::Remains { .. } => true,
            Key::Profiles => self.index.is_draining(),
            Key::Credentials(_) | Key::Unmarked(_) => false,
        };
        if is_life {
            self.add(key, at);
        }
    }

    fn add(&mut self, key: Key, at: Timestamp) {
        let due = self.queue.entry(key).or_insert(at);
        *due = (*due).min(at);
    }

    fn take(&mut self, api: &Api, key: &Key) {
        self.queue.remove(key);
        let now = self.now(api);
        let work = match key {
            Key::Pod(uid) => {
                let (decision, subject) =
                    reconcile::decide(&mut self.index, uid, KUBERNETES_VERSION, now);
                let mut effects: VecDeque<Step> =
                    decision.effects.into_iter().map(Step::Pod).collect();
                self.sabotage.effects(&subject, &mut effects);
                Work {
                    subject,
                    effects,
                    wake: decision.wake,
                }
            }
            Key::Interface(name) => {
                let Some((effect, interface)) = reconcile::decide_interface(&self.index, name, now)
                else {
                    return;
                };
                let interface = Box::new(interface);
                let (effects, wake) = match effect {
                    InterfaceEffect::Keep(wake) => (None, wake),
                    InterfaceEffect::Cool => (Some(Step::Cool(interface)), None),
                    InterfaceEffect::Delete => (Some(Step::Free(interface)), None),
                };
                Work {
                    subject: nobody(),
                    effects: effects.into_iter().collect(),
                    wake,
                }
            }
            Key::Profiles => {
                let (effects, wake) = drain::decide(&self.index, now);
                let mut effects: VecDeque<Step> = effects.into_iter().map(Step::Profile).collect();
                let subject = nobody();
                self.sabotage.effects(&subject, &mut effects);
                Work {
                    subject,
                    effects,
                    wake,
                }
            }
            Key::Remains { environment, node } => {
                if self.index.has_node(environment, node) {
                    return;
                }
                let clear = Step::Clear {
                    environment: environment.clone(),
                    node: node.clone(),
                };
                let (subject, mut effects) = (nobody(), VecDeque::from([clear]));
                self.sabotage.effects(&subject, &mut effects);
                Work {
                    subject,
                    effects,
                    wake: None,
                }
            }
            Key::Credentials(_) | Key::Unmarked(_) => return,
        };
        self.running.insert(key.clone(), work);
        self.finish_if_done(key);
    }

    fn finish_if_done(&mut self, key: &Key) {
        if self
            .running
            .get(key)
            .is_some_and(|work| work.effects.is_empty())
        {
            let wake = self.running.remove(key).and_then(|work| work.wake);
            if let Some(wake) = wake {
                self.add(key.clone(), wake);
            }
        }
    }

    fn request(&mut self, api: &mut Api, key: &Key, fate: Fate, late: &mut Vec<Late>) {
        let Some(work) = self.running.get_mut(key) else {
            return;
        };
        let Some(step) = work.effects.pop_front() else {
            return;
        };
        let subject = work.subject.clone();
        let now = api.now + self.skew;
        if let (Step::Pod(Effect::RememberFailure(attempts)), Key::Pod(uid)) = (&step, key) {
            self.index.attempts.insert(uid.clone(), attempts.clone());
            return self.finish_if_done(key);
        }
        // First, as the watch may tell of its end before the answer.
        let released = match (&step, &subject.environment) {
            (Step::Pod(Effect::ReleaseEnvironment), Some(environment)) => environment.uid(),
            _another => None,
        };
        self.index.cleared.extend(released.clone());
        let outcome = api.answers().and_then(|()| match fate {
            Fate::Done => execute(api, &subject, &step, now),
            Fate::Lost => Err(Refused::Unreachable),
            Fate::ReplyLost => {
                let done = execute(api, &subject, &step, now);
                done.and(Err(Refused::Unreachable))
            }
            Fate::Late(delay) => {
                let due = api.now + Fate::delay(delay);
                late.push(Late {
                    due,
                    subject: subject.clone(),
                    step,
                });
                Err(Refused::Unreachable)
            }
        });
        match outcome {
            Ok(created) => {
                match created {
                    Some(Object::Interface(made)) => {
                        self.index.interfaces.insert(made.name_any(), *made);
                    }
                    Some(Object::Environment(made)) => {
                        self.index.environments.insert(made.name_any(), *made);
                    }
                    _nothing => {}
                }
                self.finish_if_done(key);
            }
            Err(refused) => {
                if let (Refused::NoEnvironment, Some(gone)) = (refused, &subject.environment) {
                    for key in watches::vanished(&mut self.index, gone) {
                        self.add_if_life(key, now);
                    }
                }
                if let Some(uid) = released {
                    self.index.cleared.remove(&uid);
                }
                let retry = SignedDuration::try_from(RETRY).expect("half a second");
                if let Key::Pod(uid) = key {
                    let environment = names::environment(uid);
                    for key in watches::given_up(&mut self.index, &environment) {
                        self.add(key, now + retry);
                    }
                }
                self.running.remove(key);
                self.add(key.clone(), now + retry);
            }
        }
    }
}

impl Late {
    /// It arrives. Nobody waits for the answer.
    pub(super) fn arrive(&self, api: &mut Api) {
        let now = api.now;
        drop(execute(api, &self.subject, &self.step, now));
    }
}

/// Of what is no pod's.
fn nobody() -> Subject {
    Subject {
        uid: String::new(),
        pod: None,
        environment: None,
        interface: None,
    }
}

fn kind_of(seen: &Seen) -> Kind {
    match seen {
        Seen::Applied(object) => match object {
            Object::Pod(_) => Kind::Pod,
            Object::Node(_) => Kind::Node,
            Object::Environment(_) => Kind::Environment,
            Object::Interface(_) => Kind::Interface,
            Object::Host(_) => Kind::Host,
            Object::Role(_) => Kind::Role,
            Object::Lease(_) => Kind::Lease,
            Object::Profile(_) => Kind::Profile,
        },
        Seen::Deleted(kind, _) | Seen::Synced(kind) => *kind,
    }
}

fn change<K: super::api::Stored>(seen: Seen) -> Change<K> {
    match seen {
        Seen::Applied(object) => K::unwrap(&object)
            .cloned()
            .map_or(Change::Synced, Change::Applied),
        Seen::Deleted(kind, name) => Change::Deleted {
            namespace: if kind == Kind::Pod { "default" } else { "" }.to_owned(),
            name,
        },
        Seen::Synced(_) => Change::Synced,
    }
}

/// The requests of one effect, as the executor makes them.
fn execute(
    api: &mut Api,
    subject: &Subject,
    step: &Step,
    now: Timestamp,
) -> Result<Option<Object>, Refused> {
    let effect = match step {
        Step::Cool(interface) => return cool(api, interface, now).map(|()| None),
        Step::Free(interface) => {
            let only = Only::uid(interface.metadata.uid.as_ref());
            let name = interface.name_any();
            absent_is_fine(api.delete::<NetworkInterface>(&name, &only))?;
            let freed = api.update::<NetworkInterface>(&name, &only, |interface| {
                interface.metadata.finalizers = None;
            });
            return absent_is_fine(freed);
        }
        Step::Profile(effect) => return drain::execute(api, effect),
        Step::Clear { environment, node } => {
            clear(api, environment, node);
            return Ok(None);
        }
        Step::Pod(effect) => effect,
    };
    let pod_name = subject.pod.as_ref().map(ResourceExt::name_any);
    let pod_name = pod_name.ok_or(Refused::NotFound);
    let only = Only::uid(Some(&subject.uid));
    let environment = subject.environment.as_ref().ok_or(Refused::NotFound);
    match effect {
        Effect::CreateInterface(new) => {
            return api.create((**new).clone()).map(|made| Some(wrap(made)));
        }
        Effect::CreateEnvironment(new) => {
            return api.create((**new).clone()).map(|made| Some(wrap(made)));
        }
        Effect::Nominate { node } => api.update::<Pod>(&pod_name?, &only, |pod| {
            let status = pod.status.get_or_insert_default();
            status.nominated_node_name.clone_from(node);
        })?,
        Effect::Annotate(pairs) => api.update::<Pod>(&pod_name?, &only, |pod| {
            let all = pod.metadata.annotations.get_or_insert_default();
            all.extend(pairs.iter().map(|(k, v)| ((*k).to_owned(), v.clone())));
        })?,
        Effect::Bind { node } => {
            let environment = environment?;
            let current = api.get::<Environment>(&environment.name_any());
            if !lifecycle::is_there(environment, current) {
                return Err(Refused::NotFound);
            }
            bind(api, &pod_name?, &only, node)?;
        }
        Effect::Explain { cause, message } => api.update::<Pod>(&pod_name?, &only, |pod| {
            let condition = PodCondition {
                type_: "PodScheduled".to_owned(),
                status: "False".to_owned(),
                reason: Some(cause.reason().to_owned()),
                message: Some(message.clone()),
                last_transition_time: Some(Time(now)),
                last_probe_time: Some(Time(now)),
                ..PodCondition::default()
            };
            let conditions = pod
                .status
                .get_or_insert_default()
                .conditions
                .get_or_insert_default();
            conditions.retain(|c| c.type_ != "PodScheduled");
            conditions.push(condition);
        })?,
        Effect::FailPod { message } => api.update::<Pod>(&pod_name?, &only, |pod| {
            if let Some(lost) = lost_status(pod, message, now) {
                let status = pod.status.get_or_insert_default();
                status.phase = lost.phase;
                status.reason = lost.reason;
            }
        })?,
        Effect::DeletePod => return absent_is_fine(api.delete_pod(&pod_name?, &only, 0)),
        Effect::DeleteEnvironment => return delete_environment(api, subject, environment?),
        Effect::DeleteNode => delete_node(api, environment?)?,
        Effect::CoolInterface => {
            if let Some(interface) = &subject.interface {
                cool(api, interface, now)?;
            }
        }
        Effect::ReleaseEnvironment => {
            let environment = environment?;
            let only = Only::as_read(environment);
            let keep = |f: &String| f != labels::CONTROL_FINALIZER;
            let released = api.update::<Environment>(&environment.name_any(), &only, |held| {
                let finalizers = environment.finalizers().iter().filter(|f| keep(f));
                held.metadata.finalizers = Some(finalizers.cloned().collect());
            });
            return absent_is_fine(released);
        }
        Effect::RememberFailure(_) => {}
    }
    Ok(None)
}

fn wrap<K: super::api::Stored>(object: K) -> Object {
    object.wrap()
}

fn bind(api: &mut Api, pod: &str, only: &Only, node: &str) -> Result<(), Refused> {
    let bound = |pod: &Pod| pod.spec.as_ref().is_some_and(|s| s.node_name.is_some());
    if api
        .get::<Pod>(pod)
        .is_some_and(|p| bound(p) || p.metadata.deletion_timestamp.is_some())
    {
        return Err(Refused::Conflict);
    }
    api.update::<Pod>(pod, only, |pod| {
        pod.spec.get_or_insert_default().node_name = Some(node.to_owned());
    })
}

fn delete_environment(
    api: &mut Api,
    subject: &Subject,
    environment: &Environment,
) -> Result<Option<Object>, Refused> {
    let current = api.get::<Pod>(&environment.spec.pod.name);
    if lifecycle::stays(environment, subject.pod.as_ref(), current) {
        return Err(Refused::NotFound);
    }
    let only = Only::uid(environment.metadata.uid.as_ref());
    match api.delete::<Environment>(&environment.name_any(), &only) {
        Err(Refused::NotFound) => Err(Refused::NoEnvironment),
        deleted => deleted.map(|()| None),
    }
}

fn cool(api: &mut Api, interface: &NetworkInterface, now: Timestamp) -> Result<(), Refused> {
    let only = Only::uid(interface.metadata.uid.as_ref());
    let cooled = api.update::<NetworkInterface>(&interface.name_any(), &only, |interface| {
        let status = interface.status.get_or_insert_default();
        status.phase = InterfacePhase::Cooling;
        status.cooling_until = Some(Time(now + COOLING));
    });
    absent_is_fine(cooled).map(drop)
}

/// What an environment has left that is not there any more.
fn clear(api: &mut Api, environment: &str, node: &str) {
    match api.get::<Environment>(environment) {
        Some(current) if current.spec.node == node => return,
        Some(_) => {}
        None => drop(api.requests.remove(environment)),
    }
    let found = api.get::<Node>(node);
    if found.is_some_and(|found| lifecycle::environment_of(found) == Some(environment)) {
        drop(api.delete::<Node>(node, &Only::default()));
        api.leases.remove(node);
    }
}

fn delete_node(api: &mut Api, environment: &Environment) -> Result<(), Refused> {
    let name = &environment.spec.node;
    let provider = |node: &Node| node.spec.as_ref().and_then(|s| s.provider_id.clone());
    let provider = api.get::<Node>(name).and_then(provider).unwrap_or_default();
    if provider.ends_with(&environment.name_any()) {
        api.delete::<Node>(name, &Only::default())?;
    }
    api.leases.remove(name);
    api.requests.remove(&environment.name_any());
    Ok(())
}

pub(super) fn absent_is_fine<T>(result: Result<T, Refused>) -> Result<Option<Object>, Refused> {
    match result {
        Ok(_) | Err(Refused::NotFound) => Ok(None),
        Err(refused) => Err(refused),
    }
}
