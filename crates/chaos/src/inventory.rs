//! Everything that comes and goes with pods, by name: what is there after a fault and was not before has been left.

use monopod_testkit::{Cluster, Site, figure, grouped, record, record_of, recorded, running, tap};
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::Path;

/// Of the addresses of pods, and of what stays.
const NETWORK: &str = "10.";
/// What a host has on its disk of each environment, by its name.
const FILES: [&str; 3] = ["vms", "credentials", "logs"];
/// What a VM has on the machine itself.
const PROCESS: &str = "process";
const GROUP: &str = "control group";

/// What a cluster has of pods on some machines.
pub(crate) struct Inventory {
    /// What has a pod's name or address.
    named: BTreeSet<String>,
    /// What has a VM's name.
    traces: BTreeSet<Trace>,
    /// The VMs of which the machines have a record, of pods and of none.
    recorded: BTreeSet<String>,
}

/// Something that is of a VM, and goes with it.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Trace {
    what: String,
    vm: String,
}

impl Trace {
    fn new(what: &str, vm: &str) -> Self {
        Self {
            what: what.to_owned(),
            vm: vm.to_owned(),
        }
    }

    fn told(&self) -> String {
        format!("{} of {}", self.what, self.vm)
    }
}

impl Inventory {
    /// Looks at everything; none if it cannot be told now.
    pub(crate) fn take(cluster: &Cluster, sites: &[Site]) -> Option<Self> {
        let mut named = objects(cluster)?;
        let mut traces = processes_and_groups();
        for site in sites {
            named.extend(files(site));
            named.extend(unrecorded(site));
            named.extend(network(site)?);
            traces.extend(spare_taps(site)?);
        }
        Some(Self {
            named,
            traces,
            // Last: a record is there before anything else of a VM.
            recorded: sites.iter().flat_map(recorded).collect(),
        })
    }

    /// All of it.
    pub(crate) fn all(&self) -> BTreeSet<String> {
        let traces = self.traces.iter().map(Trace::told);
        self.named.iter().cloned().chain(traces).collect()
    }

    /// What may have been left. VMs that are recorded and belong to no pod are kept for the next ones.
    pub(crate) fn left(&self) -> BTreeSet<String> {
        let traces = self.traces.iter();
        let orphans = traces.filter(|trace| !self.recorded.contains(&trace.vm));
        let named = self.named.iter().cloned();
        named.chain(orphans.map(Trace::told)).collect()
    }
}

/// What must be in an inventory of a pod that runs on a machine, or it would not be seen if it stayed either.
pub(crate) fn of(environment: &Value, site: &Site) -> Option<BTreeSet<String>> {
    let record = record_of(environment, site).ok()?;
    let vm = record["id"].as_str()?;
    let name = environment["metadata"]["name"].as_str()?;
    let spec = |field: &str| environment["spec"][field].as_str();
    let (node, interface) = (spec("node")?, spec("networkInterface")?);
    let address: Ipv4Addr = spec("address")?.parse().ok()?;
    let mut all = BTreeSet::from([
        format!("pod/{}", environment["spec"]["pod"]["name"].as_str()?),
        format!("environment.monopod.dev/{name}"),
        format!("networkinterface.monopod.dev/{interface}"),
        format!("node/{node}"),
        format!("lease.coordination.k8s.io/{node}"),
        format!("certificate requests of {name}"),
        Trace::new(PROCESS, vm).told(),
    ]);
    let on_site = FILES
        .map(|kind| format!("{kind}/{name}"))
        .into_iter()
        .chain(["routes", "rules"].map(|what| format!("{address} in {what}")))
        .chain([tap(address)]);
    all.extend(on_site.map(|what| format!("{}: {what}", site.name)));
    // A machine need not be able to limit VMs.
    let groups = record["groups"].as_array();
    if groups.is_some_and(|groups| !groups.is_empty()) {
        all.insert(Trace::new(GROUP, vm).told());
    }
    Some(all)
}

