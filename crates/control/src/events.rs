//! Events: one for each object and reason, which says what is so now.

use crate::FIELD_MANAGER;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use monopod_core::profiles::Told;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Where events on objects without a namespace are.
const DEFAULT: &str = "default";
/// Bytes of an object's name that an event's holds beside a dot and the sum.
const NAME: usize = 236;

/// Tells as one component.
#[derive(Clone)]
pub(crate) struct Events {
    client: Client,
    component: &'static str,
}

impl Events {
    pub(crate) fn new(client: Client, component: &'static str) -> Self {
        Self { client, component }
    }

    /// Stores an event of now as far as it can be: nothing waits for it.
    pub(crate) async fn tell(&self, about: ObjectReference, told: Told) {
        let (uid, reason) = (about.uid.clone(), told.reason);
        if let Err(error) = self.store(about, told, Timestamp::now()).await {
            tracing::warn!(
                ?uid,
                reason,
                error = &error as &dyn std::error::Error,
                "event was not stored"
            );
        }
    }

    /// Stores an event in place of the object's last one for this reason. `since` is when it, or what it goes
    /// on with, began.
    pub(crate) async fn store(
        &self,
        about: ObjectReference,
        told: Told,
        since: Timestamp,
    ) -> Result<(), kube::Error> {
        // The API of `events.k8s.io` lets nobody change what an event says.
        let event = event(self.component, about, told, (since, Timestamp::now()));
        let (name, namespace) = (event.name_any(), event.namespace().unwrap_or_default());
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        match api.patch(&name, &parameters, &Patch::Apply(&event)).await {
            // The namespace is on its way out, and takes no more.
            Err(kube::Error::Api(status)) if status.code == 403 || status.code == 404 => Ok(()),
            stored => stored.map(drop),
        }
    }
}

fn event(
    component: &str,
    about: ObjectReference,
    told: Told,
    (since, now): (Timestamp, Timestamp),
) -> Event {
    let name = about.name.as_deref().unwrap_or_default();
    let mut sum = DefaultHasher::new();
    (&about.uid, told.reason, component).hash(&mut sum);
    let kept = name
        .get(..NAME)
        .unwrap_or(name)
        .trim_end_matches(['.', '-']);
    let namespace = about.namespace.clone();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{kept}.{:016x}", sum.finish())),
            namespace: Some(namespace.unwrap_or_else(|| DEFAULT.to_owned())),
            ..ObjectMeta::default()
        },
        involved_object: about,
        reason: Some(told.reason.to_owned()),
        message: Some(told.message),
        type_: Some(if told.warning { "Warning" } else { "Normal" }.to_owned()),
        count: Some(1),
        first_timestamp: Some(Time(since.min(now))),
        last_timestamp: Some(Time(now)),
        source: Some(EventSource {
            component: Some(component.to_owned()),
            host: None,
        }),
        reporting_component: Some(component.to_owned()),
        // The API server asks for one.
        reporting_instance: Some(component.to_owned()),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(uid: &str, name: &str, reason: &'static str, message: &str) -> Event {
        let about = ObjectReference {
            uid: Some(uid.to_owned()),
            name: Some(name.to_owned()),
            ..ObjectReference::default()
        };
        let told = Told {
            warning: true,
            reason,
            message: message.to_owned(),
        };
        let begin = Timestamp::UNIX_EPOCH;
        event("scheduler", about, told, (begin, begin))
    }

    #[test]
    fn an_object_has_one_event_for_each_reason() {
        let name = |event: Event| event.metadata.name.expect("a name");
        let first = name(told("1", "web", "Waits", "no room"));
        assert_eq!(first, name(told("1", "web", "Waits", "no address")));
        assert_ne!(first, name(told("1", "web", "Runs", "no room")));
        assert_ne!(first, name(told("2", "web", "Waits", "no room")));
    }

    #[test]
    fn an_events_name_fits() {
        for length in [1, 235, 236, 237, 253] {
            let mut name = "a".repeat(length);
            if length > NAME {
                name.replace_range(NAME - 1..NAME, ".");
            }
            let event = told("1", &name, "Waits", "");
            let name = event.metadata.name.expect("a name");
            assert!(name.len() <= 253 && !name.contains(".."), "{name}");
        }
    }
}
