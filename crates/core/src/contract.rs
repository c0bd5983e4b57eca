//! What a pod may ask for, in EKS Fargate's words where it may not.
//!
//! Order and spelling of the parts are those of real events (`Pod not supported on Fargate: …`).

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Volume};

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

/// What the pod asks for and cannot have; empty if it is within the contract.
pub fn violations(pod: &Pod) -> Vec<String> {
    let Some(spec) = &pod.spec else {
        return vec!["fields not supported: spec is missing".to_owned()];
    };
    let containers: Vec<&Container> = all_containers(spec).collect();
    [
        part("fields not supported: ", &host_namespaces(spec), ", "),
        part(
            "invalid SecurityContext fields: ",
            &containers
                .iter()
                .flat_map(|c| security(c))
                .collect::<Vec<_>>(),
            ",",
        ),
        part(
            "volumes not supported: ",
            &spec
                .volumes
                .iter()
                .flatten()
                .filter_map(volume)
                .collect::<Vec<_>>(),
            ", ",
        ),
        containers
            .iter()
            .any(|c| {
                c.volume_devices
                    .as_ref()
                    .is_some_and(|devices| !devices.is_empty())
            })
            .then(|| "volumeDevices not supported".to_owned()),
        containers
            .iter()
            .flat_map(|c| c.ports.iter().flatten())
            .any(|port| {
                port.host_port.unwrap_or(0) != 0
                    || port.host_ip.as_ref().is_some_and(|ip| !ip.is_empty())
            })
            .then(|| "port contains HostIP or HostPort".to_owned()),
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

fn part(prefix: &str, found: &[String], separator: &str) -> Option<String> {
    (!found.is_empty()).then(|| format!("{prefix}{}", found.join(separator)))
}

fn host_namespaces(spec: &PodSpec) -> Vec<String> {
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

/// The entries of one container. They are neither merged nor deduplicated with the others'.
fn security(container: &Container) -> Vec<String> {
    let Some(context) = &container.security_context else {
        return Vec::new();
    };
    let mut found = Vec::new();
    if context.privileged == Some(true) {
        found.push("Privileged".to_owned());
    }
    if context.allow_privilege_escalation == Some(true) {
        found.push("AllowPrivilegeEscalation".to_owned());
    }
    let added = context
        .capabilities
        .as_ref()
        .and_then(|c| c.add.as_deref())
        .unwrap_or_default();
    let forbidden: Vec<_> = added
        .iter()
        .map(String::as_str)
        .filter(|c| !CAPABILITIES.contains(c))
        .collect();
    if !forbidden.is_empty() {
        found.push(format!("Capabilities added: {}", forbidden.join(", ")));
    }
    found
}

fn volume(volume: &Volume) -> Option<String> {
    let supported = volume.empty_dir.is_some()
        || volume.secret.is_some()
        || volume.config_map.is_some()
        || volume.projected.is_some()
        || volume.downward_api.is_some();
    (!supported).then(|| format!("{} is of an unsupported volume Type", volume.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(spec: &Value) -> String {
        let pod: Pod = serde_json::from_value(json!({ "spec": spec })).expect("a pod");
        let found = violations(&pod);
        if found.is_empty() {
            String::new()
        } else {
            monopod_api::messages::pod_not_supported(&found)
        }
    }

    /// Messages as users pasted them from real clusters.
    #[test]
    fn real_events_are_reproduced() {
        let privileged = json!({"name": "c", "securityContext": {"privileged": true}});
        for (spec, expected) in [
            (json!({"containers": [{"name": "c"}]}), ""),
            (
                json!({"hostNetwork": true, "containers": [{"name": "c", "securityContext": {"privileged": true}, "ports": [{"containerPort": 1, "hostPort": 1}]}]}),
                "Pod not supported on Fargate: fields not supported: HostNetwork, invalid SecurityContext fields: Privileged, port contains HostIP or HostPort",
            ),
            (
                json!({"containers": [privileged], "volumes": [{"name": "x", "hostPath": {"path": "/"}}]}),
                "Pod not supported on Fargate: invalid SecurityContext fields: Privileged, volumes not supported: x is of an unsupported volume Type",
            ),
            (
                json!({"containers": [
                    {"name": "a", "securityContext": {"capabilities": {"add": ["DAC_READ_SEARCH", "DAC_OVERRIDE"]}}},
                    {"name": "b", "securityContext": {"capabilities": {"add": ["DAC_READ_SEARCH", "DAC_OVERRIDE"]}}}]}),
                "Pod not supported on Fargate: invalid SecurityContext fields: Capabilities added: DAC_READ_SEARCH,Capabilities added: DAC_READ_SEARCH",
            ),
            (
                json!({"initContainers": [privileged], "containers": [privileged]}),
                "Pod not supported on Fargate: invalid SecurityContext fields: Privileged,Privileged",
            ),
        ] {
            assert_eq!(check(&spec), expected);
        }
    }

    #[test]
    fn a_volume_that_no_one_knows_is_refused() {
        // A type of a later Kubernetes version, which our types drop when they read the pod.
        let refused =
            check(&json!({"containers": [], "volumes": [{"name": "v", "quantumDisk": {}}]}));
        assert!(
            refused.ends_with("v is of an unsupported volume Type"),
            "{refused}"
        );
    }
}
