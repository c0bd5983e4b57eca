//! The life of Fargate profiles.
//!
//! ```text
//!            its turn, webhook asked         deleted              its turn, no pod left
//!  CREATING ────────────────────────▶ ACTIVE ───────▶ DELETING ──────────────────────▶ gone
//!     ▲  ▼ too many profiles                          pods evicted, at the deadline deleted
//!  CREATE_FAILED
//! ```
//!
//! As on EKS one profile is created and one is deleted at a time. All are decided on together, since
//! each one's state depends on the others'.

mod condition;
mod shadow;
mod status;

#[cfg(test)]
mod tests;

pub use condition::match_condition;
pub use shadow::shadowed_by;
pub use status::{MISCONFIGURED, READY, TOO_MANY};

use crate::admission::Profiles;
use crate::lifecycle::Network;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use monopod_api::environment::PodReference;
use monopod_api::labels::PROFILE_FINALIZER;
use monopod_api::profile::{
    FargateProfile, FargateProfileStatus, PodExecutionRoleSpec, ProfileState,
};
use std::collections::BTreeMap;

/// Time between two attempts to evict a pod.
const EVICTION_RETRY: SignedDuration = SignedDuration::from_secs(5);

/// What there is, of all profiles.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// The profiles by name.
    pub profiles: &'a BTreeMap<String, FargateProfile>,
    /// How many there may be.
    pub limit: usize,
    /// The roles by name.
    pub roles: &'a BTreeMap<String, PodExecutionRoleSpec>,
    /// Subnets and groups.
    pub network: &'a Network,
    /// Pods that exist, by their profile.
    pub pods: &'a BTreeMap<String, Vec<ProfilePod>>,
    /// The condition under which the API server asks the webhook, as far as it is known.
    pub served: Option<&'a str>,
}

/// A pod of a profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProfilePod {
    /// Which.
    pub pod: PodReference,
    /// Whether its deletion was asked for.
    pub is_deleted: bool,
}

/// What to do, in this order.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Lets the API server ask the webhook under this condition.
    Serve(String),
    /// Adds control's finalizer, so that the profile's pods can be drained.
    Hold(String),
    /// Writes a profile's status.
    Report(String, Box<FargateProfileStatus>),
    /// Says in an event on a profile what changed.
    Tell(String, Told),
    /// Asks for a pod's eviction, which its disruption budgets may refuse.
    Evict(PodReference),
    /// Deletes a pod, whatever its budgets say.
    Delete(PodReference),
    /// Gives up control's finalizer, with which the profile vanishes.
    LetGo(String),
}

/// The content of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// Whether somebody should act.
    pub warning: bool,
    /// One word.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

/// What to do now, and when to look again without an event.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// In this order.
    pub effects: Vec<Effect>,
    /// Latest time of the next look.
    pub wake: Option<Timestamp>,
}

/// The profiles that select pods: those in use, and the one whose turn it is to be created.
pub fn selecting(profiles: &BTreeMap<String, FargateProfile>, limit: usize) -> Profiles {
    let turn = Turns::of(profiles, limit).creating;
    profiles
        .iter()
        .filter(|(name, profile)| {
            is_kept(profile) && (state(profile) == ProfileState::Active || turn == Some(*name))
        })
        .map(|(name, profile)| (name.clone(), profile.spec.clone()))
        .collect()
}

/// Decides for all profiles.
pub fn decide(observed: &Observed<'_>, now: Timestamp) -> Decision {
    let mut decision = Decision::default();
    let active = selecting(observed.profiles, observed.limit);
    let condition = match_condition(&active);
    let is_served = observed.served == Some(&condition);
    if !is_served {
        decision.effects.push(Effect::Serve(condition));
    }
    let turns = Turns::of(observed.profiles, observed.limit);
    for (name, profile) in observed.profiles {
        if !is_kept(profile) {
            drain(&mut decision, observed, &turns, name, now);
        } else if is_held(&profile.metadata) {
            let wanted = status::of_kept(&status::Kept {
                name,
                profile,
                active: &active,
                is_served,
                launch: crate::lifecycle::launch(
                    name,
                    &profile.spec,
                    observed.roles,
                    observed.network,
                )
                .map(drop),
                turns: &turns,
                limit: observed.limit,
                now,
            });
            report(&mut decision, name, profile, wanted);
        } else {
            decision.effects.push(Effect::Hold(name.clone()));
        }
    }
    decision
}

