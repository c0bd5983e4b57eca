//! Which host runs a VM.

use jiff::{SignedDuration, Timestamp};
use monopod_api::host::{HostSpec, HostStatus, VM_OVERHEAD_MIB};
use monopod_api::size::Size;
use std::collections::{BTreeMap, BTreeSet};

/// How long a host may leave its lease as it is until nothing is placed there: as upstream's nodes.
pub const LEASE: SignedDuration = SignedDuration::from_secs(40);

/// A host's lease as it was seen. Its own clock may be wrong: only the change of its time counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    renewed: Option<Timestamp>,
    since: Timestamp,
}

impl Heartbeat {
    /// The lease says that it was renewed then; `before` is what was known of it.
    pub fn seen(before: Option<Self>, renewed: Option<Timestamp>, now: Timestamp) -> Self {
        match before {
            Some(before) if before.renewed == renewed => before,
            Some(_) | None => Self {
                renewed,
                since: now,
            },
        }
    }

    /// Whether the host is there.
    pub fn answers(self, now: Timestamp) -> bool {
        now < self.since + LEASE
    }
}

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
#[derive(Debug, Clone, PartialEq)]
pub struct Request<'a> {
    /// The VM's size.
    pub size: Size,
    /// Zones of the subnets that the interface may be in.
    pub zones: &'a BTreeSet<String>,
    /// Images that the pod needs; a host that has them is preferred.
    pub images: &'a [String],
    /// The host of the last attempt, which failed: any other is preferred.
    pub avoid: Option<&'a str>,
    /// The control plane's version, whose minor the guests' runtime must share.
    pub kubernetes_version: &'a str,
}

/// Why no host was chosen; each host with its reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no host can take the pod ({})", .reasons.iter().map(|(reason, hosts)| format!("{reason}: {hosts}")).collect::<Vec<_>>().join(", "))]
pub struct NoHost {
    /// How many hosts were refused for each reason.
    pub reasons: BTreeMap<&'static str, usize>,
}

/// The host that takes the VM: not the one where it failed, with the images if there is one, then the emptiest.
pub fn choose<'a>(
    candidates: &'a [Candidate],
    request: &Request<'_>,
) -> Result<&'a Candidate, NoHost> {
    let mut reasons = BTreeMap::new();
    let mut fitting = Vec::new();
    for candidate in candidates {
        match refusal(candidate, request) {
            Some(reason) => *reasons.entry(reason).or_insert(0) += 1,
            None => fitting.push(candidate),
        }
    }
    fitting
        .into_iter()
        .min_by_key(|c| {
            let missing = request
                .images
                .iter()
                .filter(|i| !c.status.images.contains(i))
                .count();
            let avoided = request.avoid == Some(&c.name);
            (avoided, missing, std::cmp::Reverse(free_memory(c)), &c.name)
        })
        .ok_or(NoHost { reasons })
}

