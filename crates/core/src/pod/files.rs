//! The files that a kubelet writes for a pod: `/etc/hostname`, `/etc/hosts`, `/etc/resolv.conf`.

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use std::fmt::Write as _;
use std::net::Ipv4Addr;

/// A host name's limit on Linux.
const MAX_HOSTNAME: usize = 63;
/// glibc's limit, which the kubelet enforces.
const MAX_NAMESERVERS: usize = 3;
/// The kubelet's limit.
const MAX_SEARCHES: usize = 32;

/// The cluster's DNS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dns {
    /// Address of the DNS service.
    pub server: Ipv4Addr,
    /// Domain, such as `cluster.local`.
    pub domain: String,
}

/// Host name of the pod's containers, and its full name if it has a subdomain.
pub fn hostname(pod: &Pod, domain: &str) -> (String, Option<String>) {
    let spec = pod.spec.as_ref();
    let chosen = |value: Option<&String>| value.filter(|text| !text.is_empty()).cloned();
    if spec.is_some_and(on_hosts_network)
        && let Some(node) = chosen(spec.and_then(|spec| spec.node_name.as_ref()))
    {
        return (node, None);
    }
    if let Some(name) = chosen(spec.and_then(|spec| spec.hostname_override.as_ref())) {
        return (name, None);
    }
    let mut name = chosen(spec.and_then(|spec| spec.hostname.as_ref()))
        .unwrap_or_else(|| pod.metadata.name.clone().unwrap_or_default());
    if name.len() > MAX_HOSTNAME {
        // Pod names are ASCII; what the cut leaves at the end must not be a separator.
        name = name.chars().take(MAX_HOSTNAME).collect();
        name.truncate(name.trim_end_matches(['-', '.']).len());
    }
    let full = chosen(spec.and_then(|spec| spec.subdomain.as_ref())).map(|subdomain| {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        format!("{name}.{subdomain}.{namespace}.svc.{domain}")
    });
    let as_full = spec.and_then(|spec| spec.set_hostname_as_fqdn) == Some(true);
    match full {
        Some(full) if as_full => (full.clone(), Some(full)),
        full => (name, full),
    }
}

/// Whether a pod is named as its node is. Their address is the same for every pod.
fn on_hosts_network(spec: &PodSpec) -> bool {
    spec.host_network == Some(true)
}

/// Text of `/etc/hosts`.
pub fn hosts(pod: &Pod, address: Ipv4Addr, domain: &str) -> String {
    let (name, full) = hostname(pod, domain);
    let mut text = "# Kubernetes-managed hosts file.\n\
         127.0.0.1\tlocalhost\n\
         ::1\tlocalhost ip6-localhost ip6-loopback\n\
         fe00::0\tip6-localnet\n\
         fe00::0\tip6-mcastprefix\n\
         fe00::1\tip6-allnodes\n\
         fe00::2\tip6-allrouters\n"
        .to_owned();
    let line = match full {
        Some(full) if full != name => format!("{address}\t{full}\t{name}\n"),
        _ => format!("{address}\t{name}\n"),
    };
    text.push_str(&line);
    let aliases = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.host_aliases.as_ref());
    if let Some(aliases) = aliases.filter(|aliases| !aliases.is_empty()) {
        text.push_str("\n# Entries added by HostAliases.\n");
        for alias in aliases {
            let names = alias.hostnames.as_deref().unwrap_or_default().join("\t");
            // A String takes every write.
            let _infallible = writeln!(text, "{}\t{names}", alias.ip);
        }
    }
    text
}

