//! The three network namespaces and how they are joined.
//!
//! ```text
//!  platform            node                                   workload
//!  eth0 ---veth--- plat0     br0 -- wl0 -----veth------------ eth0
//!  169.254.170.2   .170.1    169.254.1.1                      the pod's address
//!                            eni0: the interface, no address of its own
//! ```
//!
//! The pod's address is the interface's; the workload has it on its own `eth0`. `node` routes
//! between the two and shares the address on the wire (see [`super::filter`]). There is no route
//! from `workload` to the link-local addresses but the router's, and a drop rule besides.
//! IPv4 only; IPv6 is off on every link but the workload's `lo`.

use super::filter;
use super::links::{in_namespace, parse_mac, run};
use super::namespaces::{Namespace, inside};
use anyhow::{Context, Result};
use monopod_wire::Interface;
use std::net::Ipv4Addr;

/// The router that the workload sees, and the node's own address.
pub(super) const NODE: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// The node's end of the link to `platform`.
const NODE_TO_PLATFORM: Ipv4Addr = Ipv4Addr::new(169, 254, 170, 1);
/// The task metadata endpoint; the same address as ECS has.
pub(super) const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 170, 2);
/// MTU that every link has by default.
const DEFAULT_MTU: u32 = 1500;

/// Everything that is the same in all guests.
pub(super) fn prepare() -> Result<()> {
    inside(Namespace::Platform, || set(&IPV6_OFF))?;
    inside(Namespace::Workload, || set(&WORKLOAD))?;
    inside(Namespace::Node, || {
        set(&IPV6_OFF)?;
        set(&ROUTER)
    })?;
    run(async |links| links.give("eth0", "eni0", Namespace::Node).await)
        .context("taking the interface")?;
    in_namespace(Namespace::Node, async |links| {
        links.up("lo").await?;
        links.up("eni0").await?;
        links.add_bridge("br0").await?;
        links.add_pair("wl0", "eth0", Namespace::Workload).await?;
        links.join("wl0", "br0").await?;
        links.up("wl0").await?;
        links.add_pair("plat0", "eth0", Namespace::Platform).await?;
        links.up("plat0").await?;
        links.add_address("br0", NODE).await?;
        links.add_address("plat0", NODE_TO_PLATFORM).await?;
        links
            .route_to(METADATA, "plat0", Some(NODE_TO_PLATFORM))
            .await
    })?;
    in_namespace(Namespace::Platform, async |links| {
        links.up("lo").await?;
        links.up("eth0").await?;
        links.add_address("eth0", METADATA).await?;
        links.route_to(NODE_TO_PLATFORM, "eth0", None).await
    })?;
    in_namespace(Namespace::Workload, async |links| {
        links.up("lo").await?;
        links.up("eth0").await
    })?;
    inside(Namespace::Node, filter::load)
}

/// Gives the guest its interface.
pub(super) fn assign(interface: &Interface) -> Result<()> {
    let address = interface.address;
    let mac = parse_mac(&interface.mac)?;
    let gateway_mac = parse_mac(&interface.gateway_mac)?;
    let mtu = interface.mtu;
    inside(Namespace::Node, || filter::assign(address))?;
    in_namespace(Namespace::Node, async |links| {
        links.hardware_address("eni0", mac).await?;
        if mtu != DEFAULT_MTU {
            for link in ["eni0", "wl0", "br0"] {
                links.mtu(link, mtu).await?;
            }
        }
        links.route_to(address, "br0", Some(NODE)).await?;
        links
            .route_to(interface.gateway, "eni0", Some(NODE))
            .await?;
        links
            .add_neighbour("eni0", interface.gateway, gateway_mac)
            .await?;
        links
            .default_route(interface.gateway, "eni0", Some(NODE))
            .await
    })?;
    in_namespace(Namespace::Workload, async |links| {
        if mtu != DEFAULT_MTU {
            links.mtu("eth0", mtu).await?;
        }
        links.add_address("eth0", address).await?;
        links.route_to(NODE, "eth0", None).await?;
        links.default_route(NODE, "eth0", None).await?;
        links.unreachable(Ipv4Addr::new(169, 254, 0, 0), 16).await
    })
}

/// Takes the interface of a rehearsal back. What is the same for every interface stays.
pub(super) fn unassign(interface: &Interface) -> Result<()> {
    let address = interface.address;
    inside(Namespace::Node, || filter::unassign(address))?;
    in_namespace(Namespace::Node, async |links| {
        links.unroute(address, "br0").await?;
        links.unroute(interface.gateway, "eni0").await?;
        links.forget_neighbour("eni0", interface.gateway).await
    })?;
    in_namespace(Namespace::Workload, async |links| {
        links.remove_address("eth0", address).await
    })
}

type Setting = (&'static str, &'static str);

const IPV6_OFF: [Setting; 2] = [
    ("ipv6/conf/all/disable_ipv6", "1"),
    ("ipv6/conf/default/disable_ipv6", "1"),
];

/// `lo` keeps `::1`, which programs bind without asking.
const WORKLOAD: [Setting; 2] = [
    ("ipv6/conf/default/disable_ipv6", "1"),
    // Every user may ping, as in containers elsewhere.
    ("ipv4/ping_group_range", "0 2147483647"),
];

const ROUTER: [Setting; 6] = [
    ("ipv4/ip_forward", "1"),
    // The interface's route back to a link-local source is another one.
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/conf/all/send_redirects", "0"),
    ("ipv4/conf/default/send_redirects", "0"),
    // Else a reply that the translation misses reaches the workload, which resets the connection.
    ("netfilter/nf_conntrack_tcp_be_liberal", "1"),
];

fn set(settings: &[Setting]) -> Result<()> {
    for (name, value) in settings {
        std::fs::write(format!("/proc/sys/net/{name}"), value)
            .with_context(|| format!("setting net/{name}"))?;
    }
    Ok(())
}
