//! Which address a new interface gets.

use ipnet::Ipv4Net;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

/// Addresses at the start of a subnet that EC2 keeps: network, router, DNS, future use.
const RESERVED_FIRST: u32 = 4;

/// The router's address in a subnet: its second address, as in EC2.
pub fn gateway(subnet: Ipv4Net) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(subnet.network()).saturating_add(1))
}

/// How many addresses a subnet has for interfaces.
pub fn capacity(subnet: Ipv4Net) -> u32 {
    let all = 1u64 << (32 - u32::from(subnet.prefix_len()));
    u32::try_from(all.saturating_sub(u64::from(RESERVED_FIRST) + 1)).unwrap_or(u32::MAX)
}

/// The first free address at or after a starting point that `seed` chooses, or none. One of `recent`
/// only if there is no other.
///
/// `taken` holds every address of an existing interface, released and cooling ones as well. Two
/// choosers may name one address; creating the interface of that name decides.
pub fn choose(
    subnet: Ipv4Net,
    taken: &BTreeSet<Ipv4Addr>,
    recent: &BTreeSet<Ipv4Addr>,
    seed: u64,
) -> Option<Ipv4Addr> {
    let count = capacity(subnet);
    if count == 0 {
        return None;
    }
    let first = u32::from(subnet.network()) + RESERVED_FIRST;
    let start = u32::try_from(seed % u64::from(count)).ok()?;
    let mut free = (0..count)
        .map(|n| Ipv4Addr::from(first + (start + n) % count))
        .filter(|address| !taken.contains(address));
    let mut others = free.clone();
    others
        .find(|address| !recent.contains(address))
        .or_else(|| free.next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// An address is inside, not reserved and free, not recent if it need not be; and none is given only if all are taken.
        #[test]
        fn an_address_is_free_or_the_subnet_is_full(prefix in 24u8..=30, taken in prop::collection::btree_set(0u32..256, 0..256), recent in prop::collection::btree_set(0u32..256, 0..256), seed: u64) {
            let subnet = Ipv4Net::new(Ipv4Addr::new(10, 0, 7, 0), prefix).expect("valid");
            let base = u32::from(subnet.network());
            let taken: BTreeSet<_> = taken.into_iter().map(|n| Ipv4Addr::from(base + n)).collect();
            let usable: Vec<_> = subnet.hosts().filter(|a| u32::from(*a) >= base + 4).collect();
            prop_assert_eq!(usable.len(), capacity(subnet) as usize);
            let recent = recent.into_iter().map(|n| Ipv4Addr::from(base + n)).collect();
            match choose(subnet, &taken, &recent, seed) {
                Some(address) => {
                    prop_assert!(usable.contains(&address) && !taken.contains(&address));
                    let others = usable.iter().any(|a| !taken.contains(a) && !recent.contains(a));
                    prop_assert!(!(others && recent.contains(&address)));
                }
                None => prop_assert!(usable.iter().all(|a| taken.contains(a))),
            }
        }
    }

    #[test]
    fn the_router_is_the_second_address() {
        assert_eq!(
            gateway("10.0.1.0/24".parse().expect("valid")),
            Ipv4Addr::new(10, 0, 1, 1)
        );
    }
}
