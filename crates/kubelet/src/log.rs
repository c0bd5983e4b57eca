//! Lines of log files, sent to a client as it asked for them.
//!
//! The files of a run follow one another, the oldest first. They are in the CRI format
//! ([`monopod_core::pod::log`]), but may hold anything: a host has them from its guests.

use bytes::Bytes;
use monopod_core::pod::log::{Answer, MAX_TEXT, Query};
use std::io::{self, BufRead, Read, Seek, SeekFrom};
use tokio::sync::mpsc;

/// Longest line that is read as one: the longest text, and more than its time, stream and tag.
const MAX_LINE: u64 = MAX_TEXT as u64 + 256;
/// Bytes of an answer that are sent to a client at once.
const SEND: usize = 32 * 1024;
/// Bytes read at once on the way backwards.
const BLOCK: u64 = 32 * 1024;

/// An answer that is being sent.
#[derive(Debug)]
pub struct Sending {
    answer: Answer,
    text: Vec<u8>,
    out: mpsc::Sender<Bytes>,
}

impl Sending {
    /// Begins an answer. Where it begins is the caller's business, see [`seek_tail`].
    pub fn new(query: Query, out: mpsc::Sender<Bytes>) -> Self {
        Self {
            answer: Answer::new(query),
            text: Vec::new(),
            out,
        }
    }

    /// Sends every line that a reader has. False if nothing more is wanted.
    pub async fn lines(&mut self, reader: &mut (impl BufRead + Send)) -> io::Result<bool> {
        loop {
            let line = next_line(reader)?;
            let ended = line.is_none();
            if let Some(line) = line {
                self.answer.line(&line, &mut self.text);
            }
            let full = self.answer.is_full();
            if (ended || full || self.text.len() >= SEND)
                && !self.text.is_empty()
                && self
                    .out
                    .send(Bytes::from(std::mem::take(&mut self.text)))
                    .await
                    .is_err()
            {
                return Ok(false);
            }
            if full {
                return Ok(false);
            }
            if ended {
                return Ok(true);
            }
        }
    }

    /// Waits until the client is gone.
    pub async fn closed(&self) {
        self.out.closed().await;
    }
}

/// The next line without its end.
pub fn next_line(reader: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    reader.take(MAX_LINE).read_until(b'\n', &mut line)?;
    if line.last() == Some(&b'\n') {
        line.pop();
        return Ok(Some(line));
    }
    Ok((!line.is_empty()).then_some(line))
}

/// Sets files that follow one another to where the last `tail` lines of them begin: those before
/// to their ends. Reads no more of them than it must.
pub fn seek_tail<F: Read + Seek>(files: &mut [F], tail: usize) -> io::Result<()> {
    let mut wanted = tail;
    for file in files.iter_mut().rev() {
        let end = file.seek(SeekFrom::End(0))?;
        if wanted == 0 {
            continue;
        }
        match tail_of(file, end, &mut wanted)? {
            Some(start) => {
                file.seek(SeekFrom::Start(start))?;
                wanted = 0;
            }
            None => {
                file.seek(SeekFrom::Start(0))?;
            }
        }
    }
    Ok(())
}

/// Where the last lines begin; none if all of the file belongs to them, after it took its lines
/// off the wanted ones.
fn tail_of<F: Read + Seek>(file: &mut F, end: u64, wanted: &mut usize) -> io::Result<Option<u64>> {
    let mut block = Vec::new();
    let mut position = end;
    // The newline that ends the last line begins none.
    let mut last = true;
    while position > 0 {
        let start = position.saturating_sub(BLOCK);
        file.seek(SeekFrom::Start(start))?;
        block.clear();
        file.take(position - start).read_to_end(&mut block)?;
        for (at, byte) in block.iter().enumerate().rev() {
            if *byte == b'\n' && !last {
                *wanted -= 1;
                if *wanted == 0 {
                    return Ok(Some(start + at as u64 + 1));
                }
            }
            last = false;
        }
        position = start;
    }
    if end > 0 {
        *wanted -= 1;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Cursor;

    proptest! {
        /// The tail is what one would count, however the lines are spread over files.
        #[test]
        fn the_tail_is_the_last_lines(
            files in prop::collection::vec(prop::collection::vec("[a-c]{0,3}", 0..6), 0..4),
            long in prop::option::of(0usize..3),
            cut in any::<bool>(),
            tail in 0usize..20,
        ) {
            let mut texts: Vec<Vec<u8>> = files
                .iter()
                .map(|lines| lines.iter().flat_map(|line| format!("{line}\n").into_bytes()).collect())
                .collect();
            if let Some(text) = long.and_then(|at| texts.get_mut(at)) {
                text.extend(vec![b'x'; 70_000]);
                text.push(b'\n');
            }
            // A file may end within a line only if it is the last one.
            if cut && let Some(text) = texts.last_mut() {
                text.pop();
            }
            let all: Vec<Vec<u8>> = texts
                .concat()
                .split_inclusive(|byte| *byte == b'\n')
                .map(<[u8]>::to_vec)
                .collect();
            let expected = all[all.len().saturating_sub(tail)..].concat();
            let mut cursors: Vec<_> = texts.into_iter().map(Cursor::new).collect();
            seek_tail(&mut cursors, tail).unwrap();
            let mut found = Vec::new();
            for cursor in &mut cursors {
                cursor.read_to_end(&mut found).unwrap();
            }
            prop_assert_eq!(found, expected);
        }

        /// Garbage is read to its end, in pieces of bounded length.
        #[test]
        fn lines_are_bounded(bytes in prop::collection::vec(any::<u8>(), 0..300), zeros in 0usize..50_000) {
            let mut bytes = bytes;
            bytes.extend(vec![0; zeros]);
            let mut reader = io::BufReader::new(&bytes[..]);
            let mut read = 0;
            while let Some(line) = next_line(&mut reader).unwrap() {
                prop_assert!(line.len() as u64 <= MAX_LINE);
                read += line.len() + 1;
            }
            prop_assert!(read >= bytes.len());
        }
    }
}
