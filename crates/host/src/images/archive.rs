//! Reads tar archives of layers: POSIX, GNU and the older form, with extended headers, long names
//! and sparse files. Bytes are hostile: what is kept of a header is bounded.

mod header;
mod pax;

#[cfg(test)]
mod tests;

use header::{BLOCK, Block};
use pax::Extended;
use std::collections::VecDeque;
use std::io::{self, Read};

/// Largest extended header or long name (as Go's reader has it).
const SPECIAL: u64 = 1 << 20;
/// Pieces of a sparse file.
const PIECES: usize = 1 << 16;
/// Special headers that may come before one member.
const PREFIXES: usize = 16;

/// Why an archive cannot be read further.
#[derive(Debug, thiserror::Error)]
pub(super) enum ArchiveError {
    /// The bytes cannot be had.
    #[error("it cannot be read")]
    Io(#[from] io::Error),
    /// The bytes are no archive.
    #[error("it is no tar archive: {0}")]
    Malformed(&'static str),
}

/// Kinds of members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    HardLink,
    Symlink,
    Character,
    Block,
    Directory,
    Pipe,
    /// Something that no image has.
    Other,
}

/// What is said of one member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) path: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) kind: Kind,
    pub(super) mode: u32,
    pub(super) uid: u64,
    pub(super) gid: u64,
    pub(super) mtime: u64,
    pub(super) major: u32,
    pub(super) minor: u32,
    /// Bytes of the file, holes included.
    pub(super) size: u64,
    /// Extended attributes by their names.
    pub(super) xattrs: Vec<(String, Vec<u8>)>,
}

/// A piece of a sparse file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    offset: u64,
    length: u64,
}

/// An archive that is being read.
pub(super) struct Archive<R> {
    reader: R,
    /// Bytes of the current member's data that were not read, and of the padding after it.
    data: u64,
    padding: u64,
    /// Where the next byte of the file is, its size, and the pieces that hold data.
    position: u64,
    size: u64,
    pieces: VecDeque<Piece>,
}

impl<R: Read> Archive<R> {
    pub(super) fn new(reader: R) -> Self {
        Self {
            reader,
            data: 0,
            padding: 0,
            position: 0,
            size: 0,
            pieces: VecDeque::new(),
        }
    }

    /// The next member; none at the archive's end.
    pub(super) fn next(&mut self) -> Result<Option<Member>, ArchiveError> {
        let mut extended = Extended::default();
        let (mut long_path, mut long_link) = (None, None);
        for _ in 0..=PREFIXES {
            self.skip()?;
            let Some(block) = self.block()? else {
                return Ok(None);
            };
            let size = block.size()?;
            match block.flag() {
                b'x' => extended = pax::parse(&self.special(size)?)?,
                b'g' => drop(self.special(size)?),
                b'L' => long_path = Some(until_zero(self.special(size)?)),
                b'K' => long_link = Some(until_zero(self.special(size)?)),
                _ => {
                    return self
                        .member(&block, extended, long_path, long_link)
                        .map(Some);
                }
            }
        }
        Err(ArchiveError::Malformed("a member has too many headers"))
    }

