//! What values of flags may be; a wrong one is refused before anything is made of it.

use clap::builder::RangedU64ValueParser;
use ipnet::Ipv4Net;
use monopod_api::host::VM_OVERHEAD_MIB;
use monopod_api::size::Size;
use std::path::PathBuf;

/// Ports on loopback, from the base port on.
const PORTS: u64 = 10;

/// A DNS label: what may be part of a node's name.
pub(crate) fn label(text: &str) -> Result<String, String> {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let valid = (1..=63).contains(&text.len())
        && text.chars().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-');
    valid.then(|| text.to_owned()).ok_or_else(|| {
        "at most 63 lower-case letters, digits and dashes, none at the beginning or end".to_owned()
    })
}

/// A DNS name, as objects have it.
pub(crate) fn name(text: &str) -> Result<String, String> {
    let valid = text.len() <= 253 && text.split('.').all(|part| label(part).is_ok());
    valid
        .then(|| text.to_owned())
        .ok_or_else(|| "lower-case letters, digits, dashes and dots, as in a DNS name".to_owned())
}

/// A port that can be asked for.
pub(crate) fn port() -> RangedU64ValueParser<u16> {
    RangedU64ValueParser::new().range(1..=65535)
}

/// The first of some ports.
pub(crate) fn base_port() -> RangedU64ValueParser<u16> {
    RangedU64ValueParser::new().range(1..=65536 - PORTS)
}

/// Enough for the smallest pod.
pub(crate) fn cpu_millis() -> RangedU64ValueParser<u32> {
    at_least(Size::SMALLEST.cpu_millis)
}

/// Enough for the smallest pod's VM.
pub(crate) fn memory_mib() -> RangedU64ValueParser<u32> {
    at_least(Size::SMALLEST.memory_mib + VM_OVERHEAD_MIB)
}

fn at_least(least: u32) -> RangedU64ValueParser<u32> {
    RangedU64ValueParser::new().range(u64::from(least)..=u64::from(u32::MAX))
}

/// A file that is there, by its full path.
pub(crate) fn existing_file(text: &str) -> Result<PathBuf, String> {
    std::fs::canonicalize(text).map_err(|error| error.to_string())
}

/// Interface names are at most 15 characters long, and ours add up to eight.
pub(crate) fn short_name(text: &str) -> Result<String, String> {
    let valid = (1..=7).contains(&text.len())
        && text
            .chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    valid
        .then(|| text.to_owned())
        .ok_or_else(|| "one to seven lower-case letters or digits".to_owned())
}

/// As the API server wants it, which else does not publish its keys.
pub(crate) fn issuer(text: &str) -> Result<String, String> {
    let valid = text.len() > "https://".len()
        && text.starts_with("https://")
        && !text.ends_with('/')
        && !text.contains(['?', '#', ' ']);
    valid
        .then(|| text.to_owned())
        .ok_or_else(|| "an https:// URL without a slash at its end".to_owned())
}

/// The link's two ends, and the addresses around them.
pub(crate) fn link_range(text: &str) -> Result<Ipv4Net, String> {
    let range: Ipv4Net = text
        .parse()
        .map_err(|_not_a_range| "an IPv4 range such as 100.64.0.0/30".to_owned())?;
    if range.prefix_len() == 30 {
        Ok(range.trunc())
    } else {
        Err("a range of four addresses, such as 100.64.0.0/30".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_dns() {
        for good in ["a", "rack-2", "eu-west-1", "0"] {
            assert!(label(good).is_ok() && name(good).is_ok(), "{good}");
        }
        assert!(name("a.b-c.d").is_ok() && label("a.b").is_err());
        for bad in [
            "",
            "-a",
            "a-",
            "A",
            "a b",
            "../x",
            "a_b",
            "é",
            &"a".repeat(64),
        ] {
            assert!(label(bad).is_err() && name(bad).is_err(), "{bad}");
        }
        assert!(name("a..b").is_err() && name(&"a.".repeat(200)).is_err());
    }
}
