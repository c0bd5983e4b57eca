//! The VPC's data plane on this host: one network namespace, a link to the API server, a tap per interface.
//!
//! ```text
//!  machine                      namespace <name>-vpc
//!  <name>-api 100.64.0.1/30 ─── api0 100.64.0.2/30      routes, security groups
//!  10.0.0.0/16 via 100.64.0.2   eni0a000117 (tap) ─── VM, 10.0.1.23/32
//!                               vx0 ─── the VPC's namespaces of other machines
//!                               vm-1f2e00002a (tap) ─ VM that belongs to no environment yet
//! ```
//!
//! Everything here is idempotent: a restarted host process finds what there is and goes on.

mod command;
mod firewall;
mod links;
mod local;
mod namespace;
mod tap;
mod underlay;

pub use firewall::Firewall;
pub use local::{claim, disclaim, listen};
pub use underlay::{Peers, UNDERLAY_DEVICE, Underlay};

use command::{batch, run};
use ipnet::Ipv4Net;
use links::Links;
use monopod_api::names;
use monopod_core::vpc;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// Hardware address of the router on every interface. Links are point to point, so one is enough.
pub const ROUTER_MAC: [u8; 6] = [0x0e, 0, 0, 0, 0, 1];
/// The link's device in the VPC's namespace.
pub const API_DEVICE: &str = "api0";
/// Largest packet on an interface. VXLAN between hosts takes 50 bytes of the underlay's 1500.
pub const MTU: u32 = 1450;

/// Names and addresses of the VPC on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vpc {
    /// Prefix of what is made on the machine; at most seven characters.
    pub name: String,
    /// The way to the API server.
    pub api: Api,
    /// The API server's TCP port.
    pub api_port: u16,
    /// This machine among others of the VPC; none if it stands alone.
    pub underlay: Option<Underlay>,
    /// Addresses of all pods.
    pub cidr: Ipv4Net,
    /// Addresses of all services.
    pub services: Ipv4Net,
}

/// The way from the VPC to the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// It is on this machine.
    Link {
        /// The machine's end of the link: the API server's address.
        address: Ipv4Addr,
        /// The VPC's end of the link.
        inner: Ipv4Addr,
    },
    /// It is on another machine, whose VPC has the link.
    Through {
        /// The API server's address on its link.
        address: Ipv4Addr,
        /// That machine's address.
        machine: Ipv4Addr,
    },
}

impl Api {
    /// The API server's address, as pods reach it.
    pub fn address(self) -> Ipv4Addr {
        let (Self::Link { address, .. } | Self::Through { address, .. }) = self;
        address
    }

    /// The machine through which it is reached.
    pub fn through(self) -> Option<Ipv4Addr> {
        match self {
            Self::Link { .. } => None,
            Self::Through { machine, .. } => Some(machine),
        }
    }
}

impl Vpc {
    /// Name of the network namespace.
    pub fn namespace(&self) -> String {
        format!("{}-vpc", self.name)
    }

    pub(crate) fn namespace_path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(self.namespace())
    }

    /// Name of the nftables table on the machine.
    fn table(&self) -> String {
        format!("monopod-{}", self.name)
    }

    /// Whether other machines reach the API server at this one's address.
    fn is_published(&self) -> bool {
        self.underlay.is_some() && matches!(self.api, Api::Link { .. })
    }

    /// Name of the link's device on the machine.
    fn host_device(&self) -> String {
        format!("{}-api", self.name)
    }
}

/// Why the network could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// A program could not be started.
    #[error("cannot run {program}; install the Debian packages iproute2, nftables and util-linux")]
    Start {
        /// Which one.
        program: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A program failed.
    #[error("{program} failed: {output}")]
    Failed {
        /// Which one, with its arguments.
        program: String,
        /// What it said.
        output: String,
    },
    /// A system call failed.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A thread that worked in the namespace ended without a result.
    #[error("the thread in the VPC's namespace died")]
    Thread,
}

