//! What is wrong with a machine or a cluster, and what to do about it.

mod profiles;

#[cfg(test)]
mod tests;

use crate::addresses;
use crate::placement::LEASE;
use crate::taints::{our_taint, tolerates};
use ipnet::Ipv4Net;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{NodeSelectorTerm, Pod};
use monopod_api::environment::Environment;
use monopod_api::host::Host;
use monopod_api::labels::{COMPUTE_TYPE, COMPUTE_TYPE_FARGATE};
use monopod_api::names;
use monopod_api::network::{NetworkInterface, Subnet};
use monopod_api::profile::FargateProfile;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

/// Percent of a subnet's addresses below which it is said to run out.
const FEW_ADDRESSES: u64 = 10;
/// Percent of a disk below which it is said to run out: images are removed at 15.
const LITTLE_DISK: u64 = 10;

/// Something that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// What it is about: `subnet private-a`.
    pub subject: String,
    /// What is wrong with it.
    pub problem: String,
    /// What to do.
    pub remedy: String,
}

impl Finding {
    fn new(
        subject: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            subject: subject.into(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }
}

/// What a machine has of what VMs and their network need.
#[derive(Debug, Clone, Default)]
pub struct Machine {
    /// Programs that are not there, each with the Debian package that brings it.
    pub missing_programs: Vec<(&'static str, &'static str)>,
    /// Features that the kernel lacks, each with its option.
    pub missing_features: Vec<(&'static str, &'static str)>,
    /// Bytes of the data directory's disk: free ones and all.
    pub disk: Option<(u64, u64)>,
    /// Environments that have something left in the host's directory.
    pub vms: BTreeSet<String>,
    /// The host whose directory it is.
    pub host: String,
    /// Whether it joined the cluster of another machine.
    pub joined: bool,
}

/// What a cluster has.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// All of them.
    pub daemon_sets: Vec<DaemonSet>,
    /// All of them.
    pub subnets: Vec<Subnet>,
    /// All of them.
    pub interfaces: Vec<NetworkInterface>,
    /// All of them.
    pub environments: Vec<Environment>,
    /// All of them.
    pub hosts: Vec<Host>,
    /// All of them, if they may be read.
    pub leases: Vec<Lease>,
    /// Names of all nodes.
    pub nodes: BTreeSet<String>,
    /// Uids of all pods.
    pub pods: BTreeSet<String>,
    /// Pods that have no node.
    pub waiting: Vec<Pod>,
    /// All of them, if they may be read.
    pub profiles: Option<Vec<FargateProfile>>,
    /// Names of the definitions that are not there: `environments.monopod.dev`.
    pub undefined: BTreeSet<String>,
}

/// What is wrong with a machine.
pub fn machine(machine: &Machine) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (program, package) in &machine.missing_programs {
        findings.push(Finding::new(
            "this machine",
            format!("the program {program} is missing"),
            format!("install the package {package}"),
        ));
    }
    for (feature, option) in &machine.missing_features {
        findings.push(Finding::new(
            "this machine",
            format!("the kernel has no {feature}"),
            format!("load its module, or use a kernel with {option}"),
        ));
    }
    if let Some((free, all)) = machine.disk
        && is_short(free, all, LITTLE_DISK)
    {
        findings.push(Finding::new(
            "this machine",
            format!(
                "{} MiB of {} are free on the disk of the data directory",
                free >> 20,
                all >> 20
            ),
            "remove images with `monopod image rm`, or give it a larger disk: pods write there too",
        ));
    }
    findings
}

/// What is wrong with a cluster. If definitions are missing, only that: nothing else could be known.
pub fn cluster(cluster: &Cluster, now: Timestamp) -> Vec<Finding> {
    let undefined = cluster.undefined.iter().map(|name| {
        Finding::new(
            format!("definition {name}"),
            "it is gone, and all objects of its kind with it",
            "on the cluster's machine `monopod down --keep-pods` and `monopod up` define it again; then apply your objects anew",
        )
    });
    let mut findings: Vec<Finding> = undefined.collect();
    if !findings.is_empty() {
        return findings;
    }
    findings.extend(profiles::findings(cluster));
    findings.extend(cluster.daemon_sets.iter().filter_map(daemon_set));
    findings.extend(
        cluster
            .subnets
            .iter()
            .filter_map(|subnet| addresses(cluster, subnet)),
    );
    findings.extend(cluster.hosts.iter().flat_map(host));
    findings.extend(
        cluster
            .leases
            .iter()
            .filter_map(|lease| silent(cluster, lease, now)),
    );
    if cluster.hosts.is_empty() {
        findings.push(Finding::new(
            "this cluster",
            "no machine runs VMs, so every pod of a Fargate profile waits",
            "see `monopod status` for the part `host`, or add a machine with `monopod host token NAME`",
        ));
    }
    findings.extend(left_over(cluster));
    findings
}

