//! How the VPC is one over several machines: which pods are behind which other machine.

use monopod_api::host::Host;
use monopod_api::network::{InterfacePhase, NetworkInterface};
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

/// What a host reaches through others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Remote {
    /// Addresses of the other hosts' machines.
    pub machines: BTreeSet<Ipv4Addr>,
    /// Addresses of their pods, each with that of its machine.
    pub pods: BTreeMap<Ipv4Addr, Ipv4Addr>,
}

/// What the host `own` reaches through others. Nothing of a host that names no address, or names
/// one that another host has already: packets must not go to whoever claims an address last.
pub fn remote<'a>(
    own: &str,
    hosts: impl IntoIterator<Item = &'a Host>,
    interfaces: impl IntoIterator<Item = &'a NetworkInterface>,
) -> Remote {
    let mut claims: BTreeMap<Ipv4Addr, Vec<&Host>> = BTreeMap::new();
    for host in hosts {
        if let Some(address) = host.spec.address.as_ref().and_then(|a| a.parse().ok()) {
            claims.entry(address).or_default().push(host);
        }
    }
    let first = |hosts: Vec<&'a Host>| {
        hosts.into_iter().min_by_key(|host| {
            let created = host.metadata.creation_timestamp.as_ref().map(|t| t.0);
            (created, &host.metadata.name)
        })
    };
    let machines: BTreeMap<&str, Ipv4Addr> = claims
        .into_iter()
        .filter_map(|(address, hosts)| Some((first(hosts)?.metadata.name.as_deref()?, address)))
        .filter(|(name, _address)| *name != own)
        .collect();
    let pods = interfaces
        .into_iter()
        .filter(|interface| {
            let status = interface.status.as_ref();
            status.is_none_or(|s| s.phase == InterfacePhase::InUse)
        })
        .filter_map(|interface| {
            let machine = machines.get(interface.spec.host.as_str())?;
            Some((interface.spec.address.parse().ok()?, *machine))
        })
        .collect();
    Remote {
        machines: machines.into_values().collect(),
        pods,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use monopod_api::environment::EnvironmentReference;
    use monopod_api::host::HostSpec;
    use monopod_api::network::{NetworkInterfaceSpec, NetworkInterfaceStatus};

    fn host(name: &str, address: Option<&str>, created: &str) -> Host {
        let mut host = Host::new(
            name,
            HostSpec {
                address: address.map(str::to_owned),
                ..Default::default()
            },
        );
        host.metadata.creation_timestamp =
            Some(serde_json::from_value(created.into()).expect("a time"));
        host
    }

    fn interface(host: &str, address: &str, phase: InterfacePhase) -> NetworkInterface {
        let spec = NetworkInterfaceSpec {
            address: address.to_owned(),
            mac: String::new(),
            subnet: "private-a".to_owned(),
            security_groups: Vec::new(),
            environment: EnvironmentReference {
                name: "env-1".to_owned(),
            },
            host: host.to_owned(),
        };
        let mut interface = NetworkInterface::new(address, spec);
        interface.status = Some(NetworkInterfaceStatus {
            phase,
            ..Default::default()
        });
        interface
    }

    #[test]
    fn pods_in_use_on_other_machines_are_reached_through_them() {
        let hosts = [
            host("a", Some("192.0.2.1"), "2026-01-01T00:00:00Z"),
            host("b", Some("192.0.2.2"), "2026-01-02T00:00:00Z"),
            host("claims-bs", Some("192.0.2.2"), "2026-01-03T00:00:00Z"),
            host("alone", None, "2026-01-01T00:00:00Z"),
            host("wrong", Some("no address"), "2026-01-01T00:00:00Z"),
        ];
        let interfaces = [
            interface("a", "10.0.0.1", InterfacePhase::InUse),
            interface("b", "10.0.0.2", InterfacePhase::InUse),
            interface("b", "10.0.0.3", InterfacePhase::Cooling),
            interface("claims-bs", "10.0.0.4", InterfacePhase::InUse),
            interface("alone", "10.0.0.5", InterfacePhase::InUse),
            interface("gone", "10.0.0.6", InterfacePhase::InUse),
            interface("b", "nonsense", InterfacePhase::InUse),
        ];
        let [a, b, pod] = ["192.0.2.1", "192.0.2.2", "10.0.0.2"].map(|t| t.parse().expect("valid"));
        let remote_of_a = remote("a", &hosts, &interfaces);
        assert_eq!(remote_of_a.machines, BTreeSet::from([b]));
        assert_eq!(remote_of_a.pods, BTreeMap::from([(pod, b)]));
        let remote_of_b = remote("b", &hosts, &interfaces);
        assert_eq!(remote_of_b.machines, BTreeSet::from([a]));
        assert_eq!(remote_of_b.pods.len(), 1);
    }
}
