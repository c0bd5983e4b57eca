//! Whether a profile ever takes a pod.

use crate::admission::Profiles;
use crate::wildcard;
use monopod_api::profile::{FargateProfileSpec, Selector};

/// The profile that takes every pod which this one selects, if there is such a one.
///
/// Only certain cases are found: each selector of this profile lies within one selector of a profile
/// that comes first by name, the same for all.
pub fn shadowed_by<'a>(
    name: &str,
    profile: &FargateProfileSpec,
    all: &'a Profiles,
) -> Option<&'a str> {
    all.iter()
        .take_while(|(other, _)| other.as_str() < name)
        .find(|(_, other)| {
            profile
                .selectors
                .iter()
                .all(|inner| other.selectors.iter().any(|outer| contains(outer, inner)))
        })
        .map(|(other, _)| other.as_str())
}

/// Whether every pod that the inner selector matches is one that the outer matches.
fn contains(outer: &Selector, inner: &Selector) -> bool {
    wildcard::contains(&outer.namespace, &inner.namespace)
        && outer.labels.iter().all(|(key, value)| {
            inner
                .labels
                .iter()
                .any(|(k, v)| wildcard::contains(key, k) && wildcard::contains(value, v))
        })
}
