//! One VPC over two machines, which are namespaces with a cable between them.

use crate::fixture::{Fixture, PATIENCE, denied, sh, tcp, within};
use monopod_api::network::SecurityGroupSpec;
use monopod_core::vpc::{Policy, Remote, UnderlayLink};
use monopod_host::network::{Api, Firewall, Peers, UNDERLAY_DEVICE, Underlay};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;

const MACHINES: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];

/// Two machines. The VPCs on them are removed before they are.
struct Cable {
    names: [String; 2],
}

impl Cable {
    fn new(name: &str) -> Self {
        let names = ["a", "b"].map(|machine| format!("{name}-{machine}"));
        let [a, b] = &names;
        sh(&format!(
            "ip netns add {a}; ip netns add {b}
             ip -n {a} link add cable type veth peer name cable netns {b}
             ip -n {a} address add {}/24 dev cable; ip -n {b} address add {}/24 dev cable
             for machine in {a} {b}; do ip -n $machine link set lo up; ip -n $machine link set cable up; done",
            MACHINES[0], MACHINES[1]
        ));
        Self { names }
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.names {
            sh(&format!("ip netns delete {name}"));
        }
    }
}

/// One VPC on both: the API server is on the first.
fn vpcs(cable: &Cable) -> [Fixture; 2] {
    let one = Fixture::unused();
    let underlay = |machine: usize| {
        Some(Underlay {
            address: MACHINES[machine],
            network: 7,
        })
    };
    let mut first = one.clone();
    first.underlay = underlay(0);
    let mut second = one.clone();
    second.name = format!("{}b", one.name);
    second.underlay = underlay(1);
    second.api = Api::Through {
        address: one.api.address(),
        machine: MACHINES[0],
    };
    [
        Fixture::on(Some(&cable.names[0]), first),
        Fixture::on(Some(&cable.names[1]), second),
    ]
}

/// The policies of both, in which each knows the other's pods.
fn connect(vpcs: &[Fixture; 2], carried: &[&[&str]; 2], groups: &[(&str, SecurityGroupSpec)]) {
    for here in [0, 1] {
        let (fixture, there) = (&vpcs[here], 1 - here);
        let remote = Remote {
            machines: [MACHINES[there]].into(),
            pods: vpcs[there]
                .pods
                .iter()
                .map(|pod| (pod.address, MACHINES[there]))
                .collect(),
        };
        let api = match fixture.vpc.api {
            Api::Link { .. } => fixture.policy(&[], &[]).api,
            Api::Through { .. } => None,
        };
        let mut policy = Policy {
            api,
            underlay: Some(UnderlayLink {
                device: UNDERLAY_DEVICE.to_owned(),
                own: MACHINES[here],
                api: fixture.vpc.api.address(),
                machines: remote.machines.clone(),
            }),
            ..fixture.policy(groups, &vec![carried[here]; fixture.pods.len()])
        };
        for group in carried[there] {
            let members = policy.members.entry((*group).to_owned()).or_default();
            members.extend(vpcs[there].pods.iter().map(|pod| pod.address));
        }
        let mut firewall = Firewall::new(fixture.vpc.clone());
        fixture
            .runtime
            .block_on(firewall.load(policy))
            .expect("loads");
        // As a new process of the host, which finds what the one before had set.
        for _ in 0..2 {
            let mut peers = Peers::new(fixture.vpc.clone());
            fixture
                .runtime
                .block_on(peers.set(&remote))
                .expect("the ways are set");
        }
    }
}

