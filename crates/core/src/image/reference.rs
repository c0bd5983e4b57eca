//! Image references, in the one form under which images are stored.

use std::fmt;

/// Longest name (the distribution specification) and longest tag.
const NAME: usize = 255;
const TAG: usize = 128;
/// Where names without a registry are.
pub const DEFAULT_REGISTRY: &str = "docker.io";
/// The registry that does not exist, of images that come with Monopod or are loaded by hand.
pub const LOCAL_REGISTRY: &str = "monopod.local";

/// A reference in full: registry, name, and a tag or a digest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reference {
    /// Registry and name, such as `docker.io/library/nginx`.
    pub name: String,
    /// `latest`, if neither tag nor digest was given. Ignored where there is a digest.
    pub tag: String,
    /// `sha256:…`, if one was given.
    pub digest: Option<String>,
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.digest {
            Some(digest) => write!(f, "{}@{digest}", self.name),
            None => write!(f, "{}:{}", self.name, self.tag),
        }
    }
}

impl Reference {
    /// The registry's host, and its port where there is one.
    pub fn registry(&self) -> &str {
        self.name
            .split_once('/')
            .map_or("", |(registry, _)| registry)
    }

    /// The name within the registry.
    pub fn repository(&self) -> &str {
        self.name.split_once('/').map_or("", |(_, path)| path)
    }

    /// What a registry is asked for: the digest, or else the tag.
    pub fn version(&self) -> &str {
        self.digest.as_deref().unwrap_or(&self.tag)
    }

    /// Whether it names an image that no registry has: only an operator brings it to a host.
    pub fn is_local(&self) -> bool {
        self.registry() == LOCAL_REGISTRY
    }
}

/// The text is no image reference.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reference:?} is no image reference: {why}")]
pub struct InvalidReference {
    /// As it was given.
    pub reference: String,
    /// What is wrong with it.
    pub why: &'static str,
}

/// Reads a reference as a pod's specification has it.
///
/// As everywhere else, `nginx` stands for `docker.io/library/nginx:latest`.
pub fn normalise(text: &str) -> Result<Reference, InvalidReference> {
    parse(text).map_err(|why| InvalidReference {
        reference: text.into(),
        why,
    })
}

fn parse(text: &str) -> Result<Reference, &'static str> {
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (text, None),
    };
    if let Some(digest) = digest {
        let hex = digest.strip_prefix("sha256:");
        let well_formed = |hex: &str| hex.len() == 64 && hex.bytes().all(is_lower_hex);
        if !hex.is_some_and(well_formed) {
            return Err("the digest must be sha256: and 64 hexadecimal digits in lower case");
        }
    }
    // A colon before a slash is the registry's port.
    let (rest, tag) = match rest.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        Some(_) | None => (rest, None),
    };
    if let Some(tag) = tag
        && !is_tag(tag)
    {
        return Err("the tag must be up to 128 letters, digits, underscores, dots and dashes");
    }
    let (registry, path) = match rest.split_once('/') {
        Some((first, path)) if is_registry(first) => (first, path.to_owned()),
        Some(_) => (DEFAULT_REGISTRY, rest.to_owned()),
        None => (DEFAULT_REGISTRY, format!("library/{rest}")),
    };
    if !is_host(registry) {
        return Err("the registry must be a host name or address, and a port where one is needed");
    }
    if !path.split('/').all(is_component) {
        return Err(
            "each part of the name must be lower-case letters and digits, joined by single dots, dashes or underscores",
        );
    }
    let name = format!("{registry}/{path}");
    if name.len() > NAME {
        return Err("the name is longer than 255 characters");
    }
    Ok(Reference {
        name,
        tag: tag.unwrap_or("latest").to_owned(),
        digest: digest.map(str::to_owned),
    })
}

/// The first part is a registry if it cannot be a part of a name.
fn is_registry(part: &str) -> bool {
    part == "localhost" || part.contains(['.', ':']) || part.bytes().any(|b| b.is_ascii_uppercase())
}

/// The specification's `domain` with its port: labels joined by dots, or an address in brackets.
pub(super) fn is_host(registry: &str) -> bool {
    let (host, port) = match registry.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        Some(_) | None => (registry, None),
    };
    let digits = |p: &str| p.bytes().all(|b| b.is_ascii_digit());
    let label = |l: &str| {
        let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
        edge(l.bytes().next())
            && edge(l.bytes().next_back())
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    let address = |h: &str| {
        let inner = h.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        inner.is_some_and(|h| h.parse::<std::net::Ipv6Addr>().is_ok())
    };
    port.is_none_or(|p| digits(p) && p.parse::<u16>().is_ok_and(|p| p > 0))
        && (address(host) || host.split('.').all(label))
}

fn is_lower_hex(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

fn is_tag(tag: &str) -> bool {
    let first = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let rest = |b: u8| first(b) || b == b'.' || b == b'-';
    tag.len() <= TAG && tag.bytes().next().is_some_and(first) && tag.bytes().all(rest)
}

/// `[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*` of the distribution specification.
fn is_component(part: &str) -> bool {
    let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let separators = part
        .split(|c: char| c.is_ascii() && word(c as u8))
        .filter(|s| !s.is_empty());
    let allowed = |s: &str| matches!(s, "." | "_" | "__") || s.bytes().all(|b| b == b'-');
    part.bytes().next().is_some_and(word)
        && part.bytes().next_back().is_some_and(word)
        && separators.into_iter().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_names_are_completed() {
        let digest = format!("sha256:{}", "0f".repeat(32));
        for (given, full) in [
            ("nginx", "docker.io/library/nginx:latest"),
            ("nginx:1.27", "docker.io/library/nginx:1.27"),
            ("me/nginx", "docker.io/me/nginx:latest"),
            ("monopod.local/nginx", "monopod.local/nginx:latest"),
            ("localhost/a_b/c--d:X", "localhost/a_b/c--d:X"),
            ("localhost:5000/nginx", "localhost:5000/nginx:latest"),
            ("[fd00::1]:5000/nginx", "[fd00::1]:5000/nginx:latest"),
            (
                &format!("nginx:1@{digest}"),
                &format!("docker.io/library/nginx@{digest}"),
            ),
        ] {
            assert_eq!(normalise(given).unwrap().to_string(), full);
        }
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        for bad in [
            "",
            ":",
            "@",
            "/",
            "Nginx",
            "a//b",
            "a/",
            "-a",
            "a..b",
            "a___b",
            "nginx:",
            "nginx:-1",
            "nginx@sha256:0f",
            "nginx@md5:00",
            "a b",
            "a/../b",
            "ü",
            "nginx:1:2",
            "re\u{130}g.io/a",
            "./a",
            "../a",
            ".a/b",
            "a./b",
            "a..b/c",
            "-a.b/c",
            ":5000/a",
            "a.b:/c",
            "a.b:99999/c",
            "[::1/a",
            "[g::1]:5000/a",
        ] {
            normalise(bad).expect_err(bad);
        }
        assert!(normalise(&"a".repeat(300)).is_err());
    }

    proptest! {
        /// The full form means the same, and no reference has a form that leaves a directory.
        #[test]
        fn the_full_form_is_a_fixed_point(text in "[a-zA-Z0-9./:@_-]{0,40}") {
            if let Ok(reference) = normalise(&text) {
                let full = reference.to_string();
                prop_assert_eq!(normalise(&full).unwrap().to_string(), full.clone());
                prop_assert!(!full.contains("/.") && !full.contains("./"));
            }
        }
    }
}
