//! The environment variables of a container.
//!
//! Later ones win: the image's, those of services, `envFrom`, `env`.

use super::command::expand;
use super::fields::{self, Facts};
use k8s_openapi::api::core::v1::{ConfigMap, Container, EnvVarSource, Pod, Secret, Service};
use std::collections::{BTreeMap, BTreeSet};

/// `PATH` of a container whose image has none; containerd's.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Objects that a container's variables may come from; absent ones do not exist.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sources {
    /// Config maps of the pod's namespace by name.
    pub config_maps: BTreeMap<String, ConfigMap>,
    /// Secrets of the pod's namespace by name.
    pub secrets: BTreeMap<String, Secret>,
    /// Services of the pod's namespace, and `default/kubernetes`.
    pub services: Vec<Service>,
}

/// Why variables cannot be made. The container waits with `CreateContainerConfigError`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// The object does not exist.
    #[error("{kind} \"{name}\" not found")]
    NoObject {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// The object lacks the key.
    #[error("couldn't find key {key} in {kind} {namespace}/{name}")]
    NoKey {
        /// The key.
        key: String,
        /// `ConfigMap` or `Secret`.
        kind: &'static str,
        /// Namespace of the object.
        namespace: String,
        /// Name of the object.
        name: String,
    },
    /// A secret's value is not text.
    #[error("value of key {key} in Secret {name} is not UTF-8 and cannot be a variable")]
    NotText {
        /// The key.
        key: String,
        /// Name of the secret.
        name: String,
    },
    /// The source is none that the runtime knows.
    #[error("env {name}: valueFrom is not supported")]
    Unsupported {
        /// Name of the variable.
        name: String,
    },
}

/// Names of the config maps and secrets that variables of the pod come from.
pub fn references(pod: &Pod) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut maps, mut secrets) = (BTreeSet::new(), BTreeSet::new());
    let spec = pod.spec.as_ref();
    let init = spec.and_then(|s| s.init_containers.as_ref());
    for container in init
        .into_iter()
        .flatten()
        .chain(spec.into_iter().flat_map(|s| &s.containers))
    {
        for source in container.env_from.iter().flatten() {
            maps.extend(source.config_map_ref.iter().map(|r| r.name.clone()));
            secrets.extend(source.secret_ref.iter().map(|r| r.name.clone()));
        }
        for from in container
            .env
            .iter()
            .flatten()
            .filter_map(|e| e.value_from.as_ref())
        {
            maps.extend(from.config_map_key_ref.iter().map(|r| r.name.clone()));
            secrets.extend(from.secret_key_ref.iter().map(|r| r.name.clone()));
        }
    }
    (maps, secrets)
}

/// The variables of a container by name.
pub fn variables(
    pod: &Pod,
    container: &Container,
    image: &[String],
    hostname: &str,
    sources: &Sources,
    facts: &Facts,
) -> Result<BTreeMap<String, String>, EnvironmentError> {
    let mut all = BTreeMap::from([
        ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
        ("HOSTNAME".to_owned(), hostname.to_owned()),
    ]);
    all.extend(
        image
            .iter()
            .filter_map(|entry| entry.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned())),
    );
    let service_variables = services(pod, &sources.services);
    all.extend(service_variables.clone());

    // `$(VAR)` sees services and what the spec sets, not what the image sets.
    let mut known = service_variables;
    for source in container.env_from.iter().flatten() {
        let prefix = source.prefix.as_deref().unwrap_or_default();
        let found = if let Some(reference) = &source.config_map_ref {
            from_config_map(&reference.name, reference.optional, sources)?
        } else if let Some(reference) = &source.secret_ref {
            from_secret(&reference.name, reference.optional, sources)?
        } else {
            BTreeMap::new()
        };
        known.extend(
            found
                .into_iter()
                .map(|(key, value)| (format!("{prefix}{key}"), value)),
        );
    }
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (None, Some(from)) => value_from(pod, container, &variable.name, from, sources, facts)?,
            (value, _) => Some(expand(value.as_deref().unwrap_or_default(), &known)),
        };
        if let Some(value) = value {
            known.insert(variable.name.clone(), value);
        }
    }
    all.extend(known);
    Ok(all)
}

fn from_config_map(
    name: &str,
    optional: Option<bool>,
    sources: &Sources,
) -> Result<BTreeMap<String, String>, EnvironmentError> {
    match sources.config_maps.get(name) {
        Some(map) => Ok(map.data.clone().unwrap_or_default()),
        None if optional == Some(true) => Ok(BTreeMap::new()),
        None => Err(no_object("configmap", name)),
    }
}

