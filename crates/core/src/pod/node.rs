//! The `Node` object, as users of EKS Fargate know it.

use crate::taints::our_taint;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{
    DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeSpec, NodeStatus,
    NodeSystemInfo,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference, Time};
use monopod_api::{KUBERNETES_VERSION, labels};
use monopod_wire::Task;
use std::collections::BTreeMap;
use std::time::Duration;

/// Makes the API server send exec and attach as WebSocket.
const DECLARED_FEATURES: [&str; 1] = ["ExtendWebSocketsToKubelet"];

/// What the running system says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct System {
    /// `uname -r`.
    pub kernel: String,
    /// Of this boot.
    pub boot_id: String,
    /// Drawn after GO, so that clones differ.
    pub machine_id: String,
}

/// The labels of every node on a machine. Each has its host name beside them.
pub fn labels_on(region: &str, zone: &str, host: &str) -> BTreeMap<String, String> {
    owned(&[
        ("beta.kubernetes.io/arch", "amd64"),
        ("beta.kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", "amd64"),
        ("kubernetes.io/os", "linux"),
        ("failure-domain.beta.kubernetes.io/region", region),
        ("failure-domain.beta.kubernetes.io/zone", zone),
        ("topology.kubernetes.io/region", region),
        ("topology.kubernetes.io/zone", zone),
        (labels::COMPUTE_TYPE, labels::COMPUTE_TYPE_FARGATE),
        (labels::TOPOLOGY_HOST, host),
    ])
}

/// The node of a task, Ready as of `now`.
pub fn node(task: &Task, system: &System, now: Timestamp) -> Node {
    let mut labels = labels_on(&task.region, &task.zone, &task.host);
    labels.insert("kubernetes.io/hostname".to_owned(), task.hostname.clone());
    let annotations = [
        ("node.alpha.kubernetes.io/ttl", "0"),
        (
            "volumes.kubernetes.io/controller-managed-attach-detach",
            "true",
        ),
    ];
    Node {
        metadata: ObjectMeta {
            name: Some(task.node.clone()),
            labels: Some(labels),
            annotations: Some(owned(&annotations)),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            provider_id: Some(task.provider_id.clone()),
            taints: Some(vec![our_taint()]),
            ..NodeSpec::default()
        }),
        status: Some(status(task, system, None, now)),
    }
}

/// The node's status, Ready as of `now`, or since when `stored` is.
pub fn status(task: &Task, system: &System, stored: Option<&Node>, now: Timestamp) -> NodeStatus {
    let capacity = BTreeMap::from([
        ("cpu".to_owned(), Quantity(format!("{}m", task.cpu_millis))),
        (
            "memory".to_owned(),
            Quantity(format!("{}Mi", task.memory_mib)),
        ),
        (
            "ephemeral-storage".to_owned(),
            Quantity(format!("{}Ki", task.scratch_bytes / 1024)),
        ),
        ("pods".to_owned(), Quantity("1".to_owned())),
    ]);
    let address = |kind: &str, address: &str| NodeAddress {
        type_: kind.to_owned(),
        address: address.to_owned(),
    };
    NodeStatus {
        addresses: Some(vec![
            address("InternalIP", &task.interface.address.to_string()),
            address("InternalDNS", &task.hostname),
            address("Hostname", &task.hostname),
        ]),
        allocatable: Some(capacity.clone()),
        capacity: Some(capacity),
        conditions: Some(conditions(stored, now)),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint {
                port: i32::from(labels::KUBELET_PORT),
            }),
        }),
        declared_features: Some(DECLARED_FEATURES.map(str::to_owned).to_vec()),
        node_info: Some(NodeSystemInfo {
            architecture: "amd64".to_owned(),
            boot_id: system.boot_id.clone(),
            container_runtime_version: concat!("monopod://", env!("CARGO_PKG_VERSION")).to_owned(),
            kernel_version: system.kernel.clone(),
            kube_proxy_version: String::new(),
            kubelet_version: format!("{KUBERNETES_VERSION}-monopod"),
            machine_id: system.machine_id.clone(),
            operating_system: "linux".to_owned(),
            os_image: "Monopod".to_owned(),
            system_uuid: task.pod.uid.clone(),
            ..NodeSystemInfo::default()
        }),
        ..NodeStatus::default()
    }
}

/// The node's conditions: fine as of `now`, or since when `stored` is. A node that is not fine cannot tell.
pub fn conditions(stored: Option<&Node>, now: Timestamp) -> Vec<NodeCondition> {
    let rows = [
        (
            "MemoryPressure",
            "False",
            "KubeletHasSufficientMemory",
            "kubelet has sufficient memory available",
        ),
        (
            "DiskPressure",
            "False",
            "KubeletHasNoDiskPressure",
            "kubelet has no disk pressure",
        ),
        (
            "PIDPressure",
            "False",
            "KubeletHasSufficientPID",
            "kubelet has sufficient PID available",
        ),
        (
            "Ready",
            "True",
            "KubeletReady",
            "kubelet is posting ready status",
        ),
    ];
    rows.map(|(kind, status, reason, message)| NodeCondition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_heartbeat_time: Some(Time(now)),
        last_transition_time: stored
            .and_then(|node| condition(node, kind))
            .filter(|stored| stored.status == status)
            .and_then(|stored| stored.last_transition_time.clone())
            .or(Some(Time(now))),
    })
    .to_vec()
}

/// The kubelet's `nodeStatusReportFrequency`: how often a node says again that it is fine.
const HEARTBEAT: SignedDuration = SignedDuration::from_mins(5);

