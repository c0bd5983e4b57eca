//! Which credentials go with an image: the kubelet's keyring, rule for rule.
//!
//! A key of a docker config is a registry, with a path where it is for a part of it. `*`, `?` and
//! `[…]` in a host stand for characters of one label. Longer paths come first, and of equal keys
//! the secret that was added first.

use super::reference::{DEFAULT_REGISTRY, Reference};
use crate::wildcard;
use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_STANDARD_NO_PAD};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Keys of one keyring. A secret of a megabyte could hold thousands.
const KEYS: usize = 512;
/// Docker's own name for its registry in a docker config.
const DOCKER_KEY: &str = "index.docker.io";

/// A user name and a password for a registry.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Credential {
    /// Who.
    pub username: String,
    /// The password, or a token that stands for one.
    pub password: String,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential").finish_non_exhaustive()
    }
}

/// A secret's content is no docker config. Says nothing of what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidConfig {
    /// It is no JSON of that form.
    #[error("it is no docker config: it must be {{\"auths\": {{\"registry\": {{\"auth\": …}}}}}}")]
    Form,
    /// A field `auth` is not base64 of `user:password`.
    #[error("a field auth is not base64 of user:password")]
    Auth,
    /// It names more registries than any honest one.
    #[error("it names more than {KEYS} registries")]
    TooMany,
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    auth: String,
}

impl Entry {
    fn credential(self) -> Result<Credential, InvalidConfig> {
        if self.auth.is_empty() {
            return Ok(Credential {
                username: self.username,
                password: self.password,
            });
        }
        let engine = if self.auth.trim().ends_with('=') {
            BASE64_STANDARD
        } else {
            BASE64_STANDARD_NO_PAD
        };
        let decoded = engine
            .decode(self.auth.trim())
            .ok()
            .and_then(|bytes| String::from_utf8(bytes).ok());
        let (username, password) = decoded
            .as_deref()
            .and_then(|text| text.split_once(':'))
            .ok_or(InvalidConfig::Auth)?;
        Ok(Credential {
            username: username.to_owned(),
            password: password.to_owned(),
        })
    }
}

/// The credentials of several secrets, by registry and path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Keyring(BTreeMap<String, Vec<Credential>>);

impl Keyring {
    /// Adds a `.dockerconfigjson`.
    pub fn add(&mut self, config: &[u8]) -> Result<(), InvalidConfig> {
        // A sequence would count as a configuration without fields.
        if config.trim_ascii_start().first() != Some(&b'{') {
            return Err(InvalidConfig::Form);
        }
        let config: DockerConfig =
            serde_json::from_slice(config).map_err(|_secret| InvalidConfig::Form)?;
        self.add_entries(config.auths)
    }

    /// Adds a `.dockercfg`, the older form without `auths`.
    pub fn add_legacy(&mut self, config: &[u8]) -> Result<(), InvalidConfig> {
        let entries = serde_json::from_slice(config).map_err(|_secret| InvalidConfig::Form)?;
        self.add_entries(entries)
    }

    fn add_entries(&mut self, entries: BTreeMap<String, Entry>) -> Result<(), InvalidConfig> {
        if self.0.len().saturating_add(entries.len()) > KEYS {
            return Err(InvalidConfig::TooMany);
        }
        let mut added = Vec::new();
        for (location, entry) in entries {
            let credential = entry.credential()?;
            if let Some(key) = key(&location) {
                added.push((key, credential));
            }
        }
        for (key, credential) in added {
            self.0.entry(key).or_default().push(credential);
        }
        Ok(())
    }

    /// The credentials for a name such as `registry.example/team/app`, in the order in which they
    /// are tried.
    pub fn lookup(&self, name: &str) -> Vec<&Credential> {
        let found: Vec<&Credential> = self
            .0
            .iter()
            .rev()
            .filter(|(key, _)| covers(key, name))
            .flat_map(|(_, credentials)| credentials)
            .collect();
        let docker = name
            .split('/')
            .next()
            .is_some_and(|registry| registry == DEFAULT_REGISTRY || registry == DOCKER_KEY);
        match self.0.get(DOCKER_KEY) {
            Some(default) if found.is_empty() && docker => default.iter().collect(),
            Some(_) | None => found,
        }
    }

