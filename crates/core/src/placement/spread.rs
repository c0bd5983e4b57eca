//! How evenly pods lie over zones and machines.
//!
//! Constraints are judged as upstream's scheduler would with these nodes: what may become a node is a node, one on each
//! host in the zones of the profile's subnets. A machine that is cordoned or does not answer is a tainted node.

use super::Refusal;
use super::site::{Map, Neighbour, Site};
use crate::selector::{Labels, selects};
use k8s_openapi::api::core::v1::{Pod, TopologySpreadConstraint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use std::collections::BTreeMap;

/// A constraint, and how many pods it counts in each domain.
pub(super) struct Counted {
    key: String,
    max_skew: i64,
    is_required: bool,
    counts: BTreeMap<String, i64>,
    /// In the emptiest domain.
    fewest: i64,
    /// 1 if the pod itself is one of those that are counted.
    itself: i64,
}

impl Counted {
    /// All constraints of the pod.
    pub(super) fn all(map: &Map<'_>) -> Vec<Self> {
        let constraints = map.spec.topology_spread_constraints.iter().flatten();
        constraints.map(|one| Self::new(map, one)).collect()
    }

    fn new(map: &Map<'_>, constraint: &TopologySpreadConstraint) -> Self {
        let key = &constraint.topology_key;
        let own = map.pod.metadata.labels.clone().unwrap_or_default();
        let selector = selector(constraint, &own);
        let counted = |other: &Neighbour<'_>| {
            other.pod.metadata.namespace == map.pod.metadata.namespace
                && other.pod.metadata.deletion_timestamp.is_none()
                && includes(constraint, other.site)
                && is_selected(selector.as_ref(), other.pod)
        };
        let mut counts = BTreeMap::new();
        let sites = map.sites.iter().filter(|site| includes(constraint, site));
        for domain in sites.filter_map(|site| site.domain(key)) {
            counts.insert(domain.to_owned(), 0);
        }
        for domain in map
            .others()
            .filter(counted)
            .filter_map(|other| other.domain(key))
        {
            *counts.entry(domain.to_owned()).or_default() += 1;
        }
        let fewest = counts.values().min().copied().unwrap_or_default();
        let wanted = constraint.min_domains.unwrap_or(1);
        let are_enough = i32::try_from(counts.len()).is_ok_and(|domains| domains >= wanted);
        Self {
            key: key.clone(),
            max_skew: i64::from(constraint.max_skew),
            is_required: constraint.when_unsatisfiable == "DoNotSchedule",
            fewest: if are_enough { fewest } else { 0 },
            counts,
            itself: i64::from(selects(selector.as_ref(), &own)),
        }
    }

    /// Why the pod must not be there.
    pub(super) fn refusal(&self, site: &Site<'_>) -> Option<Refusal> {
        if !self.is_required {
            return None;
        }
        let Some(domain) = site.domain(&self.key) else {
            return Some(Refusal::SpreadLabel);
        };
        let there = self.counts.get(domain).copied().unwrap_or_default();
        (there + self.itself - self.fewest > self.max_skew).then_some(Refusal::Spread)
    }

    /// How many pods are there already, if it is only a wish that they be few.
    pub(super) fn crowd(&self, site: &Site<'_>) -> i64 {
        let count = |domain| self.counts.get(domain).copied();
        let there = site.domain(&self.key).and_then(count);
        there.filter(|_| !self.is_required).unwrap_or_default()
    }
}

/// Whether nodes of a host are counted, and their domains with them.
fn includes(constraint: &TopologySpreadConstraint, site: &Site<'_>) -> bool {
    let honours = |policy: &Option<String>, otherwise| {
        policy
            .as_ref()
            .map_or(otherwise, |policy| policy == "Honor")
    };
    let candidate = site.candidate;
    let is_tainted = candidate.spec.unschedulable || !candidate.answers || !candidate.status.ready;
    site.is_in_zone
        && (site.unmet.is_empty() || !honours(&constraint.node_affinity_policy, true))
        && !(is_tainted && honours(&constraint.node_taints_policy, false))
}

/// The constraint's selector with what its `matchLabelKeys` add; newer API servers have added it already.
fn selector(constraint: &TopologySpreadConstraint, own: &Labels) -> Option<LabelSelector> {
    let mut selector = constraint.label_selector.clone()?;
    let keys = constraint.match_label_keys.iter().flatten();
    let added = keys.filter_map(|key| {
        Some(LabelSelectorRequirement {
            key: key.clone(),
            operator: "In".to_owned(),
            values: Some(vec![own.get(key)?.clone()]),
        })
    });
    selector
        .match_expressions
        .get_or_insert_default()
        .extend(added);
    Some(selector)
}

fn is_selected(selector: Option<&LabelSelector>, pod: &Pod) -> bool {
    let none = Labels::new();
    selects(selector, pod.metadata.labels.as_ref().unwrap_or(&none))
}

/// The pod's siblings in each zone and on each host.
///
/// These have the same controller: it says which pods are replicas of one another, whatever their labels, and a new
/// revision of a Deployment is spread anew, without regard to the pods that it replaces. Without a controller,
/// pods of equal labels are what a person started to be alike.
pub(super) struct Siblings<'m> {
    zones: BTreeMap<&'m str, usize>,
    hosts: BTreeMap<&'m str, usize>,
}

impl<'m> Siblings<'m> {
    pub(super) fn of(map: &'m Map<'_>) -> Self {
        let (mut zones, mut hosts) = (BTreeMap::new(), BTreeMap::new());
        for other in map
            .others()
            .filter(|other| are_siblings(map.pod, other.pod))
        {
            let candidate = other.site.candidate;
            *zones.entry(candidate.spec.zone.as_str()).or_default() += 1;
            *hosts.entry(candidate.name.as_str()).or_default() += 1;
        }
        Self { zones, hosts }
    }

    /// How many are in the host's zone, and how many on the host.
    pub(super) fn near(&self, site: &Site<'_>) -> (usize, usize) {
        let candidate = site.candidate;
        let zone = self.zones.get(candidate.spec.zone.as_str());
        let host = self.hosts.get(candidate.name.as_str());
        (
            zone.copied().unwrap_or_default(),
            host.copied().unwrap_or_default(),
        )
    }
}

fn are_siblings(one: &Pod, other: &Pod) -> bool {
    fn controller(pod: &Pod) -> Option<&str> {
        let mut owners = pod.metadata.owner_references.iter().flatten();
        let controller = owners.find(|owner| owner.controller == Some(true))?;
        Some(&controller.uid)
    }
    let alike = match (controller(one), controller(other)) {
        (None, None) => one.metadata.labels == other.metadata.labels,
        (one, other) => one == other,
    };
    alike
        && one.metadata.namespace == other.metadata.namespace
        && other.metadata.deletion_timestamp.is_none()
}
