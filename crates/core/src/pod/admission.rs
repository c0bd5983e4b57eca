//! Which pod the node runs, and what it cannot run.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Probe, Volume};
use k8s_openapi::api::node::v1::RuntimeClass;
use monopod_api::{labels, messages};
use monopod_wire::PodIdentity;

/// Kernel parameters that belong to a pod alone; upstream's safe set.
const SAFE_SYSCTLS: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
];

/// A pod that never runs on this node. Its phase becomes `Failed`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// `status.reason`, and the event's reason.
    pub reason: &'static str,
    /// `status.message`, and the event's message.
    pub message: String,
}

impl Refusal {
    fn new(message: &str) -> Self {
        Self {
            reason: messages::UNSUPPORTED_POD_SPEC,
            message: format!("Pod not supported: {message}"),
        }
    }
}

/// Decides whether the node runs a pod that is bound to it: only the one that it was made for.
pub fn admit(own: &PodIdentity, pod: &Pod) -> Result<(), Refusal> {
    let scheduler = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.scheduler_name.as_deref());
    if scheduler != Some(labels::SCHEDULER_NAME) {
        return Err(Refusal::new(&format!(
            "SchedulerName is not {}",
            labels::SCHEDULER_NAME
        )));
    }
    let meta = &pod.metadata;
    if own.uid.is_empty()
        || meta.uid.as_ref() != Some(&own.uid)
        || meta.namespace.as_ref() != Some(&own.namespace)
        || meta.name.as_ref() != Some(&own.name)
    {
        return Err(Refusal::new(&format!(
            "node runs only pod {}/{}",
            own.namespace, own.name
        )));
    }
    let fields = unsupported(pod);
    if fields.is_empty() {
        Ok(())
    } else {
        Err(Refusal::new(&format!(
            "fields not supported by this runtime: {}",
            fields.join(", ")
        )))
    }
}

/// The handler of the runtime classes that a VM serves: what containerd calls its ordinary runtime, so that
/// classes made for other nodes serve here as well.
const HANDLER: &str = "runc";

/// Decides whether the node runs a pod of a runtime class. The class may have been deleted since the pod
/// was made.
pub fn admit_class(name: &str, class: Option<&RuntimeClass>) -> Result<(), Refusal> {
    let field = "spec.runtimeClassName";
    match class {
        Some(class) if class.handler == HANDLER => Ok(()),
        Some(class) => Err(Refusal::new(&format!(
            "{field}: {name} has the handler {}, and a microVM serves {HANDLER} alone; use a class with that handler, or none",
            class.handler
        ))),
        None => Err(Refusal::new(&format!(
            "{field}: there is no runtime class {name}; use another, or none"
        ))),
    }
}

/// The fields of a pod that the runtime cannot honour, each by its path. Empty for most pods.
pub fn unsupported(pod: &Pod) -> Vec<String> {
    let mut found = Vec::new();
    let Some(spec) = &pod.spec else {
        return vec!["spec".to_owned()];
    };
    of_pod(spec, &mut found);
    for volume in spec.volumes.iter().flatten() {
        of_volume(volume, &mut found);
    }
    let init = spec.init_containers.as_deref().unwrap_or_default();
    for container in init {
        of_container(container, true, &mut found);
    }
    for container in &spec.containers {
        of_container(container, false, &mut found);
    }
    found
}

/// What changed in a running pod that the runtime cannot follow, each by its path.
///
/// The pod goes on as it was; whoever changed it is told by an event.
pub fn unsupported_changes(before: &Pod, after: &Pod) -> Vec<String> {
    let mut found = Vec::new();
    let (Some(before), Some(after)) = (&before.spec, &after.spec) else {
        return found;
    };
    if before.resources != after.resources {
        found.push("spec.resources".to_owned());
    }
    let ephemeral = |spec: &PodSpec| spec.ephemeral_containers.as_ref().map_or(0, Vec::len);
    if ephemeral(after) > ephemeral(before) {
        found.push("spec.ephemeralContainers".to_owned());
    }
    let lists = [
        (
            "initContainers",
            before.init_containers.as_ref(),
            after.init_containers.as_ref(),
        ),
        (
            "containers",
            Some(&before.containers),
            Some(&after.containers),
        ),
    ];
    for (list, before, after) in lists {
        for container in after.into_iter().flatten() {
            let same = |c: &&Container| c.name == container.name;
            let Some(old) = before.into_iter().flatten().find(same) else {
                continue;
            };
            if old.image != container.image {
                found.push(format!("spec.{list}[{}].image", container.name));
            }
            if old.resources != container.resources {
                found.push(format!("spec.{list}[{}].resources", container.name));
            }
        }
    }
    found
}

