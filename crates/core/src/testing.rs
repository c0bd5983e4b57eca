//! Objects for this crate's own tests.

use k8s_openapi::api::core::v1::{Node, Pod};
use monopod_api::environment::{
    Environment, EnvironmentImage, EnvironmentPhase, EnvironmentSpec, EnvironmentStatus, PhaseTime,
    PodReference, PullPolicy,
};
use monopod_api::size::Size;
use monopod_api::{labels, names};
use serde_json::json;

pub(crate) const ADDRESS: std::net::Ipv4Addr = std::net::Ipv4Addr::new(10, 0, 1, 23);

pub(crate) fn environment(pod_uid: &str) -> Environment {
    let mut environment = Environment::new(
        &names::environment(pod_uid),
        EnvironmentSpec {
            pod: PodReference {
                namespace: "default".to_owned(),
                name: "web".to_owned(),
                uid: pod_uid.to_owned(),
            },
            profile: "fp-default".to_owned(),
            pod_execution_role: "default".to_owned(),
            size: Size {
                cpu_millis: 250,
                memory_mib: 512,
            },
            scratch_gib: 20,
            host: "host-1".to_owned(),
            node: names::node(ADDRESS, "local-1"),
            network_interface: names::network_interface(ADDRESS),
            address: ADDRESS.to_string(),
            images: vec![EnvironmentImage {
                reference: "nginx".to_owned(),
                pull_policy: PullPolicy::IfNotPresent,
            }],
            pull_credentials: false,
            kubernetes_version: "v1.37.2".to_owned(),
        },
    );
    environment.metadata.uid = Some(format!("env-uid-{pod_uid}"));
    environment
}

pub(crate) fn in_phase(
    mut environment: Environment,
    phase: EnvironmentPhase,
    since: &str,
) -> Environment {
    environment.status = Some(EnvironmentStatus {
        phase,
        phases: vec![PhaseTime {
            phase,
            time: serde_json::from_value(json!(since)).expect("a time"),
        }],
        ..Default::default()
    });
    environment
}

pub(crate) fn pod(pod_uid: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "default", "uid": pod_uid,
            "labels": {labels::FARGATE_PROFILE: "fp-default"}},
        "spec": {"schedulerName": labels::SCHEDULER_NAME, "containers": [{"name": "c", "image": "nginx"}]},
        "status": {"phase": "Pending"},
    }))
    .expect("a pod")
}

pub(crate) fn ready_node(environment: &Environment) -> Node {
    serde_json::from_value(json!({
        "metadata": {"name": environment.spec.node, "uid": "node-uid"},
        "spec": {"providerID": format!("monopod:///local-1a/{}", environment.metadata.name.as_deref().expect("named"))},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }))
    .expect("a node")
}
