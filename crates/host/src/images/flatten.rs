//! Merges an image's layers into one tar stream, in two passes over them: the first finds out what
//! is in the image, the second copies the contents that are. Memory holds the names, not the data.

use super::ImageError;
use super::archive::{Archive, ArchiveError, Kind, Member};
use super::digest::Digest;
use super::layer;
use super::manifest::Descriptor;
use super::source::Source;
use super::tree::{Content, Device, Entry, Meta, Node, Tree};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tar::{EntryType, Header};

const XATTR: &str = "SCHILY.xattr.";
/// Longest link target that fits into a header.
const SHORT: usize = 100;
/// Times of a squashfs have 32 bits.
const LATEST: u64 = i32::MAX as u64;

/// First pass: what is in the image. Its files may have `budget` bytes together, holes included.
pub(super) fn survey(
    source: &mut Source,
    layers: &[(Descriptor, Digest)],
    budget: u64,
) -> Result<Tree, ImageError> {
    let mut tree = Tree::default();
    let (mut unpacked, mut files) = (budget, budget);
    for (number, layer) in layers.iter().enumerate() {
        layer::read(source, layer, &mut unpacked, |reader| {
            survey_layer(&mut tree, number, &mut files, reader)
        })?;
    }
    Ok(tree)
}

/// Second pass: writes the image's one tar stream.
pub(super) fn write(
    tree: &Tree,
    source: &mut Source,
    layers: &[(Descriptor, Digest)],
    mut budget: u64,
    output: impl Write,
) -> Result<(), ImageError> {
    let mut writer = Writer(tar::Builder::new(output));
    let mut wanted: BTreeMap<Content, Vec<(&[u8], &Meta)>> = BTreeMap::new();
    for (path, node) in tree.nodes() {
        match node {
            Node::File(_, content) => {
                if let Some(meta) = tree.meta(content) {
                    wanted.entry(*content).or_default().push((path, meta));
                }
            }
            Node::Directory(_) | Node::Symlink(..) | Node::Device { .. } => {
                writer.node(path, node)?;
            }
        }
    }
    for (number, layer) in layers.iter().enumerate() {
        if wanted.range((number, 0)..(number + 1, 0)).next().is_some() {
            layer::read(source, layer, &mut budget, |reader| {
                copy(&mut writer, number, &wanted, reader)
            })?;
        }
    }
    let mut output = writer.0.into_inner().map_err(writing())?;
    output.flush().map_err(writing())
}

fn writing() -> impl FnOnce(std::io::Error) -> ImageError {
    ImageError::io("write the flattened image")
}

fn reading(layer: usize) -> impl FnOnce(ArchiveError) -> ImageError {
    move |error| match error {
        ArchiveError::Io(source) => ImageError::Io {
            what: format!("read layer {layer}"),
            source,
        },
        ArchiveError::Malformed(_) => {
            ImageError::damaged(format!("layer {layer}"), error.to_string())
        }
    }
}

fn survey_layer(
    tree: &mut Tree,
    layer: usize,
    files: &mut u64,
    reader: &mut dyn Read,
) -> Result<(), ImageError> {
    let mut archive = Archive::new(reader);
    let mut number = 0;
    while let Some(member) = archive.next().map_err(reading(layer))? {
        let hostile = |path: &[u8], why| ImageError::Hostile {
            layer,
            path: String::from_utf8_lossy(&path[..path.len().min(256)]).into_owned(),
            why,
        };
        let path = member.path.clone();
        *files = files
            .checked_sub(member.size)
            .ok_or_else(|| hostile(&path, "the image's files are too large together"))?;
        let Some(entry) = entry(member, (layer, number)) else {
            return Err(hostile(&path, "it is of a kind that no image has"));
        };
        tree.apply(layer, &path, entry)
            .map_err(|why| hostile(&path, why))?;
        number += 1;
    }
    Ok(())
}

