//! Where a registry's images are asked for: mirrors first, then the registry itself.
//!
//! The configuration has the form of k3s's `registries.yaml`. Plain HTTP is used only for an
//! endpoint that is written `http://`.

use super::reference::{DEFAULT_REGISTRY, Reference};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The host that serves Docker's registry.
const DOCKER_HOST: &str = "registry-1.docker.io";
/// The mirrors of every registry that has none of its own.
const ANY: &str = "*";

/// Registries with their mirrors and certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields, default)]
pub struct Registries {
    /// Endpoints by registry, as references name it; `*` is for all others.
    pub mirrors: BTreeMap<String, Mirror>,
    /// How hosts are spoken to, by `host` or `host:port`.
    pub configs: BTreeMap<String, HostConfig>,
}

/// Other places to ask for a registry's images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct Mirror {
    /// URLs, tried in this order before the registry itself.
    #[serde(default)]
    pub endpoint: Vec<String>,
}

/// How one host is spoken to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct HostConfig {
    /// Its certificate.
    #[serde(default)]
    pub tls: Tls,
}

/// Whose certificates are believed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub struct Tls {
    /// PEM file of certificate authorities, beside those of the system.
    #[serde(default)]
    pub ca_file: Option<String>,
}

/// The configuration names something that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {why}")]
pub struct InvalidRegistries {
    /// Which field.
    pub field: String,
    /// What is wrong with it, and what to write.
    pub why: &'static str,
}

/// One place to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Host, and port where one is given.
    pub host: String,
    /// URL to which `/<name>/manifests/…` is added.
    pub base: String,
    /// Whether it is spoken to without TLS.
    pub plain: bool,
    /// The registry that it is a mirror of, which it is told; none for the registry itself.
    pub mirror_of: Option<String>,
    /// The name under which credentials for it are looked up. A mirror is given those for its own
    /// host, never the registry's.
    pub credentials_for: String,
}

impl Registries {
    /// Refuses what could not be used, by its field.
    pub fn check(&self) -> Result<(), InvalidRegistries> {
        for (registry, mirror) in &self.mirrors {
            let field = || format!("mirrors.{registry:?}");
            if registry != ANY && !is_authority(registry) {
                return Err(InvalidRegistries {
                    field: field(),
                    why: "it must be a registry such as registry.example:5000, or *",
                });
            }
            for (number, url) in mirror.endpoint.iter().enumerate() {
                if split(url).is_none() {
                    return Err(InvalidRegistries {
                        field: format!("{}.endpoint[{number}]", field()),
                        why: "it must be a URL such as https://mirror.example:5000",
                    });
                }
            }
        }
        match self.configs.keys().find(|host| !is_authority(host)) {
            Some(host) => Err(InvalidRegistries {
                field: format!("configs.{host:?}"),
                why: "it must be a host, and its port where it has one",
            }),
            None => Ok(()),
        }
    }

    /// Where to ask for an image, in this order.
    pub fn endpoints(&self, reference: &Reference) -> Vec<Endpoint> {
        let registry = reference.registry();
        let mirror = self.mirrors.get(registry).or_else(|| self.mirrors.get(ANY));
        let mut all: Vec<Endpoint> = mirror
            .into_iter()
            .flat_map(|mirror| &mirror.endpoint)
            .filter_map(|url| {
                let (plain, host, path) = split(url)?;
                let path = if path.is_empty() { "/v2" } else { path };
                let is_mirror = host != registry && host != own_host(registry);
                Some(Endpoint {
                    host: host.to_owned(),
                    base: format!("{}://{host}{path}", if plain { "http" } else { "https" }),
                    plain,
                    mirror_of: is_mirror.then(|| registry.to_owned()),
                    credentials_for: if is_mirror {
                        format!("{host}/{}", reference.repository())
                    } else {
                        reference.name.clone()
                    },
                })
            })
            .collect();
        if all.iter().all(|endpoint| endpoint.mirror_of.is_some()) {
            let host = own_host(registry);
            all.push(Endpoint {
                host: host.to_owned(),
                base: format!("https://{host}/v2"),
                plain: false,
                mirror_of: None,
                credentials_for: reference.name.clone(),
            });
        }
        all
    }

    /// Hosts that may be spoken to without TLS.
    pub fn is_plain(&self, host: &str) -> bool {
        self.mirrors
            .values()
            .flat_map(|mirror| &mirror.endpoint)
            .filter_map(|url| split(url))
            .any(|(plain, named, _)| plain && named == host)
    }
}