    /// Keeps only what goes with one of these names.
    pub fn retain_for(&mut self, names: &[Reference]) {
        self.0.retain(|key, _| {
            names.iter().any(|reference| {
                covers(key, &reference.name)
                    || (key == DOCKER_KEY && reference.registry() == DEFAULT_REGISTRY)
            })
        });
    }

    /// Whether it holds no credentials.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Keyrings in the order in which they are asked: the role's, then the pod's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Keyrings {
    /// In this order.
    pub keyrings: Vec<Keyring>,
}

impl Keyrings {
    /// The credentials for a name, each once.
    pub fn lookup(&self, name: &str) -> Vec<Credential> {
        let mut found: Vec<Credential> = Vec::new();
        for credential in self
            .keyrings
            .iter()
            .flat_map(|keyring| keyring.lookup(name))
        {
            if !found.contains(credential) {
                found.push(credential.clone());
            }
        }
        found
    }
}

/// A key in the form in which it is compared: host, port and path. `/v1/` and `/v2/` at the path's
/// beginning mean the registry itself, as docker writes it.
fn key(location: &str) -> Option<String> {
    let rest = location
        .strip_prefix("https://")
        .or_else(|| location.strip_prefix("http://"))
        .unwrap_or(location);
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority.rsplit('@').next().unwrap_or_default();
    let valid_port = split_port(host).1.bytes().all(|b| b.is_ascii_digit());
    if host.is_empty() || !valid_port || host.contains(char::is_whitespace) {
        return None;
    }
    let path = match path.get(..4) {
        Some("/v1/" | "/v2/") => &path[3..],
        Some(_) | None => path,
    };
    Some(match path {
        "" | "/" => host.to_owned(),
        path => format!("{host}{path}"),
    })
}

fn split_port(host: &str) -> (&str, &str) {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.contains(']') => (name, port),
        Some(_) | None => (host, ""),
    }
}

/// Whether a key is for a name: equal ports, equally many labels that match one by one, and a path
/// that the name's begins with.
fn covers(key: &str, name: &str) -> bool {
    let parts = |text: &str| -> (String, String) {
        let (host, path) = text.split_at(text.find('/').unwrap_or(text.len()));
        (host.to_owned(), path.to_owned())
    };
    let ((key_host, key_path), (host, path)) = (parts(key), parts(name));
    let ((key_host, key_port), (host, port)) = (split_port(&key_host), split_port(&host));
    key_port == port
        && path.starts_with(&key_path)
        && key_host.split('.').count() == host.split('.').count()
        && key_host
            .split('.')
            .zip(host.split('.'))
            .all(|(pattern, label)| matches(pattern.as_bytes(), label.as_bytes()))
}

/// One part of a pattern.
enum Token {
    Star,
    Any,
    Byte(u8),
    Class {
        negated: bool,
        ranges: Vec<(u8, u8)>,
    },
}

impl Token {
    fn takes(&self, byte: u8) -> bool {
        match self {
            Self::Star => false,
            Self::Any => true,
            Self::Byte(own) => *own == byte,
            Self::Class { negated, ranges } => {
                let inside = ranges
                    .iter()
                    .any(|&(low, high)| (low..=high).contains(&byte));
                inside != *negated
            }
        }
    }
}

/// Go's `filepath.Match` on one label. A pattern that is none matches nothing.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    tokens(pattern).is_some_and(|tokens| {
        let is_star = |token: &Token| matches!(token, Token::Star);
        wildcard::covers(&tokens, text, is_star, |token, &byte| token.takes(byte))
    })
}

