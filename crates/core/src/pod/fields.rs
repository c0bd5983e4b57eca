//! Values that a pod can ask about itself: `fieldRef` and `resourceFieldRef`.

use crate::quantity;
use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What the node knows and the pod's object does not (yet) say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The node's name.
    pub node: String,
    /// The pod's address, which is the node's as well.
    pub address: String,
    /// Allocatable thousandths of a CPU.
    pub cpu_millis: u64,
    /// Allocatable bytes of memory.
    pub memory_bytes: u64,
    /// Allocatable bytes of the scratch disk.
    pub scratch_bytes: u64,
}

/// Value of a field of the pod, or none if the path is not one that a pod can ask for.
pub fn field(pod: &Pod, facts: &Facts, path: &str) -> Option<String> {
    let meta = &pod.metadata;
    if let Some((map, key)) = path.strip_suffix("']").and_then(|p| p.split_once("['")) {
        let map = match map {
            "metadata.labels" => &meta.labels,
            "metadata.annotations" => &meta.annotations,
            _ => return None,
        };
        return Some(
            map.as_ref()
                .and_then(|map| map.get(key))
                .cloned()
                .unwrap_or_default(),
        );
    }
    let text = |value: &Option<String>| Some(value.clone().unwrap_or_default());
    match path {
        "metadata.name" => text(&meta.name),
        "metadata.namespace" => text(&meta.namespace),
        "metadata.uid" => text(&meta.uid),
        "metadata.labels" => Some(map_text(meta.labels.as_ref())),
        "metadata.annotations" => Some(map_text(meta.annotations.as_ref())),
        "spec.nodeName" => Some(facts.node.clone()),
        "spec.serviceAccountName" => pod
            .spec
            .as_ref()
            .and_then(|spec| text(&spec.service_account_name)),
        "status.hostIP" | "status.hostIPs" | "status.podIP" | "status.podIPs" => {
            Some(facts.address.clone())
        }
        _ => None,
    }
}

/// A map as the kubelet writes it: a line `key="value"` for each entry, escaped.
fn map_text(map: Option<&BTreeMap<String, String>>) -> String {
    let mut text = String::new();
    for (key, value) in map.into_iter().flatten() {
        let separator = if text.is_empty() { "" } else { "\n" };
        // A String takes every write.
        let _infallible = write!(text, "{separator}{key}={value:?}");
    }
    text
}

/// Value of a resource of a container, or none if it is not one that a pod can ask for.
///
/// A limit that is not set is the node's allocatable amount.
pub fn resource(
    container: &Container,
    facts: &Facts,
    selector: &ResourceFieldSelector,
) -> Option<String> {
    let (kind, name) = selector.resource.split_once('.')?;
    let resources = container.resources.as_ref();
    let limits = resources.and_then(|r| r.limits.as_ref());
    let requests = resources.and_then(|r| r.requests.as_ref());
    let allocatable = match name {
        "cpu" => facts.cpu_millis,
        "memory" => facts.memory_bytes.saturating_mul(1000),
        "ephemeral-storage" => facts.scratch_bytes.saturating_mul(1000),
        _ => return None,
    };
    let found = match kind {
        "limits" => limits.and_then(|map| map.get(name)),
        "requests" => requests
            .and_then(|map| map.get(name))
            .or_else(|| limits.and_then(|map| map.get(name))),
        _ => return None,
    };
    let value = match (found, kind) {
        (Some(quantity), _) => quantity::millis(quantity).ok()?,
        (None, "requests") => 0,
        (None, _) => allocatable,
    };
    let divisor = selector
        .divisor
        .as_ref()
        .and_then(|divisor| quantity::millis(divisor).ok())
        .filter(|&divisor| divisor > 0)
        .unwrap_or(1000);
    Some(value.div_ceil(divisor).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            node: "n".to_owned(),
            address: "10.0.0.1".to_owned(),
            cpu_millis: 250,
            memory_bytes: 512 << 20,
            scratch_bytes: 20 << 30,
        }
    }

    #[test]
    fn fields_and_refusals() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "p", "labels": {"a": "1", "b": "x\"y\nz"}},
            "spec": {"containers": []},
        }))
        .unwrap();
        let get = |path| field(&pod, &facts(), path);
        assert_eq!(get("metadata.name").as_deref(), Some("p"));
        assert_eq!(get("metadata.labels['a']").as_deref(), Some("1"));
        assert_eq!(get("metadata.annotations['none']").as_deref(), Some(""));
        assert_eq!(
            get("metadata.labels").as_deref(),
            Some("a=\"1\"\nb=\"x\\\"y\\nz\"")
        );
        assert_eq!(get("status.podIP").as_deref(), Some("10.0.0.1"));
        assert_eq!(get("spec.containers"), None);
        assert_eq!(get("metadata.finalizers['x']"), None);
    }

    #[test]
    fn resources_default_to_the_node() {
        let container: Container = serde_json::from_value(serde_json::json!({
            "name": "c", "resources": {"limits": {"cpu": "1500m"}}
        }))
        .unwrap();
        let get = |resource: &str, divisor: Option<&str>| {
            super::resource(
                &container,
                &facts(),
                &serde_json::from_value(
                    serde_json::json!({"resource": resource, "divisor": divisor}),
                )
                .unwrap(),
            )
        };
        assert_eq!(get("limits.cpu", None).as_deref(), Some("2"));
        assert_eq!(get("limits.cpu", Some("1m")).as_deref(), Some("1500"));
        assert_eq!(get("requests.cpu", Some("1m")).as_deref(), Some("1500"));
        assert_eq!(get("limits.memory", Some("1Mi")).as_deref(), Some("512"));
        assert_eq!(get("requests.memory", None).as_deref(), Some("0"));
        assert_eq!(get("limits.gpu", None), None);
    }
}