/// Hosts that know of fewer VMs that wait for a pod than their machines have, also because one is being started, or
/// that do not answer.
pub(crate) fn forgotten(sites: &[Site]) -> BTreeSet<String> {
    let told = |site: &Site| {
        let waiting = names(&site.data.join("host/spare")).len();
        let text = site.scrape().ok()?;
        let known: usize = figure(&text, "monopod_host_pool_vms")?;
        Some((waiting, known))
    };
    let all = sites.iter().map(|site| match told(site) {
        Some((waiting, known)) if waiting == known => None,
        Some((waiting, known)) => Some(format!(
            "{}: {waiting} VMs that wait, of which its host knows {known}",
            site.name
        )),
        None => Some(format!("{}: its host does not answer", site.name)),
    });
    all.flatten().collect()
}

/// Objects in the API server.
fn objects(cluster: &Cluster) -> Option<BTreeSet<String>> {
    const HOSTS: &str = "monopod-host-";
    let ask = |arguments: &[&str]| {
        let output = cluster.try_kubectl(&[&["get"], arguments].concat());
        let lines = output.out.lines().map(|line| line.trim().to_owned());
        output.success.then(|| lines.collect::<Vec<String>>())
    };
    let kinds = "pods,environments,networkinterfaces,nodes";
    let mut all: BTreeSet<String> = ask(&[kinds, "-o", "name"])?.into_iter().collect();
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
    let path = |kind: &str| site.data.join("host").join(kind);
    FILES
        .into_iter()
        .flat_map(|kind| {
            names(&path(kind))
                .into_iter()
                .map(move |name| format!("{}: {kind}/{name}", site.name))
        })
        .collect()
}

/// Directories of VMs of none that have no record, so that nobody will find what is there.
fn unrecorded(site: &Site) -> BTreeSet<String> {
    let spare = site.data.join("host/spare");
    let all = names(&spare).into_iter();
    all.filter(|name| record(&spare.join(name)).is_err())
        .map(|name| format!("{}: spare/{name}", site.name))
        .collect()
}

/// Interfaces, and the pods' addresses in routes and in our rules; kube-proxy makes its own when it likes.
fn network(site: &Site) -> Option<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    for (what, arguments) in [
        ("addresses", &["ip", "address", "show", "dev", "lo"][..]),
        ("routes", &["ip", "route"]),
        ("rules", &["nft", "list", "table", "inet", "monopod"]),
    ] {
        let text = in_vpc(site, arguments)?;
        let words = text.split(|c: char| c != '.' && !c.is_ascii_digit());
        let addresses =
            words.filter(|word| word.starts_with(NETWORK) && word.parse::<Ipv4Addr>().is_ok());
        all.extend(addresses.map(|address| format!("{}: {address} in {what}", site.name)));
    }
    let links = links(site, "eni")?.into_iter();
    all.extend(links.map(|name| format!("{}: {name}", site.name)));
    Some(all)
}

/// Taps that are no pod's interface yet, each with its VM's name.
fn spare_taps(site: &Site) -> Option<Vec<Trace>> {
    let what = format!("{}: tap", site.name);
    let taps = links(site, "vm-")?;
    Some(taps.iter().map(|vm| Trace::new(&what, vm)).collect())
}

/// Links of the VPC whose names begin so.
fn links(site: &Site, prefix: &str) -> Option<Vec<String>> {
    let text = in_vpc(site, &["ip", "-brief", "link"])?;
    let names = text
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let chosen = names.filter(|name| name.starts_with(prefix));
    Some(chosen.map(str::to_owned).collect())
}

/// What a program says in the VPC's namespace.
fn in_vpc(site: &Site, arguments: &[&str]) -> Option<String> {
    let output = site.in_vpc(arguments);
    output.success.then_some(output.out)
}

/// Processes and control groups of VMs, wherever they come from.
fn processes_and_groups() -> BTreeSet<Trace> {
    let processes = running().into_iter().map(|vm| Trace::new(PROCESS, &vm));
    let groups = grouped().into_iter().map(|vm| Trace::new(GROUP, &vm));
    processes.chain(groups).collect()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}