fn tokens(mut pattern: &[u8]) -> Option<Vec<Token>> {
    let mut tokens = Vec::new();
    while let Some((&first, rest)) = pattern.split_first() {
        pattern = rest;
        tokens.push(match first {
            b'*' => Token::Star,
            b'?' => Token::Any,
            b'\\' => {
                let (byte, rest) = pattern.split_first()?;
                pattern = rest;
                Token::Byte(*byte)
            }
            b'[' => {
                let (class, rest) = class(pattern)?;
                pattern = rest;
                class
            }
            byte => Token::Byte(byte),
        });
    }
    Some(tokens)
}

/// The class that begins after `[`, and what follows it.
fn class(pattern: &[u8]) -> Option<(Token, &[u8])> {
    let (negated, mut rest) = match pattern.split_first()? {
        (b'^', rest) => (true, rest),
        _ => (false, pattern),
    };
    let mut ranges = Vec::new();
    loop {
        if !ranges.is_empty() && rest.first() == Some(&b']') {
            return Some((Token::Class { negated, ranges }, &rest[1..]));
        }
        let (low, after) = character(rest)?;
        rest = after;
        let high = if rest.first() == Some(&b'-') {
            let (high, after) = character(&rest[1..])?;
            rest = after;
            high
        } else {
            low
        };
        ranges.push((low, high));
    }
}

