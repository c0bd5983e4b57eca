//! The file system that an image's layers make together. Pure: nothing is read or written.
//!
//! Paths are kept without a leading slash and never hold `.` or `..`: whatever a layer says, an
//! entry lies inside the image. A path through a symbolic link of the image goes where the link
//! points, as it does when a layer is unpacked, but never above the image's root.

use std::collections::{BTreeMap, VecDeque};

/// Longest path and longest name (linux/limits.h).
const PATH: usize = 4096;
const NAME: usize = 255;
/// Symbolic links that one path may go through (the kernel's limit).
const LINKS: usize = 40;
/// Entries of an image. The largest in use have some hundred thousand.
const ENTRIES: usize = 1 << 21;
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Names a file's content: the layer's number and the entry's number in it.
pub(super) type Content = (usize, usize);

/// Owner, permissions and the like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Meta {
    pub(super) mode: u32,
    pub(super) uid: u64,
    pub(super) gid: u64,
    pub(super) mtime: u64,
    /// Extended attributes by their names.
    pub(super) xattrs: Vec<(String, Vec<u8>)>,
}

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Node {
    Directory(Meta),
    /// A file; several paths with one content are hard links.
    File(Meta, Content),
    Symlink(Meta, Vec<u8>),
    Device {
        meta: Meta,
        kind: Device,
        major: u32,
        minor: u32,
    },
}

/// Kinds of special files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Device {
    Character,
    Block,
    Pipe,
}

/// One entry of a layer.
#[derive(Clone, Debug)]
pub(super) enum Entry {
    /// Something new at the path.
    Node(Node),
    /// The path is another name of the file at this path, which takes on what is said of the name.
    HardLink(Vec<u8>, Meta),
}

/// Why an entry cannot be part of an image.
pub(super) type Refusal = &'static str;

#[derive(Debug)]
struct Placed {
    layer: usize,
    node: Node,
}

/// The result of all layers applied so far.
#[derive(Debug, Default)]
pub(super) struct Tree {
    placed: BTreeMap<Vec<u8>, Placed>,
    /// Of each file, as all its names share it: what was said of the last of them.
    files: BTreeMap<Content, Meta>,
}

impl Tree {
    /// Adds one entry of a layer. Layers come lowest first.
    pub(super) fn apply(&mut self, layer: usize, path: &[u8], entry: Entry) -> Result<(), Refusal> {
        let mut parts = split(path)?;
        let Some(name) = parts.pop() else {
            // The root itself: its owner and permissions are those of every image, as in containerd.
            return Ok(());
        };
        let parent = self.directory(layer, parts)?;
        if name == OPAQUE {
            self.empty(layer, &parent);
            return Ok(());
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            if hidden.is_empty() || hidden == b"." || hidden == b".." {
                return Err("it hides nothing that has a name");
            }
            self.hide(layer, &join(&parent, hidden));
            return Ok(());
        }
        let path = join(&parent, &name);
        let node = match entry {
            Entry::Node(node) => node,
            Entry::HardLink(target, meta) => {
                let node = self.link_target(layer, &target)?;
                if let Node::File(_, content) = &node
                    && let Some(known) = self.files.get_mut(content)
                {
                    take_over(known, meta);
                }
                node
            }
        };
        if let Node::File(meta, content) = &node {
            self.files.entry(*content).or_insert_with(|| meta.clone());
        }
        let stays = matches!(node, Node::Directory(_));
        if !(stays && self.is_directory(&path)) {
            self.remove(&path);
        }
        if self.placed.len() >= ENTRIES {
            return Err("the image has too many entries");
        }
        self.placed.insert(path, Placed { layer, node });
        Ok(())
    }

    /// Everything in the image, each directory before what is in it.
    pub(super) fn nodes(&self) -> impl Iterator<Item = (&[u8], &Node)> {
        self.placed
            .iter()
            .map(|(path, placed)| (path.as_slice(), &placed.node))
    }

    /// Owner, permissions and the like of a file under all its names.
    pub(super) fn meta(&self, content: &Content) -> Option<&Meta> {
        self.files.get(content)
    }

    /// The latest time of anything in it, in seconds since 1970.
    pub(super) fn newest(&self) -> u64 {
        let placed = self.placed.values().map(|placed| match &placed.node {
            Node::Directory(meta)
            | Node::File(meta, _)
            | Node::Symlink(meta, _)
            | Node::Device { meta, .. } => meta,
        });
        let all = placed.chain(self.files.values());
        all.map(|meta| meta.mtime).max().unwrap_or_default()
    }