fn refusal(candidate: &Candidate, request: &Request<'_>) -> Option<&'static str> {
    if !candidate.answers {
        Some("does not answer")
    } else if !candidate.status.ready {
        Some("not ready")
    } else if candidate.spec.unschedulable {
        Some("cordoned")
    } else if !same_minor(
        candidate
            .status
            .runtime_version
            .as_deref()
            .unwrap_or_default(),
        request.kubernetes_version,
    ) {
        Some("guest runtime built for another Kubernetes version")
    } else if !request.zones.contains(&candidate.spec.zone) {
        Some("in no zone of the profile's subnets")
    } else if free_memory(candidate) < memory_cost(request.size) {
        Some("not enough memory")
    } else if free_cpu(candidate) < u64::from(request.size.cpu_millis) {
        Some("not enough cpu")
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate() -> impl Strategy<Value = Candidate> {
        let sizes: Vec<Size> = Size::all().take(8).collect();
        let used = prop::collection::vec(prop::sample::select(sizes), 0..6);
        (
            "[a-c]",
            0u32..20_000,
            0u32..8_000,
            any::<bool>(),
            any::<bool>(),
            "z[12]",
            used,
            any::<bool>(),
            any::<bool>(),
            prop::bool::weighted(0.8),
        )
            .prop_map(
                |(
                    name,
                    memory_mib,
                    cpu_millis,
                    ready,
                    unschedulable,
                    zone,
                    used,
                    cached,
                    old,
                    answers,
                )| {
                    Candidate {
                        name,
                        spec: HostSpec {
                            region: "r".to_owned(),
                            zone,
                            address: None,
                            memory_mib,
                            cpu_millis,
                            unschedulable,
                        },
                        status: HostStatus {
                            ready,
                            runtime_version: Some(
                                if old { "v1.36.9" } else { "v1.37.0" }.to_owned(),
                            ),
                            images: if cached { vec!["i".to_owned()] } else { vec![] },
                            ..Default::default()
                        },
                        answers,
                        used,
                    }
                },
            )
    }

    #[test]
    fn a_lease_counts_by_its_changes_alone() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        // Its clock is years behind.
        let first = Heartbeat::seen(None, Some(at(5)), at(1_000_000));
        assert!(first.answers(at(1_000_039)) && !first.answers(at(1_000_040)));
        let again = Heartbeat::seen(Some(first), Some(at(5)), at(1_000_030));
        assert_eq!(again, first, "listed again, not renewed");
        let renewed = Heartbeat::seen(Some(first), Some(at(4)), at(1_000_030));
        assert!(renewed.answers(at(1_000_069)) && !renewed.answers(at(1_000_070)));
    }

    #[test]
    fn versions_are_compared_by_major_and_minor() {
        assert!(same_minor("v1.37.2", "v1.37.0"));
        assert!(same_minor("v1.37.2", "v1.37.2-monopod"));
        assert!(!same_minor("v1.37.2", "v1.36.2"));
        assert!(!same_minor("", ""));
    }

    proptest! {
        /// A chosen host can take the VM without being overcommitted, and a refusal is true of all.
        #[test]
        fn a_choice_fits_and_a_refusal_is_true(candidates in prop::collection::vec(candidate(), 0..5), pick in 0usize..8, avoid in prop::option::of("[a-c]")) {
            let size = Size::all().nth(pick).expect("there are more");
            let zones = BTreeSet::from(["z1".to_owned()]);
            let images = ["i".to_owned()];
            let request = Request { size, zones: &zones, images: &images, avoid: avoid.as_deref(), kubernetes_version: "v1.37.2" };
            let fits = |c: &Candidate| {
                let memory: u64 = c.used.iter().chain([&size]).map(|s| u64::from(s.memory_mib) + 100).sum();
                let cpu: u64 = c.used.iter().chain([&size]).map(|s| u64::from(s.cpu_millis)).sum();
                c.answers && c.status.ready && c.status.runtime_version.as_deref() == Some("v1.37.0") && !c.spec.unschedulable && c.spec.zone == "z1"
                    && memory <= u64::from(c.spec.memory_mib) && cpu <= u64::from(c.spec.cpu_millis)
            };
            match choose(&candidates, &request) {
                Ok(chosen) => {
                    prop_assert!(fits(chosen));
                    let cached = |c: &Candidate| !c.status.images.is_empty();
                    let failed = |c: &Candidate| avoid.as_ref() == Some(&c.name);
                    prop_assert!(!failed(chosen) || candidates.iter().all(|c| !fits(c) || failed(c)));
                    prop_assert!(cached(chosen) || !candidates.iter().any(|c| fits(c) && cached(c) && failed(c) == failed(chosen)));
                }
                Err(no) => {
                    prop_assert!(!candidates.iter().any(fits));
                    prop_assert_eq!(no.reasons.values().sum::<usize>(), candidates.len());
                }
            }
        }
    }
}
