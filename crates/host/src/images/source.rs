//! Where an image comes from: an OCI layout, as a directory or as a tar archive of it.

use super::ImageError;
use super::manifest::Descriptor;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Files that an archive may hold; an image has a handful.
const FILES: usize = 4096;

/// An OCI layout.
#[derive(Debug)]
pub(super) enum Source {
    Directory(PathBuf),
    Archive {
        file: File,
        /// Where each file's content is: offset and length.
        contents: BTreeMap<PathBuf, (u64, u64)>,
    },
}

impl Source {
    /// Opens a directory or an uncompressed archive.
    pub(super) fn open(path: &Path) -> Result<Self, ImageError> {
        if path.is_dir() {
            return Ok(Self::Directory(path.to_owned()));
        }
        let file = File::open(path).map_err(ImageError::reading(path))?;
        let contents = contents(&file).map_err(ImageError::reading(path))?;
        if !contents.contains_key(Path::new("index.json")) {
            return Err(ImageError::Unsupported {
                what: path.display().to_string(),
                why: "it must be an uncompressed tar of an OCI layout, or such a directory".into(),
            });
        }
        Ok(Self::Archive { file, contents })
    }

    /// The layout's index.
    pub(super) fn index(&mut self, limit: u64) -> Result<Vec<u8>, ImageError> {
        let (content, length) = self.file(Path::new("index.json"))?;
        if length > limit {
            return Err(ImageError::damaged(
                "index.json",
                format!("it is larger than {limit} bytes"),
            ));
        }
        read_all(content, length, "index.json")
    }

    /// A small blob, whose digest and size are checked.
    pub(super) fn whole(&mut self, descriptor: &Descriptor) -> Result<Vec<u8>, ImageError> {
        let what = descriptor.digest.to_string();
        let bytes = read_all(self.blob(descriptor)?, descriptor.size, &what)?;
        if hex::encode(Sha256::digest(&bytes)) != descriptor.digest.hex() {
            return Err(ImageError::damaged(what, "its content has another digest"));
        }
        Ok(bytes)
    }

    /// A blob, whose size is checked; the reader must check the digest.
    pub(super) fn blob(
        &mut self,
        descriptor: &Descriptor,
    ) -> Result<Box<dyn Read + '_>, ImageError> {
        let path = Path::new("blobs/sha256").join(descriptor.digest.hex());
        let (content, length) = self.file(&path)?;
        if length != descriptor.size {
            return Err(ImageError::damaged(
                descriptor.digest.to_string(),
                format!("it has {length} bytes instead of {}", descriptor.size),
            ));
        }
        Ok(content)
    }

    fn file(&mut self, name: &Path) -> Result<(Box<dyn Read + '_>, u64), ImageError> {
        match self {
            Self::Directory(directory) => {
                let path = directory.join(name);
                let file = File::open(&path).map_err(ImageError::reading(&path))?;
                let length = file.metadata().map_err(ImageError::reading(&path))?.len();
                Ok((Box::new(file), length))
            }
            Self::Archive { file, contents } => {
                let &(offset, length) = contents.get(name).ok_or_else(|| {
                    ImageError::damaged(name.display().to_string(), "it is missing")
                })?;
                file.seek(SeekFrom::Start(offset))
                    .map_err(ImageError::reading(name))?;
                Ok((Box::new(file.take(length)), length))
            }
        }
    }
}

fn contents(file: &File) -> std::io::Result<BTreeMap<PathBuf, (u64, u64)>> {
    let mut contents = BTreeMap::new();
    for entry in tar::Archive::new(file).entries_with_seek()? {
        let entry = entry?;
        if entry.header().entry_type().is_file() && contents.len() < FILES {
            let path = entry.path()?;
            let path = path.strip_prefix("./").unwrap_or(&path).to_owned();
            contents.insert(path, (entry.raw_file_position(), entry.size()));
        }
    }
    Ok(contents)
}

fn read_all(content: impl Read, length: u64, what: &str) -> Result<Vec<u8>, ImageError> {
    let mut bytes = Vec::new();
    content
        .take(length)
        .read_to_end(&mut bytes)
        .map_err(ImageError::io(format!("read {what}")))?;
    Ok(bytes)
}
