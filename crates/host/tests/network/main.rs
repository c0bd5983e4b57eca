//! The VPC's data plane in network namespaces of its own.

mod fixture;
mod two_machines;

use fixture::{Fixture, PATIENCE, denied, sh, tcp};
use monopod_api::network::SecurityGroupSpec;
use monopod_host::network::{self, API_DEVICE, Firewall, Interface};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn security_groups_allow_what_they_say_and_nothing_else() {
    let mut fixture = Fixture::new();
    fixture.pod(10);
    fixture.pod(20);
    let database = SecurityGroupSpec {
        ingress: vec![tcp(5432, &[], &["web"])],
        ..Default::default()
    };
    let web = SecurityGroupSpec {
        ingress: vec![tcp(
            80,
            &[&format!("{}/32", fixture.vpc.api.address())],
            &[],
        )],
        egress: Some(vec![tcp(5432, &["10.0.0.0/8"], &[])]),
        ..Default::default()
    };
    let mut firewall = Firewall::new(fixture.vpc.clone());
    let groups = [("database", database), ("web", web)];
    let policy = fixture.policy(&groups, &[&["web"], &["database"]]);
    fixture
        .runtime
        .block_on(firewall.load(policy))
        .expect("loads");
    let (web, database) = (fixture.pods[0].address, fixture.pods[1].address);
    let _servers = [
        fixture.listen(1, 5432),
        fixture.listen(1, 9999),
        fixture.listen(0, 80),
        fixture.listen(0, 5432),
    ];

    fixture
        .connect(0, database, 5432)
        .expect("web reaches the database, by its group");
    assert!(
        denied(fixture.connect(0, database, 9999)),
        "no rule of the database's group"
    );
    assert!(
        denied(fixture.connect(1, web, 5432)),
        "no rule of the web group lets the database in"
    );
    TcpStream::connect_timeout(&SocketAddr::from((web, 80)), PATIENCE)
        .expect("the machine reaches web, by its range");
    assert!(denied(TcpStream::connect_timeout(
        &SocketAddr::from((database, 5432)),
        PATIENCE
    )));

    // An interface without a known group is denied everything.
    let nobody = fixture.policy(&groups, &[&["gone"], &["database"]]);
    fixture
        .runtime
        .block_on(firewall.load(nobody))
        .expect("loads");
    assert!(denied(fixture.connect(0, database, 5432)));
    assert!(denied(TcpStream::connect_timeout(
        &SocketAddr::from((web, 80)),
        PATIENCE
    )));
}

#[test]
fn a_flow_that_is_no_longer_allowed_is_cut_and_others_go_on() {
    let mut fixture = Fixture::new();
    fixture.pod(10);
    fixture.pod(20);
    let both = SecurityGroupSpec {
        ingress: vec![
            tcp(1000, &["10.0.0.0/8"], &[]),
            tcp(2000, &["10.0.0.0/8"], &[]),
        ],
        ..Default::default()
    };
    let one = SecurityGroupSpec {
        ingress: vec![tcp(2000, &["10.0.0.0/8"], &[])],
        ..Default::default()
    };
    let mut firewall = Firewall::new(fixture.vpc.clone());
    let policy = fixture.policy(&[("all", both)], &[&["all"], &["all"]]);
    fixture
        .runtime
        .block_on(firewall.load(policy))
        .expect("loads");
    let server = fixture.pods[1].address;
    let echo = |port| {
        let listener = fixture.listen(1, port);
        let client = fixture.connect(0, server, port).expect("allowed");
        let (accepted, _) = listener.accept().expect("accepts");
        client.set_read_timeout(Some(PATIENCE)).expect("set");
        (client, accepted)
    };
    let (mut cut_client, mut cut_server) = echo(1000);
    let (mut kept_client, mut kept_server) = echo(2000);
    let policy = fixture.policy(&[("all", one)], &[&["all"], &["all"]]);
    fixture
        .runtime
        .block_on(firewall.load(policy))
        .expect("loads");
    let mut byte = [0];
    // The server speaks first: the reply direction is judged by the connection's own direction.
    kept_server.write_all(b"k").expect("sent");
    kept_client
        .read_exact(&mut byte)
        .expect("the allowed flow goes on");
    cut_server.write_all(b"c").expect("buffered");
    assert!(
        cut_client.read_exact(&mut byte).is_err(),
        "the denied flow is cut"
    );
}

