//! Host and subnet are chosen together.

use super::Cluster;
use crate::lifecycle::Subnet;
use jiff::SignedDuration;
use monopod_api::environment::EnvironmentPhase;
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

/// What failed may be the network's fault, too.
#[test]
fn the_next_attempt_is_on_another_host_and_in_another_subnet_where_there_are_any() {
    let mut cluster = Cluster::new();
    let (name, only) = cluster.network.subnets.first_key_value().expect("one");
    let (name, cidr, zone) = (name.clone(), only.cidr, only.zone.clone());
    let try_once = |cluster: &mut Cluster| -> (String, Ipv4Addr) {
        cluster.step();
        let environment = cluster.environment.as_ref().expect("placed");
        let place = (
            environment.spec.host.clone(),
            environment.spec.address.parse().expect("an address"),
        );
        for _until_it_is_gone in 0..2 {
            cluster.host(EnvironmentPhase::Failed);
            cluster.step();
        }
        assert!(cluster.environment.is_none());
        cluster.interface = None;
        cluster.now += SignedDuration::from_mins(5);
        place
    };
    let (host, first) = try_once(&mut cluster);
    let (again, second) = try_once(&mut cluster);
    assert!(again == host && cidr.contains(&second), "there is no other");

    let other = Subnet {
        id: "subnet-other".to_owned(),
        cidr: "10.77.0.0/28".parse().expect("valid"),
        zone,
    };
    cluster.network.subnets.insert(format!("{name}-too"), other);
    let mut twin = cluster.candidates[0].clone();
    twin.name = "twin".to_owned();
    cluster.candidates.push(twin);
    let (twin, third) = try_once(&mut cluster);
    assert!(
        twin == "twin" && !cidr.contains(&third),
        "{first} failed, and {twin} tried {third}"
    );
    let (back, fourth) = try_once(&mut cluster);
    assert!(
        back == host && cidr.contains(&fourth),
        "{third} failed, and {back} tried {fourth}"
    );
}