    fn link_target(&mut self, layer: usize, target: &[u8]) -> Result<Node, Refusal> {
        let mut parts = split(target)?;
        let name = parts.pop().ok_or("it is a link to the root")?;
        let path = join(&self.directory(layer, parts)?, &name);
        match self.placed.get(&path).map(|placed| &placed.node) {
            Some(Node::Directory(_)) => Err("it is a hard link to a directory"),
            Some(node) => Ok(node.clone()),
            None => Err("it is a hard link to nothing"),
        }
    }

    /// The directory at a path, which is made if it is missing.
    fn directory(&mut self, layer: usize, parts: Vec<Vec<u8>>) -> Result<Vec<u8>, Refusal> {
        let mut todo: VecDeque<Vec<u8>> = parts.into();
        let mut path = Vec::new();
        let mut links = 0;
        while let Some(part) = todo.pop_front() {
            if part == b".." {
                // Only out of a symbolic link's target.
                path.truncate(path.iter().rposition(|&byte| byte == b'/').unwrap_or(0));
                continue;
            }
            let next = join(&path, &part);
            match self.placed.get(&next).map(|placed| &placed.node) {
                Some(Node::Directory(_)) => path = next,
                Some(Node::Symlink(_, target)) => {
                    links += 1;
                    if links > LINKS {
                        return Err("it lies behind too many symbolic links");
                    }
                    if target.first() == Some(&b'/') {
                        path.clear();
                    }
                    for part in target.split(|&byte| byte == b'/').rev() {
                        if !part.is_empty() && part != b"." {
                            todo.push_front(part.to_vec());
                        }
                    }
                }
                Some(Node::File(..) | Node::Device { .. }) => return Err("it lies in a file"),
                None => {
                    if next.len() > PATH {
                        return Err("its path is too long");
                    }
                    let meta = Meta {
                        mode: 0o755,
                        ..Meta::default()
                    };
                    let node = Node::Directory(meta);
                    self.placed.insert(next.clone(), Placed { layer, node });
                    path = next;
                }
            }
        }
        Ok(path)
    }

    fn is_directory(&self, path: &[u8]) -> bool {
        matches!(
            self.placed.get(path),
            Some(Placed {
                node: Node::Directory(_),
                ..
            })
        )
    }

    fn remove(&mut self, path: &[u8]) {
        self.placed.remove(path);
        let below: Vec<_> = self
            .below(&inside(path))
            .map(|(path, _)| path.clone())
            .collect();
        for path in below {
            self.placed.remove(&path);
        }
    }

    /// Removes what lower layers put at a path and below it.
    fn hide(&mut self, layer: usize, path: &[u8]) {
        self.empty(layer, path);
        self.remove_lower(layer, path);
    }

    /// Removes what lower layers put below a path.
    fn empty(&mut self, layer: usize, path: &[u8]) {
        let below: Vec<_> = self
            .below(&inside(path))
            .map(|(path, _)| path.clone())
            .collect();
        // From the inside out: a directory that something of this layer is in stays.
        for path in below.iter().rev() {
            self.remove_lower(layer, path);
        }
    }

    fn remove_lower(&mut self, layer: usize, path: &[u8]) {
        let lower = self
            .placed
            .get(path)
            .is_some_and(|placed| placed.layer < layer);
        if lower && self.below(&inside(path)).next().is_none() {
            self.placed.remove(path);
        }
    }

    fn below<'a>(
        &'a self,
        prefix: &[u8],
    ) -> impl Iterator<Item = (&'a Vec<u8>, &'a Placed)> + use<'a> {
        let prefix = prefix.to_vec();
        self.placed
            .range(prefix.clone()..)
            .take_while(move |(path, _)| path.starts_with(&prefix))
    }
}

/// What a later name says of a file; attributes are added to those it has.
fn take_over(known: &mut Meta, new: Meta) {
    let mut xattrs = std::mem::take(&mut known.xattrs);
    for (name, value) in new.xattrs {
        xattrs.retain(|(known, _)| *known != name);
        xattrs.push((name, value));
    }
    *known = Meta { xattrs, ..new };
}

/// Parts of a path that a layer gives.
fn split(path: &[u8]) -> Result<Vec<Vec<u8>>, Refusal> {
    if path.len() > PATH {
        return Err("its path is too long");
    }
    let mut parts = Vec::new();
    for part in path.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err("its path leaves the image"),
            _ if part.len() > NAME => return Err("its name is too long"),
            _ if part.contains(&0) => return Err("its name holds a zero byte"),
            _ => parts.push(part.to_vec()),
        }
    }
    Ok(parts)
}

fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = inside(parent);
    path.extend_from_slice(name);
    path
}

/// The beginning of all paths inside a directory.
fn inside(directory: &[u8]) -> Vec<u8> {
    let mut prefix = directory.to_vec();
    if !prefix.is_empty() {
        prefix.push(b'/');
    }
    prefix
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