/// Makes the namespace, the link and the way to other hosts, as far as they are missing.
pub async fn ensure(vpc: &Vpc) -> Result<(), NetworkError> {
    let namespace = vpc.namespace();
    if !vpc.namespace_path().exists() {
        run("ip", &["netns", "add", &namespace], "").await?;
    }
    batch(
        Some(&namespace),
        &format!("link set lo up\nroute replace unreachable {}\n", vpc.cidr),
    )
    .await?;
    if let Api::Link { address, inner } = vpc.api {
        link(vpc, address, inner).await?;
    }
    if let Some(underlay) = &vpc.underlay {
        underlay::ensure(vpc, underlay).await?;
        if let Api::Link { address, .. } = vpc.api {
            publish(vpc, underlay.address, address).await?;
        }
    }
    settings(vpc).await
}

/// Makes the link to the API server on this machine.
async fn link(vpc: &Vpc, host: Ipv4Addr, inside: Ipv4Addr) -> Result<(), NetworkError> {
    let (namespace, device) = (vpc.namespace(), vpc.host_device());
    if !has_link(&[], &device).await? {
        run(
            "ip",
            &[
                "link", "add", &device, "type", "veth", "peer", "name", API_DEVICE, "netns",
                &namespace,
            ],
            "",
        )
        .await?;
    }
    batch(
        None,
        &format!(
            "address replace {host}/30 dev {device}\nlink set {device} up\nroute replace {} via {inside} dev {device} src {host}\n",
            vpc.cidr
        ),
    )
    .await?;
    batch(
        Some(&namespace),
        &format!(
            // A service's address needs a route, or kube-proxy's refusals are not reached; the link's rules let none pass.
            "address replace {inside}/30 dev {API_DEVICE}\nlink set {API_DEVICE} up\nroute replace {} via {host} dev {API_DEVICE}\n",
            vpc.services
        ),
    )
    .await
}

/// Lets other hosts reach the API server at this machine's address; it listens at one of its own only.
async fn publish(vpc: &Vpc, machine: Ipv4Addr, api: Ipv4Addr) -> Result<(), NetworkError> {
    let (table, port) = (vpc.table(), vpc.api_port);
    let mut rules = format!("table ip {table}\ndelete table ip {table}\ntable ip {table} {{\n");
    // From other machines, and from this one.
    for hook in ["prerouting", "output"] {
        let chain = format!(
            "chain {hook} {{\ntype nat hook {hook} priority -100\nip daddr {machine} tcp dport {port} dnat to {api}:{port}\n}}\n"
        );
        rules.push_str(&chain);
    }
    rules.push_str("}\n");
    run("nft", &["-f", "-"], &rules).await
}

/// Whether there is a link of this name on the machine, or where `ip` looks with these arguments. Not by
/// `/sys`, which may show another namespace's.
async fn has_link(place: &[&str], name: &str) -> Result<bool, NetworkError> {
    let arguments = [place, &["-brief", "link", "show"]].concat();
    let listed = command::output("ip", &arguments, "").await?;
    Ok(listed
        .lines()
        .any(|line| line.split([' ', '@']).next() == Some(name)))
}

/// Sets how the namespace treats packets.
async fn settings(vpc: &Vpc) -> Result<(), NetworkError> {
    let settings = [
        "net.ipv4.ip_forward=1",
        "net.ipv4.conf.all.rp_filter=0",
        "net.ipv4.conf.default.rp_filter=0",
        "net.ipv4.conf.all.send_redirects=0",
        "net.ipv4.conf.default.send_redirects=0",
        "net.ipv6.conf.default.disable_ipv6=1",
        // Replies that the kernel finds out of window must reach the rules, not skip them.
        "net.netfilter.nf_conntrack_tcp_be_liberal=1",
        "net.netfilter.nf_conntrack_acct=1",
    ];
    let mut arguments = vec![
        format!("--net={}", vpc.namespace_path().display()),
        "sysctl".to_owned(),
        "-qw".to_owned(),
    ];
    arguments.extend(settings.map(str::to_owned));
    run(
        "nsenter",
        &arguments.iter().map(String::as_str).collect::<Vec<_>>(),
        "",
    )
    .await
}

/// An interface of a VM on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The pod's address.
    pub address: Ipv4Addr,
    /// The router's address in its subnet.
    pub gateway: Ipv4Addr,
}