/// Whatever of the rules somebody takes away comes back with the next look.
#[test]
fn rules_that_somebody_removes_are_loaded_again() {
    let mut fixture = Fixture::new();
    fixture.pod(10);
    fixture.pod(20);
    let policy = fixture.policy(
        &[("all", SecurityGroupSpec::default())],
        &[&["all"], &["all"]],
    );
    let mut firewall = Firewall::new(fixture.vpc.clone());
    let server = fixture.pods[1].address;
    let _listener = fixture.listen(1, 80);
    let load = |firewall: &mut Firewall| {
        let loaded = fixture.runtime.block_on(firewall.load(policy.clone()));
        loaded.expect("loads");
        assert!(denied(fixture.connect(0, server, 80)), "no group allows it");
    };
    load(&mut firewall);
    for removal in [
        "delete table inet monopod",
        "flush chain inet monopod entering",
    ] {
        let namespace = fixture.vpc.namespace();
        sh(&format!(
            "nsenter --net=/run/netns/{namespace} nft {removal}"
        ));
        fixture.connect(0, server, 80).expect("nothing denies it");
        fixture.runtime.block_on(firewall.check()).expect("checks");
        load(&mut firewall);
    }
    fixture.runtime.block_on(firewall.check()).expect("checks");
    load(&mut firewall);
}

/// A network service of the machine that starts again takes away what it does not know.
#[test]
fn the_machines_way_to_the_pods_comes_back() {
    let fixture = Fixture::new();
    let mut firewall = Firewall::new(fixture.vpc.clone());
    let policy = fixture.policy(&[], &[]);
    let device = format!("{}-api", fixture.vpc.name);
    let loaded = || {
        let namespace = format!("--net=/run/netns/{}", fixture.vpc.namespace());
        let list = Command::new("nsenter")
            .args([&namespace, "nft", "list", "ruleset"])
            .output();
        list.expect("nft runs").stdout
    };
    // What is as it should be is left alone: a ruleset that is loaded again has another number.
    let mut again = Vec::new();
    for _ in 0..2 {
        let load = fixture.runtime.block_on(firewall.load(policy.clone()));
        load.expect("loads");
        fixture.runtime.block_on(firewall.check()).expect("checks");
        again.push(loaded());
    }
    assert_eq!(again[0], again[1]);
    for removal in [
        format!("ip route delete {}", fixture.vpc.cidr),
        format!("ip address flush dev {device}"),
        format!("ip link set {device} down"),
        format!("ip link delete {device}"),
    ] {
        let loaded = fixture.runtime.block_on(firewall.load(policy.clone()));
        loaded.expect("loads");
        sh(&removal);
        fixture.runtime.block_on(firewall.check()).expect("checks");
        let pod = fixture.address(10);
        sh(&format!("ip route get {pod} | grep -w {device}"));
        // And back from the other end.
        let namespace = fixture.vpc.namespace();
        let api = fixture.vpc.api.address();
        sh(&format!(
            "ip -n {namespace} route get {api} | grep -w {API_DEVICE}"
        ));
    }
}

/// As kube-proxy translates it, from a service's address to a pod's.
#[test]
fn a_service_leads_to_pods_also_to_the_one_that_asks_and_groups_see_the_pods() {
    let mut fixture = Fixture::new();
    fixture.pod(10);
    fixture.pod(20);
    let group = SecurityGroupSpec {
        ingress: vec![tcp(8080, &[], &["all"])],
        ..Default::default()
    };
    let mut firewall = Firewall::new(fixture.vpc.clone());
    let policy = fixture.policy(&[("all", group)], &[&["all"], &["all"]]);
    fixture
        .runtime
        .block_on(firewall.load(policy))
        .expect("loads");
    let (one, other) = (fixture.pods[0].address, fixture.pods[1].address);
    sh(&format!(
        "nsenter --net=/run/netns/{} nft -f - <<END
table ip services {{
  chain pre {{
    type nat hook prerouting priority dstnat
    ip daddr 10.96.0.1 tcp dport 80 dnat to {one}:8080
    ip daddr 10.96.0.1 tcp dport 81 dnat to {one}:9999
    ip daddr 10.96.0.2 tcp dport 80 dnat to {other}:8080
  }}
  chain none {{
    type filter hook forward priority filter
    ip daddr 10.96.0.3 reject
  }}
}}
END",
        fixture.vpc.namespace()
    ));
    let servers = [fixture.listen(0, 8080), fixture.listen(1, 8080)];
    let _denied = fixture.listen(0, 9999);
    for (last, listener) in (1..).zip(&servers) {
        let _client = fixture
            .connect(0, Ipv4Addr::new(10, 96, 0, last), 80)
            .expect("the service answers");
        let (_accepted, peer) = listener.accept().expect("accepts");
        // The other pod sees who asks; a pod that asks itself must see somebody else.
        assert_eq!(peer.ip() == one, last == 2, "{peer}");
    }
    assert!(
        denied(fixture.connect(1, Ipv4Addr::new(10, 96, 0, 1), 81)),
        "the group denies the pod's port, whatever the service's is"
    );
    let refused = fixture.connect(0, Ipv4Addr::new(10, 96, 0, 3), 80);
    assert_eq!(
        refused.expect_err("nobody there").kind(),
        ErrorKind::ConnectionRefused,
        "a service without pods refuses"
    );
}

