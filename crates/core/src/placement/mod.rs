//! Which host runs a VM.
//!
//! What must be so is asked of each host first ([`Refusal`]). Among those that are left, the pod goes to one where it did not
//! fail last; then to the one that its preferences and those of other pods favour; without any, where fewest replicas
//! of its owner are, by zone and then by host; then to one with its images; then to the emptiest.

mod heartbeat;
mod neighbours;
mod refusal;
mod site;
mod spread;
#[cfg(test)]
mod tests;

pub use heartbeat::{Heartbeat, LEASE};
pub use neighbours::is_constrained;
pub use refusal::{NoHost, Refusal};
pub use site::Placed;

use crate::selector::Labels;
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use monopod_api::host::{HostSpec, HostStatus, VM_OVERHEAD_MIB};
use monopod_api::size::Size;
use neighbours::Attitudes;
use site::{Map, Site};
use spread::{Counted, Siblings};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// A host as the scheduler sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The host's name.
    pub name: String,
    /// What it has.
    pub spec: HostSpec,
    /// What it said last.
    pub status: HostStatus,
    /// Whether it renews its lease.
    pub answers: bool,
    /// Sizes of the environments that name it, whatever their phase, until their VM is gone.
    pub used: Vec<Size>,
}

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The pod.
    pub pod: &'a Pod,
    /// Its spec.
    pub spec: &'a PodSpec,
    /// The VM's size.
    pub size: Size,
    /// Zones of the subnets that the interface may be in, and whether an address is free there.
    pub zones: &'a BTreeMap<&'a str, bool>,
    /// The host where the pod has an address already.
    pub holds: Option<&'a str>,
    /// Images that the pod needs; a host that has them is preferred.
    pub images: &'a [String],
    /// The host of the last attempt, which failed: any other is preferred.
    pub avoid: Option<&'a str>,
    /// The control plane's version, whose minor the guests' runtime must share.
    pub kubernetes_version: &'a str,
    /// The pods that have an environment.
    pub placed: &'a [Placed<'a>],
    /// Labels of all namespaces.
    pub namespaces: &'a BTreeMap<String, Labels>,
}

/// The host that takes the VM.
pub fn choose<'a>(
    candidates: &'a [Candidate],
    request: &Request<'a>,
) -> Result<&'a Candidate, NoHost> {
    let map = Map::new(candidates, request);
    let (spread, attitudes) = (Counted::all(&map), Attitudes::new(&map));
    let mut no = NoHost {
        reasons: BTreeMap::new(),
        unmet: Vec::new(),
    };
    let mut fitting = Vec::new();
    for site in &map.sites {
        let others = || {
            let mut broken = spread.iter().filter_map(|one| one.refusal(site));
            broken.next().or_else(|| attitudes.refusal(site))
        };
        match refusal(site, request).or_else(others) {
            Some(reason) => {
                *no.reasons.entry(reason).or_insert(0) += 1;
                if reason == Refusal::Selector {
                    no.unmet.clone_from(&site.unmet);
                }
            }
            None => fitting.push(site),
        }
    }
    let values = |value: &dyn Fn(&Site<'_>) -> i64| {
        let all: Vec<i64> = fitting.iter().map(|site| value(site)).collect();
        percent(&all)
    };
    let nodes = values(&|site| site.preference(request.spec));
    let near = values(&|site| attitudes.preference(site));
    let thin = values(&|site| -spread.iter().map(|one| one.crowd(site)).sum::<i64>());
    let preferences = nodes.iter().zip(near).zip(thin);
    let preferences = preferences.map(|((nodes, near), thin)| nodes + near + thin);
    let siblings = Siblings::of(&map);
    let best = fitting
        .iter()
        .zip(preferences)
        .min_by_key(|(site, preference)| {
            let candidate = site.candidate;
            let images = request.images.iter();
            let missing = images.filter(|image| !candidate.status.images.contains(image));
            (
                request.avoid == Some(&candidate.name),
                Reverse(*preference),
                siblings.near(site),
                missing.count(),
                Reverse(free_memory(candidate)),
                &candidate.name,
            )
        });
    best.map(|(site, _)| site.candidate).ok_or(no)
}

/// Values from 0 for the least to 100 for the greatest, as upstream makes its scores comparable; 0 if all are equal.
fn percent(values: &[i64]) -> Vec<i64> {
    let least = values.iter().min().copied().unwrap_or_default();
    let most = values.iter().max().copied().unwrap_or_default();
    let range = (most - least).max(1);
    let of = |value: &i64| (value - least) * 100 / range;
    values.iter().map(of).collect()
}

/// Why the host cannot take the pod, wherever others are.
fn refusal(site: &Site<'_>, request: &Request<'_>) -> Option<Refusal> {
    let Candidate {
        name,
        spec,
        status,
        answers,
        ..
    } = site.candidate;
    let runtime = status.runtime_version.as_deref().unwrap_or_default();
    let has_address = request.zones.get(spec.zone.as_str()) == Some(&true);
    if !site.is_in_zone {
        Some(Refusal::Zone)
    } else if !site.unmet.is_empty() {
        Some(Refusal::Selector)
    } else if !answers {
        Some(Refusal::Silent)
    } else if !status.ready {
        Some(Refusal::NotReady)
    } else if spec.unschedulable {
        Some(Refusal::Cordoned)
    } else if !same_minor(runtime, request.kubernetes_version) {
        Some(Refusal::Runtime)
    } else if free_memory(site.candidate) < memory_cost(request.size) {
        Some(Refusal::Memory)
    } else if free_cpu(site.candidate) < u64::from(request.size.cpu_millis) {
        Some(Refusal::Cpu)
    } else if !has_address && request.holds != Some(name) {
        Some(Refusal::Address)
    } else {
        None
    }
}

/// Whether two versions such as `v1.37.2` have equal major and minor numbers.
pub fn same_minor(one: &str, other: &str) -> bool {
    fn minor(version: &str) -> Option<(u32, u32)> {
        let mut numbers = version.trim_start_matches('v').split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    }
    minor(one).is_some() && minor(one) == minor(other)
}

fn memory_cost(size: Size) -> u64 {
    u64::from(size.memory_mib) + u64::from(VM_OVERHEAD_MIB)
}

fn free_memory(candidate: &Candidate) -> u64 {
    let used: u64 = candidate.used.iter().map(|size| memory_cost(*size)).sum();
    u64::from(candidate.spec.memory_mib).saturating_sub(used)
}

fn free_cpu(candidate: &Candidate) -> u64 {
    let used: u64 = candidate
        .used
        .iter()
        .map(|size| u64::from(size.cpu_millis))
        .sum();
    u64::from(candidate.spec.cpu_millis).saturating_sub(used)
}