/// What this machine has that the cluster does not know: its VMs, or itself.
pub fn strays(machine: &Machine, cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !cluster.undefined.is_empty() {
        return findings;
    }
    let is_known = |host: &Host| host.metadata.name.as_deref() == Some(&machine.host);
    if !cluster.hosts.iter().any(is_known) {
        let remedy = if machine.joined {
            "if it does not come back within a minute, its namespace was deleted: `monopod down` here, then join with a new token"
        } else {
            "if it does not come back within a minute, its namespace was deleted: `monopod down --keep-pods`, then `monopod up`"
        };
        findings.push(Finding::new(
            format!("host {}", machine.host),
            "the cluster does not know this machine",
            remedy,
        ));
    }
    let known: BTreeSet<&str> = cluster
        .environments
        .iter()
        .filter(|environment| environment.spec.host == machine.host)
        .filter_map(|environment| environment.metadata.name.as_deref())
        .collect();
    let unknown = machine.vms.iter().filter(|vm| !known.contains(vm.as_str()));
    findings.extend(unknown.map(|name| {
        Finding::new(
            format!("VM {name}"),
            "no environment of the cluster names it",
            "its host ends it within seconds; if it stays, restart the host process and see its log",
        )
    }));
    findings
}

fn is_short(free: u64, all: u64, percent: u64) -> bool {
    u128::from(free) * 100 < u128::from(all) * u128::from(percent)
}

/// A `DaemonSet` that wants a pod on each of our nodes, which take no second one.
fn daemon_set(set: &DaemonSet) -> Option<Finding> {
    let template = set.spec.template.spec.as_ref()?;
    let tolerates = template
        .tolerations
        .iter()
        .flatten()
        .any(|toleration| tolerates(toleration, &our_taint()));
    let selector = template.node_selector.as_ref();
    let elsewhere = selector
        .and_then(|selector| selector.get(COMPUTE_TYPE))
        .is_some_and(|value| value != COMPUTE_TYPE_FARGATE);
    let terms = template
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|node| {
            node.required_during_scheduling_ignored_during_execution
                .as_ref()
        })
        .map(|required| required.node_selector_terms.as_slice())
        .unwrap_or_default();
    // Terms are alternatives: each must exclude our nodes.
    let excluded = !terms.is_empty() && terms.iter().all(excludes_our_nodes);
    (tolerates && !elsewhere && !excluded).then(|| {
        let (namespace, name) = (set.metadata.namespace.as_deref(), set.metadata.name.as_deref());
        Finding::new(
            format!(
                "DaemonSet {}/{}",
                namespace.unwrap_or("default"),
                name.unwrap_or_default()
            ),
            "it tolerates the taint of Fargate nodes, so that one of its pods waits for ever for each of them",
            format!("add a required node affinity: key {COMPUTE_TYPE}, operator NotIn, values [{COMPUTE_TYPE_FARGATE}]"),
        )
    })
}

fn excludes_our_nodes(term: &NodeSelectorTerm) -> bool {
    term.match_expressions.iter().flatten().any(|expression| {
        let names_it = expression
            .values
            .iter()
            .flatten()
            .any(|value| value == COMPUTE_TYPE_FARGATE);
        expression.key == COMPUTE_TYPE
            && match expression.operator.as_str() {
                "NotIn" => names_it,
                "In" => !names_it,
                "DoesNotExist" => true,
                _other => false,
            }
    })
}

