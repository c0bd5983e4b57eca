use super::*;
use monopod_api::network::{Protocol, SecurityGroupRule};
use proptest::prelude::*;

fn rule(
    protocol: Protocol,
    port: Option<u16>,
    cidrs: &[&str],
    groups: &[&str],
) -> SecurityGroupRule {
    SecurityGroupRule {
        protocol,
        from_port: port,
        to_port: port,
        cidrs: cidrs.iter().map(|c| (*c).to_owned()).collect(),
        groups: groups.iter().map(|g| (*g).to_owned()).collect(),
    }
}

fn interface(last: u8, groups: &[&str]) -> LocalInterface {
    let address = Ipv4Addr::new(10, 0, 1, last);
    LocalInterface {
        address,
        mac: monopod_api::names::mac(address),
        groups: groups.iter().map(|g| (*g).to_owned()).collect(),
    }
}

fn example() -> Policy {
    let web = SecurityGroupSpec {
        ingress: vec![
            rule(Protocol::Tcp, Some(80), &["0.0.0.0/0"], &[]),
            rule(Protocol::All, None, &["100.64.0.1/32"], &["web"]),
        ],
        ..Default::default()
    };
    let database = SecurityGroupSpec {
        ingress: vec![rule(Protocol::Tcp, Some(5432), &[], &["web", "unknown"])],
        egress: Some(vec![rule(
            Protocol::Udp,
            Some(53),
            &["10.0.0.0/8", "10.0.0.0/16"],
            &[],
        )]),
        ..Default::default()
    };
    Policy {
        local: [
            interface(23, &["web"]),
            interface(45, &["database", "web", "unknown"]),
        ]
        .into(),
        groups: [("web".to_owned(), web), ("database".to_owned(), database)].into(),
        members: [(
            "web".to_owned(),
            [Ipv4Addr::new(10, 0, 1, 23), Ipv4Addr::new(10, 0, 2, 9)].into(),
        )]
        .into(),
        api: Some(ApiLink {
            device: "api0".to_owned(),
            address: Ipv4Addr::new(100, 64, 0, 1),
            port: 6443,
            inner: Ipv4Addr::new(100, 64, 0, 2),
        }),
        underlay: Some(UnderlayLink {
            device: "vx0".to_owned(),
            own: Ipv4Addr::new(192, 0, 2, 1),
            api: Ipv4Addr::new(100, 64, 0, 1),
            machines: [Ipv4Addr::new(192, 0, 2, 2)].into(),
        }),
    }
}

#[test]
fn the_ruleset_of_an_example() {
    insta::assert_snapshot!(compile(&example(), 7));
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let names = ["a", "b", "c", "unknown"];
    let group_names = prop::collection::vec(prop::sample::select(names.to_vec()), 0..4);
    let cidr = (any::<[u8; 4]>(), 0u8..=32)
        .prop_map(|(octets, length)| format!("{}/{length}", Ipv4Addr::from(octets)));
    let protocol = prop::sample::select(vec![
        Protocol::All,
        Protocol::Icmp,
        Protocol::Tcp,
        Protocol::Udp,
    ]);
    let rule = (
        protocol,
        any::<u16>(),
        any::<u16>(),
        prop::collection::vec(cidr, 0..4),
        group_names.clone(),
    )
        .prop_map(|(protocol, a, b, cidrs, groups)| {
            let ports = matches!(protocol, Protocol::Tcp | Protocol::Udp) && a % 3 != 0;
            SecurityGroupRule {
                protocol,
                from_port: ports.then_some(a.min(b)),
                to_port: ports.then_some(a.max(b)),
                cidrs,
                groups: groups.into_iter().map(str::to_owned).collect(),
            }
        });
    let rules = prop::collection::vec(rule, 0..3);
    let group =
        (rules.clone(), prop::option::of(rules)).prop_map(|(ingress, egress)| SecurityGroupSpec {
            ingress,
            egress,
            ..Default::default()
        });
    let groups = prop::collection::btree_map(
        prop::sample::select(vec!["a", "b", "c"]).prop_map(str::to_owned),
        group,
        0..4,
    );
    let local = prop::collection::btree_set(
        (1u8..60, group_names).prop_map(|(n, g)| interface(n, &g)),
        0..4,
    );
    (local, groups).prop_map(|(local, groups)| {
        let mut members: BTreeMap<String, BTreeSet<Ipv4Addr>> = BTreeMap::new();
        // An address has one interface.
        let mut seen = BTreeSet::new();
        let local: BTreeSet<LocalInterface> = local
            .into_iter()
            .filter(|i| seen.insert(i.address))
            .collect();
        for interface in &local {
            for group in &interface.groups {
                members
                    .entry(group.clone())
                    .or_default()
                    .insert(interface.address);
            }
        }
        Policy {
            local,
            groups,
            members,
            api: None,
            underlay: None,
        }
    })
}

proptest! {
    /// Every jump leads to a chain that exists, every interface can be denied, and nothing that
    /// is not asked for is accepted.
    #[test]
    fn the_ruleset_is_closed_and_denies_by_default(policy in any_policy(), generation: u32) {
        let text = compile(&policy, generation);
        let chains: BTreeSet<&str> = text.lines().filter_map(|l| l.trim().strip_prefix("chain ")?.strip_suffix(" {")).collect();
        for jump in text.split("jump ").skip(1).filter_map(|rest| rest.split([',', ' ', '\n']).next()) {
            prop_assert!(chains.contains(jump), "{jump} in\n{text}");
        }
        for interface in &policy.local {
            let unspoofed = format!("\"{}\" . {} . {}", device(interface.address), interface.mac, interface.address);
            prop_assert!(text.contains(&unspoofed), "{} in\n{}", unspoofed, text);
            let known = interface.groups.iter().filter(|g| policy.groups.contains_key(*g)).count();
            let entry = format!("{} : jump", interface.address);
            prop_assert_eq!(text.matches(&entry).count(), 2 * known);
        }
        for denial in ["ct original ip saddr @local counter log", "ct reply ip saddr @local counter log"] {
            prop_assert_eq!(text.matches(denial).count(), 1);
        }
        let without_egress = policy.groups.values().filter(|g| g.egress.is_none()).count();
        let bare = text.lines().filter(|l| l.trim() == "accept").count();
        prop_assert_eq!(bare, without_egress, "an unconditional accept only stands for an absent egress list");
    }
}