#[test]
fn pods_reach_only_the_api_servers_port_of_the_machine_and_cannot_spoof() {
    let mut fixture = Fixture::new();
    fixture.pod(10);
    let open = SecurityGroupSpec::default();
    let mut firewall = Firewall::new(fixture.vpc.clone());
    let policy = fixture.policy(&[("all", open)], &[&["all"]]);
    fixture
        .runtime
        .block_on(firewall.load(policy))
        .expect("loads");
    let machine = fixture.vpc.api.address();
    let _servers = [
        TcpListener::bind((machine, 6443)).expect("listens"),
        TcpListener::bind((machine, 6444)).expect("listens"),
    ];
    fixture
        .connect(0, machine, 6443)
        .expect("the API server is reached");
    assert!(
        denied(fixture.connect(0, machine, 6444)),
        "nothing else of the machine is"
    );
    assert!(denied(fixture.connect(
        0,
        Ipv4Addr::new(169, 254, 169, 254),
        80
    )));
    let namespace = &fixture.pods[0].namespace;
    sh(&format!(
        "ip -n {namespace} address add 10.99.99.99/32 dev eth0; ip -n {namespace} route replace {machine}/32 via {} dev eth0 src 10.99.99.99",
        fixture.address(1)
    ));
    assert!(
        denied(fixture.connect(0, machine, 6443)),
        "a source address that is not the interface's"
    );
}

/// The VM is gone and the host answers at its address: to the machine, never to a pod.
#[test]
fn a_finished_pods_address_is_reached_by_the_machine_alone() {
    let mut fixture = Fixture::new();
    fixture.pod(10);
    let policy = fixture.policy(&[("all", SecurityGroupSpec::default())], &[&["all"]]);
    let mut firewall = Firewall::new(fixture.vpc.clone());
    let finished = fixture.address(99);
    let vpc = fixture.vpc.clone();
    let _listener = fixture.runtime.block_on(async {
        firewall.load(policy).await.expect("loads");
        network::claim(&vpc, finished).await.expect("claimed");
        network::claim(&vpc, finished).await.expect("fine again");
        network::listen(&vpc, finished, 60250)
            .await
            .expect("listens")
    });
    TcpStream::connect_timeout(&SocketAddr::from((finished, 60250)), PATIENCE)
        .expect("the machine reaches it");
    assert!(
        denied(fixture.connect(0, finished, 60250)),
        "a pod does not"
    );
    // Nor does one that has the finished pod's address, or sends as if it had.
    let namespace = &fixture.pods[0].namespace;
    sh(&format!(
        "ip -n {namespace} address add 10.99.99.98/32 dev eth0; ip -n {namespace} route add {finished}/32 via {} dev eth0 src 10.99.99.98",
        fixture.address(1)
    ));
    assert!(denied(fixture.connect(0, finished, 60250)));
    fixture.runtime.block_on(async {
        network::disclaim(&vpc, finished).await.expect("given up");
        network::disclaim(&vpc, finished)
            .await
            .expect("fine if it is gone");
    });
    TcpStream::connect_timeout(&SocketAddr::from((finished, 60250)), PATIENCE)
        .expect_err("nobody is there");
}

#[test]
fn taps_are_made_once_found_again_and_removed() {
    let fixture = Fixture::new();
    let address = fixture.address(7);
    let interface = Interface {
        address,
        gateway: fixture.address(1),
    };
    fixture.runtime.block_on(async {
        let vpc = &fixture.vpc;
        let spare = async |name| network::spare(vpc, name).await.expect("made");
        let plug = |name| network::plug(vpc, &interface, name);
        assert!(plug("vm-000001").await.is_err(), "there is no such tap");
        let left = spare("vm-000001").await;
        plug("vm-000001").await.expect("named");
        plug("vm-000001").await.expect("found");
        // The address has a new VM; the tap of the former is in the way.
        let _new = spare("vm-000002").await;
        plug("vm-000002").await.expect("named");
        drop(left);
        let gateway = |address| network::gateway(vpc, address);
        assert_eq!(
            gateway(address).await.expect("looked up"),
            Some(interface.gateway)
        );
        assert_eq!(
            gateway(fixture.address(8)).await.expect("looked up"),
            None,
            "it is not plugged"
        );
        assert_eq!(
            network::plugged(&fixture.vpc).await.expect("listed"),
            [address]
        );
        network::unplug(&fixture.vpc, address)
            .await
            .expect("removed");
        network::unplug(&fixture.vpc, address)
            .await
            .expect("fine if it is gone");
        let deadline = Instant::now() + Duration::from_secs(5);
        while !network::plugged(&fixture.vpc)
            .await
            .expect("listed")
            .is_empty()
        {
            assert!(Instant::now() < deadline, "the tap stays");
        }
    });
}
