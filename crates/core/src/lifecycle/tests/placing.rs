//! Host and subnet are chosen together.

use super::Cluster;
use crate::lifecycle::Subnet;
use proptest::prelude::*;
use std::net::Ipv4Addr;

/// A subnet's zone, and whether it is full.
fn subnets() -> impl Strategy<Value = Vec<(u8, bool)>> {
    prop::collection::vec((0u8..3, any::<bool>()), 1..5)
}

proptest! {
    /// A pod is placed exactly if some host that takes it is in a zone with a free address, and then there.
    #[test]
    fn no_full_subnet_and_no_full_zone_keeps_a_pod_from_another(subnets in subnets(), hosts in prop::collection::vec((0u8..3, any::<bool>()), 0..5)) {
        let mut cluster = Cluster::new();
        let like = cluster.candidates.remove(0);
        for (n, (zone, has_room)) in hosts.iter().enumerate() {
            let mut host = like.clone();
            host.name = format!("host-{n}");
            host.spec.zone = format!("zone-{zone}");
            host.spec.memory_mib = if *has_room { 4096 } else { 100 };
            cluster.candidates.push(host);
        }
        cluster.network.subnets.clear();
        for (n, (zone, is_full)) in (0u8..).zip(&subnets) {
            let subnet = Subnet {
                id: format!("subnet-{n}"),
                cidr: format!("10.0.{n}.0/28").parse().expect("valid"),
                zone: format!("zone-{zone}"),
            };
            cluster.network.subnets.insert(format!("private-{n}"), subnet);
            if *is_full {
                cluster.network.taken.extend((0..16).map(|host| Ipv4Addr::new(10, 0, n, host)));
            }
        }
        let can = hosts.iter().any(|(zone, has_room)| *has_room && subnets.contains(&(*zone, false)));
        cluster.step();
        prop_assert_eq!(cluster.environment.is_some(), can, "{:?}", cluster.events);
        if let (Some(environment), Some(interface)) = (&cluster.environment, &cluster.interface) {
            let host = cluster.candidates.iter().find(|host| host.name == environment.spec.host).expect("chosen");
            let subnet = &cluster.network.subnets[&interface.spec.subnet];
            prop_assert_eq!(&host.spec.zone, &subnet.zone);
            let address: Ipv4Addr = interface.spec.address.parse().expect("an address");
            prop_assert!(subnet.cidr.contains(&address));
        }
    }
}
