//! What a pod may ask for, in EKS Fargate's words where it may not.
//!
//! Order and spelling of the parts are those of real events (`Pod not supported on Fargate: …`). What a
//! profile's `allow` opens is no violation for its pods.

use crate::admission;
use k8s_openapi::api::core::v1::{
    Container, ContainerPort, PersistentVolume, PersistentVolumeClaim, Pod, PodSpec,
    ResourceRequirements, SecurityContext, Volume,
};
use monopod_api::profile::Allowances;
use std::collections::{BTreeMap, BTreeSet};

/// Capabilities that may be added: containerd's default set. Written without `CAP_`.
const CAPABILITIES: [&str; 14] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "NET_RAW",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

/// Resources that a VM is sized by; it has no others.
const RESOURCES: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

/// The driver of the only volumes that a claim may stand for.
const EFS_DRIVER: &str = "efs.csi.aws.com";

/// What a persistent volume claim stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// No volume yet, or one that is gone.
    Unbound,
    /// A persistent volume.
    Bound {
        /// The volume's name.
        volume: String,
        /// Its CSI driver, if it has one.
        driver: Option<String>,
    },
}

/// Claims by namespace and name.
pub type Claims = BTreeMap<(String, String), Claim>;

/// Reads a claim, with the volumes that there are by name.
pub fn claim(claim: &PersistentVolumeClaim, volumes: &BTreeMap<String, PersistentVolume>) -> Claim {
    let bound = claim.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Bound");
    let name = claim.spec.as_ref().and_then(|s| s.volume_name.as_ref());
    match name.and_then(|name| volumes.get_key_value(name)) {
        Some((name, volume)) if bound => Claim::Bound {
            volume: name.clone(),
            driver: volume
                .spec
                .as_ref()
                .and_then(|s| s.csi.as_ref())
                .map(|csi| csi.driver.clone()),
        },
        Some(_) | None => Claim::Unbound,
    }
}

/// What the pod asks for and cannot have; empty if it is within the contract.
///
/// The order of containers makes no difference.
pub fn violations(pod: &Pod, claims: &Claims, allow: &Allowances) -> Vec<String> {
    let Some(spec) = &pod.spec else {
        return vec!["fields not supported: spec is missing".to_owned()];
    };
    let containers = parts_of(spec);
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let volumes: Vec<_> = spec
        .volumes
        .iter()
        .flatten()
        .filter_map(|volume| refused(volume, namespace, claims))
        .collect();
    let daemon = admission::is_of_daemon_set(pod);
    let flag = |found: bool, part: &str| found.then(|| part.to_owned());
    [
        part(
            "fields not supported: ",
            &host_namespaces(spec, allow),
            ", ",
        ),
        part(
            "invalid SecurityContext fields: ",
            &security(&containers, allow),
            ",",
        ),
        part("volumes not supported: ", &volumes, ", "),
        flag(
            containers.iter().any(|c| c.devices),
            "volumeDevices not supported",
        ),
        flag(
            containers
                .iter()
                .flat_map(|c| c.ports)
                .any(|port| is_of_the_host(port, spec, allow)),
            "port contains HostIP or HostPort",
        ),
        part(
            "resources not supported: ",
            &resources(spec, &containers),
            ", ",
        ),
        flag(daemon, "DaemonSet not supported"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Containers and init containers. Ephemeral ones come only after the pod was stored.
pub fn all_containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
}

/// What the contract looks at in a container of any kind.
struct Parts<'a> {
    context: Option<&'a SecurityContext>,
    ports: &'a [ContainerPort],
    resources: Option<&'a ResourceRequirements>,
    devices: bool,
}

fn parts_of(spec: &PodSpec) -> Vec<Parts<'_>> {
    let any = |devices: Option<usize>| devices.is_some_and(|count| count > 0);
    let lasting = all_containers(spec).map(|c| Parts {
        context: c.security_context.as_ref(),
        ports: c.ports.as_deref().unwrap_or_default(),
        resources: c.resources.as_ref(),
        devices: any(c.volume_devices.as_ref().map(Vec::len)),
    });
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| Parts {
        context: c.security_context.as_ref(),
        ports: c.ports.as_deref().unwrap_or_default(),
        resources: c.resources.as_ref(),
        devices: any(c.volume_devices.as_ref().map(Vec::len)),
    });
    lasting.chain(ephemeral).collect()
}

fn part(prefix: &str, found: &[String], separator: &str) -> Option<String> {
    (!found.is_empty()).then(|| format!("{prefix}{}", found.join(separator)))
}