/// Whose turn it is.
struct Turns<'a> {
    creating: Option<&'a String>,
    deleting: Option<&'a String>,
    /// Those beyond the limit.
    too_many: Vec<&'a String>,
}

impl<'a> Turns<'a> {
    fn of(profiles: &'a BTreeMap<String, FargateProfile>, limit: usize) -> Self {
        let mut kept: Vec<_> = profiles.iter().filter(|(_, p)| is_kept(p)).collect();
        kept.sort_by_key(|(name, p)| {
            let since = p.metadata.creation_timestamp.as_ref().map(|t| t.0);
            (state(p) != ProfileState::Active, since, *name)
        });
        let too_many = kept.split_off(kept.len().min(limit));
        let going = profiles.iter().filter(|(_, p)| !is_kept(p));
        Self {
            creating: kept
                .into_iter()
                .find(|(_, p)| state(p) != ProfileState::Active)
                .map(|(name, _)| name),
            deleting: going
                .min_by_key(|(name, p)| {
                    let since = p.metadata.deletion_timestamp.as_ref().map(|t| t.0);
                    (since, *name)
                })
                .map(|(name, _)| name),
            too_many: too_many.into_iter().map(|(name, _)| name).collect(),
        }
    }
}

/// Ends the pods of a profile that is being deleted, and then the profile.
fn drain(
    decision: &mut Decision,
    observed: &Observed<'_>,
    turns: &Turns<'_>,
    name: &String,
    now: Timestamp,
) {
    let Some((_, profile)) = observed.profiles.get_key_value(name) else {
        return;
    };
    let asked = profile.metadata.deletion_timestamp.as_ref().map(|t| t.0);
    if !is_held(&profile.metadata) {
        return;
    }
    let none = Vec::new();
    let pods = observed.pods.get(name).unwrap_or(&none);
    let timeout = SignedDuration::from_secs(i64::from(profile.spec.drain_timeout_seconds));
    let deadline = asked.unwrap_or(now) + timeout;
    let before = turns.deleting.filter(|first| *first != name);
    let wanted = status::of_going(name, profile, before, pods.len(), deadline, now);
    report(decision, name, profile, wanted);
    if before.is_some() {
        return;
    }
    if pods.is_empty() {
        decision.effects.push(Effect::LetGo(name.clone()));
        return;
    }
    let end = |pod: PodReference| {
        if now < deadline {
            Effect::Evict(pod)
        } else {
            Effect::Delete(pod)
        }
    };
    let left = pods.iter().filter(|pod| !pod.is_deleted);
    decision
        .effects
        .extend(left.map(|left| end(left.pod.clone())));
    decision.wake = Some(if now < deadline {
        deadline.min(now + EVICTION_RETRY)
    } else {
        now + EVICTION_RETRY
    });
}

fn report(
    decision: &mut Decision,
    name: &str,
    profile: &FargateProfile,
    wanted: FargateProfileStatus,
) {
    let current = profile.status.clone().unwrap_or_default();
    if current == wanted {
        return;
    }
    let told = status::told(profile, &current, &wanted);
    let report = Effect::Report(name.to_owned(), Box::new(wanted));
    decision.effects.push(report);
    let tell = |told| Effect::Tell(name.to_owned(), told);
    decision.effects.extend(told.into_iter().map(tell));
}

fn state(profile: &FargateProfile) -> ProfileState {
    profile.status.as_ref().map_or_else(
        || FargateProfileStatus::default().status,
        |status| status.status,
    )
}

fn is_kept(profile: &FargateProfile) -> bool {
    profile.metadata.deletion_timestamp.is_none()
}

fn is_held(metadata: &ObjectMeta) -> bool {
    let mut finalizers = metadata.finalizers.iter().flatten();
    finalizers.any(|finalizer| finalizer == PROFILE_FINALIZER)
}
