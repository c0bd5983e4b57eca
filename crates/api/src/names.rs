//! Names derived from what they belong to, so that the API server's uniqueness is the lock.

use std::net::Ipv4Addr;

/// What the names of all our nodes begin with.
const NODE_PREFIX: &str = "fargate-ip-";

/// Name of the one environment that a pod uid can have.
pub fn environment(pod_uid: &str) -> String {
    format!("env-{pod_uid}")
}

/// Whether something may be the name of an environment: made for a uid, and fit for a selector.
pub fn is_environment(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let uid = name.strip_prefix("env-").unwrap_or_default();
    !uid.is_empty() && name.len() <= 63 && uid.chars().all(is_part) && !uid.ends_with('-')
}

/// Name of the one network interface that an address can have.
pub fn network_interface(address: Ipv4Addr) -> String {
    format!("eni-{}", dashed(address))
}

/// EKS Fargate's node name: `fargate-ip-10-0-1-23.local-1.compute.internal`.
pub fn node(address: Ipv4Addr, region: &str) -> String {
    format!("fargate-{}", hostname(address, region))
}

/// The node's host name, which lacks the prefix: `ip-10-0-1-23.local-1.compute.internal`.
pub fn hostname(address: Ipv4Addr, region: &str) -> String {
    format!("ip-{}.{region}.compute.internal", dashed(address))
}

/// The address that a node's name was made from, if it is one of ours.
pub fn node_address(name: &str) -> Option<Ipv4Addr> {
    let (dashed, _) = name.strip_prefix(NODE_PREFIX)?.split_once('.')?;
    dashed.replace('-', ".").parse().ok()
}

/// Whether a node name is one of ours.
pub fn is_fargate_node(name: &str) -> bool {
    name.starts_with(NODE_PREFIX)
}

/// The namespace of what is addressed to one host alone.
///
/// A host's name may be longer than a namespace's and hold dots; then a sum of it tells it apart.
pub fn host_namespace(host: &str) -> String {
    let label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if host.len() <= 48 && host.chars().all(label) && !host.ends_with('-') {
        return format!("monopod-host-{host}");
    }
    let kept: String = host
        .chars()
        .map(|c| if label(c) { c } else { '-' })
        .take(32)
        .collect();
    // FNV-1a: stable over releases, as the name is stored.
    let sum = host.bytes().fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("monopod-host-{kept}.{sum:016x}").replace('.', "-")
}

/// An EC2-style id such as `eni-0a1b2c3d4e5f60718`, made from an object's uid.
pub fn ec2_id(prefix: &str, uid: &str) -> String {
    let digits: String = uid
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(17)
        .collect();
    format!("{prefix}-{digits}")
}

/// A locally administered MAC address that follows from the IP address.
///
/// Interfaces are point-to-point links, so it need be unique only among the VPC's addresses.
pub fn mac(address: Ipv4Addr) -> String {
    hardware_address(mac_bytes(address))
}

/// The six bytes of [`mac`].
pub fn mac_bytes(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x0a, 0x01, a, b, c, d]
}

/// A hardware address as people write it: `0a:01:0a:00:01:17`.
pub fn hardware_address(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

fn dashed(address: Ipv4Addr) -> String {
    address.to_string().replace('.', "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_a_namespace_of_its_own() {
        assert_eq!(host_namespace("host-1"), "monopod-host-host-1");
        let long = "a".repeat(253);
        let names = [
            "host-1",
            "host.1",
            "host-1-",
            "Host-1",
            &long,
            &long[1..],
            "rack.1.example.com",
        ];
        let namespaces: std::collections::BTreeSet<_> = names.map(host_namespace).into();
        assert_eq!(namespaces.len(), names.len());
        for namespace in namespaces {
            assert!(namespace.len() <= 63, "{namespace}");
            assert!(
                namespace
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'),
                "{namespace}"
            );
            assert!(!namespace.ends_with('-'), "{namespace}");
        }
    }

    #[test]
    fn names_are_those_of_eks_fargate() {
        let address = Ipv4Addr::new(10, 0, 1, 23);
        assert_eq!(
            node(address, "local-1"),
            "fargate-ip-10-0-1-23.local-1.compute.internal"
        );
        assert_eq!(
            hostname(address, "local-1"),
            "ip-10-0-1-23.local-1.compute.internal"
        );
        assert_eq!(node_address(&node(address, "local-1")), Some(address));
        for other in [
            "",
            "fargate-ip-10-0-1.r",
            "fargate-ip-10-0-1-23",
            "ip-10-0-1-23.r",
            "fargate-ip-10-0-1-256.r",
        ] {
            assert_eq!(node_address(other), None, "{other}");
        }
        assert_eq!(network_interface(address), "eni-10-0-1-23");
        assert_eq!(mac(address), "0a:01:0a:00:01:17");
        assert_eq!(
            ec2_id("eni", "a1b2c3d4-e5f6-0718-293a-4b5c6d7e8f90"),
            "eni-a1b2c3d4e5f607182"
        );
    }

    #[test]
    fn what_is_no_name_of_an_environment_selects_nothing() {
        assert!(is_environment(&environment(
            "0b9e4a5c-3b2e-4f7a-9d55-000000000001"
        )));
        for name in [
            "", "env-", "=env-a", "env-a,b", "env-a b", "env-a-", "env-A", "eni-a",
        ] {
            assert!(!is_environment(name), "{name}");
        }
        assert!(!is_environment(&environment(&"a".repeat(60))));
    }
}