fn entry(member: Member, content: Content) -> Option<Entry> {
    let meta = Meta {
        mode: member.mode,
        uid: member.uid,
        gid: member.gid,
        mtime: member.mtime.min(LATEST),
        xattrs: member.xattrs,
    };
    let device = |kind, meta| Node::Device {
        meta,
        kind,
        major: member.major,
        minor: member.minor,
    };
    Some(Entry::Node(match member.kind {
        Kind::File => Node::File(meta, content),
        Kind::Directory => Node::Directory(meta),
        Kind::Symlink => Node::Symlink(meta, member.link),
        Kind::HardLink => return Some(Entry::HardLink(member.link, meta)),
        Kind::Character => device(Device::Character, meta),
        Kind::Block => device(Device::Block, meta),
        Kind::Pipe => device(Device::Pipe, meta),
        Kind::Other => return None,
    }))
}

/// Second pass: the contents of this layer that the image has.
fn copy<W: Write>(
    writer: &mut Writer<W>,
    layer: usize,
    wanted: &BTreeMap<Content, Vec<(&[u8], &Meta)>>,
    reader: &mut dyn Read,
) -> Result<(), ImageError> {
    let mut archive = Archive::new(reader);
    let mut next = 0;
    while let Some(member) = archive.next().map_err(reading(layer))? {
        let number = next;
        next += 1;
        let Some([(path, meta), links @ ..]) = wanted.get(&(layer, number)).map(Vec::as_slice)
        else {
            continue;
        };
        writer.file(path, meta, member.size, &mut archive)?;
        for (link, meta) in links {
            writer.link(EntryType::Link, link, meta, path)?;
        }
    }
    Ok(())
}

struct Writer<W: Write>(tar::Builder<W>);

impl<W: Write> Writer<W> {
    fn header(&mut self, kind: EntryType, meta: &Meta) -> Result<Header, ImageError> {
        if !meta.xattrs.is_empty() {
            let named: Vec<(String, &[u8])> = meta
                .xattrs
                .iter()
                .map(|(name, value)| (format!("{XATTR}{name}"), value.as_slice()))
                .collect();
            let pairs = named.iter().map(|(name, value)| (name.as_str(), *value));
            self.0.append_pax_extensions(pairs).map_err(writing())?;
        }
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(meta.mode);
        header.set_uid(meta.uid);
        header.set_gid(meta.gid);
        header.set_mtime(meta.mtime);
        header.set_size(0);
        Ok(header)
    }

    fn node(&mut self, path: &[u8], node: &Node) -> Result<(), ImageError> {
        match node {
            Node::Directory(meta) => {
                let mut header = self.header(EntryType::Directory, meta)?;
                self.append(&mut header, path, std::io::empty())
            }
            Node::Symlink(meta, target) => self.link(EntryType::Symlink, path, meta, target),
            Node::Device {
                meta,
                kind,
                major,
                minor,
            } => {
                let kind = match kind {
                    Device::Character => EntryType::Char,
                    Device::Block => EntryType::Block,
                    Device::Pipe => EntryType::Fifo,
                };
                let mut header = self.header(kind, meta)?;
                header.set_device_major(*major).map_err(writing())?;
                header.set_device_minor(*minor).map_err(writing())?;
                self.append(&mut header, path, std::io::empty())
            }
            // Copied in the second pass, with its content.
            Node::File(..) => Ok(()),
        }
    }

    fn file(
        &mut self,
        path: &[u8],
        meta: &Meta,
        size: u64,
        content: impl Read,
    ) -> Result<(), ImageError> {
        let mut header = self.header(EntryType::Regular, meta)?;
        header.set_size(size);
        self.append(&mut header, path, content)
    }

    fn link(
        &mut self,
        kind: EntryType,
        path: &[u8],
        meta: &Meta,
        target: &[u8],
    ) -> Result<(), ImageError> {
        let mut header = self.header(kind, meta)?;
        if target.len() <= SHORT {
            // As it is: the other way drops what it thinks redundant.
            header.set_link_name_literal(target).map_err(writing())?;
            return self.append(&mut header, path, std::io::empty());
        }
        self.0
            .append_link(&mut header, as_path(path), as_path(target))
            .map_err(writing())
    }

    fn append(
        &mut self,
        header: &mut Header,
        path: &[u8],
        content: impl Read,
    ) -> Result<(), ImageError> {
        self.0
            .append_data(header, as_path(path), content)
            .map_err(writing())
    }
}

fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}
