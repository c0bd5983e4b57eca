//! The VPC's data plane in network namespaces of its own; pods are namespaces behind veth pairs
//! that have the names of taps.

use monopod_api::names;
use monopod_api::network::{Protocol, SecurityGroupRule, SecurityGroupSpec};
use monopod_core::vpc::{ApiLink, LocalInterface, Policy, device};
use monopod_host::network::{self, API_DEVICE, Firewall, Interface, ROUTER_MAC, Vpc};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// Long enough for a handshake on a busy machine, short enough to wait for its absence.
const PATIENCE: Duration = Duration::from_millis(700);
static NEXT: AtomicU8 = AtomicU8::new(0);

struct Pod {
    namespace: String,
    address: Ipv4Addr,
}

/// A VPC that is removed at the end, also of a failed test.
struct Fixture {
    vpc: Vpc,
    pods: Vec<Pod>,
    runtime: tokio::runtime::Runtime,
}

fn sh(script: &str) {
    let output = Command::new("sh")
        .args(["-ec", script])
        .output()
        .expect("sh runs");
    assert!(
        output.status.success(),
        "{script}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Fixture {
    fn new() -> Self {
        let number = NEXT.fetch_add(1, Ordering::SeqCst);
        let tag = std::process::id() % 1000;
        let link = u32::from(Ipv4Addr::new(100, 64, 100, 0)) + 4 * u32::from(number);
        let vpc = Vpc {
            name: format!("t{tag}{number}"),
            host_address: Ipv4Addr::from(link + 1),
            inner_address: Ipv4Addr::from(link + 2),
            services: "10.96.0.0/16".parse().expect("a range"),
            cidr: format!("10.{}.0.0/16", 100 + number)
                .parse()
                .expect("valid"),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime
            .block_on(network::ensure(&vpc))
            .expect("the VPC is made");
        // Twice, as after a restart of the host process.
        runtime
            .block_on(network::ensure(&vpc))
            .expect("the VPC is found");
        Self {
            vpc,
            pods: Vec::new(),
            runtime,
        }
    }

    fn address(&self, last: u8) -> Ipv4Addr {
        let [a, b, ..] = self.vpc.cidr.network().octets();
        Ipv4Addr::new(a, b, 1, last)
    }

    fn pod(&mut self, last: u8) {
        let address = self.address(last);
        let (vpc, mac, device) = (self.vpc.namespace(), names::mac(address), device(address));
        let router = names::hardware_address(ROUTER_MAC);
        let (namespace, gateway) = (format!("{}-p{last}", self.vpc.name), self.address(1));
        sh(&format!(
            "ip netns add {namespace}
             ip -n {vpc} link add {device} address {router} type veth peer name eth0 netns {namespace} address {mac}
             ip -n {vpc} link set {device} up
             ip -n {vpc} address replace {gateway}/32 dev lo
             ip -n {vpc} route replace {address}/32 dev {device} src {gateway}
             ip -n {vpc} neighbour replace {address} lladdr {mac} dev {device} nud permanent
             ip -n {namespace} link set lo up
             ip -n {namespace} link set eth0 up
             ip -n {namespace} address add {address}/32 dev eth0
             ip -n {namespace} route add {gateway}/32 dev eth0
             ip -n {namespace} neighbour replace {gateway} lladdr {router} dev eth0 nud permanent
             ip -n {namespace} route add default via {gateway} dev eth0"
        ));
        self.pods.push(Pod { namespace, address });
    }

    /// Runs in a pod's namespace, on a thread of its own.
    fn within<T: Send + 'static>(
        &self,
        pod: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let path = format!("/run/netns/{}", self.pods[pod].namespace);
        std::thread::spawn(move || {
            let file = std::fs::File::open(path).expect("the namespace exists");
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("entered");
            work()
        })
        .join()
        .expect("the thread ends")
    }

    fn listen(&self, pod: usize, port: u16) -> TcpListener {
        let address = self.pods[pod].address;
        self.within(pod, move || {
            TcpListener::bind((address, port)).expect("listens")
        })
    }

    fn connect(&self, from: usize, to: Ipv4Addr, port: u16) -> std::io::Result<TcpStream> {
        self.within(from, move || {
            TcpStream::connect_timeout(&SocketAddr::from((to, port)), PATIENCE)
        })
    }

    fn policy(&self, groups: &[(&str, SecurityGroupSpec)], carried: &[&[&str]]) -> Policy {
        let mut policy = Policy {
            groups: groups
                .iter()
                .map(|(name, spec)| ((*name).to_owned(), spec.clone()))
                .collect(),
            api: Some(ApiLink {
                device: API_DEVICE.to_owned(),
                address: self.vpc.host_address,
                port: 6443,
                inner: self.vpc.inner_address,
            }),
            ..Default::default()
        };
        for (pod, names) in self.pods.iter().zip(carried) {
            let groups: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
            for group in &groups {
                policy
                    .members
                    .entry(group.clone())
                    .or_default()
                    .insert(pod.address);
            }
            policy.local.insert(LocalInterface {
                address: pod.address,
                mac: names::mac(pod.address),
                groups,
            });
        }
        policy
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for pod in &self.pods {
            let _removed = Command::new("ip")
                .args(["netns", "delete", &pod.namespace])
                .status();
        }
        let removed = self.runtime.block_on(network::remove(&self.vpc));
        if !std::thread::panicking() {
            removed.expect("the VPC is removed");
        }
    }
}

fn tcp(port: u16, cidrs: &[&str], groups: &[&str]) -> SecurityGroupRule {
    SecurityGroupRule {
        protocol: Protocol::Tcp,
        from_port: Some(port),
        to_port: Some(port),
        cidrs: cidrs.iter().map(|c| (*c).to_owned()).collect(),
        groups: groups.iter().map(|g| (*g).to_owned()).collect(),
    }
}

fn denied(result: std::io::Result<TcpStream>) -> bool {
    result.is_err_and(|error| matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock))
}

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
        ingress: vec![tcp(80, &[&format!("{}/32", fixture.vpc.host_address)], &[])],
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
    let machine = fixture.vpc.host_address;
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
