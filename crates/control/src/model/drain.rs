//! The end of a profile: whose pods are evicted, and which are deleted in spite of their budget, and when.

use super::api::{Api, Object, Only, Refused};
use super::control::absent_is_fine;
use super::world::GRACE_SECONDS;
use crate::index::Index;
use crate::profiles::pods_of_deleted;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use monopod_api::environment::PodReference;
use monopod_api::labels::PROFILE_FINALIZER;
use monopod_api::profile::{
    FargateProfile, FargateProfileSpec, FargateProfileStatus, ProfileState, Selector,
};
use monopod_core::profiles::{self, Effect, Observed};

/// The one profile.
pub(super) const PROFILE: &str = "fp-default";
/// How long its pods are only evicted.
const DRAIN_SECONDS: u32 = 120;
/// How wrong a clock can be.
const SKEW: SignedDuration = SignedDuration::from_secs(33);
/// Pods whose disruption budget permits no eviction.
const PROTECTED: [&str; 2] = ["pod-1", "pod-3"];

/// What became of pods by a drain.
#[derive(Debug, Clone, Default)]
pub(super) struct Drained {
    /// Pods that a drain ended.
    pub(super) pods: Vec<String>,
    /// The first one whose budget was broken before the profile's deadline.
    pub(super) too_early: Option<String>,
    /// Until when budgets hold, as the deletion of the profile announced.
    announced: Option<Timestamp>,
}

pub(super) fn profile() -> FargateProfile {
    let selector = Selector {
        namespace: "default".to_owned(),
        ..Selector::default()
    };
    let spec = FargateProfileSpec {
        selectors: vec![selector],
        pod_execution_role: "default".to_owned(),
        drain_timeout_seconds: DRAIN_SECONDS,
        ..FargateProfileSpec::default()
    };
    let mut profile = FargateProfile::new(PROFILE, spec);
    profile.metadata.finalizers = Some(vec![PROFILE_FINALIZER.to_owned()]);
    profile.status = Some(FargateProfileStatus {
        status: ProfileState::Active,
        ..FargateProfileStatus::default()
    });
    profile
}

/// Somebody deletes the profile.
pub(super) fn begins(api: &mut Api) {
    drop(api.delete::<FargateProfile>(PROFILE, &Only::default()));
    let asked = api.get::<FargateProfile>(PROFILE);
    if let Some(asked) = asked.and_then(|p| p.metadata.deletion_timestamp.clone()) {
        api.drained.announced = Some(asked.0 + SignedDuration::from_secs(DRAIN_SECONDS.into()));
    }
}

/// What control does about the pods of a profile that is being deleted; the rest is about what is said.
pub(super) fn decide(index: &Index, now: Timestamp) -> (Vec<Effect>, Option<Timestamp>) {
    let snapshot = index.snapshot(now);
    let observed = Observed {
        profiles: &index.profiles,
        limit: index.profile_limit(),
        roles: &snapshot.roles,
        network: &snapshot.network,
        pods: &pods_of_deleted(index),
        served: None,
    };
    let mut decision = profiles::decide(&observed, now);
    decision.effects.retain(|effect| {
        matches!(
            effect,
            Effect::Evict(_) | Effect::Delete(_) | Effect::LetGo(_)
        )
    });
    (decision.effects, decision.wake)
}

/// The request of one effect.
pub(super) fn execute(api: &mut Api, effect: &Effect) -> Result<Option<Object>, Refused> {
    match effect {
        Effect::Evict(pod) => {
            let is_protected = PROTECTED.contains(&pod.name.as_str());
            if !is_protected {
                end(api, pod);
            }
        }
        Effect::Delete(pod) => {
            let announced = api.drained.announced;
            let is_early = announced.is_none_or(|announced| api.now + SKEW < announced);
            if end(api, pod) && is_early {
                api.drained.too_early.get_or_insert_with(|| pod.uid.clone());
            }
        }
        Effect::LetGo(name) => {
            let let_go = |profile: &mut FargateProfile| profile.metadata.finalizers = None;
            return absent_is_fine(api.update(name, &Only::default(), let_go));
        }
        _said => {}
    }
    Ok(None)
}

/// Deletes a pod gracefully. True if it was there.
fn end(api: &mut Api, pod: &PodReference) -> bool {
    let only = Only::uid(Some(&pod.uid));
    let found = api.get::<Pod>(&pod.name).and_then(ResourceExt::uid);
    let is_there = found.as_ref() == Some(&pod.uid);
    if is_there {
        api.drained.pods.push(pod.uid.clone());
        drop(api.delete_pod(&pod.name, &only, GRACE_SECONDS));
    }
    is_there
}
