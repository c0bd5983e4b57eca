//! Everything that comes and goes with pods, by name: what is there after a fault and was not before has been left.

use crate::vm;
use monopod_testkit::{Cluster, Site};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

/// Of the addresses of pods, and of what stays.
const NETWORK: &str = "10.";

/// What a cluster has of pods on these machines; none if that cannot be told now.
pub(crate) fn take(cluster: &Cluster, sites: &[Site]) -> Option<BTreeSet<String>> {
    let mut all = objects(cluster)?;
    for site in sites {
        all.extend(files(site));
        all.extend(network(site)?);
    }
    all.extend(orphaned_groups(sites));
    Some(all)
}

/// Objects in the API server.
fn objects(cluster: &Cluster) -> Option<BTreeSet<String>> {
    const HOSTS: &str = "monopod-host-";
    let ask = |arguments: &[&str]| {
        let output = cluster.try_kubectl(&[&["get"], arguments].concat());
        let lines = output.out.lines().map(|line| line.trim().to_owned());
        output.success.then(|| lines.collect::<Vec<String>>())
    };
    let mut all: BTreeSet<String> = ask(&["environments,networkinterfaces,nodes", "-o", "name"])?
        .into_iter()
        .collect();
    all.extend(ask(&["leases", "-n", "kube-node-lease", "-o", "name"])?);
    // A node that goes on asks for certificates under other names.
    let environment = r"-o=custom-columns=:.metadata.labels.monopod\.dev/environment";
    let requests = ask(&["csr", "-l", "monopod.dev/environment", environment])?;
    all.extend(
        requests
            .into_iter()
            .filter(|line| !line.is_empty())
            .map(|name| format!("certificate requests of {name}")),
    );
    let named = "-o=custom-columns=:.metadata.namespace,:.metadata.name";
    let secrets = ask(&["secrets", "-A", named])?;
    all.extend(
        secrets
            .into_iter()
            .filter(|line| line.starts_with(HOSTS))
            .map(|line| format!("secret {line}")),
    );
    Some(all)
}

/// What a host has on its disk of environments.
fn files(site: &Site) -> BTreeSet<String> {
    let kinds = ["vms", "credentials", "logs"].into_iter();
    let path = |kind: &str| site.data.join("host").join(kind);
    kinds
        .flat_map(|kind| {
            names(&path(kind))
                .into_iter()
                .map(move |name| format!("{}: {kind}/{name}", site.name))
        })
        .collect()
}

/// Interfaces, and the pods' addresses in routes and in our rules; kube-proxy makes its own when it likes.
fn network(site: &Site) -> Option<BTreeSet<String>> {
    let inside = |arguments: &[&str]| {
        let namespace = format!("--net=/run/netns/{}-vpc", site.name);
        let output = Command::new("nsenter")
            .arg(namespace)
            .args(arguments)
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success().then_some(text)
    };
    let mut all = BTreeSet::new();
    for (what, arguments) in [
        ("addresses", &["ip", "address", "show", "dev", "lo"][..]),
        ("routes", &["ip", "route"]),
        ("rules", &["nft", "list", "table", "inet", "monopod"]),
    ] {
        let text = inside(arguments)?;
        let words = text.split(|c: char| c != '.' && !c.is_ascii_digit());
        let addresses =
            words.filter(|word| word.starts_with(NETWORK) && word.parse::<Ipv4Addr>().is_ok());
        all.extend(addresses.map(|address| format!("{}: {address} in {what}", site.name)));
    }
    let links = inside(&["ip", "-brief", "link"])?;
    let links = links
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    all.extend(
        links
            .filter(|name| name.starts_with("eni"))
            .map(|name| format!("{}: {name}", site.name)),
    );
    Some(all)
}

/// Control groups of VMs that no machine has.
fn orphaned_groups(sites: &[Site]) -> BTreeSet<String> {
    let mut groups = BTreeSet::new();
    find_groups(Path::new("/sys/fs/cgroup"), &mut groups);
    let known: BTreeSet<String> = sites.iter().flat_map(vm::ids).collect();
    groups
        .difference(&known)
        .map(|name| format!("control group {name}"))
        .collect()
}

fn find_groups(directory: &Path, found: &mut BTreeSet<String>) {
    for name in names(directory) {
        let path = directory.join(&name);
        // No link leads out of the hierarchies, or round in them.
        if !path.is_dir() || path.is_symlink() {
            continue;
        }
        if directory.ends_with("monopod") && name.starts_with("vm-") {
            found.insert(name);
        } else {
            find_groups(&path, found);
        }
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}