/// Text of `/etc/resolv.conf`.
pub fn resolv_conf(pod: &Pod, dns: &Dns) -> String {
    let empty = PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&empty);
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let policy = match spec.dns_policy.as_deref() {
        // What the API says of pods on their host's network.
        None | Some("ClusterFirst") if on_hosts_network(spec) => Some("Default"),
        policy => policy,
    };
    let (mut servers, mut searches, mut options) = match policy {
        // The node itself resolves no names, so there is nothing that `Default` could inherit.
        Some("None" | "Default") => (Vec::new(), Vec::new(), Vec::new()),
        _ => (
            vec![dns.server.to_string()],
            vec![
                format!("{namespace}.svc.{}", dns.domain),
                format!("svc.{}", dns.domain),
                dns.domain.clone(),
            ],
            vec![("ndots".to_owned(), Some("5".to_owned()))],
        ),
    };
    if let Some(config) = &spec.dns_config {
        servers.extend(config.nameservers.iter().flatten().cloned());
        searches.extend(config.searches.iter().flatten().cloned());
        for option in config.options.iter().flatten() {
            let name = option.name.clone().unwrap_or_default();
            options.retain(|(known, _)| *known != name);
            options.push((name, option.value.clone()));
        }
    }
    deduplicate(&mut servers);
    deduplicate(&mut searches);
    servers.truncate(MAX_NAMESERVERS);
    searches.truncate(MAX_SEARCHES);
    let search = (!searches.is_empty()).then(|| format!("search {}\n", searches.join(" ")));
    let servers = servers
        .into_iter()
        .map(|server| format!("nameserver {server}\n"));
    let options: Vec<_> = options
        .into_iter()
        .map(|(name, value)| match value {
            Some(value) => format!("{name}:{value}"),
            None => name,
        })
        .collect();
    let options = (!options.is_empty()).then(|| format!("options {}\n", options.join(" ")));
    search.into_iter().chain(servers).chain(options).collect()
}

fn deduplicate(list: &mut Vec<String>) {
    let mut seen = std::collections::BTreeSet::new();
    list.retain(|item| seen.insert(item.clone()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn pod(name: &str, spec: serde_json::Value) -> Pod {
        let mut spec = spec;
        spec["containers"] = json!([]);
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "ns"}, "spec": spec}))
            .unwrap()
    }

    fn dns() -> Dns {
        Dns {
            server: Ipv4Addr::new(10, 100, 0, 10),
            domain: "cluster.local".to_owned(),
        }
    }

    #[test]
    fn hosts_with_a_subdomain_and_aliases() {
        let pod = pod(
            "p",
            json!({"hostname": "h", "subdomain": "sub",
                   "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["a", "b"]}]}),
        );
        let text = hosts(&pod, Ipv4Addr::new(10, 0, 1, 2), "cluster.local");
        assert!(text.starts_with("# Kubernetes-managed hosts file.\n"));
        assert!(text.contains("\n10.0.1.2\th.sub.ns.svc.cluster.local\th\n"));
        assert!(text.ends_with("\n# Entries added by HostAliases.\n1.2.3.4\ta\tb\n"));
    }

    #[test]
    fn resolv_conf_follows_the_policy() {
        assert_eq!(
            resolv_conf(&pod("p", json!({})), &dns()),
            "search ns.svc.cluster.local svc.cluster.local cluster.local\n\
             nameserver 10.100.0.10\noptions ndots:5\n"
        );
        let own = json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": ["9.9.9.9"],
            "searches": ["x.y"], "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}]}});
        assert_eq!(
            resolv_conf(&pod("p", own), &dns()),
            "search x.y\nnameserver 9.9.9.9\noptions ndots:2 edns0\n"
        );
        let changed = json!({"dnsConfig": {"options": [{"name": "ndots", "value": "1"}]}});
        assert!(resolv_conf(&pod("p", changed), &dns()).ends_with("options ndots:1\n"));
    }

    proptest! {
        #[test]
        fn any_pod_name_gives_a_host_name(name in "[a-z0-9]([-.a-z0-9]{0,250}[a-z0-9])?") {
            let (host, _) = hostname(&pod(&name, json!({})), "d");
            prop_assert!(!host.is_empty() && host.len() <= MAX_HOSTNAME);
            prop_assert!(name.starts_with(&host) && !host.ends_with(['-', '.']));
        }
    }

    #[test]
    fn a_pod_on_its_hosts_network_is_named_as_the_node_and_asks_no_cluster_dns() {
        let pod = |policy: &str| -> Pod {
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": "p", "namespace": "ns"},
                "spec": {"hostNetwork": true, "dnsPolicy": policy, "nodeName": "the-node", "containers": []},
            }))
            .unwrap()
        };
        let dns = Dns {
            server: Ipv4Addr::new(10, 96, 0, 10),
            domain: "cluster.local".to_owned(),
        };
        assert_eq!(hostname(&pod("Default"), &dns.domain).0, "the-node");
        assert_eq!(resolv_conf(&pod("ClusterFirst"), &dns), "");
        let with_cluster = resolv_conf(&pod("ClusterFirstWithHostNet"), &dns);
        assert!(
            with_cluster.contains("nameserver 10.96.0.10"),
            "{with_cluster}"
        );
    }
}
