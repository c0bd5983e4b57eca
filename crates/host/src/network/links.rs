//! Links, addresses, routes and neighbours in the VPC's namespace by netlink: what is on the way of
//! a pod's start must not start a program.

use super::namespace::within;
use super::{NetworkError, Vpc};
use futures::TryStreamExt;
use rtnetlink::packet_route::neighbour::NeighbourState;
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteScope};
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, RouteMessageBuilder};
use std::net::{IpAddr, Ipv4Addr};

/// Netlink in the VPC's namespace.
pub(super) struct Links {
    handle: Handle,
}

impl Links {
    /// Opens a socket there. It serves until it is dropped.
    pub(super) async fn open(vpc: &Vpc) -> Result<Self, NetworkError> {
        let runtime = tokio::runtime::Handle::current();
        let handle = within(vpc.namespace_path(), move || {
            // The socket stays in the namespace of the thread that made it.
            let _in_runtime = runtime.enter();
            let (connection, handle, _) =
                rtnetlink::new_connection().map_err(|source| NetworkError::System {
                    what: "open a netlink socket",
                    source,
                })?;
            runtime.spawn(connection);
            Ok(handle)
        });
        Ok(Self {
            handle: handle.await?,
        })
    }

    /// The number of a link; none if there is no such link.
    pub(super) async fn index(&self, name: &str) -> Result<Option<u32>, NetworkError> {
        let mut found = self
            .handle
            .link()
            .get()
            .match_name(name.to_owned())
            .execute();
        match found.try_next().await {
            Ok(link) => Ok(link.map(|link| link.header.index)),
            Err(error) if is(&error, rustix::io::Errno::NODEV) => Ok(None),
            Err(error) => Err(failed("look for a link")(error)),
        }
    }

    /// Names a link that is down, and starts it.
    pub(super) async fn set_up(
        &self,
        index: u32,
        name: &str,
        mac: [u8; 6],
        mtu: u32,
    ) -> Result<(), NetworkError> {
        let link = LinkMessageBuilder::<LinkUnspec>::default()
            .index(index)
            .name(name.to_owned())
            .address(mac.to_vec())
            .mtu(mtu)
            .up();
        let set = self.handle.link().set(link.build()).execute();
        set.await.map_err(failed("name an interface"))
    }

    /// Removes a link. It is fine if there is none.
    pub(super) async fn delete(&self, name: &str) -> Result<(), NetworkError> {
        let Some(index) = self.index(name).await? else {
            return Ok(());
        };
        match self.handle.link().del(index).execute().await {
            Err(error) if !is(&error, rustix::io::Errno::NODEV) => {
                Err(failed("remove an interface")(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Adds an address without a subnet.
    pub(super) async fn address(&self, index: u32, address: Ipv4Addr) -> Result<(), NetworkError> {
        let address = self.handle.address().add(index, IpAddr::V4(address), 32);
        let added = address.replace().execute();
        added.await.map_err(failed("add a router's address"))
    }

    /// A route to one address, which answers from `source`.
    pub(super) async fn route(
        &self,
        index: u32,
        address: Ipv4Addr,
        source: Ipv4Addr,
    ) -> Result<(), NetworkError> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(address, 32)
            .scope(RouteScope::Link)
            .output_interface(index)
            .pref_source(source);
        let added = self.handle.route().add(route.build()).replace().execute();
        added.await.map_err(failed("add an interface's route"))
    }

    /// The source of a link's route; none if it has none.
    pub(super) async fn source(&self, index: u32) -> Result<Option<Ipv4Addr>, NetworkError> {
        let all = RouteMessageBuilder::<Ipv4Addr>::new().build();
        let routes = self.handle.route().get(all).execute();
        let routes: Vec<RouteMessage> = routes
            .try_collect()
            .await
            .map_err(failed("list the interfaces' routes"))?;
        let ours = routes
            .iter()
            .filter(|route| route.attributes.contains(&RouteAttribute::Oif(index)));
        Ok(ours
            .flat_map(|route| &route.attributes)
            .find_map(|attribute| match attribute {
                RouteAttribute::PrefSource(RouteAddress::Inet(source)) => Some(*source),
                _ => None,
            }))
    }

    /// Says once and for all which hardware address a neighbour has.
    pub(super) async fn neighbour(
        &self,
        index: u32,
        address: Ipv4Addr,
        mac: [u8; 6],
    ) -> Result<(), NetworkError> {
        let neighbour = self
            .handle
            .neighbours()
            .add(index, IpAddr::V4(address))
            .link_layer_address(&mac)
            .state(NeighbourState::Permanent);
        let added = neighbour.replace().execute();
        added.await.map_err(failed("add an interface's neighbour"))
    }
}

fn is(error: &rtnetlink::Error, code: rustix::io::Errno) -> bool {
    matches!(error, rtnetlink::Error::NetlinkError(message) if message.raw_code() == -code.raw_os_error())
}

fn failed(what: &'static str) -> impl FnOnce(rtnetlink::Error) -> NetworkError {
    move |error| NetworkError::System {
        what,
        source: match error {
            rtnetlink::Error::NetlinkError(message) => message.to_io(),
            other => std::io::Error::other(other),
        },
    }
}