fn character(pattern: &[u8]) -> Option<(u8, &[u8])> {
    match pattern.split_first()? {
        (b'-' | b']', _) => None,
        (b'\\', rest) => rest.split_first().map(|(byte, rest)| (*byte, rest)),
        (byte, rest) => Some((*byte, rest)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::reference::normalise;
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn keyring(keys: &[&str]) -> Keyring {
        let mut keyring = Keyring::default();
        for key in keys {
            let auth = BASE64_STANDARD.encode(format!("{}:pass:word", key.replace(':', ";")));
            let config = json!({"auths": {*key: {"auth": auth}}}).to_string();
            keyring.add(config.as_bytes()).unwrap();
        }
        keyring
    }

    fn users(keyring: &Keyring, image: &str) -> Vec<String> {
        keyring
            .lookup(&normalise(image).unwrap().name)
            .into_iter()
            .map(|credential| {
                assert_eq!(credential.password, "pass:word");
                credential.username.replace(';', ":")
            })
            .collect()
    }

    /// The cases of upstream's `TestURLsMatch` and `TestDockerKeyringForGlob`, as far as they are
    /// about keys and names.
    #[test]
    fn keys_match_as_in_the_kubelet() {
        for (key, name, expected) in [
            ("*.kubernetes.io", "prefix.kubernetes.io/x", true),
            ("prefix.*.io", "prefix.kubernetes.io/x", true),
            ("prefix.kubernetes.*", "prefix.kubernetes.io/x", true),
            ("*-good.kubernetes.io", "prefix-good.kubernetes.io/x", true),
            ("*.kubernetes.io/blah", "prefix.kubernetes.io/blah", true),
            ("prefix.*.io/foo", "prefix.kubernetes.io/foo/bar", true),
            ("*.kubernetes.io", "kubernetes.io/x", false),
            ("*.*.kubernetes.io", "prefix.kubernetes.io/x", false),
            ("*kubernetes.io", "a.kubernetes.io/x", false),
            ("*.io", "kubernetes.com/x", false),
            ("prefix.*.io/path", "prefix.kubernetes.io/x", false),
            ("prefix.kubernetes.io:5000", "prefix.kubernetes.io/x", false),
            (
                "prefix.kubernetes.io:5000",
                "prefix.kubernetes.io:5000/x",
                true,
            ),
            (
                "prefix.kubernetes.io:5000",
                "prefix.kubernetes.io:5001/x",
                false,
            ),
            ("p[a-r]efix.io", "prefix.io/x", true),
            ("p[^a-r]efix.io", "prefix.io/x", false),
            ("https://gcr.io/v1/", "gcr.io/a/b", true),
            ("https://gcr.io/v2/a", "gcr.io/a/b", true),
            ("http://gcr.io", "gcr.io/a/b", true),
            ("gcr.io/b", "gcr.io/a/b", false),
            ("gcr.io:x", "gcr.io/a/b", false),
        ] {
            let found = !users(&keyring(&[key]), name).is_empty();
            assert_eq!(found, expected, "{key} {name}");
        }
    }

    #[test]
    fn longer_paths_come_first_and_dockers_own_names_are_known() {
        let keys = ["gcr.io", "gcr.io/team", "quay.io"];
        assert_eq!(
            users(&keyring(&keys), "gcr.io/team/app:1"),
            ["gcr.io/team", "gcr.io"]
        );
        assert_eq!(users(&keyring(&keys), "gcr.io/other"), ["gcr.io"]);
        let mut docker = Keyring::default();
        let config = json!({"auths": {"https://index.docker.io/v1/": {"username": "u", "password": "pass:word"}}});
        docker.add(config.to_string().as_bytes()).unwrap();
        assert_eq!(users(&docker, "nginx"), ["u"]);
        assert_eq!(users(&docker, "team/app"), ["u"]);
        assert!(users(&docker, "gcr.io/team/app").is_empty());
        docker.retain_for(&[normalise("nginx").unwrap()]);
        assert!(!docker.is_empty());
        docker.retain_for(&[normalise("gcr.io/nginx").unwrap()]);
        assert!(docker.is_empty());
    }

    #[test]
    fn the_roles_come_before_the_pods_and_each_once() {
        let keyrings = Keyrings {
            keyrings: vec![keyring(&["*.io"]), keyring(&["gcr.io/team", "*.io"])],
        };
        let found = keyrings.lookup("gcr.io/team/app");
        let users: Vec<_> = found.iter().map(|c| c.username.as_str()).collect();
        assert_eq!(users, ["*.io", "gcr.io/team"]);
    }

    #[test]
    fn what_is_no_docker_config_is_refused_without_its_content() {
        for bad in [
            "",
            "[]",
            r#"{"auths": []}"#,
            r#"{"auths": {"a": {"auth": "c2VjcmV0"}}}"#,
            r#"{"auths": {"a": {"auth": "???"}}}"#,
        ] {
            let error = Keyring::default().add(bad.as_bytes()).unwrap_err();
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        let many: BTreeMap<String, serde_json::Value> =
            (0..600).map(|n| (format!("r{n}.io"), json!({}))).collect();
        let config = json!({"auths": many}).to_string();
        assert_eq!(
            Keyring::default().add(config.as_bytes()),
            Err(InvalidConfig::TooMany)
        );
        let shown = format!("{:?}", keyring(&["gcr.io"]));
        assert!(!shown.contains("pass"), "{shown}");
    }

    proptest! {
        /// Whatever a secret holds, a name without wildcards is given only what its own host has.
        #[test]
        fn credentials_go_to_their_own_host(
            keys in prop::collection::vec("(https?://)?[ab]{1,2}(\\.[ab])?(:[0-9]{1,2})?(/[ab12v]{0,2}){0,2}", 0..6),
            host in "[ab]\\.[ab]", path in "[ab]{1,2}",
        ) {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            for user in users(&keyring(&keys), &format!("{host}/{path}")) {
                let bare = user.trim_start_matches("https://").trim_start_matches("http://");
                prop_assert!(bare == host || bare.starts_with(&format!("{host}/")), "{user} for {host}");
            }
        }

        #[test]
        fn arbitrary_bytes_and_patterns_do_no_harm(bytes: Vec<u8>, pattern in "[a*?\\[\\]^\\\\-]{0,12}", text in "[a-]{0,8}") {
            let _refused = Keyring::default().add(&bytes).is_err();
            let _matched = matches(pattern.as_bytes(), text.as_bytes());
        }
    }
}