fn from_secret(
    name: &str,
    optional: Option<bool>,
    sources: &Sources,
) -> Result<BTreeMap<String, String>, EnvironmentError> {
    let Some(secret) = sources.secrets.get(name) else {
        return if optional == Some(true) {
            Ok(BTreeMap::new())
        } else {
            Err(no_object("secret", name))
        };
    };
    secret
        .data
        .iter()
        .flatten()
        .map(|(key, value)| Ok((key.clone(), secret_text(name, key, &value.0)?)))
        .collect()
}

fn secret_text(name: &str, key: &str, value: &[u8]) -> Result<String, EnvironmentError> {
    match std::str::from_utf8(value) {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(EnvironmentError::NotText {
            key: key.to_owned(),
            name: name.to_owned(),
        }),
    }
}

fn no_object(kind: &'static str, name: &str) -> EnvironmentError {
    EnvironmentError::NoObject {
        kind,
        name: name.to_owned(),
    }
}

fn value_from(
    pod: &Pod,
    container: &Container,
    variable: &str,
    from: &EnvVarSource,
    sources: &Sources,
    facts: &Facts,
) -> Result<Option<String>, EnvironmentError> {
    let no_key = |kind, name: &str, key: &str| EnvironmentError::NoKey {
        key: key.to_owned(),
        kind,
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: name.to_owned(),
    };
    let unsupported = || EnvironmentError::Unsupported {
        name: variable.to_owned(),
    };
    if let Some(reference) = &from.field_ref {
        return fields::field(pod, facts, &reference.field_path)
            .map(Some)
            .ok_or_else(unsupported);
    }
    if let Some(reference) = &from.resource_field_ref {
        let of = reference
            .container_name
            .as_deref()
            .and_then(|name| super::container_spec(pod, name))
            .unwrap_or(container);
        return fields::resource(of, facts, reference)
            .map(Some)
            .ok_or_else(unsupported);
    }
    if let Some(reference) = &from.config_map_key_ref {
        let optional = reference.optional == Some(true);
        let Some(map) = sources.config_maps.get(&reference.name) else {
            return if optional {
                Ok(None)
            } else {
                Err(no_object("configmap", &reference.name))
            };
        };
        return match map.data.as_ref().and_then(|data| data.get(&reference.key)) {
            Some(value) => Ok(Some(value.clone())),
            None if optional => Ok(None),
            None => Err(no_key("ConfigMap", &reference.name, &reference.key)),
        };
    }
    if let Some(reference) = &from.secret_key_ref {
        let optional = reference.optional == Some(true);
        let Some(secret) = sources.secrets.get(&reference.name) else {
            return if optional {
                Ok(None)
            } else {
                Err(no_object("secret", &reference.name))
            };
        };
        return match secret
            .data
            .as_ref()
            .and_then(|data| data.get(&reference.key))
        {
            Some(value) => secret_text(&reference.name, &reference.key, &value.0).map(Some),
            None if optional => Ok(None),
            None => Err(no_key("Secret", &reference.name, &reference.key)),
        };
    }
    Err(unsupported())
}

/// Docker-style variables of services: `NAME_SERVICE_HOST`, `NAME_PORT_80_TCP` and so on.
///
/// `default/kubernetes` always, the namespace's own unless `enableServiceLinks` is false.
fn services(pod: &Pod, services: &[Service]) -> BTreeMap<String, String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let links = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.enable_service_links)
        .unwrap_or(true);
    let mut all = BTreeMap::new();
    let is_master = |service: &Service| {
        service.metadata.namespace.as_deref() == Some("default")
            && service.metadata.name.as_deref() == Some("kubernetes")
    };
    let chosen = services.iter().filter(|service| is_master(service)).chain(
        services
            .iter()
            .filter(|service| links && service.metadata.namespace.as_deref() == Some(namespace)),
    );
    for service in chosen {
        let Some(spec) = &service.spec else { continue };
        let Some(host) = spec
            .cluster_ip
            .as_deref()
            .filter(|ip| !ip.is_empty() && *ip != "None")
        else {
            continue;
        };
        let ports = spec.ports.as_deref().unwrap_or_default();
        let Some(first) = ports.first() else { continue };
        let name = upper(service.metadata.name.as_deref().unwrap_or_default());
        all.insert(format!("{name}_SERVICE_HOST"), host.to_owned());
        all.insert(format!("{name}_SERVICE_PORT"), first.port.to_string());
        for port in ports {
            if let Some(port_name) = port.name.as_deref().filter(|name| !name.is_empty()) {
                all.insert(
                    format!("{name}_SERVICE_PORT_{}", upper(port_name)),
                    port.port.to_string(),
                );
            }
        }
        let url =
            |port: i32, protocol: &str| format!("{}://{host}:{port}", protocol.to_lowercase());
        let protocol_of =
            |protocol: &Option<String>| protocol.clone().unwrap_or_else(|| "TCP".to_owned());
        all.insert(
            format!("{name}_PORT"),
            url(first.port, &protocol_of(&first.protocol)),
        );
        for port in ports {
            let protocol = protocol_of(&port.protocol);
            let prefix = format!("{name}_PORT_{}_{}", port.port, protocol.to_uppercase());
            all.insert(prefix.clone(), url(port.port, &protocol));
            all.insert(format!("{prefix}_PROTO"), protocol.to_lowercase());
            all.insert(format!("{prefix}_PORT"), port.port.to_string());
            all.insert(format!("{prefix}_ADDR"), host.to_owned());
        }
    }
    all
}

