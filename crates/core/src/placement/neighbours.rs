//! Pods that want to be near others, or far from them, as upstream's scheduler judges them.
//!
//! `matchLabelKeys` and `mismatchLabelKeys` are in the selectors already: the API server puts them there.

use super::Refusal;
use super::site::{Map, Neighbour, Site};
use crate::selector::{Labels, selects};
use k8s_openapi::api::core::v1::{Affinity, Pod, PodAffinityTerm, WeightedPodAffinityTerm};
use std::collections::{BTreeMap, BTreeSet};

/// What an existing pod's requirement to be near pods such as this one weighs (upstream's default).
const HARD_WEIGHT: i64 = 1;

/// Values of a label: of the label's key, and the value.
type Domains<'m> = BTreeSet<(&'m str, &'m str)>;

/// What other pods mean for where the pod may be.
pub(super) struct Attitudes<'m> {
    /// For each thing to be near of: the key, and where that is.
    near: Vec<(&'m str, BTreeSet<&'m str>)>,
    /// Nobody is there whom it wants to be near but the pod itself.
    is_first: bool,
    avoids: Domains<'m>,
    is_avoided_in: Domains<'m>,
    weights: BTreeMap<(&'m str, &'m str), i64>,
}

impl<'m> Attitudes<'m> {
    pub(super) fn new(map: &'m Map<'_>) -> Self {
        let wanted: Vec<&PodAffinityTerm> = required(map.pod, Side::Near).collect();
        let is_wanted = |other: &Pod| {
            let mut terms = wanted.iter();
            terms.all(|term| applies(map, term, map.pod, other))
        };
        let mut this = Self {
            near: wanted
                .iter()
                .map(|term| (term.topology_key.as_str(), BTreeSet::new()))
                .collect(),
            is_first: is_wanted(map.pod),
            avoids: Domains::new(),
            is_avoided_in: Domains::new(),
            weights: BTreeMap::new(),
        };
        for other in map.others() {
            if is_wanted(other.pod) {
                for (key, domains) in &mut this.near {
                    domains.extend(other.domain(key));
                    this.is_first = false;
                }
            }
            let avoided =
                required(map.pod, Side::Far).filter(|term| applies(map, term, map.pod, other.pod));
            this.avoids.extend(domains(avoided, other));
            let avoiding = required(other.pod, Side::Far)
                .filter(|term| applies(map, term, other.pod, map.pod));
            this.is_avoided_in.extend(domains(avoiding, other));
            this.weigh(map, other);
        }
        this
    }

    /// Adds what the pod and another prefer of each other.
    fn weigh(&mut self, map: &'m Map<'_>, other: Neighbour<'m>) {
        let mut add = |term: &'m PodAffinityTerm, weight: i64| {
            if let Some(domain) = other.domain(&term.topology_key) {
                *self
                    .weights
                    .entry((&term.topology_key, domain))
                    .or_default() += weight;
            }
        };
        for (side, sign) in [(Side::Near, 1), (Side::Far, -1)] {
            for (one, two) in [(map.pod, other.pod), (other.pod, map.pod)] {
                for weighted in preferred(one, side) {
                    if applies(map, &weighted.pod_affinity_term, one, two) {
                        add(
                            &weighted.pod_affinity_term,
                            sign * i64::from(weighted.weight),
                        );
                    }
                }
            }
        }
        for term in required(other.pod, Side::Near) {
            if applies(map, term, other.pod, map.pod) {
                add(term, HARD_WEIGHT);
            }
        }
    }

    /// Why the pod must not be there.
    pub(super) fn refusal(&self, site: &Site<'_>) -> Option<Refusal> {
        let is_in = |domains: &Domains<'_>| {
            let mut all = domains.iter();
            all.any(|(key, domain)| site.domain(key) == Some(domain))
        };
        let is_near = |(key, domains): &(&str, BTreeSet<&str>)| {
            let here = site.domain(key);
            here.is_some_and(|here| self.is_first || domains.contains(here))
        };
        if !self.near.iter().all(is_near) {
            Some(Refusal::Affinity)
        } else if is_in(&self.avoids) {
            Some(Refusal::AntiAffinity)
        } else if is_in(&self.is_avoided_in) {
            Some(Refusal::ExistingAntiAffinity)
        } else {
            None
        }
    }

    /// How much the pod and the others prefer that it is there.
    pub(super) fn preference(&self, site: &Site<'_>) -> i64 {
        let weights = self.weights.iter();
        let here = weights.filter(|((key, domain), _)| site.domain(key) == Some(domain));
        here.map(|(_, weight)| weight).sum()
    }
}

/// Whether where other pods are may decide on where this one may be.
pub fn is_constrained(pod: &Pod) -> bool {
    let spread = pod.spec.iter().flat_map(|s| &s.topology_spread_constraints);
    spread.flatten().next().is_some()
        || required(pod, Side::Near).next().is_some()
        || required(pod, Side::Far).next().is_some()
}

#[derive(Clone, Copy)]
enum Side {
    Near,
    Far,
}

fn affinity(pod: &Pod) -> Option<&Affinity> {
    pod.spec.as_ref()?.affinity.as_ref()
}

fn required(pod: &Pod, side: Side) -> impl Iterator<Item = &PodAffinityTerm> {
    let terms = affinity(pod).and_then(|affinity| match side {
        Side::Near => affinity
            .pod_affinity
            .as_ref()?
            .required_during_scheduling_ignored_during_execution
            .as_ref(),
        Side::Far => affinity
            .pod_anti_affinity
            .as_ref()?
            .required_during_scheduling_ignored_during_execution
            .as_ref(),
    });
    terms.into_iter().flatten()
}

fn preferred(pod: &Pod, side: Side) -> impl Iterator<Item = &WeightedPodAffinityTerm> {
    let terms = affinity(pod).and_then(|affinity| match side {
        Side::Near => affinity
            .pod_affinity
            .as_ref()?
            .preferred_during_scheduling_ignored_during_execution
            .as_ref(),
        Side::Far => affinity
            .pod_anti_affinity
            .as_ref()?
            .preferred_during_scheduling_ignored_during_execution
            .as_ref(),
    });
    terms.into_iter().flatten()
}

/// Whether a pod's term is about another pod.
fn applies(map: &Map<'_>, term: &PodAffinityTerm, owner: &Pod, other: &Pod) -> bool {
    let none = Labels::new();
    let namespace = other.metadata.namespace.as_deref().unwrap_or_default();
    let listed = term.namespaces.as_deref().unwrap_or_default();
    let is_there = if listed.is_empty() && term.namespace_selector.is_none() {
        owner.metadata.namespace == other.metadata.namespace
    } else {
        let labels = map.namespace(namespace).unwrap_or(&none);
        listed.iter().any(|one| one == namespace)
            || selects(term.namespace_selector.as_ref(), labels)
    };
    is_there
        && selects(
            term.label_selector.as_ref(),
            other.metadata.labels.as_ref().unwrap_or(&none),
        )
}

/// Where the terms do not want the pod, since this other one is there.
fn domains<'m>(
    terms: impl Iterator<Item = &'m PodAffinityTerm>,
    other: Neighbour<'m>,
) -> impl Iterator<Item = (&'m str, &'m str)> {
    terms.filter_map(move |term| {
        Some((
            term.topology_key.as_str(),
            other.domain(&term.topology_key)?,
        ))
    })
}
