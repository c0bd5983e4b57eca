//! The file that names mirrors, extra certificate authorities and registries without TLS.

use monopod_core::image::endpoints::{InvalidRegistries, Registries};
use std::path::{Path, PathBuf};

/// Largest file.
const LIMIT: u64 = 1 << 20;

/// The file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It has another form.
    #[error(
        "{path} is not of the form of k3s's registries.yaml (mirrors.<registry>.endpoint, configs.<host>.tls.ca_file): {why}"
    )]
    Form {
        /// Which file.
        path: PathBuf,
        /// What the parser says, with line and field.
        why: String,
    },
    /// A field cannot be used.
    #[error("{path}")]
    Field {
        /// Which file.
        path: PathBuf,
        /// Which field and why.
        #[source]
        source: InvalidRegistries,
    },
    /// A certificate file cannot be used.
    #[error("{path}: configs.{host:?}.tls.ca_file: {why}")]
    Certificates {
        /// Which file.
        path: PathBuf,
        /// Of which host.
        host: String,
        /// Why.
        why: String,
    },
}

/// Reads and checks the file.
pub fn read(path: &Path) -> Result<Registries, ConfigError> {
    let unreadable = |source| ConfigError::Read {
        path: path.to_owned(),
        source,
    };
    let length = std::fs::metadata(path).map_err(unreadable)?.len();
    let form = |why: String| ConfigError::Form {
        path: path.to_owned(),
        why,
    };
    if length > LIMIT {
        return Err(form(format!("it is larger than {LIMIT} bytes")));
    }
    let text = std::fs::read_to_string(path).map_err(unreadable)?;
    let registries: Registries = if text.trim().is_empty() {
        Registries::default()
    } else {
        serde_saphyr::from_str(&text).map_err(|error| form(error.to_string()))?
    };
    registries.check().map_err(|source| ConfigError::Field {
        path: path.to_owned(),
        source,
    })?;
    for (host, config) in &registries.configs {
        if let Some(file) = &config.tls.ca_file {
            super::wire::authorities(Path::new(file)).map_err(|why| ConfigError::Certificates {
                path: path.to_owned(),
                host: host.clone(),
                why,
            })?;
        }
    }
    Ok(registries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Registries, ConfigError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        read(file.path())
    }

    #[test]
    fn the_form_is_that_of_k3s() {
        let registries = parse(
            "mirrors:\n  docker.io:\n    endpoint:\n    - https://mirror.example:5000\n  \"127.0.0.1:5000\":\n    endpoint: [\"http://127.0.0.1:5000\"]\n",
        )
        .unwrap();
        assert!(
            registries.is_plain("127.0.0.1:5000") && !registries.is_plain("mirror.example:5000")
        );
        assert_eq!(parse("").unwrap(), Registries::default());
    }

    #[test]
    fn what_is_not_known_is_named() {
        for (text, named) in [
            ("mirror: {}", "mirror"),
            ("mirrors: {a.io: {endpoints: []}}", "endpoints"),
            ("configs: {a.io: {auth: {username: u}}}", "auth"),
            (
                "configs: {a.io: {tls: {insecure_skip_verify: true}}}",
                "insecure_skip_verify",
            ),
            (
                "mirrors: {a.io: {endpoint: [mirror]}}",
                "mirrors.\"a.io\".endpoint[0]",
            ),
            ("configs: {a.io: {tls: {ca_file: /nowhere}}}", "/nowhere"),
        ] {
            let error = parse(text).unwrap_err();
            let mut chain = error.to_string();
            if let Some(source) = std::error::Error::source(&error) {
                chain.push_str(&source.to_string());
            }
            assert!(chain.contains(named), "{text}: {chain}");
        }
    }
}
