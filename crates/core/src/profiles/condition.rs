//! For which pods the API server asks the webhook.

use crate::admission::Profiles;
use monopod_api::labels;
use std::collections::BTreeSet;

/// A CEL expression that is true of every pod that the profiles may select: those of their namespaces,
/// and those whose label names one, so that a mistake there can be said.
///
/// Labels are left to the webhook. The API server asks again about a pod whose labels another webhook
/// changed only if it asked before.
pub fn match_condition(profiles: &Profiles) -> String {
    let patterns: BTreeSet<&str> = profiles
        .values()
        .flat_map(|profile| &profile.selectors)
        .map(|selector| selector.namespace.as_str())
        .filter(|pattern| is_possible(pattern))
        .collect();
    let named = format!(
        "has(object.metadata.labels) && '{}' in object.metadata.labels",
        labels::FARGATE_PROFILE
    );
    let (wild, plain): (Vec<&str>, Vec<&str>) =
        patterns.into_iter().partition(|p| p.contains(['*', '?']));
    let mut alternatives = vec![named];
    if !plain.is_empty() {
        let list: Vec<_> = plain.iter().map(|name| format!("'{name}'")).collect();
        alternatives.push(format!("request.namespace in [{}]", list.join(", ")));
    }
    for pattern in wild {
        let expression = pattern.replace('*', ".*").replace('?', ".");
        alternatives.push(format!("request.namespace.matches('^{expression}$')"));
    }
    alternatives.join(" || ")
}

/// Whether a namespace may match. What no namespace's name has need not be asked about, nor quoted.
fn is_possible(pattern: &str) -> bool {
    let usable = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-*?".contains(&b);
    pattern.bytes().all(usable)
}