fn of_pod(spec: &PodSpec, found: &mut Vec<String>) {
    let context = spec.security_context.as_ref();
    let rows = [
        (spec.host_users == Some(false), "spec.hostUsers"),
        (
            is_some_list(spec.ephemeral_containers.as_ref()),
            "spec.ephemeralContainers",
        ),
        (
            is_some_list(spec.resource_claims.as_ref()),
            "spec.resourceClaims",
        ),
        (
            spec.os.as_ref().is_some_and(|os| os.name != "linux"),
            "spec.os",
        ),
        (
            context.is_some_and(|c| c.windows_options.is_some()),
            "spec.securityContext.windowsOptions",
        ),
        (
            context.is_some_and(|c| c.se_linux_options.is_some()),
            "spec.securityContext.seLinuxOptions",
        ),
        (
            context
                .and_then(|c| c.seccomp_profile.as_ref())
                .is_some_and(|p| p.type_ == "Localhost"),
            "spec.securityContext.seccompProfile",
        ),
        (
            context
                .and_then(|c| c.app_armor_profile.as_ref())
                .is_some_and(|p| p.type_ == "Localhost"),
            "spec.securityContext.appArmorProfile",
        ),
    ];
    let own = spec.resources.iter().flat_map(|r| {
        let kinds = [("limits", &r.limits), ("requests", &r.requests)];
        let names = |(kind, list): (_, &Option<std::collections::BTreeMap<String, _>>)| {
            let names: Vec<_> = list
                .iter()
                .flatten()
                .map(|(name, _)| name.clone())
                .collect();
            names.into_iter().map(move |name| (kind, name))
        };
        kinds.into_iter().flat_map(names)
    });
    for (kind, name) in own.filter(|(_, name)| !["cpu", "memory"].contains(&name.as_str())) {
        found.push(format!("spec.resources.{kind}.{name}"));
    }
    for sysctl in context.iter().flat_map(|c| c.sysctls.iter().flatten()) {
        if !SAFE_SYSCTLS.contains(&sysctl.name.replace('/', ".").as_str()) {
            found.push(format!("spec.securityContext.sysctls[{}]", sysctl.name));
        }
    }
    found.extend(
        rows.into_iter()
            .filter(|row| row.0)
            .map(|row| row.1.to_owned()),
    );
}

fn of_volume(volume: &Volume, found: &mut Vec<String>) {
    let path = |field: &str| format!("spec.volumes[{}]{field}", volume.name);
    let simple = volume.empty_dir.is_some()
        || volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.downward_api.is_some();
    if simple {
        if let Some(medium) = volume.empty_dir.as_ref().and_then(|e| e.medium.as_deref())
            && !medium.is_empty()
            && medium != "Memory"
        {
            found.push(path(".emptyDir.medium"));
        }
        // In memory the limit is the file system's size; on disk nothing would hold to it.
        if let Some(empty) = &volume.empty_dir
            && empty.size_limit.is_some()
            && empty.medium.as_deref() != Some("Memory")
        {
            found.push(path(".emptyDir.sizeLimit"));
        }
    } else if let Some(projected) = &volume.projected {
        let unknown = projected.sources.iter().flatten().any(|source| {
            source.config_map.is_none()
                && source.secret.is_none()
                && source.downward_api.is_none()
                && source.service_account_token.is_none()
        });
        if unknown {
            found.push(path(".projected.sources"));
        }
    } else {
        found.push(path(""));
    }
}

