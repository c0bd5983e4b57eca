//! Security groups, compiled to one nftables ruleset per host.
//!
//! The shape, measured and tested in the project's reference notes: interfaces are found by maps keyed by address, group members
//! are sets, and rules match the connection's own tuples (`ct original` is the client, `ct reply` the real
//! server, after a service's address was translated), so that packets of either direction can be judged anew.
//! A flow carries the number of the ruleset that allowed it; after a change every flow is judged once more.
//!
//! Everything that is not allowed is denied: an unknown group has no rules and no members.

mod ruleset;
mod underlay;

#[cfg(test)]
mod tests;

use ipnet::Ipv4Net;
use monopod_api::network::SecurityGroupSpec;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

pub use ruleset::compile;
pub use underlay::{Remote, remote};

/// Groups that an interface can carry (EC2's default quota; also the CRD's limit).
pub const MAX_GROUPS: usize = 5;

/// Prefix of the names of all interfaces' devices on the host.
pub const DEVICE_PREFIX: &str = "eni";

/// An interface on this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LocalInterface {
    /// The pod's address.
    pub address: Ipv4Addr,
    /// Hardware address in lower case, as [`monopod_api::names::mac`] makes it.
    pub mac: String,
    /// Names of its groups.
    pub groups: Vec<String>,
}

/// Everything that a host's ruleset depends on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Policy {
    /// Interfaces of this host.
    pub local: BTreeSet<LocalInterface>,
    /// Groups by name.
    pub groups: BTreeMap<String, SecurityGroupSpec>,
    /// Addresses of the interfaces of all hosts, by the names of their groups.
    pub members: BTreeMap<String, BTreeSet<Ipv4Addr>>,
    /// Device of the link to the API server, its address and its port: all that pods reach over it.
    pub api: Option<ApiLink>,
    /// The way to other hosts, if this one may have such.
    pub underlay: Option<UnderlayLink>,
}

/// The link to the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiLink {
    /// Name of the device in the VPC's namespace.
    pub device: String,
    /// Address of the API server.
    pub address: Ipv4Addr,
    /// The API server's TCP port.
    pub port: u16,
    /// The link's address in the VPC's namespace.
    pub inner: Ipv4Addr,
}

/// The way to the pods of other hosts, and to the API server where there is no link to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnderlayLink {
    /// Name of the device in the VPC's namespace.
    pub device: String,
    /// This machine's address.
    pub own: Ipv4Addr,
    /// Address of the API server, from which nodes are called.
    pub api: Ipv4Addr,
    /// Addresses of the other machines.
    pub machines: BTreeSet<Ipv4Addr>,
}

/// Name of an interface's device on its host: 11 of the 15 characters that Linux allows.
pub fn device(address: Ipv4Addr) -> String {
    format!("{DEVICE_PREFIX}{:08x}", u32::from(address))
}

/// IPv4 ranges of a rule without overlaps. Texts that are none match nothing; the CRD refuses them.
fn ranges(cidrs: &[String]) -> Vec<Ipv4Net> {
    let parsed: Vec<Ipv4Net> = cidrs
        .iter()
        .filter_map(|text| text.parse::<Ipv4Net>().ok())
        .map(|net| net.trunc())
        .collect();
    Ipv4Net::aggregate(&parsed)
}