fn own_host(registry: &str) -> &str {
    if registry == DEFAULT_REGISTRY {
        DOCKER_HOST
    } else {
        registry
    }
}

/// Whether a URL is plain, its host with the port, and its path without a slash at the end.
fn split(url: &str) -> Option<(bool, &str, &str)> {
    let (plain, rest) = match url.split_once("://")? {
        ("http", rest) => (true, rest),
        ("https", rest) => (false, rest),
        _ => return None,
    };
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"/._-".contains(&b);
    let path = path.trim_end_matches('/');
    (is_authority(host) && path.bytes().all(allowed)).then_some((plain, host, path))
}

/// A host and an optional port, as in a reference.
fn is_authority(text: &str) -> bool {
    super::reference::is_host(text)
}

#[cfg(test)]
mod tests {
    use super::super::reference::normalise;
    use super::*;
    use proptest::prelude::*;

    fn registries(mirrors: &[(&str, &[&str])]) -> Registries {
        Registries {
            mirrors: mirrors
                .iter()
                .map(|(name, endpoints)| {
                    let endpoint = endpoints.iter().map(|e| (*e).to_owned()).collect();
                    ((*name).to_owned(), Mirror { endpoint })
                })
                .collect(),
            configs: BTreeMap::new(),
        }
    }

    fn bases(registries: &Registries, image: &str) -> Vec<String> {
        registries
            .endpoints(&normalise(image).unwrap())
            .into_iter()
            .map(|endpoint| endpoint.base)
            .collect()
    }

    #[test]
    fn mirrors_come_first_and_the_registry_last() {
        let config = registries(&[
            (
                "docker.io",
                &["https://mirror:5000", "http://[fd00::1]:80/proxy/v2/"],
            ),
            ("plain:5000", &["http://plain:5000"]),
            ("*", &["https://all.example"]),
        ]);
        config.check().unwrap();
        assert_eq!(
            bases(&config, "nginx"),
            [
                "https://mirror:5000/v2",
                "http://[fd00::1]:80/proxy/v2",
                "https://registry-1.docker.io/v2"
            ]
        );
        assert_eq!(bases(&config, "plain:5000/x"), ["http://plain:5000/v2"]);
        assert_eq!(
            bases(&config, "quay.io/x"),
            ["https://all.example/v2", "https://quay.io/v2"]
        );
        let mirror = &config.endpoints(&normalise("nginx").unwrap())[0];
        assert_eq!(mirror.mirror_of.as_deref(), Some("docker.io"));
        assert_eq!(mirror.credentials_for, "mirror:5000/library/nginx");
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        for (config, field) in [
            (registries(&[("a/b", &[])]), "mirrors.\"a/b\""),
            (
                registries(&[("a", &["mirror"])]),
                "mirrors.\"a\".endpoint[0]",
            ),
            (
                registries(&[("a", &["ftp://mirror"])]),
                "mirrors.\"a\".endpoint[0]",
            ),
            (
                registries(&[("a", &["https://m", "https://m/?x"])]),
                "mirrors.\"a\".endpoint[1]",
            ),
        ] {
            assert_eq!(config.check().unwrap_err().field, field);
        }
    }

    proptest! {
        /// Without an endpoint that says so, nothing is asked without TLS.
        #[test]
        fn plain_http_is_only_for_endpoints_named_so(
            mirrors in prop::collection::btree_map("[ab]\\.io|\\*", prop::collection::vec("https?://[ab]\\.io(/x)?", 0..3), 0..3),
            registry in "[ab]\\.io",
        ) {
            let config = Registries {
                mirrors: mirrors.into_iter().map(|(name, endpoint)| (name, Mirror { endpoint })).collect(),
                configs: BTreeMap::new(),
            };
            prop_assert!(config.check().is_ok());
            let reference = normalise(&format!("{registry}/x")).unwrap();
            let endpoints = config.endpoints(&reference);
            prop_assert!(!endpoints.is_empty());
            for endpoint in endpoints {
                prop_assert_eq!(endpoint.plain, endpoint.base.starts_with("http://"));
                prop_assert!(!endpoint.plain || config.is_plain(&endpoint.host));
                // Credentials of the registry stay with the registry.
                let own = format!("{}/", endpoint.host);
                prop_assert!(endpoint.credentials_for.starts_with(&own));
            }
        }
    }
}