fn of_container(container: &Container, init: bool, found: &mut Vec<String>) {
    let list = if init { "initContainers" } else { "containers" };
    let path = |field: &str| format!("spec.{list}[{}].{field}", container.name);
    let context = container.security_context.as_ref();
    let mounts = container.volume_mounts.as_deref().unwrap_or_default();
    let resources = container.resources.as_ref();
    let limits = resources.and_then(|r| r.limits.as_ref());
    let requests = resources.and_then(|r| r.requests.as_ref());
    // Whatever else is asked for, a GPU or huge pages, no VM has; and no limit of storage is kept.
    for name in limits.into_iter().flat_map(|l| l.keys()) {
        if !["cpu", "memory"].contains(&name.as_str()) {
            found.push(path(&format!("resources.limits.{name}")));
        }
    }
    for name in requests.into_iter().flat_map(|r| r.keys()) {
        if !["cpu", "memory", "ephemeral-storage"].contains(&name.as_str()) {
            found.push(path(&format!("resources.requests.{name}")));
        }
    }
    let rows = [
        (
            context.is_some_and(|c| c.se_linux_options.is_some()),
            "securityContext.seLinuxOptions",
        ),
        (
            context
                .and_then(|c| c.seccomp_profile.as_ref())
                .is_some_and(|p| p.type_ == "Localhost"),
            "securityContext.seccompProfile",
        ),
        (
            context
                .and_then(|c| c.app_armor_profile.as_ref())
                .is_some_and(|p| p.type_ == "Localhost"),
            "securityContext.appArmorProfile",
        ),
        (
            context
                .and_then(|c| c.proc_mount.as_deref())
                .is_some_and(|kind| kind != "Default"),
            "securityContext.procMount",
        ),
        (
            is_tls(container.liveness_probe.as_ref()),
            "livenessProbe.grpc.mode",
        ),
        (
            is_tls(container.readiness_probe.as_ref()),
            "readinessProbe.grpc.mode",
        ),
        (
            is_tls(container.startup_probe.as_ref()),
            "startupProbe.grpc.mode",
        ),
        (
            container
                .lifecycle
                .as_ref()
                .is_some_and(|lifecycle| lifecycle.stop_signal.is_some()),
            "lifecycle.stopSignal",
        ),
        (
            is_some_list(container.volume_devices.as_ref()),
            "volumeDevices",
        ),
        (
            !init && container.restart_policy.is_some()
                || is_some_list(container.restart_policy_rules.as_ref())
                || init
                    && container
                        .restart_policy
                        .as_deref()
                        .is_some_and(|policy| policy != "Always"),
            "restartPolicy",
        ),
        (
            mounts
                .iter()
                .any(|m| m.mount_propagation.as_deref().is_some_and(|p| p != "None")),
            "volumeMounts.mountPropagation",
        ),
        (
            container.ports.iter().flatten().any(|p| {
                let port = p.host_port.filter(|port| *port != 0);
                port.is_some_and(|port| port != p.container_port)
            }),
            "ports.hostPort",
        ),
    ];
    found.extend(rows.into_iter().filter(|row| row.0).map(|row| path(row.1)));
}

/// Asks for TLS to a gRPC service, which upstream has behind a gate that is off.
fn is_tls(probe: Option<&Probe>) -> bool {
    let mode = probe.and_then(|probe| probe.grpc.as_ref()?.mode.as_deref());
    mode.is_some_and(|mode| mode != "Plaintext")
}

