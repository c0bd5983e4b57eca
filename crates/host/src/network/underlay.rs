//! The way to other hosts: one VXLAN device whose neighbours are written down, never learnt.
//!
//! ```text
//!  10.0.1.45 (a pod there) via 192.0.2.2 dev vx0 ── 0e:01:c0:00:02:02 ── UDP to 192.0.2.2
//! ```
//!
//! Its packets leave by the machine's own network, in which it was made. Nothing of it is encrypted:
//! the network between the machines must be one that nobody else is in.

use super::command::{batch, output, run};
use super::{MTU, NetworkError, Vpc, has_link};
use monopod_core::vpc::Remote;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::Ipv4Addr;

/// The device in the VPC's namespace.
pub const UNDERLAY_DEVICE: &str = "vx0";
/// UDP port of VXLAN (RFC 7348).
const PORT: u16 = 4789;
/// What marks routes that were made here (`rtm_protocol`), so that no others are touched.
const PROTOCOL: &str = "201";

/// This machine among those of the VPC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Underlay {
    /// Address of this machine.
    pub address: Ipv4Addr,
    /// VXLAN network identifier, 24 bits; the same on all hosts of a VPC.
    pub network: u32,
}

/// A machine's hardware address on the device.
fn mac(machine: Ipv4Addr) -> String {
    let [a, b, c, d] = machine.octets();
    monopod_api::names::hardware_address([0x0e, 0x01, a, b, c, d])
}

/// Makes the device if it is missing, and the way to the API server if that is on another machine.
pub(super) async fn ensure(vpc: &Vpc, underlay: &Underlay) -> Result<(), NetworkError> {
    let (namespace, Underlay { address, network }) = (vpc.namespace(), underlay);
    if !has_link(&["-n", &namespace], UNDERLAY_DEVICE).await? {
        let made = format!("{}-vx", vpc.name);
        batch(
            None,
            &format!(
                "link add {made} type vxlan id {network} local {address} dstport {PORT} nolearning\n\
                 link set {made} netns {namespace} name {UNDERLAY_DEVICE}\n"
            ),
        )
        .await?;
    }
    let known = Remote {
        machines: vpc.api.through().into_iter().collect(),
        pods: BTreeMap::new(),
    };
    let mut lines = format!(
        "link set {UNDERLAY_DEVICE} address {} mtu {MTU} up\naddress replace {address}/32 dev {UNDERLAY_DEVICE}\n",
        mac(*address)
    );
    lines.push_str(&routes(&Remote::default(), &known));
    if let Some(machine) = vpc.api.through() {
        for destination in [vpc.api.address().to_string(), vpc.services.to_string()] {
            writeln_infallible(
                &mut lines,
                format_args!(
                    "route replace {destination} via {machine} dev {UNDERLAY_DEVICE} onlink"
                ),
            );
        }
    }
    batch(Some(&namespace), &lines).await?;
    forward(&namespace, &forwarding(&Remote::default(), &known)).await
}

/// Runs `bridge -batch` with these lines, if there are any.
async fn forward(namespace: &str, lines: &str) -> Result<(), NetworkError> {
    if lines.is_empty() {
        return Ok(());
    }
    run("bridge", &["-n", namespace, "-batch", "-"], lines).await
}

/// Routes, neighbours and forwarding entries, as they were set last.
#[derive(Debug)]
pub struct Peers {
    vpc: Vpc,
    set: Option<Remote>,
}

impl Peers {
    /// Those of a VPC; what a former process set is found.
    pub fn new(vpc: Vpc) -> Self {
        Self { vpc, set: None }
    }

    /// Sets what is missing, and then removes what is too much: a pod that moves is never without a way.
    pub async fn set(&mut self, remote: &Remote) -> Result<(), NetworkError> {
        if self.vpc.underlay.is_none() || self.set.as_ref() == Some(remote) {
            return Ok(());
        }
        let namespace = self.vpc.namespace();
        let before = match self.set.take() {
            Some(before) => before,
            None => Remote {
                machines: BTreeSet::new(),
                pods: existing(&namespace).await?,
            },
        };
        forward(&namespace, &forwarding(&before, remote)).await?;
        batch(Some(&namespace), &routes(&before, remote)).await?;
        self.set = Some(remote.clone());
        Ok(())
    }
}

fn writeln_infallible(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String does not fail.
    let _infallible = writeln!(text, "{line}");
}