/// Whether a node that is fine must say so: the API server has it otherwise, or from long ago.
///
/// Kubernetes sets the conditions of a node that it did not hear of for 50 s to Unknown, and never
/// takes that back: pods are evicted after 300 s in which nobody did.
pub fn must_tell(stored: &Node, now: Timestamp) -> bool {
    !conditions(None, now).iter().all(|ours| {
        let Some(stored) = condition(stored, &ours.type_) else {
            return false;
        };
        let heard = stored.last_heartbeat_time.as_ref();
        let age = heard.map(|Time(heard)| now.duration_since(*heard));
        // A time to come is of a clock that was wrong.
        stored.status == ours.status && age.is_some_and(|age| !age.is_negative() && age < HEARTBEAT)
    })
}

fn condition<'a>(node: &'a Node, kind: &str) -> Option<&'a NodeCondition> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

/// How often a node renews its lease: the kubelet does it four times in the lease's time.
pub const RENEW: Duration = Duration::from_secs(10);

/// What a node's lease says that is renewed at `now`.
pub fn lease_spec(node: &str, now: Timestamp) -> LeaseSpec {
    LeaseSpec {
        holder_identity: Some(node.to_owned()),
        lease_duration_seconds: Some(40),
        renew_time: Some(MicroTime(now)),
        ..LeaseSpec::default()
    }
}

/// The lease, new at `now`, of the node that has this name and uid.
pub fn lease(node: &str, uid: &str, now: Timestamp) -> Lease {
    Lease {
        metadata: ObjectMeta {
            name: Some(node.to_owned()),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: node.to_owned(),
                uid: uid.to_owned(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(lease_spec(node, now)),
    }
}

/// Whether a control plane of this version can be served: its minor version is ours.
pub fn is_same_minor(control_plane: &str) -> bool {
    fn minor(version: &str) -> Option<(&str, &str)> {
        let mut parts = version.trim_start_matches('v').split('.');
        Some((parts.next()?, parts.next()?))
    }
    minor(control_plane).is_some() && minor(control_plane) == minor(KUBERNETES_VERSION)
}

fn owned(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|&(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn task() -> Task {
        serde_json::from_value(serde_json::json!({
            "environment": "env-1", "pod": {"namespace": "ns", "name": "p", "uid": "u"},
            "node": "fargate-ip-10-0-1-23.local-1.compute.internal",
            "hostname": "ip-10-0-1-23.local-1.compute.internal",
            "region": "local-1", "zone": "local-1a", "host": "host-1", "providerId": "monopod:///local-1a/env-1",
            "apiServer": "https://172.31.0.1:6443", "clusterDns": "10.100.0.10",
            "clusterDomain": "cluster.local", "kubernetesVersion": "v1.37.2",
            "cpuMillis": 250, "memoryMib": 512, "scratchBytes": 21_474_836_480_u64,
            "interface": {"address": "10.0.1.23", "mac": "02:00:0a:00:01:17",
                          "gateway": "10.0.1.1", "gatewayMac": "02:00:00:00:00:01", "mtu": 1450},
        }))
        .unwrap()
    }

    #[test]
    fn the_node_is_as_users_know_it() {
        insta::assert_yaml_snapshot!(node(&task(), &System::default(), Timestamp::UNIX_EPOCH));
    }

    proptest! {
        /// Exactly if one thing is not stored as it would be told, or so long ago that it must be said again.
        #[test]
        fn a_node_tells_what_is_not_known_of_it(
            ages in prop::collection::vec(0..300_i64, 4),
            spoilt in prop::option::of((0..4_usize, 0..4_u8, prop_oneof![300..9_000_i64, -400..0_i64])),
        ) {
            let at = |second| Timestamp::from_second(second).unwrap();
            let (mut stored, now) = (node(&task(), &System::default(), at(1_000)), at(10_000));
            let mut since = vec![Some(Time(at(1_000))); 4];
            let all = stored.status.as_mut().unwrap().conditions.as_mut().unwrap();
            for (condition, age) in all.iter_mut().zip(&ages) {
                condition.last_heartbeat_time = Some(Time(at(10_000 - age)));
            }
            prop_assert!(!must_tell(&stored, now));
            if let Some((which, how, age)) = spoilt {
                let all = stored.status.as_mut().unwrap().conditions.as_mut().unwrap();
                match how {
                    0 => all[which].last_heartbeat_time = Some(Time(at(10_000 - age))),
                    1 => all[which].last_heartbeat_time = None,
                    2 => all[which].status = "Unknown".to_owned(),
                    _ => all[which].type_ = "Other".to_owned(),
                }
                if how > 1 {
                    since[which] = Some(Time(now));
                }
                prop_assert!(must_tell(&stored, now));
            }
            let told = status(&task(), &System::default(), Some(&stored), now);
            let transitions = told.conditions.iter().flatten().map(|c| c.last_transition_time.clone());
            prop_assert_eq!(transitions.collect::<Vec<_>>(), since);
            stored.status = Some(told);
            prop_assert!(!must_tell(&stored, now));
        }
    }

    #[test]
    fn only_the_minor_version_counts() {
        for (version, same) in [
            (KUBERNETES_VERSION, true),
            ("v1.37.0", true),
            ("v1.37.9+k3s1", true),
            ("v1.36.2", false),
            ("v2.37.2", false),
            ("", false),
            ("v1", false),
        ] {
            assert_eq!(is_same_minor(version), same, "{version}");
        }
    }
}
