//! A profile's status, and what is said when it changes.

use super::{Told, Turns, shadowed_by};
use crate::admission::Profiles;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use monopod_api::messages;
use monopod_api::names;
use monopod_api::profile::{FargateProfile, FargateProfileStatus, ProfileState, Selector};

/// The condition that says whether pods can be launched.
pub const READY: &str = "Ready";
/// Its reason while what the profile names is missing or wrong.
pub const MISCONFIGURED: &str = "Misconfigured";
/// Its reason while there are too many profiles.
pub const TOO_MANY: &str = "TooManyProfiles";
const SHADOWED: &str = "Shadowed";

/// What the status of a profile that is not being deleted follows from.
pub(super) struct Kept<'a> {
    pub(super) name: &'a String,
    pub(super) profile: &'a FargateProfile,
    /// The profiles that select pods.
    pub(super) active: &'a Profiles,
    /// Whether the API server asks the webhook about all that they select.
    pub(super) is_served: bool,
    /// Why no pods can be launched.
    pub(super) launch: Result<(), String>,
    pub(super) turns: &'a Turns<'a>,
    pub(super) limit: usize,
    pub(super) now: Timestamp,
}

pub(super) fn of_kept(kept: &Kept<'_>) -> FargateProfileStatus {
    let Kept {
        name,
        profile,
        active,
        is_served,
        launch,
        turns,
        limit,
        now,
    } = kept;
    let is_active = super::state(profile) == ProfileState::Active;
    let (state, ready, reason, message) = if turns.too_many.contains(name) {
        let message = format!(
            "a cluster has at most {limit} Fargate profiles; delete one, add a selector to one, or bring the cluster up with a larger --max-profiles"
        );
        (ProfileState::CreateFailed, false, TOO_MANY, message)
    } else if !is_active && let Some(other) = turns.creating.filter(|other| other != name) {
        let message = messages::cannot_create_profile(name, other);
        (ProfileState::Creating, false, "Creating", message)
    } else if !is_active && !is_served {
        let message = "the API server is being told to ask the webhook about its pods".to_owned();
        (ProfileState::Creating, false, "Creating", message)
    } else {
        match launch {
            Ok(()) => (
                ProfileState::Active,
                true,
                "Launching",
                "new pods are launched".to_owned(),
            ),
            Err(why) => (ProfileState::Active, false, MISCONFIGURED, why.clone()),
        }
    };
    let mut wanted = vec![(READY, ready, reason, message)];
    if let Some(first) = shadowed_by(name, &profile.spec, active) {
        let message = format!(
            "every pod that it selects is taken by the Fargate profile {first}, which comes first by name; change one of them, or name this one in the pods' label"
        );
        wanted.push((SHADOWED, true, "Shadowed", message));
    }
    status(profile, state, wanted, *now)
}

pub(super) fn of_going(
    name: &str,
    profile: &FargateProfile,
    before: Option<&String>,
    pods: usize,
    deadline: Timestamp,
    now: Timestamp,
) -> FargateProfileStatus {
    let (reason, message) = match before {
        Some(other) => ("Waiting", messages::cannot_delete_profile(name, other)),
        None => (
            "Draining",
            format!(
                "{pods} pods left; they are evicted as their disruption budgets permit, and deleted at {deadline}"
            ),
        ),
    };
    let wanted = vec![(READY, false, reason, message)];
    status(profile, ProfileState::Deleting, wanted, now)
}

fn status(
    profile: &FargateProfile,
    state: ProfileState,
    wanted: Vec<(&str, bool, &str, String)>,
    now: Timestamp,
) -> FargateProfileStatus {
    let before = profile.status.clone().unwrap_or_default();
    let generation = profile.metadata.generation.unwrap_or_default();
    let condition = |(kind, value, reason, message): (&str, bool, &str, String)| {
        let value = if value { "True" } else { "False" };
        let same = |c: &&Condition| c.type_ == kind && c.status == value;
        let since = before.conditions.iter().find(same);
        Condition {
            type_: kind.to_owned(),
            status: value.to_owned(),
            reason: reason.to_owned(),
            message,
            // Whole seconds, as the API server keeps them.
            last_transition_time: since.map_or_else(
                || Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
                |c| c.last_transition_time.clone(),
            ),
            observed_generation: Some(generation),
        }
    };
    let uid = profile.metadata.uid.as_deref();
    FargateProfileStatus {
        status: state,
        observed_generation: generation,
        conditions: wanted.into_iter().map(condition).collect(),
        id: uid.map(|uid| names::ec2_id("fp", uid)),
    }
}

/// What a change of the status is worth saying.
pub(super) fn told(
    profile: &FargateProfile,
    before: &FargateProfileStatus,
    after: &FargateProfileStatus,
) -> Vec<Told> {
    let mut told = Vec::new();
    if before.observed_generation != 0
        && before.observed_generation != after.observed_generation
        && after.status != ProfileState::Deleting
    {
        told.push(Told {
            warning: false,
            reason: "ProfileChanged",
            message: format!(
                "selects {} now; pods that have an environment keep it, new ones follow",
                selectors(&profile.spec.selectors)
            ),
        });
    }
    for condition in &after.conditions {
        let earlier = before
            .conditions
            .iter()
            .find(|c| c.type_ == condition.type_);
        let is_same =
            |c: &Condition| (&c.status, &c.reason) == (&condition.status, &condition.reason);
        if earlier.is_some_and(is_same) {
            continue;
        }
        let (warning, reason) = match condition.reason.as_str() {
            "Launching" => (false, "ProfileReady"),
            "Creating" => continue,
            "Waiting" => (false, "DeletionWaits"),
            "Draining" => (false, "Draining"),
            MISCONFIGURED => (true, "ProfileMisconfigured"),
            "Shadowed" => (true, "ProfileShadowed"),
            _too_many => (true, "TooManyProfiles"),
        };
        told.push(Told {
            warning,
            reason,
            message: condition.message.clone(),
        });
    }
    told
}

/// For people: `default, team-*{tier=front}`.
fn selectors(selectors: &[Selector]) -> String {
    let one = |selector: &Selector| {
        let labels: Vec<_> = selector
            .labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        if labels.is_empty() {
            selector.namespace.clone()
        } else {
            format!("{}{{{}}}", selector.namespace, labels.join(","))
        }
    };
    selectors.iter().map(one).collect::<Vec<_>>().join(", ")
}
