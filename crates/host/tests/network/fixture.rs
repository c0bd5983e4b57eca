//! VPCs of tests: pods are namespaces behind veth pairs that have the names of taps.

use monopod_api::names;
use monopod_api::network::{Protocol, SecurityGroupRule, SecurityGroupSpec};
use monopod_core::vpc::{ApiLink, LocalInterface, Policy, device};
use monopod_host::network::{self, API_DEVICE, Api, ROUTER_MAC, Vpc};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// Long enough for a handshake on a busy machine, short enough to wait for its absence.
pub(crate) const PATIENCE: Duration = Duration::from_millis(700);
static NEXT: AtomicU8 = AtomicU8::new(0);

pub(crate) struct Pod {
    pub(crate) namespace: String,
    pub(crate) address: Ipv4Addr,
}

/// A VPC on one machine that is removed at the end, also of a failed test.
pub(crate) struct Fixture {
    pub(crate) vpc: Vpc,
    pub(crate) pods: Vec<Pod>,
    pub(crate) runtime: tokio::runtime::Runtime,
    /// The namespace that stands for its machine; none is this one.
    machine: Option<String>,
}

pub(crate) fn sh(script: &str) {
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
    pub(crate) fn new() -> Self {
        Self::on(None, Self::unused())
    }

    /// A VPC that no other test has, and no cluster of a suite: these have 10.1 to 10.200 and 100.64.
    pub(crate) fn unused() -> Vpc {
        let number = NEXT.fetch_add(1, Ordering::SeqCst);
        let tag = std::process::id() % 1000;
        let link = u32::from(Ipv4Addr::new(100, 66, 0, 0)) + 4 * u32::from(number);
        Vpc {
            name: format!("t{tag}{number}"),
            api: Api::Link {
                address: Ipv4Addr::from(link + 1),
                inner: Ipv4Addr::from(link + 2),
            },
            underlay: None,
            api_port: 6443,
            services: "10.96.0.0/16".parse().expect("a range"),
            cidr: format!("10.{}.0.0/16", 210 + number)
                .parse()
                .expect("valid"),
        }
    }

    /// Makes a VPC on a machine.
    pub(crate) fn on(machine: Option<&str>, vpc: Vpc) -> Self {
        let machine = machine.map(str::to_owned);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        // Twice, as after a restart of the host process.
        for _ in 0..2 {
            let vpc = vpc.clone();
            on(
                machine.as_deref(),
                async move { network::ensure(&vpc).await },
            )
            .expect("the VPC is made or found");
        }
        Self {
            vpc,
            pods: Vec::new(),
            runtime,
            machine,
        }
    }

    /// Removes the VPC and makes it at once, as `down` and `up` do, while the kernel has the former namespace still.
    pub(crate) fn make_again(&self) {
        let vpc = self.vpc.clone();
        let _former =
            std::fs::File::open(format!("/run/netns/{}", vpc.namespace())).expect("its namespace");
        on(self.machine.as_deref(), async move {
            network::remove(&vpc).await?;
            network::ensure(&vpc).await
        })
        .expect("the VPC is made again");
    }

    pub(crate) fn address(&self, last: u8) -> Ipv4Addr {
        let [a, b, ..] = self.vpc.cidr.network().octets();
        Ipv4Addr::new(a, b, 1, last)
    }

    pub(crate) fn pod(&mut self, last: u8) {
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
    pub(crate) fn within<T: Send + 'static>(
        &self,
        pod: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        within(&self.pods[pod].namespace, work)
    }

    pub(crate) fn listen(&self, pod: usize, port: u16) -> TcpListener {
        let address = self.pods[pod].address;
        self.within(pod, move || {
            TcpListener::bind((address, port)).expect("listens")
        })
    }

    pub(crate) fn connect(
        &self,
        from: usize,
        to: Ipv4Addr,
        port: u16,
    ) -> std::io::Result<TcpStream> {
        self.within(from, move || {
            TcpStream::connect_timeout(&SocketAddr::from((to, port)), PATIENCE)
        })
    }

    pub(crate) fn policy(
        &self,
        groups: &[(&str, SecurityGroupSpec)],
        carried: &[&[&str]],
    ) -> Policy {
        let mut policy = Policy {
            groups: groups
                .iter()
                .map(|(name, spec)| ((*name).to_owned(), spec.clone()))
                .collect(),
            api: Some(ApiLink {
                device: API_DEVICE.to_owned(),
                address: self.vpc.api.address(),
                port: 6443,
                inner: Ipv4Addr::from(u32::from(self.vpc.api.address()) + 1),
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
        let vpc = self.vpc.clone();
        let removed = on(self.machine.as_deref(), async move {
            network::remove(&vpc).await
        });
        if !std::thread::panicking() {
            removed.expect("the VPC is removed");
        }
    }
}

/// Runs in a network namespace, on a thread of its own.
pub(crate) fn within<T: Send + 'static>(
    namespace: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let path = format!("/run/netns/{namespace}");
    std::thread::spawn(move || {
        let file = std::fs::File::open(path).expect("the namespace exists");
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).expect("entered");
        work()
    })
    .join()
    .expect("the thread ends")
}

/// Does something on a machine.
fn on<T: Send + 'static>(
    machine: Option<&str>,
    work: impl Future<Output = T> + Send + 'static,
) -> T {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(work)
    };
    match machine {
        Some(namespace) => within(namespace, run),
        None => run(),
    }
}

pub(crate) fn tcp(port: u16, cidrs: &[&str], groups: &[&str]) -> SecurityGroupRule {
    SecurityGroupRule {
        protocol: Protocol::Tcp,
        from_port: Some(port),
        to_port: Some(port),
        cidrs: cidrs.iter().map(|c| (*c).to_owned()).collect(),
        groups: groups.iter().map(|g| (*g).to_owned()).collect(),
    }
}

pub(crate) fn denied(result: std::io::Result<TcpStream>) -> bool {
    result.is_err_and(|error| matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock))
}
