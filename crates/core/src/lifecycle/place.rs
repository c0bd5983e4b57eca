//! Choosing host, subnet and address for a pod that has no environment.

use super::launch::{Launch, launch};
use super::{Cause, Decision, Effect, Observed, World};
use crate::image::{credentials, reference::normalise};
use crate::placement::{self, NoHost, Request};
use crate::sizing::{self, Requirement, SizingError};
use crate::{addresses, admission, contract};
use ipnet::Ipv4Net;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use monopod_api::environment::{
    Environment, EnvironmentImage, EnvironmentReference, EnvironmentSpec, PodReference, PullPolicy,
};
use monopod_api::network::{NetworkInterface, NetworkInterfaceSpec};
use monopod_api::profile::{Allowances, FargateProfileSpec};
use monopod_api::{labels, messages, names};
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

/// How long what was said stays: API servers keep events for an hour.
const TOLD: SignedDuration = SignedDuration::from_mins(30);

/// Subnets, groups and addresses of the VPC.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Network {
    /// Subnets by name.
    pub subnets: BTreeMap<String, Subnet>,
    /// Names of security groups, and their ids with the name that each stands for.
    pub groups: BTreeMap<String, String>,
    /// Addresses of all interfaces, cooling ones as well, and of the nodes that pods are bound to.
    pub taken: BTreeSet<Ipv4Addr>,
    /// Addresses of which a node's certificate may still be good, as far as control remembers.
    pub recent: BTreeSet<Ipv4Addr>,
}

/// A subnet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subnet {
    /// EC2-style id.
    pub id: String,
    /// Addresses.
    pub cidr: Ipv4Net,
    /// Zone.
    pub zone: String,
}

/// A reason for which a pod waits, and what names it.
struct Waits {
    cause: Cause,
    message: String,
}

impl Waits {
    fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self {
            cause,
            message: message.into(),
        }
    }
}

pub(super) fn place(
    observed: &Observed<'_>,
    pod: &Pod,
    world: &World<'_>,
    seed: u64,
    now: Timestamp,
) -> Decision {
    let gated = pod.spec.as_ref().is_some_and(|s| {
        s.scheduling_gates
            .as_ref()
            .is_some_and(|gates| !gates.is_empty())
    });
    if !super::is_ours(pod) || pod.metadata.deletion_timestamp.is_some() || gated {
        return Decision::idle();
    }
    if let Some(attempts) = observed.attempts.filter(|attempts| now < attempts.next) {
        return Decision::at(attempts.next);
    }
    match request(observed, pod, world, seed, now) {
        Ok(effects) => Decision::now(effects),
        Err(Waits { cause, message }) => {
            let mut told = explain(pod, cause, message, now);
            // A host that falls silent tells nobody, and with it a domain may be gone.
            let look = placement::is_constrained(pod).then(|| now + placement::LEASE);
            told.wake = look.into_iter().chain(told.wake).min();
            told
        }
    }
}

/// Says why the pod waits, unless its condition says so already, and not long ago.
pub(super) fn explain(pod: &Pod, cause: Cause, message: String, now: Timestamp) -> Decision {
    let conditions = pod
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten());
    let said = conditions
        .filter(|c| c.type_ == "PodScheduled" && c.status == "False")
        .find(|c| c.message.as_deref() == Some(&message));
    let again = said.map(|c| c.last_probe_time.as_ref().map_or(now, |told| told.0 + TOLD));
    match again {
        Some(again) if now < again => Decision::at(again),
        Some(_) | None => Decision::now([Effect::Explain { cause, message }]),
    }
}