impl Interface {
    /// What a guest is told of it.
    pub fn as_told(&self) -> monopod_wire::Interface {
        monopod_wire::Interface {
            address: self.address,
            mac: names::mac(self.address),
            gateway: self.gateway,
            gateway_mac: names::hardware_address(ROUTER_MAC),
            mtu: MTU,
        }
    }
}

/// Makes a tap in the VPC's namespace that leads nowhere; the descriptor is for a VM's process,
/// with whose end the tap goes.
pub async fn spare(vpc: &Vpc, device: &str) -> Result<OwnedFd, NetworkError> {
    tap::open(vpc.namespace_path(), device.to_owned()).await
}

/// Makes a spare tap an interface's. Done again, it changes nothing.
///
/// No packet passes before the [`Firewall`] knows the interface.
pub async fn plug(vpc: &Vpc, interface: &Interface, spare: &str) -> Result<(), NetworkError> {
    let Interface { address, gateway } = *interface;
    let links = Links::open(vpc).await?;
    let device = vpc::device(address);
    let index = if let Some(index) = links.index(spare).await? {
        // Left by a VM that had the address before.
        links.delete(&device).await?;
        links.set_up(index, &device, ROUTER_MAC, MTU).await?;
        index
    } else {
        let missing = || NetworkError::System {
            what: "find the VM's tap",
            source: std::io::ErrorKind::NotFound.into(),
        };
        links.index(&device).await?.ok_or_else(missing)?
    };
    let loopback = 1;
    links.address(loopback, gateway).await?;
    links.route(index, address, gateway).await?;
    links
        .neighbour(index, address, names::mac_bytes(address))
        .await
}

/// The gateway of an interface that is plugged; none if it is not. Its subnet may be gone.
pub async fn gateway(vpc: &Vpc, address: Ipv4Addr) -> Result<Option<Ipv4Addr>, NetworkError> {
    let links = Links::open(vpc).await?;
    match links.index(&vpc::device(address)).await? {
        Some(index) => links.source(index).await,
        None => Ok(None),
    }
}

/// Removes an interface's tap. It is fine if there is none.
pub async fn unplug(vpc: &Vpc, address: Ipv4Addr) -> Result<(), NetworkError> {
    let links = Links::open(vpc).await?;
    links.delete(&vpc::device(address)).await
}

/// Addresses whose taps exist, for the comparison with the records.
pub async fn plugged(vpc: &Vpc) -> Result<Vec<Ipv4Addr>, NetworkError> {
    let namespace = vpc.namespace();
    let listed = command::output("ip", &["-n", &namespace, "-brief", "link", "show"], "").await?;
    Ok(listed
        .lines()
        .filter_map(|line| {
            line.split([' ', '@'])
                .next()?
                .strip_prefix(vpc::DEVICE_PREFIX)
        })
        .filter_map(|digits| u32::from_str_radix(digits, 16).ok())
        .map(Ipv4Addr::from)
        .collect())
}

/// Removes the namespace with everything in it, the link and the table. It is fine if there is none.
pub async fn remove(vpc: &Vpc) -> Result<(), NetworkError> {
    if vpc.underlay.is_some() {
        // Made empty first, so that there is one to delete.
        let table = vpc.table();
        run(
            "nft",
            &["-f", "-"],
            &format!("table ip {table}\ndelete table ip {table}\n"),
        )
        .await?;
    }
    if has_link(&[], &vpc.host_device()).await? {
        run("ip", &["link", "delete", &vpc.host_device()], "").await?;
    }
    let namespace = vpc.namespace();
    if vpc.namespace_path().exists() {
        // The kernel takes a namespace apart some time later, and until then nobody else has the device's number.
        let inside = ["-n", &namespace];
        let delete = [&inside[..], &["link", "delete", UNDERLAY_DEVICE]].concat();
        if let Err(error) = run("ip", &delete, "").await
            && has_link(&inside, UNDERLAY_DEVICE).await.unwrap_or(false)
        {
            return Err(error);
        }
        run("ip", &["netns", "delete", &namespace], "").await?;
    }
    Ok(())
}
