//! Where a pod's node would be, and where those of others are.

use super::{Candidate, Request};
use crate::affinity;
use crate::pod::node::labels_on;
use crate::selector::Labels;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use std::collections::BTreeMap;

/// The label that no two nodes share.
const HOSTNAME: &str = "kubernetes.io/hostname";

/// A pod that has an environment, and where that is.
#[derive(Debug, Clone, Copy)]
pub struct Placed<'a> {
    /// The pod; not one that is over.
    pub pod: &'a Pod,
    /// Its host's name.
    pub host: &'a str,
    /// Its node's name.
    pub node: &'a str,
}

/// A host as the place of a new node.
pub(super) struct Site<'a> {
    pub(super) candidate: &'a Candidate,
    labels: Labels,
    /// Whether the profile's pods can be in its zone.
    pub(super) is_in_zone: bool,
    /// What the pod requires of its node and these do not have.
    pub(super) unmet: Vec<String>,
}

impl<'a> Site<'a> {
    fn of(candidate: &'a Candidate, request: &Request<'_>) -> Self {
        let host = &candidate.spec;
        let labels = labels_on(&host.region, &host.zone, &candidate.name);
        Self {
            candidate,
            is_in_zone: request.zones.contains_key(host.zone.as_str()),
            unmet: affinity::unmet(request.spec, &labels),
            labels,
        }
    }

    /// How much the pod prefers nodes of this host.
    pub(super) fn preference(&self, spec: &PodSpec) -> i64 {
        affinity::preference(spec, &self.labels)
    }

    /// What a new node here has as a label's value. Its own name is like no other.
    pub(super) fn domain(&self, key: &str) -> Option<&str> {
        self.domain_of("", key)
    }

    fn domain_of<'s>(&'s self, node: &'s str, key: &str) -> Option<&'s str> {
        if key == HOSTNAME {
            return Some(node);
        }
        self.labels.get(key).map(String::as_str)
    }
}

/// All hosts, and the pods that are on them.
pub(super) struct Map<'a> {
    pub(super) pod: &'a Pod,
    pub(super) spec: &'a PodSpec,
    pub(super) sites: Vec<Site<'a>>,
    by_host: BTreeMap<&'a str, usize>,
    others: Vec<Placed<'a>>,
    namespaces: &'a BTreeMap<String, Labels>,
}

impl<'a> Map<'a> {
    pub(super) fn new(candidates: &'a [Candidate], request: &Request<'a>) -> Self {
        let sites: Vec<Site<'a>> = candidates
            .iter()
            .map(|candidate| Site::of(candidate, request))
            .collect();
        let uid = &request.pod.metadata.uid;
        let others = request.placed.iter();
        Self {
            pod: request.pod,
            spec: request.spec,
            by_host: candidates
                .iter()
                .enumerate()
                .map(|(at, candidate)| (candidate.name.as_str(), at))
                .collect(),
            sites,
            others: others
                .copied()
                .filter(|placed| placed.pod.metadata.uid != *uid)
                .collect(),
            namespaces: request.namespaces,
        }
    }

    /// The other pods with the hosts that they are on.
    pub(super) fn others(&self) -> impl Iterator<Item = Neighbour<'_>> {
        self.others.iter().filter_map(|placed| {
            let site = self.sites.get(*self.by_host.get(placed.host)?)?;
            Some(Neighbour {
                pod: placed.pod,
                site,
                node: placed.node,
            })
        })
    }

    /// The labels of a namespace.
    pub(super) fn namespace(&self, name: &str) -> Option<&Labels> {
        self.namespaces.get(name)
    }
}

/// Another pod, and where it is.
#[derive(Clone, Copy)]
pub(super) struct Neighbour<'m> {
    pub(super) pod: &'m Pod,
    pub(super) site: &'m Site<'m>,
    node: &'m str,
}

impl<'m> Neighbour<'m> {
    /// What its node has as a label's value.
    pub(super) fn domain(&self, key: &str) -> Option<&'m str> {
        self.site.domain_of(self.node, key)
    }
}