fn request(
    observed: &Observed<'_>,
    pod: &Pod,
    world: &World<'_>,
    seed: u64,
    now: Timestamp,
) -> Result<Vec<Effect>, Waits> {
    let (Some(spec), Some(pod_reference)) = (&pod.spec, reference(pod)) else {
        return Err(Waits::new(
            Cause::Unsupported,
            "the pod has no name, uid or spec",
        ));
    };
    let found = profile(pod, &pod_reference.namespace, world);
    let nothing = Allowances::default();
    let allow = found.as_ref().map_or(&nothing, |(_, spec)| &spec.allow);
    permitted(pod, world, allow)?;
    let (profile_name, profile) = found?;
    let required = required(spec, profile)?;
    let Launch {
        role,
        subnets,
        security_groups,
    } = launch(profile_name, profile, world.roles, world.network)
        .map_err(|why| Waits::new(Cause::Profile, why))?;
    let images = images(spec);
    // As hosts name them.
    let references: Vec<String> = images
        .iter()
        .filter_map(|image| Some(normalise(&image.reference).ok()?.to_string()))
        .collect();
    let pull_credentials =
        !role.image_pull_secrets.is_empty() || !credentials::of_pod(pod).is_empty();
    let environment_name = names::environment(&pod_reference.uid);
    let held = observed
        .interface
        .filter(|interface| is_usable(interface, &environment_name));
    let last = observed.attempts.and_then(|attempts| attempts.address);
    let free = free(&subnets, last, world.network, seed);
    let zones = subnets.iter().map(|(_, subnet)| subnet.zone.as_str());
    let zones: BTreeMap<&str, bool> = zones.map(|zone| (zone, free.contains_key(zone))).collect();
    let wanted = Request {
        pod,
        spec,
        size: required.size,
        zones: &zones,
        holds: held.map(|interface| interface.spec.host.as_str()),
        images: &references,
        avoid: observed.attempts.map(|attempts| attempts.host.as_str()),
        kubernetes_version: world.kubernetes_version,
        placed: world.placed,
        namespaces: world.namespaces,
    };
    let host = placement::choose(world.candidates, &wanted)
        .map_err(|no| Waits::new(Cause::from(&no), no_host(&no, &subnets, &zones)))?;
    let held = held.filter(|interface| interface.spec.host == host.name);
    let (address, interface) =
        if let Some(address) = held.and_then(|interface| interface.spec.address.parse().ok()) {
            (address, None)
        } else {
            let (subnet, address) = *free
                .get(host.spec.zone.as_str())
                .ok_or_else(|| Waits::new(Cause::Address, no_address(&subnets, &zones)))?;
            let spec = NetworkInterfaceSpec {
                address: address.to_string(),
                mac: names::mac(address),
                subnet: subnet.to_owned(),
                security_groups,
                environment: EnvironmentReference {
                    name: environment_name.clone(),
                },
                host: host.name.clone(),
            };
            (address, Some(create_interface(address, spec)))
        };
    let mut environment = Environment::new(
        &environment_name,
        EnvironmentSpec {
            pod: pod_reference,
            profile: profile_name.to_owned(),
            pod_execution_role: profile.pod_execution_role.clone(),
            size: required.size,
            scratch_gib: required.scratch_gib,
            host: host.name.clone(),
            node: names::node(address, &host.spec.region),
            network_interface: names::network_interface(address),
            address: address.to_string(),
            images,
            pull_credentials,
            kubernetes_version: world.kubernetes_version.to_owned(),
        },
    );
    let requested = (labels::REQUESTED_AT.to_owned(), now.to_string());
    environment.metadata.annotations = Some([requested].into());
    environment.metadata.finalizers = Some(vec![
        labels::CONTROL_FINALIZER.to_owned(),
        labels::HOST_FINALIZER.to_owned(),
    ]);
    let node = environment.spec.node.clone();
    let size = required.size.to_string();
    Ok(interface
        .into_iter()
        .chain([
            Effect::CreateEnvironment(Box::new(environment)),
            Effect::Annotate(vec![(labels::CAPACITY_PROVISIONED, size)]),
            Effect::Nominate { node: Some(node) },
        ])
        .collect())
}

fn create_interface(address: Ipv4Addr, spec: NetworkInterfaceSpec) -> Effect {
    let mut new = NetworkInterface::new(&names::network_interface(address), spec);
    new.metadata.finalizers = Some(vec![labels::CONTROL_FINALIZER.to_owned()]);
    Effect::CreateInterface(Box::new(new))
}

/// The pod's images, each with the strictest policy that one of its containers has.
fn images(spec: &PodSpec) -> Vec<EnvironmentImage> {
    let mut images: BTreeMap<&str, PullPolicy> = BTreeMap::new();
    for container in contract::all_containers(spec) {
        let Some(reference) = container.image.as_deref() else {
            continue;
        };
        let policy = match container.image_pull_policy.as_deref() {
            Some("Always") => PullPolicy::Always,
            Some("Never") => PullPolicy::Never,
            // The API server sets one of the three.
            Some(_) | None => PullPolicy::IfNotPresent,
        };
        let strictest = images.entry(reference).or_insert(policy);
        *strictest = policy.max(*strictest);
    }
    images
        .into_iter()
        .map(|(reference, pull_policy)| EnvironmentImage {
            reference: reference.to_owned(),
            pull_policy,
        })
        .collect()
}