fn upper(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(container: &serde_json::Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns"},
            "spec": {"containers": [container]},
        }))
        .unwrap()
    }

    fn sources() -> Sources {
        Sources {
            config_maps: BTreeMap::from([(
                "map".to_owned(),
                serde_json::from_value(json!({"data": {"K": "v", "A": "from-map"}})).unwrap(),
            )]),
            secrets: BTreeMap::from([(
                "secret".to_owned(),
                serde_json::from_value(json!({"data": {"P": "cGFzcw==", "B": "/w=="}})).unwrap(),
            )]),
            services: serde_json::from_value(json!([
                {"metadata": {"name": "kubernetes", "namespace": "default"},
                 "spec": {"clusterIP": "10.100.0.1", "ports": [{"name": "https", "port": 443}]}},
                {"metadata": {"name": "my-web", "namespace": "ns"},
                 "spec": {"clusterIP": "10.100.0.9", "ports": [{"port": 80, "protocol": "TCP"}]}},
                {"metadata": {"name": "headless", "namespace": "ns"},
                 "spec": {"clusterIP": "None", "ports": [{"port": 80}]}},
                {"metadata": {"name": "other", "namespace": "elsewhere"},
                 "spec": {"clusterIP": "10.100.0.10", "ports": [{"port": 80}]}},
            ]))
            .unwrap(),
        }
    }

    fn get(container: &serde_json::Value) -> Result<BTreeMap<String, String>, EnvironmentError> {
        let pod = pod(container);
        let container = &pod.spec.as_ref().unwrap().containers[0];
        variables(
            &pod,
            container,
            &["A=image".to_owned()],
            "host",
            &sources(),
            &Facts::default(),
        )
    }

    #[test]
    fn order_and_expansion() {
        let all = get(&json!({"name": "c",
            "envFrom": [{"configMapRef": {"name": "map"}, "prefix": "X_"},
                        {"configMapRef": {"name": "gone", "optional": true}}],
            "env": [{"name": "ONE", "value": "1"}, {"name": "TWO", "value": "$(ONE)$(ONE) $(A)"},
                    {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    {"name": "PASS", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "P"}}},
                    {"name": "NOT", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "gone", "optional": true}}}]}))
        .unwrap();
        let is = |name: &str, value: &str| {
            assert_eq!(all.get(name).map(String::as_str), Some(value), "{name}");
        };
        is("A", "image");
        is("X_A", "from-map");
        is("TWO", "11 $(A)");
        is("POD", "p");
        is("PASS", "pass");
        is("HOSTNAME", "host");
        is("KUBERNETES_SERVICE_PORT_HTTPS", "443");
        is("KUBERNETES_PORT_443_TCP", "tcp://10.100.0.1:443");
        is("MY_WEB_SERVICE_HOST", "10.100.0.9");
        assert!(!all.contains_key("NOT") && !all.contains_key("OTHER_SERVICE_HOST"));
        assert!(!all.contains_key("HEADLESS_SERVICE_HOST"));
    }

    #[test]
    fn what_is_missing_is_named() {
        let message = |container: serde_json::Value| get(&container).unwrap_err().to_string();
        assert_eq!(
            message(json!({"name": "c", "envFrom": [{"secretRef": {"name": "gone"}}]})),
            "secret \"gone\" not found"
        );
        assert_eq!(
            message(
                json!({"name": "c", "env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "map", "key": "no"}}}]})
            ),
            "couldn't find key no in ConfigMap ns/map"
        );
        assert!(message(json!({"name": "c", "env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "B"}}}]}))
            .contains("not UTF-8"));
    }
}
