//! Extended headers: `length key=value\n`, where a value may hold any bytes.

use super::{ArchiveError, PIECES, Piece};

const XATTR: &[u8] = b"SCHILY.xattr.";
/// Attributes of one member, and bytes of one (linux/limits.h).
const XATTRS: usize = 256;
const XATTR_NAME: usize = 255;
const XATTR_VALUE: usize = 64 << 10;

/// What an extended header says, as far as it matters.
#[derive(Debug, Default)]
pub(super) struct Extended {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<u64>,
    pub(super) xattrs: Vec<(String, Vec<u8>)>,
    /// Size of a sparse file, if it is one.
    pub(super) sparse_size: Option<u64>,
    /// Its pieces, unless they are at the beginning of its data.
    pub(super) sparse_map: Option<Vec<Piece>>,
}

pub(super) fn parse(mut bytes: &[u8]) -> Result<Extended, ArchiveError> {
    let mut extended = Extended::default();
    let mut pieces: Vec<u64> = Vec::new();
    let mut sparse_name = None;
    while !bytes.is_empty() {
        let (key, value, rest) = record(bytes).ok_or(ArchiveError::Malformed(
            "a record of an extended header is none",
        ))?;
        bytes = rest;
        let text = || value.to_vec();
        match key {
            b"path" => extended.path = Some(text()),
            b"linkpath" => extended.link = Some(text()),
            b"size" => extended.size = Some(number(value)?),
            b"uid" => extended.uid = Some(number(value)?),
            b"gid" => extended.gid = Some(number(value)?),
            b"mtime" => extended.mtime = Some(seconds(value)?),
            b"GNU.sparse.name" => sparse_name = Some(text()),
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => {
                extended.sparse_size = Some(number(value)?);
            }
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => pieces.push(number(value)?),
            b"GNU.sparse.map" => {
                pieces = value
                    .split(|&b| b == b',')
                    .map(number)
                    .collect::<Result<_, _>>()?;
            }
            _ => {
                if let Some(name) = key.strip_prefix(XATTR) {
                    attribute(&mut extended.xattrs, name, value)?;
                }
            }
        }
        if pieces.len() > 2 * PIECES {
            return Err(ArchiveError::Malformed("a sparse file has too many pieces"));
        }
    }
    if !pieces.is_empty() {
        extended.sparse_map = Some(pairs(&pieces));
    }
    if sparse_name.is_some() {
        extended.path = sparse_name;
    }
    Ok(extended)
}

/// Splits off the first record: key, value, rest.
fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().take(20).position(|&byte| byte == b' ')?;
    let length = usize::try_from(number(&bytes[..space]).ok()?).ok()?;
    if length <= space + 1 || length > bytes.len() || bytes[length - 1] != b'\n' {
        return None;
    }
    let pair = &bytes[space + 1..length - 1];
    let equals = pair.iter().position(|&byte| byte == b'=')?;
    Some((&pair[..equals], &pair[equals + 1..], &bytes[length..]))
}

/// Keeps an attribute that a file system of an image can have. Those of overlay file systems would
/// mean something to the guest's own.
fn attribute(
    xattrs: &mut Vec<(String, Vec<u8>)>,
    name: &[u8],
    value: &[u8],
) -> Result<(), ArchiveError> {
    let Ok(name) = std::str::from_utf8(name) else {
        return Ok(());
    };
    let kept = ["user.", "trusted.", "security."]
        .iter()
        .any(|space| name.len() > space.len() && name.starts_with(space));
    let overlay = ["user.overlay.", "trusted.overlay."]
        .iter()
        .any(|space| name.starts_with(space));
    if !kept || overlay || name.contains('\0') {
        return Ok(());
    }
    if name.len() > XATTR_NAME || value.len() > XATTR_VALUE {
        return Err(ArchiveError::Malformed(
            "an extended attribute is too large",
        ));
    }
    xattrs.retain(|(known, _)| known != name);
    if xattrs.len() >= XATTRS {
        return Err(ArchiveError::Malformed(
            "a file has too many extended attributes",
        ));
    }
    xattrs.push((name.to_owned(), value.to_vec()));
    Ok(())
}

/// A decimal number.
pub(super) fn number(digits: &[u8]) -> Result<u64, ArchiveError> {
    let text = std::str::from_utf8(digits).unwrap_or_default();
    let number = text
        .bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| text.parse().ok());
    number.flatten().ok_or(ArchiveError::Malformed(
        "a number of an extended header is none",
    ))
}

/// Whole seconds of a time with a fraction; times before 1970 count as 1970.
fn seconds(value: &[u8]) -> Result<u64, ArchiveError> {
    if value.first() == Some(&b'-') {
        return Ok(0);
    }
    number(value.split(|&byte| byte == b'.').next().unwrap_or_default())
}

/// Pieces from offsets and lengths in turn.
pub(super) fn pairs(numbers: &[u64]) -> Vec<Piece> {
    numbers
        .chunks_exact(2)
        .map(|pair| Piece {
            offset: pair[0],
            length: pair[1],
        })
        .collect()
}