    fn member(
        &mut self,
        block: &Block,
        extended: Extended,
        long_path: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<Member, ArchiveError> {
        let path = extended.path.or(long_path).unwrap_or_else(|| block.path());
        let kind = block.kind(&path);
        let stored = match kind {
            Kind::File => extended.size.map_or_else(|| block.size(), Ok)?,
            // Whatever size these claim, nothing of theirs follows.
            Kind::HardLink
            | Kind::Symlink
            | Kind::Character
            | Kind::Block
            | Kind::Directory
            | Kind::Pipe => 0,
            Kind::Other => block.size()?,
        };
        self.data = stored;
        self.padding = stored.wrapping_neg() % BLOCK as u64;
        self.position = 0;
        self.pieces.clear();
        let whole = Piece {
            offset: 0,
            length: stored,
        };
        let (pieces, size) = if kind != Kind::File {
            (Vec::new(), 0)
        } else if block.flag() == b'S' {
            self.gnu_sparse(block)?
        } else if let Some(size) = extended.sparse_size {
            let pieces = match extended.sparse_map {
                Some(pieces) => pieces,
                None => self.map_in_data()?,
            };
            (pieces, size)
        } else {
            (vec![whole], stored)
        };
        check(&pieces, size, self.data)?;
        self.pieces = pieces
            .into_iter()
            .filter(|piece| piece.length > 0)
            .collect();
        self.size = size;
        Ok(Member {
            path,
            link: extended.link.or(long_link).unwrap_or_else(|| block.link()),
            kind,
            mode: block.mode()?,
            uid: extended.uid.map_or_else(|| block.uid(), Ok)?,
            gid: extended.gid.map_or_else(|| block.gid(), Ok)?,
            mtime: extended.mtime.map_or_else(|| block.mtime(), Ok)?,
            major: block.major(kind)?,
            minor: block.minor(kind)?,
            size,
            xattrs: extended.xattrs,
        })
    }

    /// The map of the old GNU form: in the header and in blocks after it.
    fn gnu_sparse(&mut self, block: &Block) -> Result<(Vec<Piece>, u64), ArchiveError> {
        let mut pieces = block.sparse_pieces()?;
        let mut more = block.is_extended();
        while more {
            let Some(next) = self.raw_block()? else {
                return Err(ArchiveError::Malformed("a sparse file's map ends early"));
            };
            more = header::more_pieces(&next, &mut pieces)?;
            if pieces.len() > PIECES {
                return Err(ArchiveError::Malformed("a sparse file has too many pieces"));
            }
        }
        Ok((pieces, block.real_size()?))
    }

    /// The map of the newest form: numbers on lines of their own, at the beginning of the data.
    fn map_in_data(&mut self) -> Result<Vec<Piece>, ArchiveError> {
        let mut numbers: Vec<u64> = Vec::new();
        let mut digits: Vec<u8> = Vec::new();
        let short = || ArchiveError::Malformed("a sparse file's map ends early");
        loop {
            if self.data < BLOCK as u64 {
                return Err(short());
            }
            let block = self.raw_block()?.ok_or_else(short)?;
            self.data -= BLOCK as u64;
            for byte in block {
                if byte != b'\n' {
                    digits.push(byte);
                    if digits.len() > 20 {
                        return Err(ArchiveError::Malformed("a sparse file's map is no number"));
                    }
                    continue;
                }
                numbers.push(pax::number(&digits)?);
                digits.clear();
                let wanted = numbers.first().map_or(0, |count| count.saturating_mul(2));
                if wanted > 2 * PIECES as u64 {
                    return Err(ArchiveError::Malformed("a sparse file has too many pieces"));
                }
                if numbers.len() as u64 == wanted + 1 {
                    return Ok(pax::pairs(&numbers[1..]));
                }
            }
        }
    }

    /// A special header's content.
    fn special(&mut self, size: u64) -> Result<Vec<u8>, ArchiveError> {
        if size > SPECIAL {
            return Err(ArchiveError::Malformed(
                "an extended header is larger than 1 MiB",
            ));
        }
        let mut bytes = Vec::new();
        (&mut self.reader).take(size).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != size {
            return Err(ArchiveError::Malformed("it ends in an extended header"));
        }
        self.padding = size.wrapping_neg() % BLOCK as u64;
        Ok(bytes)
    }

    /// Skips what was not read of the member before.
    fn skip(&mut self) -> Result<(), ArchiveError> {
        let left = self.data.saturating_add(self.padding);
        let skipped = io::copy(&mut (&mut self.reader).take(left), &mut io::sink())?;
        // The padding after the last member may be missing.
        if skipped < self.data {
            return Err(ArchiveError::Malformed("it ends in a file"));
        }
        (self.data, self.padding) = (0, 0);
        Ok(())
    }

    /// The next header; none at the end, which is a block of zeros or of the bytes.
    fn block(&mut self) -> Result<Option<Block>, ArchiveError> {
        match self.raw_block()? {
            Some(bytes) if bytes.iter().any(|&byte| byte != 0) => Block::new(&bytes).map(Some),
            Some(_) | None => Ok(None),
        }
    }

    fn raw_block(&mut self) -> Result<Option<[u8; BLOCK]>, ArchiveError> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.reader.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(ArchiveError::Malformed("it ends in a header")),
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Some(block))
    }
}

/// The content of the current file, holes as zeros.
impl<R: Read> Read for Archive<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.size - self.position;
        let wanted = usize::try_from(left).map_or(buffer.len(), |left| left.min(buffer.len()));
        if wanted == 0 {
            return Ok(0);
        }
        let piece = self.pieces.front().copied();
        let read = match piece {
            Some(piece) if piece.offset <= self.position => {
                let inside = piece.offset + piece.length - self.position;
                let wanted = usize::try_from(inside).map_or(wanted, |inside| inside.min(wanted));
                let read = self.reader.read(&mut buffer[..wanted])?;
                if read == 0 {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the archive ends in a file",
                    ));
                }
                self.data -= read as u64;
                if read as u64 == inside {
                    self.pieces.pop_front();
                }
                read
            }
            piece => {
                let hole = piece.map_or(left, |piece| piece.offset - self.position);
                let length = usize::try_from(hole).map_or(wanted, |hole| hole.min(wanted));
                buffer[..length].fill(0);
                length
            }
        };
        self.position += read as u64;
        Ok(read)
    }
}

/// Pieces come in order, within the file, and hold exactly the data that is stored.
fn check(pieces: &[Piece], size: u64, stored: u64) -> Result<(), ArchiveError> {
    let (mut end, mut sum) = (0u64, 0u64);
    for piece in pieces {
        if piece.offset < end {
            return Err(ArchiveError::Malformed("a sparse file's pieces overlap"));
        }
        end = piece
            .offset
            .checked_add(piece.length)
            .filter(|&end| end <= size)
            .ok_or(ArchiveError::Malformed(
                "a sparse file's pieces reach beyond its end",
            ))?;
        sum = sum.saturating_add(piece.length);
    }
    if sum != stored {
        return Err(ArchiveError::Malformed(
            "a sparse file's pieces are not what is stored",
        ));
    }
    Ok(())
}

fn until_zero(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(
        bytes
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(bytes.len()),
    );
    bytes
}
