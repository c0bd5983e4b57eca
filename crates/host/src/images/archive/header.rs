//! One header block of a tar archive.

use super::{ArchiveError, Kind, Piece};

/// Bytes of a block.
pub(super) const BLOCK: usize = 512;

/// A header whose checksum is right.
pub(super) struct Block([u8; BLOCK]);

impl Block {
    pub(super) fn new(bytes: &[u8; BLOCK]) -> Result<Self, ArchiveError> {
        let blanked = |(at, &byte): (usize, &u8)| {
            if (148..156).contains(&at) { b' ' } else { byte }
        };
        let unsigned: i64 = bytes
            .iter()
            .enumerate()
            .map(|b| i64::from(blanked(b)))
            .sum();
        // Some old programs summed signed characters.
        let signed: i64 = bytes
            .iter()
            .enumerate()
            .map(|b| i64::from(blanked(b).cast_signed()))
            .sum();
        match number(&bytes[148..156]) {
            Some(sum) if sum == unsigned || sum == signed => Ok(Self(*bytes)),
            Some(_) | None => Err(ArchiveError::Malformed("a header's checksum is wrong")),
        }
    }

    pub(super) fn flag(&self) -> u8 {
        self.0[156]
    }

    pub(super) fn kind(&self, path: &[u8]) -> Kind {
        match self.flag() {
            // The oldest form has no type for directories.
            b'0' | 0 if path.ends_with(b"/") => Kind::Directory,
            b'0' | 0 | b'7' | b'S' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' => Kind::Character,
            b'4' => Kind::Block,
            b'5' => Kind::Directory,
            b'6' => Kind::Pipe,
            _ => Kind::Other,
        }
    }

    pub(super) fn path(&self) -> Vec<u8> {
        let name = text(&self.0[..100]);
        let prefix = text(&self.0[345..500]);
        if self.is_posix() && !prefix.is_empty() {
            [prefix, b"/", name].concat()
        } else {
            name.to_vec()
        }
    }

    pub(super) fn link(&self) -> Vec<u8> {
        text(&self.0[157..257]).to_vec()
    }

    pub(super) fn size(&self) -> Result<u64, ArchiveError> {
        self.natural(124..136, "a size is no number")
    }

    pub(super) fn mode(&self) -> Result<u32, ArchiveError> {
        let mode = self.natural(100..108, "a mode is no number")?;
        // Permissions alone; some programs add the kind.
        Ok(u32::try_from(mode & 0o7777).unwrap_or(0))
    }

    pub(super) fn uid(&self) -> Result<u64, ArchiveError> {
        self.natural(108..116, "an owner is no number")
    }

    pub(super) fn gid(&self) -> Result<u64, ArchiveError> {
        self.natural(116..124, "a group is no number")
    }

    /// Times before 1970 count as 1970.
    pub(super) fn mtime(&self) -> Result<u64, ArchiveError> {
        number(&self.0[136..148])
            .map(|time| u64::try_from(time).unwrap_or(0))
            .ok_or(ArchiveError::Malformed("a time is no number"))
    }

    pub(super) fn major(&self, kind: Kind) -> Result<u32, ArchiveError> {
        self.device(329..337, kind)
    }

    pub(super) fn minor(&self, kind: Kind) -> Result<u32, ArchiveError> {
        self.device(337..345, kind)
    }

    fn device(&self, range: std::ops::Range<usize>, kind: Kind) -> Result<u32, ArchiveError> {
        let is_device = matches!(kind, Kind::Character | Kind::Block);
        if !is_device || &self.0[257..262] != b"ustar" {
            return Ok(0);
        }
        let number = self.natural(range, "a device's number is none")?;
        u32::try_from(number)
            .map_err(|_too_large| ArchiveError::Malformed("a device's number is too large"))
    }

    fn is_posix(&self) -> bool {
        &self.0[257..263] == b"ustar\0"
    }

    /// Whether blocks with more of a sparse file's map follow.
    pub(super) fn is_extended(&self) -> bool {
        self.0[482] != 0
    }

    /// Size of a sparse file.
    pub(super) fn real_size(&self) -> Result<u64, ArchiveError> {
        self.natural(483..495, "a sparse file's size is no number")
    }

    pub(super) fn sparse_pieces(&self) -> Result<Vec<Piece>, ArchiveError> {
        let mut pieces = Vec::new();
        take_pieces(&self.0[386..482], &mut pieces)?;
        Ok(pieces)
    }

    fn natural(
        &self,
        range: std::ops::Range<usize>,
        why: &'static str,
    ) -> Result<u64, ArchiveError> {
        number(&self.0[range])
            .and_then(|number| u64::try_from(number).ok())
            .ok_or(ArchiveError::Malformed(why))
    }
}

/// Takes the pieces of a block that follows a sparse file's header; gives whether another follows.
pub(super) fn more_pieces(
    block: &[u8; BLOCK],
    pieces: &mut Vec<Piece>,
) -> Result<bool, ArchiveError> {
    take_pieces(&block[..504], pieces)?;
    Ok(block[504] != 0)
}

fn take_pieces(bytes: &[u8], pieces: &mut Vec<Piece>) -> Result<(), ArchiveError> {
    let natural = |bytes: &[u8]| {
        number(bytes)
            .and_then(|number| u64::try_from(number).ok())
            .ok_or(ArchiveError::Malformed("a sparse file's map is no number"))
    };
    for piece in bytes.chunks_exact(24) {
        if piece[0] == 0 {
            break;
        }
        pieces.push(Piece {
            offset: natural(&piece[..12])?,
            length: natural(&piece[12..])?,
        });
    }
    Ok(())
}

/// A field's text, up to the first zero.
fn text(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// A number in octal digits, or in base 256 if its first bit is set. An empty field is 0.
fn number(field: &[u8]) -> Option<i64> {
    let first = *field.first()?;
    if first & 0x80 != 0 {
        // Two's complement of which the first bit is the mark.
        let negative = first & 0x40 != 0;
        let mut value: i128 = if negative { -1 } else { 0 };
        for (at, &byte) in field.iter().enumerate() {
            let byte = if at == 0 && !negative {
                byte & 0x7f
            } else {
                byte
            };
            value = (value << 8) | i128::from(byte);
        }
        return i64::try_from(value).ok();
    }
    let digits = text(field);
    let digits = digits.trim_ascii();
    let mut value: i64 = 0;
    for &digit in digits {
        if !(b'0'..=b'7').contains(&digit) {
            return None;
        }
        value = value.checked_mul(8)?.checked_add(i64::from(digit - b'0'))?;
    }
    Some(value)
}