fn addresses(cluster: &Cluster, subnet: &Subnet) -> Option<Finding> {
    let cidr: Ipv4Net = subnet.spec.cidr.parse().ok()?;
    let taken = cluster
        .interfaces
        .iter()
        .filter_map(|interface| interface.spec.address.parse::<Ipv4Addr>().ok())
        .filter(|address| cidr.contains(address))
        .count();
    let all = u64::from(addresses::capacity(cidr));
    let free = all.saturating_sub(u64::try_from(taken).unwrap_or(u64::MAX));
    is_short(free, all, FEW_ADDRESSES).then(|| {
        Finding::new(
            format!(
                "subnet {}",
                subnet.metadata.name.as_deref().unwrap_or_default()
            ),
            format!("{free} of its {all} addresses are free"),
            "add a subnet of the same zone: profiles that name none use it at once",
        )
    })
}

fn host(host: &Host) -> Vec<Finding> {
    let subject = format!("host {}", host.metadata.name.as_deref().unwrap_or_default());
    let mut findings = Vec::new();
    let Some(status) = &host.status else {
        let remedy = "see `monopod status` on that machine";
        findings.push(Finding::new(subject, "it has never reported", remedy));
        return findings;
    };
    if !status.ready {
        findings.push(Finding::new(
            subject.clone(),
            format!(
                "it takes no VMs: {}",
                status.message.as_deref().unwrap_or("it gives no reason")
            ),
            "see `monopod status` and logs/host.log in the data directory of that machine",
        ));
    }
    if status.accelerator.as_deref() == Some("tcg") {
        findings.push(Finding::new(
            subject.clone(),
            format!(
                "its VMs are emulated and slow: {}",
                status
                    .accelerator_reason
                    .as_deref()
                    .unwrap_or("KVM does not work")
            ),
            "use a machine whose KVM runs a VM: bare metal, or a VM with nested virtualization",
        ));
    }
    if let Some(reason) = &status.vm_limits_reason {
        findings.push(Finding::new(
            subject,
            format!("its VMs may take more than their size: {reason}"),
            "give the host process control groups for cpu, memory and pids",
        ));
    }
    findings
}

/// A host that has not renewed its lease, whose pods nobody can end.
fn silent(cluster: &Cluster, lease: &Lease, now: Timestamp) -> Option<Finding> {
    let mut hosts = cluster
        .hosts
        .iter()
        .filter_map(|host| host.metadata.name.as_deref());
    let host = hosts.find(|host| {
        lease.metadata.name.as_deref() == Some(host)
            && lease.metadata.namespace == Some(names::host_namespace(host))
    })?;
    let renewed = lease.spec.as_ref()?.renew_time.as_ref()?.0;
    (now.duration_since(renewed) >= LEASE).then(|| {
        Finding::new(
            format!("host {host}"),
            format!("it has not been heard of since {renewed:.0}, so that it gets no pods and its addresses stay taken"),
            format!("see `monopod status` and the clock of that machine; if it is gone for good, `monopod host forget {host} --yes`"),
        )
    })
}

/// Objects whose owner is gone.
fn left_over(cluster: &Cluster) -> Vec<Finding> {
    let environments: BTreeSet<&str> = cluster
        .environments
        .iter()
        .filter_map(|environment| environment.metadata.name.as_deref())
        .collect();
    let nodes: BTreeSet<&str> = cluster
        .environments
        .iter()
        .map(|environment| environment.spec.node.as_str())
        .collect();
    let remedy =
        "control removes it within seconds; if it stays, see the log of the part `control`";
    let mut findings = Vec::new();
    for environment in &cluster.environments {
        let pod = &environment.spec.pod;
        if !cluster.pods.contains(&pod.uid) {
            findings.push(Finding::new(
                format!(
                    "environment {}",
                    environment.metadata.name.as_deref().unwrap_or_default()
                ),
                format!("its pod {}/{} is gone", pod.namespace, pod.name),
                remedy,
            ));
        }
    }
    for interface in &cluster.interfaces {
        let cooling = interface
            .status
            .as_ref()
            .is_some_and(|status| status.cooling_until.is_some());
        if !cooling && !environments.contains(interface.spec.environment.name.as_str()) {
            findings.push(Finding::new(
                format!(
                    "interface {}",
                    interface.metadata.name.as_deref().unwrap_or_default()
                ),
                "its environment is gone",
                remedy,
            ));
        }
    }
    for node in &cluster.nodes {
        if names::is_fargate_node(node) && !nodes.contains(node.as_str()) {
            findings.push(Finding::new(
                format!("node {node}"),
                "no environment has it",
                "control removes within seconds what a guest registered; delete another with `kubectl delete node` once no pod is on it",
            ));
        }
    }
    findings
}