fn is_some_list<T>(list: Option<&Vec<T>>) -> bool {
    list.is_some_and(|list| !list.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn own() -> PodIdentity {
        PodIdentity {
            namespace: "ns".to_owned(),
            name: "p".to_owned(),
            uid: "u".to_owned(),
        }
    }

    fn pod(spec: serde_json::Value) -> Pod {
        let mut spec = spec;
        spec["schedulerName"] = json!("fargate-scheduler");
        if spec.get("containers").is_none() {
            spec["containers"] = json!([{"name": "c", "image": "i"}]);
        }
        serde_json::from_value(
            json!({"metadata": {"namespace": "ns", "name": "p", "uid": "u"}, "spec": spec}),
        )
        .unwrap()
    }

    #[test]
    fn the_own_pod_is_admitted() {
        assert_eq!(admit(&own(), &pod(json!({}))), Ok(()));
    }

    #[test]
    fn a_pod_of_another_scheduler_is_refused_in_the_known_words() {
        let mut other = pod(json!({}));
        other.spec.as_mut().unwrap().scheduler_name = Some("default-scheduler".to_owned());
        let refusal = admit(&own(), &other).unwrap_err();
        assert_eq!(refusal.reason, "UnsupportedPodSpec");
        assert_eq!(
            refusal.message,
            "Pod not supported: SchedulerName is not fargate-scheduler"
        );
    }

    proptest! {
        /// Nothing but the pod that the node was made for is ever admitted.
        #[test]
        fn only_the_own_pod(namespace in "ns|other", name in "p|other", uid in prop::option::of("u|v|"), scheduler in prop::option::of("fargate-scheduler|default-scheduler|")) {
            let mut pod = pod(json!({}));
            let is_own = namespace == "ns" && name == "p" && uid.as_deref() == Some("u")
                && scheduler.as_deref() == Some("fargate-scheduler");
            pod.metadata.namespace = Some(namespace);
            pod.metadata.name = Some(name);
            pod.metadata.uid = uid;
            pod.spec.as_mut().unwrap().scheduler_name = scheduler;
            prop_assert_eq!(admit(&own(), &pod).is_ok(), is_own);
            prop_assert!(admit(&PodIdentity::default(), &pod).is_err());
        }
    }

    #[test]
    fn changes_that_cannot_be_followed_are_named() {
        let before =
            pod(json!({"containers": [{"name": "c", "image": "i"}, {"name": "d", "image": "i"}]}));
        assert!(unsupported_changes(&before, &before).is_empty());
        let after = pod(json!({
            "activeDeadlineSeconds": 5,
            "containers": [{"name": "c", "image": "j"}, {"name": "d", "image": "i", "resources": {"limits": {"cpu": "1"}}}],
            "ephemeralContainers": [{"name": "debug", "image": "i"}],
        }));
        assert_eq!(
            unsupported_changes(&before, &after),
            [
                "spec.ephemeralContainers",
                "spec.containers[c].image",
                "spec.containers[d].resources"
            ]
        );
    }

    #[test]
    fn a_runtime_class_is_one_that_the_vm_serves() {
        let class = |handler: &str| RuntimeClass {
            handler: handler.to_owned(),
            ..Default::default()
        };
        assert_eq!(admit_class("plain", Some(&class("runc"))), Ok(()));
        let refused = [
            (
                admit_class("sandbox", Some(&class("runsc"))),
                "sandbox has the handler runsc",
            ),
            (admit_class("gone", None), "there is no runtime class gone"),
        ];
        for (verdict, words) in refused {
            let refusal = verdict.unwrap_err();
            assert_eq!(refusal.reason, "UnsupportedPodSpec");
            assert!(
                refusal.message.contains("spec.runtimeClassName: ")
                    && refusal.message.contains(words),
                "{}",
                refusal.message
            );
        }
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let named = |spec| unsupported(&pod(spec));
        assert_eq!(
            named(json!({"hostUsers": false, "resources": {"limits": {"hugepages-2Mi": "4Mi"}}})),
            ["spec.resources.limits.hugepages-2Mi", "spec.hostUsers"]
        );
        assert_eq!(
            named(json!({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]})),
            ["spec.volumes[v]"]
        );
        assert_eq!(
            named(
                json!({"volumes": [{"name": "v", "projected": {"sources": [{"clusterTrustBundle": {"path": "x"}}]}}]})
            ),
            ["spec.volumes[v].projected.sources"]
        );
        assert_eq!(
            named(
                json!({"containers": [{"name": "c", "securityContext": {"procMount": "Unmasked"}}]})
            ),
            ["spec.containers[c].securityContext.procMount"]
        );
        assert_eq!(
            named(json!({
                "volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}],
                "containers": [{"name": "c", "resources": {"limits": {"cpu": "1", "ephemeral-storage": "1Gi", "hugepages-2Mi": "4Mi"}, "requests": {"ephemeral-storage": "1Gi", "nvidia.com/gpu": "1"}},
                    "securityContext": {"seLinuxOptions": {"level": "s0"}}}],
            })),
            [
                "spec.volumes[v].emptyDir.sizeLimit",
                "spec.containers[c].resources.limits.ephemeral-storage",
                "spec.containers[c].resources.limits.hugepages-2Mi",
                "spec.containers[c].resources.requests.nvidia.com/gpu",
                "spec.containers[c].securityContext.seLinuxOptions",
            ]
        );
        let sysctls = json!({"securityContext": {"sysctls": [
            {"name": "net.ipv4.tcp_syncookies", "value": "1"}, {"name": "kernel.panic", "value": "1"}]}});
        assert_eq!(
            named(sysctls),
            ["spec.securityContext.sysctls[kernel.panic]"]
        );
        assert!(named(json!({
            "securityContext": {"fsGroup": 1, "seccompProfile": {"type": "RuntimeDefault"}},
            "initContainers": [{"name": "i", "restartPolicy": "Always"}],
            "volumes": [{"name": "a", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}, {"name": "b", "secret": {"secretName": "s"}},
                        {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}],
        }))
        .is_empty());
    }
}
