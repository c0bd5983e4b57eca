//! Registries: what is stored is named, fetched and proven here.
//!
//! ```text
//!  pull ──▶ resolve: reference ─▶ digest, by the pod's own credentials (its proof of access)
//!   │         │ tries endpoints and credentials in order ─▶ repository ─▶ wire
//!   ▼         ▼
//!  download: blobs by digest into an OCI layout, resumed after interruptions ─▶ the image store
//! ```
//!
//! A registry is as hostile as an image: every answer is bounded, digests are checked, nothing it
//! says becomes a path, and it is never asked without TLS unless the operator named it so.
//! The widely used client crate reads answers without bounds and panics on some tokens, so only
//! HTTP itself and the challenges' grammar are left to libraries.

mod challenge;
mod config;
mod download;
mod pull;
mod repository;
mod resolve;
mod wire;

pub use config::{ConfigError, read as read_config};
pub use pull::{Acquired, Puller, Request};

use crate::images::ImageError;

/// Largest document of a registry: manifests, configurations, tokens.
const DOCUMENT: usize = 512 << 10;
/// What is shown of a registry's own words.
const WORDS: usize = 512;

/// Why an image was not pulled. It is tried again.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The registry did not say what the reference means.
    #[error("failed to resolve reference \"{reference}\": {why}")]
    Resolve {
        /// The reference in full.
        reference: String,
        /// Each endpoint's words.
        why: String,
    },
    /// A part of the image could not be downloaded.
    #[error("failed to download \"{reference}\"")]
    Download {
        /// The reference in full.
        reference: String,
        /// Why.
        #[source]
        source: Box<RegistryError>,
    },
    /// What was downloaded cannot be used.
    #[error("failed to unpack \"{reference}\"")]
    Unpack {
        /// The reference in full.
        reference: String,
        /// Why.
        #[source]
        source: ImageError,
    },
    /// The image store cannot be used.
    #[error("the image store cannot be used")]
    Store(#[from] ImageError),
    /// Another pod's pull of the same image ended so.
    #[error("{0}")]
    Shared(String),
}

impl PullError {
    /// What [`PullError::category`] may say.
    pub(crate) const CATEGORIES: [&'static str; 5] =
        ["resolve", "download", "unpack", "store", "shared"];

    /// As metrics name it.
    pub(crate) fn category(&self) -> &'static str {
        match self {
            Self::Resolve { .. } => "resolve",
            Self::Download { .. } => "download",
            Self::Unpack { .. } => "unpack",
            Self::Store(_) => "store",
            Self::Shared(_) => "shared",
        }
    }
}

/// Why a registry did not give what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// It could not be reached, or the connection broke.
    #[error("{host} cannot be reached")]
    Unreachable {
        /// Which one.
        host: String,
        /// Why.
        #[source]
        source: reqwest::Error,
    },
    /// It did not answer in time.
    #[error("{host} is too slow: {what}")]
    Slow {
        /// Which one.
        host: String,
        /// What took too long.
        what: &'static str,
    },
    /// It refused.
    #[error("{host} answered {status}{}{words}", if .words.is_empty() { "" } else { ": " })]
    Refused {
        /// Which one.
        host: String,
        /// The status line's code and reason.
        status: reqwest::StatusCode,
        /// Its own words.
        words: String,
    },
    /// It answered something else than it was asked for.
    #[error("{host}: {what}: {why}")]
    Wrong {
        /// Which one.
        host: String,
        /// Which part.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// It sends somewhere that the configuration does not allow.
    #[error(
        "{host} {what} {url}, which is not https; name that host with an http:// endpoint in the registries file if that is meant"
    )]
    Insecure {
        /// Which one.
        host: String,
        /// How it does so.
        what: &'static str,
        /// Where to.
        url: String,
    },
    /// The host's trust in certificates cannot be set up.
    #[error("certificates for {host} cannot be used: {why}")]
    Trust {
        /// Which one.
        host: String,
        /// Why.
        why: String,
    },
    /// The disk is full or cannot be written.
    #[error("cannot {what}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// Too large for this host.
    #[error("{what}: {why}")]
    TooLarge {
        /// Which part.
        what: String,
        /// The limit.
        why: String,
    },
    /// Nobody waits for it any more.
    #[error("it was given up")]
    Abandoned,
}

impl RegistryError {
    /// Whether other credentials may help.
    fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused { status, .. } if status.is_client_error())
    }

    fn wrong(host: &str, what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Wrong {
            host: host.to_owned(),
            what: what.into(),
            why: why.into(),
        }
    }
}

/// Text of a registry, fit to be shown: bounded, and without control characters.
fn shown(text: &str) -> String {
    let text: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(WORDS)
        .collect();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