#[test]
fn pods_of_two_machines_and_the_api_server_reach_each_other_as_groups_say() {
    let cable = Cable::new("two1");
    let mut vpcs = vpcs(&cable);
    vpcs[0].pod(10);
    vpcs[1].pod(20);
    let api = vpcs[0].vpc.api.address();
    let web = SecurityGroupSpec {
        ingress: vec![
            tcp(80, &[], &["client"]),
            tcp(60250, &[&format!("{api}/32")], &[]),
        ],
        ..Default::default()
    };
    let client = SecurityGroupSpec::default();
    connect(
        &vpcs,
        &[&["client"], &["web"]],
        &[("web", web), ("client", client)],
    );
    let [first, second] = [&vpcs[0], &vpcs[1]];
    let (client, web) = (first.pods[0].address, second.pods[0].address);
    let _servers = [
        second.listen(0, 80),
        second.listen(0, 81),
        second.listen(0, 60250),
        first.listen(0, 80),
    ];
    let machine = cable.names[0].as_str();
    let _api_server = within(machine, move || {
        [6443, 6444].map(|port| TcpListener::bind((api, port)).expect("listens"))
    });

    first
        .connect(0, web, 80)
        .expect("a member of the group that is named, on the other machine");
    assert!(denied(first.connect(0, web, 81)), "no rule for the port");
    assert!(denied(second.connect(0, client, 80)), "no rule lets it in");
    second
        .connect(0, api, 6443)
        .expect("the API server, through its machine");
    assert!(
        denied(second.connect(0, api, 6444)),
        "nothing else of that machine"
    );
    let call = move |port| TcpStream::connect_timeout(&SocketAddr::from((web, port)), PATIENCE);
    within(machine, move || call(60250))
        .expect("the API server reaches the node on the other machine");
    assert!(
        denied(within(machine, move || call(80))),
        "it is no member of the group"
    );

    // The way is the host's word, and goes with it.
    let gone = Remote::default();
    let mut peers = Peers::new(first.vpc.clone());
    first.runtime.block_on(peers.set(&gone)).expect("removed");
    assert!(first.connect(0, web, 80).is_err(), "no way any more");
}

#[test]
fn a_machine_does_not_get_packets_that_claim_to_be_from_its_own_pods() {
    let cable = Cable::new("two2");
    let mut vpcs = vpcs(&cable);
    vpcs[0].pod(10);
    vpcs[1].pod(20);
    let open = SecurityGroupSpec {
        ingress: vec![tcp(80, &[], &["all"])],
        ..Default::default()
    };
    connect(&vpcs, &[&["all"], &["all"]], &[("all", open.clone())]);
    let (pod, target) = (vpcs[0].pods[0].address, vpcs[1].pods[0].address);
    let _server = vpcs[1].listen(0, 80);
    vpcs[0]
        .connect(0, target, 80)
        .expect("reached by its own address");
    // The other machine lies about who sends: its packets seem to be from a pod that is here.
    vpcs[1].pod(30);
    connect(&vpcs, &[&["all"], &["all"]], &[("all", open)]);
    let liar = vpcs[0].vpc.namespace();
    sh(&format!(
        "ip netns exec {liar} nft add table ip lie
         ip netns exec {liar} nft add chain ip lie out '{{ type nat hook postrouting priority 200; }}'
         ip netns exec {liar} nft add rule ip lie out ip saddr {pod} snat to {}",
        vpcs[1].pods[1].address
    ));
    assert!(denied(vpcs[0].connect(0, target, 80)), "nobody answers");
    let counted = Command::new("ip")
        .args([
            "netns",
            "exec",
            &vpcs[1].vpc.namespace(),
            "nft",
            "list",
            "chain",
            "inet",
            "monopod",
            "antispoof",
        ])
        .output()
        .expect("nft runs");
    let rules = String::from_utf8_lossy(&counted.stdout);
    let rule = rules
        .lines()
        .find(|line| line.contains("vx0"))
        .expect("the rule");
    assert!(!rule.contains("packets 0 "), "not dropped: {rule}");
}

#[test]
fn a_vpc_is_made_again_right_after_its_end() {
    let cable = Cable::new("two9");
    for vpc in &vpcs(&cable) {
        for _ in 0..3 {
            vpc.make_again();
        }
    }
}
