//! Network links, addresses and routes, by netlink, without starting a process.

use super::namespaces::{Namespace, inside};
use anyhow::{Context, Result};
use futures::TryStreamExt;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::route::{RouteMessage, RouteScope, RouteType};
use rtnetlink::{LinkBridge, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, PoisonError};

/// Netlink in one network namespace.
pub(super) struct Links {
    handle: rtnetlink::Handle,
    /// Numbers of links by name: asking costs as much as changing.
    known: Mutex<BTreeMap<String, u32>>,
}

/// Does network work inside a namespace.
pub(super) fn in_namespace(
    namespace: Namespace,
    work: impl AsyncFnOnce(&Links) -> Result<()> + Send,
) -> Result<()> {
    inside(namespace, || run(work))
}

/// Does network work where this thread is.
pub(super) fn run(work: impl AsyncFnOnce(&Links) -> Result<()>) -> Result<()> {
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?
        .block_on(async {
            let (connection, handle, _) = rtnetlink::new_connection()?;
            let connection = tokio::spawn(connection);
            let links = Links {
                handle,
                known: Mutex::default(),
            };
            let outcome = work(&links).await;
            connection.abort();
            outcome
        })
}

impl Links {
    async fn index(&self, name: &str) -> Result<u32> {
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = known().get(name) {
            return Ok(*index);
        }
        let link = self
            .handle
            .link()
            .get()
            .match_name(name)
            .execute()
            .try_next()
            .await
            .with_context(|| format!("looking for the link {name}"))?
            .with_context(|| format!("no link {name}"))?;
        known().insert(name.to_owned(), link.header.index);
        Ok(link.header.index)
    }

    async fn change(
        &self,
        name: &str,
        change: impl FnOnce(LinkMessageBuilder<LinkUnspec>) -> LinkMessageBuilder<LinkUnspec>,
    ) -> Result<()> {
        let link = LinkUnspec::new_with_name(name);
        self.handle
            .link()
            .set(change(link).build())
            .execute()
            .await
            .with_context(|| format!("changing the link {name}"))
    }

    /// Starts a link.
    pub(super) async fn up(&self, name: &str) -> Result<()> {
        self.change(name, LinkMessageBuilder::up).await
    }

    /// Sets the largest packet.
    pub(super) async fn mtu(&self, name: &str, bytes: u32) -> Result<()> {
        self.change(name, |link| link.mtu(bytes)).await
    }

    /// Sets the hardware address.
    pub(super) async fn hardware_address(&self, name: &str, mac: [u8; 6]) -> Result<()> {
        self.change(name, |link| link.address(mac.to_vec())).await
    }

    /// Makes a bridge that is up.
    pub(super) async fn add_bridge(&self, name: &str) -> Result<()> {
        self.handle
            .link()
            .add(LinkBridge::new(name).build())
            .execute()
            .await
            .with_context(|| format!("making the bridge {name}"))
    }

    /// Puts a link into a bridge.
    pub(super) async fn join(&self, name: &str, bridge: &str) -> Result<()> {
        let bridge = self.index(bridge).await?;
        self.change(name, |link| link.controller(bridge)).await
    }

    /// Makes a pair of links: `name` here, `peer` in another namespace.
    pub(super) async fn add_pair(&self, name: &str, peer: &str, other: Namespace) -> Result<()> {
        // The peer is made under a name of its own: both may exist here for a moment.
        let passing = format!("{name}-peer");
        self.handle
            .link()
            .add(LinkVeth::new(name, &passing).build())
            .execute()
            .await
            .with_context(|| format!("making the pair {name}"))?;
        self.give(&passing, peer, other).await
    }

    /// Moves a link into another namespace, under a new name.
    pub(super) async fn give(&self, name: &str, new_name: &str, other: Namespace) -> Result<()> {
        let namespace = other.open()?;
        // By number, as the name in the message is the new one.
        let link = LinkUnspec::new_with_index(self.index(name).await?)
            .name(new_name.to_owned())
            .setns_by_fd(namespace.as_raw_fd());
        self.known
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(name);
        self.handle
            .link()
            .set(link.build())
            .execute()
            .await
            .with_context(|| format!("moving the link {name}"))
    }

    /// Adds an address of its own, without a subnet.
    pub(super) async fn add_address(&self, name: &str, address: Ipv4Addr) -> Result<()> {
        let index = self.index(name).await?;
        self.handle
            .address()
            .add(index, IpAddr::V4(address), 32)
            .replace()
            .execute()
            .await
            .with_context(|| format!("adding {address} to {name}"))
    }