/// Lines for `bridge -batch`.
fn forwarding(before: &Remote, after: &Remote) -> String {
    let mut lines = String::new();
    for machine in after.machines.difference(&before.machines) {
        writeln_infallible(
            &mut lines,
            format_args!(
                "fdb replace {} dev {UNDERLAY_DEVICE} dst {machine}",
                mac(*machine)
            ),
        );
    }
    for machine in before.machines.difference(&after.machines) {
        writeln_infallible(
            &mut lines,
            format_args!(
                "fdb del {} dev {UNDERLAY_DEVICE} dst {machine}",
                mac(*machine)
            ),
        );
    }
    lines
}

/// Lines for `ip -batch`.
fn routes(before: &Remote, after: &Remote) -> String {
    let mut lines = String::new();
    for machine in after.machines.difference(&before.machines) {
        writeln_infallible(
            &mut lines,
            format_args!(
                "neighbour replace {machine} lladdr {} dev {UNDERLAY_DEVICE} nud permanent",
                mac(*machine)
            ),
        );
        // Its own address: kube-proxy there asks the API server from it.
        writeln_infallible(
            &mut lines,
            format_args!("route replace {machine} dev {UNDERLAY_DEVICE}"),
        );
    }
    for (pod, machine) in &after.pods {
        if before.pods.get(pod) != Some(machine) {
            writeln_infallible(
                &mut lines,
                format_args!(
                    "route replace {pod} via {machine} dev {UNDERLAY_DEVICE} onlink proto {PROTOCOL}"
                ),
            );
        }
    }
    for pod in before
        .pods
        .keys()
        .filter(|pod| !after.pods.contains_key(pod))
    {
        writeln_infallible(
            &mut lines,
            format_args!("route del {pod} dev {UNDERLAY_DEVICE} proto {PROTOCOL}"),
        );
    }
    for machine in before.machines.difference(&after.machines) {
        writeln_infallible(
            &mut lines,
            format_args!("route del {machine} dev {UNDERLAY_DEVICE}"),
        );
        writeln_infallible(
            &mut lines,
            format_args!("neighbour del {machine} dev {UNDERLAY_DEVICE}"),
        );
    }
    lines
}

/// The routes that a former process made.
async fn existing(namespace: &str) -> Result<BTreeMap<Ipv4Addr, Ipv4Addr>, NetworkError> {
    let arguments = [
        "-n",
        namespace,
        "route",
        "show",
        "dev",
        UNDERLAY_DEVICE,
        "proto",
        PROTOCOL,
    ];
    let listed = output("ip", &arguments, "").await?;
    Ok(listed
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let pod = words.next()?.parse().ok()?;
            let machine = words
                .skip_while(|word| *word != "via")
                .nth(1)?
                .parse()
                .ok()?;
            Some((pod, machine))
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(machines: &[u8], pods: &[(u8, u8)]) -> Remote {
        let machine = |last: u8| Ipv4Addr::new(192, 0, 2, last);
        Remote {
            machines: machines.iter().map(|last| machine(*last)).collect(),
            pods: pods
                .iter()
                .map(|(pod, last)| (Ipv4Addr::new(10, 0, 0, *pod), machine(*last)))
                .collect(),
        }
    }

    #[test]
    fn only_what_changed_is_set_and_ways_are_made_before_they_are_removed() {
        let (before, after) = (
            remote(&[2, 3], &[(5, 2), (6, 3)]),
            remote(&[2, 4], &[(5, 2), (6, 4)]),
        );
        assert_eq!(
            routes(&before, &after),
            "neighbour replace 192.0.2.4 lladdr 0e:01:c0:00:02:04 dev vx0 nud permanent\n\
             route replace 192.0.2.4 dev vx0\n\
             route replace 10.0.0.6 via 192.0.2.4 dev vx0 onlink proto 201\n\
             route del 192.0.2.3 dev vx0\n\
             neighbour del 192.0.2.3 dev vx0\n"
        );
        assert_eq!(
            forwarding(&before, &after),
            "fdb replace 0e:01:c0:00:02:04 dev vx0 dst 192.0.2.4\n\
             fdb del 0e:01:c0:00:02:03 dev vx0 dst 192.0.2.3\n"
        );
        assert_eq!(routes(&after, &after), "");
        assert_eq!(
            routes(&after, &remote(&[2, 4], &[(5, 2)])),
            "route del 10.0.0.6 dev vx0 proto 201\n"
        );
    }
}
