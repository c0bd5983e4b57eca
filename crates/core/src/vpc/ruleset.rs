//! The text of a ruleset, for `nft -f`.

use super::{DEVICE_PREFIX, MAX_GROUPS, Policy, UnderlayLink, device, ranges};
use monopod_api::network::{Protocol, SecurityGroupRule};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::Ipv4Addr;

/// Which side of a connection a group's rules judge.
#[derive(Clone, Copy)]
enum Direction {
    In,
    Out,
}

impl Direction {
    fn suffix(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Out => "out",
        }
    }

    /// The peer's address: the client of what comes in, the real server of what goes out.
    fn peer(self) -> &'static str {
        match self {
            Self::In => "ct original ip saddr",
            Self::Out => "ct reply ip saddr",
        }
    }
}

/// The whole ruleset; loading it replaces the one before in one transaction.
///
/// `generation` must differ from that of every ruleset which marked a flow that lives.
pub fn compile(policy: &Policy, generation: u32) -> String {
    let numbers: BTreeMap<&str, usize> = policy
        .groups
        .keys()
        .enumerate()
        .map(|(n, name)| (name.as_str(), n))
        .collect();
    let mut text =
        String::from("table inet monopod\ndelete table inet monopod\ntable inet monopod {\n");
    sets(&mut text, policy, &numbers);
    for (name, group) in &policy.groups {
        let number = numbers[name.as_str()];
        chain(
            &mut text,
            number,
            Direction::In,
            Some(&group.ingress),
            &numbers,
        );
        chain(
            &mut text,
            number,
            Direction::Out,
            group.egress.as_deref(),
            &numbers,
        );
    }
    hooks(&mut text, policy, generation);
    text.push_str("}\n");
    text
}

fn sets(text: &mut String, policy: &Policy, numbers: &BTreeMap<&str, usize>) {
    let spoof: Vec<String> = policy
        .local
        .iter()
        .map(|i| format!("\"{}\" . {} . {}", device(i.address), i.mac, i.address))
        .collect();
    set(text, "spoof", "ifname . ether_addr . ipv4_addr", &spoof);
    let local: Vec<String> = policy.local.iter().map(|i| i.address.to_string()).collect();
    set(text, "local", "ipv4_addr", &local);
    let selves: Vec<String> = local.iter().map(|a| format!("{a} . {a}")).collect();
    set(text, "self", "ipv4_addr . ipv4_addr", &selves);
    let none = BTreeSet::new();
    for (name, number) in numbers {
        let members = policy.members.get(*name).unwrap_or(&none);
        set(
            text,
            &format!("members{number}"),
            "ipv4_addr",
            &members.iter().map(Ipv4Addr::to_string).collect::<Vec<_>>(),
        );
    }
    for direction in [Direction::In, Direction::Out] {
        let suffix = direction.suffix();
        for slot in 0..MAX_GROUPS {
            let jumps: Vec<String> = policy
                .local
                .iter()
                .filter_map(|i| Some((i.address, numbers.get(i.groups.get(slot)?.as_str())?)))
                .map(|(address, number)| format!("{address} : jump g{number}_{suffix}"))
                .collect();
            block(
                text,
                "map",
                &format!("{suffix}{slot}"),
                "ipv4_addr : verdict",
                &jumps,
            );
        }
    }
}

fn set(text: &mut String, name: &str, kind: &str, elements: &[String]) {
    block(text, "set", name, kind, elements);
}

fn block(text: &mut String, keyword: &str, name: &str, kind: &str, elements: &[String]) {
    line(text, 1, &format!("{keyword} {name} {{"));
    line(text, 2, &format!("type {kind}"));
    if !elements.is_empty() {
        line(
            text,
            2,
            &format!("elements = {{ {} }}", elements.join(", ")),
        );
    }
    line(text, 1, "}");
}

fn chain(
    text: &mut String,
    number: usize,
    direction: Direction,
    rules: Option<&[SecurityGroupRule]>,
    numbers: &BTreeMap<&str, usize>,
) {
    line(
        text,
        1,
        &format!("chain g{number}_{} {{", direction.suffix()),
    );
    match rules {
        // A group without an egress list lets everything out.
        None => line(text, 2, "accept"),
        Some(rules) => {
            for statement in rules
                .iter()
                .flat_map(|rule| statements(rule, direction, numbers))
            {
                line(text, 2, &statement);
            }
        }
    }
    line(text, 1, "}");
}

fn statements(
    rule: &SecurityGroupRule,
    direction: Direction,
    numbers: &BTreeMap<&str, usize>,
) -> Vec<String> {
    let what = match rule.protocol {
        Protocol::All => String::new(),
        Protocol::Icmp => "meta l4proto icmp ".to_owned(),
        Protocol::Tcp => format!("meta l4proto tcp {}", ports(rule)),
        Protocol::Udp => format!("meta l4proto udp {}", ports(rule)),
    };
    let peer = direction.peer();
    let ranges = ranges(&rule.cidrs);
    let mut statements = Vec::new();
    if ranges.iter().any(|range| range.prefix_len() == 0) {
        statements.push(format!("meta nfproto ipv4 {what}accept"));
    } else if !ranges.is_empty() {
        let list: Vec<String> = ranges.iter().map(ToString::to_string).collect();
        statements.push(format!("{peer} {{ {} }} {what}accept", list.join(", ")));
    }
    for number in rule
        .groups
        .iter()
        .filter_map(|group| numbers.get(group.as_str()))
    {
        statements.push(format!("{peer} @members{number} {what}accept"));
    }
    statements
}