    /// Takes back [`Self::add_address`].
    pub(super) async fn remove_address(&self, name: &str, address: Ipv4Addr) -> Result<()> {
        let index = self.index(name).await?;
        let mut found = self
            .handle
            .address()
            .get()
            .set_link_index_filter(index)
            .set_address_filter(IpAddr::V4(address))
            .execute();
        while let Some(message) = found.try_next().await? {
            self.handle
                .address()
                .del(message)
                .execute()
                .await
                .with_context(|| format!("removing {address} from {name}"))?;
        }
        Ok(())
    }

    /// Takes back [`Self::route_to`].
    pub(super) async fn unroute(&self, address: Ipv4Addr, name: &str) -> Result<()> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(address, 32)
            .scope(RouteScope::Link)
            .output_interface(self.index(name).await?)
            .build();
        self.handle
            .route()
            .del(route)
            .execute()
            .await
            .with_context(|| format!("removing the route to {address}"))
    }

    /// Takes back [`Self::add_neighbour`].
    pub(super) async fn forget_neighbour(&self, name: &str, address: Ipv4Addr) -> Result<()> {
        let mut neighbour = NeighbourMessage::default();
        neighbour.header.family = AddressFamily::Inet;
        neighbour.header.ifindex = self.index(name).await?;
        let destination = NeighbourAddress::Inet(address);
        neighbour.attributes = vec![NeighbourAttribute::Destination(destination)];
        self.handle
            .neighbours()
            .del(neighbour)
            .execute()
            .await
            .with_context(|| format!("removing the neighbour {address} from {name}"))
    }

    /// Says once and for all which hardware address a neighbour has.
    pub(super) async fn add_neighbour(
        &self,
        name: &str,
        address: Ipv4Addr,
        mac: [u8; 6],
    ) -> Result<()> {
        let index = self.index(name).await?;
        self.handle
            .neighbours()
            .add(index, IpAddr::V4(address))
            .link_layer_address(&mac)
            .state(NeighbourState::Permanent)
            .replace()
            .execute()
            .await
            .with_context(|| format!("adding the neighbour {address} to {name}"))
    }

    /// A route to one address on a link.
    pub(super) async fn route_to(
        &self,
        address: Ipv4Addr,
        name: &str,
        source: Option<Ipv4Addr>,
    ) -> Result<()> {
        let mut route = RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(address, 32)
            .scope(RouteScope::Link)
            .output_interface(self.index(name).await?);
        if let Some(source) = source {
            route = route.pref_source(source);
        }
        self.add_route(route.build(), &address.to_string()).await
    }

    /// The default route.
    pub(super) async fn default_route(
        &self,
        gateway: Ipv4Addr,
        name: &str,
        source: Option<Ipv4Addr>,
    ) -> Result<()> {
        let mut route = RouteMessageBuilder::<Ipv4Addr>::new()
            .gateway(gateway)
            .output_interface(self.index(name).await?);
        if let Some(source) = source {
            route = route.pref_source(source);
        }
        self.add_route(route.build(), "everything").await
    }

    /// Says that a network cannot be reached.
    pub(super) async fn unreachable(&self, network: Ipv4Addr, prefix: u8) -> Result<()> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(network, prefix)
            .kind(RouteType::Unreachable)
            .build();
        self.add_route(route, &format!("{network}/{prefix}")).await
    }

    async fn add_route(&self, route: RouteMessage, target: &str) -> Result<()> {
        self.handle
            .route()
            .add(route)
            .replace()
            .execute()
            .await
            .with_context(|| format!("adding the route to {target}"))
    }
}

/// Reads `0a:01:0a:00:01:17`.
pub(super) fn parse_mac(text: &str) -> Result<[u8; 6]> {
    let mut mac = [0; 6];
    let mut digits = text.split(':');
    for byte in &mut mac {
        *byte = digits
            .next()
            .filter(|pair| pair.len() == 2)
            .and_then(|pair| u8::from_str_radix(pair, 16).ok())
            .with_context(|| format!("{text:?} is no hardware address"))?;
    }
    anyhow::ensure!(digits.next().is_none(), "{text:?} is no hardware address");
    Ok(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_addresses() {
        assert_eq!(
            parse_mac("0a:01:0a:00:01:17").unwrap(),
            [10, 1, 10, 0, 1, 23]
        );
        for bad in [
            "",
            "0a:01:0a:00:01",
            "0a:01:0a:00:01:17:00",
            "0a:01:0a:00:01:g7",
            "a:1:a:0:1:7",
        ] {
            assert!(parse_mac(bad).is_err(), "{bad}");
        }
    }
}