/// Whether the pod is one that can run here at all.
fn permitted(pod: &Pod, world: &World<'_>, allow: &Allowances) -> Result<(), Waits> {
    let refused =
        |parts: &[String]| Waits::new(Cause::Unsupported, messages::pod_not_supported(parts));
    let violations = contract::violations(pod, world.claims, allow);
    if !violations.is_empty() {
        return Err(refused(&violations));
    }
    // The node would refuse it too, but only after its VM has started, and for good.
    let unsupported = crate::pod::admission::unsupported(pod);
    if !unsupported.is_empty() {
        let part = format!(
            "fields not supported by this version of the runtime: {}",
            unsupported.join(", ")
        );
        return Err(refused(&[part]));
    }
    Ok(())
}

/// What the pod's VM must have.
fn required(spec: &PodSpec, profile: &FargateProfileSpec) -> Result<Requirement, Waits> {
    sizing::requirement(spec, profile.sizing).map_err(|error| {
        let cause = match error {
            SizingError::TooLarge => Cause::TooLarge,
            SizingError::Invalid(_) => Cause::Unsupported,
        };
        Waits::new(cause, error.to_string())
    })
}

/// In each zone the first subnet with a free address, and one of these; the subnet of an address with
/// which an attempt failed comes last.
fn free<'a>(
    subnets: &[(&'a str, &'a Subnet)],
    failed: Option<Ipv4Addr>,
    network: &Network,
    seed: u64,
) -> BTreeMap<&'a str, (&'a str, Ipv4Addr)> {
    let has_failed = |subnet: &Subnet| failed.is_some_and(|address| subnet.cidr.contains(&address));
    let mut subnets = subnets.to_vec();
    subnets.sort_by_key(|(_, subnet)| has_failed(subnet));
    let mut free = BTreeMap::new();
    for (name, subnet) in subnets {
        if !free.contains_key(subnet.zone.as_str())
            && let Some(address) =
                addresses::choose(subnet.cidr, &network.taken, &network.recent, seed)
        {
            free.insert(subnet.zone.as_str(), (name, address));
        }
    }
    free
}

fn reference(pod: &Pod) -> Option<PodReference> {
    Some(PodReference {
        namespace: pod.metadata.namespace.clone()?,
        name: pod.metadata.name.clone()?,
        uid: pod.metadata.uid.clone()?,
    })
}

/// The profile that the pod carries, if its selectors match still: labels can be edited.
fn profile<'a>(
    pod: &Pod,
    namespace: &str,
    world: &World<'a>,
) -> Result<(&'a str, &'a FargateProfileSpec), Waits> {
    admission::profile_of(pod, namespace, world.profiles)
        .and_then(|name| world.profiles.get_key_value(name))
        .map(|(name, spec)| (name.as_str(), spec))
        .ok_or_else(|| {
            let named = pod.metadata.labels.as_ref().and_then(|all| all.get(labels::FARGATE_PROFILE));
            Waits::new(Cause::Profile, match named {
                Some(name) => format!(
                    "Misconfigured Fargate Profile: fargate profile {name} does not exist or none of its selectors matches the pod"
                ),
                None => "no Fargate profile has a selector that matches the pod".to_owned(),
            })
        })
}

/// What the pod is told.
fn no_host(no: &NoHost, subnets: &[(&str, &Subnet)], zones: &BTreeMap<&str, bool>) -> String {
    match Cause::from(no) {
        Cause::Selector => messages::node_unmet(&no.unmet),
        Cause::Address => format!("{} ({no})", no_address(subnets, zones)),
        Cause::Capacity => format!("{} ({no})", messages::NO_CAPACITY),
        _others => no.to_string(),
    }
}

fn no_address(subnets: &[(&str, &Subnet)], zones: &BTreeMap<&str, bool>) -> String {
    let list: Vec<_> = subnets
        .iter()
        .filter(|(_, subnet)| zones.get(subnet.zone.as_str()) == Some(&false))
        .map(|(name, subnet)| format!("{name} ({})", subnet.cidr))
        .collect();
    format!(
        "no free IP address in subnet {}; add a subnet or delete pods",
        list.join(", ")
    )
}

/// Whether an interface that an earlier attempt made for this pod can be used again.
fn is_usable(interface: &NetworkInterface, environment: &str) -> bool {
    let released = interface
        .status
        .as_ref()
        .is_some_and(|s| s.phase == monopod_api::network::InterfacePhase::Cooling);
    interface.spec.environment.name == environment
        && interface.metadata.deletion_timestamp.is_none()
        && !released
}
