//! What there is, in figures: read from the index when somebody asks. Replicas that do not act know the same.
//!
//! Label values are closed sets, but for the names of subnets, which operators give.

use crate::index::{Index, Shared};
use crate::webhook::Served;
use jiff::Timestamp;
use monopod_api::environment::EnvironmentPhase;
use monopod_core::addresses;
use monopod_ops::election::Leadership;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::collections::BTreeMap;
use std::fmt::Debug;

/// A gauge's name, what it is, and its label's values, if it has one.
struct Figure {
    name: &'static str,
    help: &'static str,
    label: Option<&'static str>,
    values: BTreeMap<String, i64>,
}

impl Figure {
    fn one(name: &'static str, help: &'static str, value: i64) -> Self {
        Self {
            name,
            help,
            label: None,
            values: [(String::new(), value)].into(),
        }
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> std::fmt::Result {
        let family = Family::<Vec<(&str, &str)>, Gauge>::default();
        for (value, number) in &self.values {
            let labels = self.label.map(|label| (label, value.as_str()));
            family
                .get_or_create(&labels.into_iter().collect())
                .set(*number);
        }
        let (name, help, kind) = (self.name, self.help, family.metric_type());
        family.encode(encoder.encode_descriptor(name, help, None, kind)?)
    }
}

/// Gives the figures whenever it is asked.
pub(crate) struct Gauges {
    pub(crate) index: Shared,
    pub(crate) leadership: Leadership,
    pub(crate) served: Served,
}

impl Debug for Gauges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gauges").finish_non_exhaustive()
    }
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let mut all = figures(&self.index.lock(), Timestamp::now());
        all.push(Figure::one(
            "leader",
            "1 if this process acts",
            self.leadership.holds().into(),
        ));
        // Without one there is no figure: nobody takes it for one that lasts.
        if let Some(end) = self.served.until() {
            all.push(Figure {
                name: "certificate_expiry_timestamp_seconds",
                help: "Until when a certificate can be used",
                label: Some("certificate"),
                values: [("webhook".to_owned(), end.as_second())].into(),
            });
        }
        all.iter()
            .try_for_each(|figure| figure.encode(&mut encoder))
    }
}

fn figures(index: &Index, now: Timestamp) -> Vec<Figure> {
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    vec![
        Figure {
            name: "environments",
            help: "Environments by phase",
            label: Some("phase"),
            values: environments(index),
        },
        Figure {
            name: "hosts",
            help: "Hosts by whether they take pods",
            label: Some("state"),
            values: hosts(index, now),
        },
        Figure {
            name: "subnet_free_addresses",
            help: "Addresses that a subnet has left",
            label: Some("subnet"),
            values: free_addresses(index, now),
        },
        Figure::one(
            "waiting_pods",
            "Pods that have no environment",
            number(index.waiting().len()),
        ),
    ]
}

fn environments(index: &Index) -> BTreeMap<String, i64> {
    use EnvironmentPhase::{Booting, Failed, Finished, Joining, Registered, Requested, Running};
    let all = [
        Requested, Booting, Joining, Registered, Running, Finished, Failed,
    ];
    let name = |phase: EnvironmentPhase| format!("{phase:?}");
    let mut counts: BTreeMap<String, i64> = all.map(|phase| (name(phase), 0)).into();
    for environment in index.environments.values() {
        let status = environment.status.as_ref();
        let phase = status.map_or(Requested, |status| status.phase);
        *counts.entry(name(phase)).or_default() += 1;
    }
    counts
}

fn hosts(index: &Index, now: Timestamp) -> BTreeMap<String, i64> {
    let all = ["ready", "cordoned", "not_ready", "silent"];
    let mut counts: BTreeMap<String, i64> = all.map(|name| (name.to_owned(), 0)).into();
    for (name, host) in &index.hosts {
        let answers = index.heartbeats.get(name).is_some_and(|h| h.answers(now));
        let state = match &host.status {
            _ if !answers => "silent",
            Some(status) if status.ready && host.spec.unschedulable => "cordoned",
            Some(status) if status.ready => "ready",
            Some(_) | None => "not_ready",
        };
        *counts.entry(state.to_owned()).or_default() += 1;
    }
    counts
}

fn free_addresses(index: &Index, now: Timestamp) -> BTreeMap<String, i64> {
    let network = index.snapshot(now).network;
    let free = |subnet: &monopod_core::lifecycle::Subnet| {
        let taken = network.taken.iter().filter(|a| subnet.cidr.contains(*a));
        let taken = i64::try_from(taken.count()).unwrap_or(i64::MAX);
        i64::from(addresses::capacity(subnet.cidr)).saturating_sub(taken)
    };
    let subnets = network.subnets.iter();
    subnets
        .map(|(name, subnet)| (name.clone(), free(subnet)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use monopod_api::host::{Host, HostSpec, HostStatus};
    use monopod_api::network::{Subnet, SubnetSpec};
    use monopod_core::placement::Heartbeat;

    #[test]
    fn what_there_is_has_its_number_and_what_there_is_not_its_zero() {
        let now = Timestamp::UNIX_EPOCH;
        let mut index = Index::default();
        for (name, unschedulable) in [("one", false), ("two", true), ("mute", false)] {
            let spec = HostSpec {
                unschedulable,
                ..HostSpec::default()
            };
            let mut host = Host::new(name, spec);
            host.status = Some(HostStatus {
                ready: true,
                ..HostStatus::default()
            });
            index.hosts.insert(name.to_owned(), host);
            if name != "mute" {
                let heartbeat = Heartbeat::seen(None, None, now);
                index.heartbeats.insert(name.to_owned(), heartbeat);
            }
        }
        let subnet = SubnetSpec {
            cidr: "10.0.0.0/28".to_owned(),
            zone: "z".to_owned(),
        };
        let subnet = Subnet::new("private-a", subnet);
        index.subnets.insert("private-a".to_owned(), subnet);
        let shown: Vec<String> = figures(&index, now)
            .iter()
            .flat_map(|figure| {
                let values = figure.values.iter();
                values.map(|(value, number)| format!("{}:{value}:{number}", figure.name))
            })
            .collect();
        assert_eq!(
            shown.join(" "),
            "environments:Booting:0 environments:Failed:0 environments:Finished:0 environments:Joining:0 \
             environments:Registered:0 environments:Requested:0 environments:Running:0 \
             hosts:cordoned:1 hosts:not_ready:0 hosts:ready:1 hosts:silent:1 \
             subnet_free_addresses:private-a:11 waiting_pods::0"
        );
    }
}