/// The server's port. `ct reply proto-src` is the real one, behind a service's.
fn ports(rule: &SecurityGroupRule) -> String {
    match (rule.from_port, rule.to_port) {
        (Some(from), Some(to)) if from == to => format!("ct reply proto-src {from} "),
        (Some(from), Some(to)) => format!("ct reply proto-src {from}-{to} "),
        // The CRD refuses one without the other; the narrower reading is the safe one.
        (Some(one), None) | (None, Some(one)) => format!("ct reply proto-src {one} "),
        (None, None) => String::new(),
    }
}

fn hooks(text: &mut String, policy: &Policy, generation: u32) {
    let mark = format!("{generation:#010x}");
    let pods = format!("iifname \"{DEVICE_PREFIX}*\"");
    let section = |text: &mut String, name: &str, hook: &str, rules: &[String]| {
        line(text, 1, &format!("chain {name} {{"));
        line(text, 2, &format!("type filter hook {hook}; policy accept"));
        for rule in rules {
            line(text, 2, rule);
        }
        line(text, 1, "}");
    };
    let mut antispoof = vec![
        format!("{pods} meta nfproto ipv6 counter drop"),
        format!("{pods} iifname . ether saddr . ip saddr != @spoof counter drop"),
        format!("{pods} ip daddr 169.254.0.0/16 counter drop"),
    ];
    if let Some(UnderlayLink { device, .. }) = &policy.underlay {
        antispoof.push(format!("iifname \"{device}\" ip saddr @local counter drop"));
    }
    section(text, "antispoof", "prerouting priority raw", &antispoof);
    let judge = |direction: Direction, address: &str| -> Vec<String> {
        let suffix = direction.suffix();
        (0..MAX_GROUPS)
            .map(|slot| format!("{address} vmap @{suffix}{slot}"))
            .chain([format!(
                "{address} @local counter log group 5 prefix \"REJECT-{suffix}\" drop"
            )])
            .collect()
    };
    let known = format!("ct state established,related ct mark {mark} accept");
    let out = ["ct state invalid counter drop".to_owned(), known.clone()];
    section(
        text,
        "leaving",
        "forward priority filter",
        &[&out[..], &judge(Direction::Out, "ct original ip saddr")].concat(),
    );
    section(
        text,
        "entering",
        "forward priority filter + 1",
        &[&[known][..], &judge(Direction::In, "ct reply ip saddr")].concat(),
    );
    if let Some(api) = &policy.api {
        // Over the link, pods open connections to the API server and to nothing else of the machine.
        let link = format!("oifname \"{}\"", api.device);
        section(
            text,
            "link",
            "forward priority filter + 2",
            &[
                format!("{link} ct direction reply accept"),
                format!(
                    "{link} ip daddr {} tcp dport {} accept",
                    api.address, api.port
                ),
                format!("{link} ip daddr {} ip protocol icmp accept", api.address),
                format!("{link} counter drop"),
            ],
        );
    }
    translations(text, policy);
    section(
        text,
        "judged",
        "forward priority filter + 3",
        &[format!("ct mark != {mark} ct mark set {mark}")],
    );
    let mut router = vec![
        format!("{pods} ct state established,related accept"),
        format!("{pods} ip protocol icmp accept"),
        format!("{pods} counter drop"),
    ];
    if let Some(UnderlayLink { device, api, .. }) = &policy.underlay {
        // The API server asks for the logs of pods that ended here; nobody else has business here.
        let from = format!("iifname \"{device}\"");
        router.extend([
            format!("{from} ct state established,related accept"),
            format!("{from} ip saddr {api} accept"),
            format!("{from} counter drop"),
        ]);
    }
    section(text, "router", "input priority filter", &router);
}

/// Source addresses that must not be seen by whom a packet reaches.
fn translations(text: &mut String, policy: &Policy) {
    let (api, underlay) = (policy.api.as_ref(), policy.underlay.as_ref());
    let Some(own) = api.map(|a| a.inner).or_else(|| underlay.map(|u| u.own)) else {
        return;
    };
    line(text, 1, "chain hairpin {");
    line(
        text,
        2,
        "type nat hook postrouting priority srcnat; policy accept",
    );
    // A pod that reaches itself by a service must not see its own address as the sender. kube-proxy
    // does this only for endpoints on a node of its own name, and a host has none.
    line(
        text,
        2,
        &format!("ct status dnat ip saddr . ip daddr @self snat ip to {own}"),
    );
    if let (Some(api), Some(underlay)) = (api, underlay)
        && !underlay.machines.is_empty()
    {
        // The kube-proxy of another host; the machine would answer it past the VPC.
        let machines: Vec<String> = underlay.machines.iter().map(ToString::to_string).collect();
        let (device, machines) = (&api.device, machines.join(", "));
        line(
            text,
            2,
            &format!("oifname \"{device}\" ip saddr {{ {machines} }} snat ip to {own}"),
        );
    }
    line(text, 1, "}");
}

fn line(text: &mut String, depth: usize, content: &str) {
    // Writing to a String does not fail.
    let _infallible = writeln!(text, "{:width$}{content}", "", width = depth * 4);
}