fn host_namespaces(spec: &PodSpec, allow: &Allowances) -> Vec<String> {
    if allow.host_namespaces {
        return Vec::new();
    }
    [
        ("HostNetwork", spec.host_network),
        ("HostPID", spec.host_pid),
        ("HostIPC", spec.host_ipc),
    ]
    .into_iter()
    .filter(|(_, asked)| *asked == Some(true))
    .map(|(name, _)| name.to_owned())
    .collect()
}

/// A refused field of a security context, in the order in which events name them.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Refused {
    Privileged,
    AllowPrivilegeEscalation,
    Capabilities(Vec<String>),
}

/// The entries of all containers, neither merged nor deduplicated, each container's together.
fn security(containers: &[Parts<'_>], allow: &Allowances) -> Vec<String> {
    let mut found: Vec<Vec<Refused>> = containers
        .iter()
        .filter_map(|c| Some(refused_context(c.context?, allow)))
        .collect();
    found.sort();
    found
        .into_iter()
        .flatten()
        .map(|entry| match entry {
            Refused::Privileged => "Privileged".to_owned(),
            Refused::AllowPrivilegeEscalation => "AllowPrivilegeEscalation".to_owned(),
            Refused::Capabilities(names) => format!("Capabilities added: {}", names.join(", ")),
        })
        .collect()
}

fn refused_context(context: &SecurityContext, allow: &Allowances) -> Vec<Refused> {
    let mut found = Vec::new();
    if context.privileged == Some(true) && !allow.privileged {
        found.push(Refused::Privileged);
    }
    if context.allow_privilege_escalation == Some(true) && !allow.privilege_escalation {
        found.push(Refused::AllowPrivilegeEscalation);
    }
    let added = context
        .capabilities
        .as_ref()
        .and_then(|c| c.add.as_deref())
        .unwrap_or_default();
    let all = allow.added_capabilities.iter().any(|name| name == "ALL");
    let granted = |name: &str| {
        CAPABILITIES.contains(&name)
            || !name.starts_with("CAP_") && all
            || allow.added_capabilities.iter().any(|given| given == name)
    };
    let forbidden: Vec<_> = added
        .iter()
        .filter(|name| !granted(name))
        .cloned()
        .collect();
    if !forbidden.is_empty() {
        found.push(Refused::Capabilities(forbidden));
    }
    found
}

/// The API server gives each port of a pod on its host's network its own number as host port.
fn is_of_the_host(port: &ContainerPort, spec: &PodSpec, allow: &Allowances) -> bool {
    let is_own = allow.host_namespaces
        && spec.host_network == Some(true)
        && port.host_port == Some(port.container_port);
    let is_other = port.host_port.unwrap_or(0) != 0 && !is_own;
    is_other || port.host_ip.as_ref().is_some_and(|ip| !ip.is_empty())
}

/// Names of resources that no VM has, such as GPUs and huge pages, each once.
fn resources(spec: &PodSpec, containers: &[Parts<'_>]) -> Vec<String> {
    let named: BTreeSet<&String> = containers
        .iter()
        .filter_map(|c| c.resources)
        .chain(&spec.resources)
        .flat_map(|r| r.requests.iter().chain(&r.limits))
        .flat_map(BTreeMap::keys)
        .filter(|name| !RESOURCES.contains(&name.as_str()))
        .collect();
    named.into_iter().cloned().collect()
}

/// Why a volume cannot be had.
fn refused(volume: &Volume, namespace: &str, claims: &Claims) -> Option<String> {
    let because = |why: String| Some(format!("{} not supported because: {why}", volume.name));
    if let Some(source) = &volume.persistent_volume_claim {
        let name = &source.claim_name;
        return match claims.get(&(namespace.to_owned(), name.clone())) {
            None => because(format!("persistentvolumeclaim \"{name}\" not found")),
            Some(Claim::Unbound) => because(format!("PVC {name} not bound")),
            Some(Claim::Bound { driver, .. }) if driver.as_deref() == Some(EFS_DRIVER) => None,
            Some(Claim::Bound { volume, driver }) => because(match driver {
                Some(driver) => {
                    format!("PVC {name} bound to invalid PV {volume} with CSI Driver: {driver}")
                }
                None => format!("PVC {name} bound to invalid PV {volume} with nil CSI spec"),
            }),
        };
    }
    let supported = volume.empty_dir.is_some()
        || volume.secret.is_some()
        || volume.config_map.is_some()
        || volume.projected.is_some()
        || volume.downward_api.is_some()
        || volume.nfs.is_some();
    (!supported).then(|| format!("{} is of an unsupported volume Type", volume.name))
}

#[cfg(test)]
mod tests;
