//! Container images on this machine: one flattened, read-only squashfs per image.
//!
//! ```text
//! <directory>/index.json                    reference -> digest -> size, how to run it, who may use it
//! <directory>/sha256-<digest>.squashfs      named by the digest of the image's manifest
//! <directory>/lock                          held while the index is changed
//! <directory>/.make-*/                      an image in the making, locked by who makes it
//! <directory>/pulls/                        downloads that are under way or were interrupted
//! ```
//!
//! Images come from OCI archives and layouts, and from registries, which are all hostile: every digest is
//! checked, sizes are bounded, and no layer is ever unpacked into this machine's file system. A
//! file appears under its name only when it is whole.

mod archive;
mod config;
mod digest;
mod flatten;
mod index;
mod layer;
mod manifest;
mod source;
pub(crate) mod squash;
mod store;
mod tree;

pub(crate) use config::ManifestDocuments;
pub(crate) use digest::Digest;
pub(crate) use manifest::{Part, choose, describe};
pub(crate) use store::Pulled;
pub use store::{Store, StoredImage};

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The reference is none.
    #[error("{reference:?} is no image reference: {why}")]
    InvalidName {
        /// As it was given.
        reference: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A file cannot be read or written.
    #[error("cannot {what}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: std::io::Error,
    },
    /// A document of the image, or the store's index, is not what it should be.
    #[error("{what} cannot be understood")]
    Document {
        /// Which one.
        what: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// The image is not whole, or something else than it says.
    #[error("{what}: {why}")]
    Damaged {
        /// Which part.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// The image is well-formed but not for this system.
    #[error("{what} is not supported: {why}")]
    Unsupported {
        /// Which part.
        what: String,
        /// What is supported.
        why: String,
    },
    /// A layer holds something that no honest one does.
    #[error("layer {layer} holds {path:?}: {why}")]
    Hostile {
        /// Number of the layer, from 0.
        layer: usize,
        /// The entry's path.
        path: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The squashfs could not be made.
    #[error("sqfstar failed: {message}")]
    Squash {
        /// What it printed.
        message: String,
    },
}

impl ImageError {
    /// The reason that a waiting container shows.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::InvalidName { .. } => "InvalidImageName",
            Self::Io { .. }
            | Self::Document { .. }
            | Self::Damaged { .. }
            | Self::Unsupported { .. }
            | Self::Hostile { .. }
            | Self::Squash { .. } => "ErrImagePull",
        }
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    fn reading(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        Self::io(format!("read {}", path.display()))
    }

    fn damaged(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Damaged {
            what: what.into(),
            why: why.into(),
        }
    }
}

impl From<monopod_core::image::reference::InvalidReference> for ImageError {
    fn from(error: monopod_core::image::reference::InvalidReference) -> Self {
        Self::InvalidName {
            reference: error.reference,
            why: error.why,
        }
    }
}
