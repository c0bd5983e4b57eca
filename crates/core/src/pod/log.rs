//! Lines of log files in the CRI format, and questions to them.
//!
//! A line is `<time> <stream> <tag> <text>`, for instance
//! `2026-11-30T12:00:00.000000001Z stdout F hello`. The tag `P` marks a part of a longer line.

use jiff::Timestamp;

/// Longest text in one line of a file; longer ones are cut into parts. containerd's.
pub const MAX_TEXT: usize = 16 * 1024;
/// A log file of this size is set aside, at the latest; the kubelet's `containerLogMaxSize`.
pub const MAX_FILE: u64 = 10 << 20;
/// Files that are kept of a run: the current one and the one before.
pub const FILES: usize = 2;
/// Runs of a container that are kept: the current one and the one before.
pub const RUNS: usize = 2;
/// Bytes of all logs of a pod. Four containers may fill all their files.
pub const POD_LIMIT: u64 = 4 * (RUNS * FILES) as u64 * MAX_FILE;

/// At which size a log file is set aside, so that all files of a pod with so many containers stay
/// within [`POD_LIMIT`].
pub fn file_limit(containers: usize) -> u64 {
    let files = u64::try_from(containers.max(1).saturating_mul(RUNS * FILES)).unwrap_or(u64::MAX);
    (POD_LIMIT / files).min(MAX_FILE)
}

/// How many of the first bytes of whole lines fit into so much room; no line is divided. At least
/// one line is taken where there is `room` for a whole file (`fresh`).
pub fn whole_lines(lines: &[u8], room: usize, fresh: bool) -> usize {
    if lines.len() <= room {
        return lines.len();
    }
    let fitting = lines[..room].iter().rposition(|&byte| byte == b'\n');
    match fitting {
        Some(end) => end + 1,
        None if fresh => lines
            .iter()
            .position(|&byte| byte == b'\n')
            .map_or(lines.len(), |end| end + 1),
        None => 0,
    }
}

/// How far a log is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// How often its file was set aside.
    pub generation: u64,
    /// Bytes of the file that was set aside last.
    pub before: u64,
    /// Bytes of the current file.
    pub current: u64,
    /// Nothing more will come.
    pub closed: bool,
}

/// Which piece of a log to carry to the host next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// At most so many bytes of a file from an offset on; possibly none, to say that it exists.
    Piece {
        /// Of which file.
        generation: u64,
        /// From where.
        offset: u64,
        /// How many there are.
        length: u64,
    },
    /// Nothing, until there is progress.
    Idle,
    /// Nothing any more.
    Done,
}

/// How much of a log the host has, as the node knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    generation: u64,
    offset: u64,
    /// The host has said what it has.
    known: bool,
}

impl Carried {
    /// What to carry next. What was deleted before it was carried is passed over.
    pub fn next(&mut self, progress: &Progress) -> Next {
        let oldest = progress.generation.saturating_sub(1);
        if self.generation < oldest {
            self.enter(oldest);
        }
        if self.generation < progress.generation && self.known && self.offset >= progress.before {
            self.enter(progress.generation);
            // The host knows the run already.
            self.known = true;
        }
        let size = if self.generation < progress.generation {
            progress.before
        } else {
            progress.current
        };
        let length = size.saturating_sub(self.offset);
        if length > 0 || !self.known {
            return Next::Piece {
                generation: self.generation,
                offset: self.offset.min(size),
                length,
            };
        }
        if progress.closed {
            Next::Done
        } else {
            Next::Idle
        }
    }

    fn enter(&mut self, generation: u64) {
        *self = Self {
            generation,
            offset: 0,
            known: false,
        };
    }

    /// The host has so many bytes of a file.
    pub fn stored(&mut self, generation: u64, length: u64) {
        if generation == self.generation {
            self.offset = length;
            self.known = true;
        }
    }

    /// The host takes nothing more of a file.
    pub fn refused(&mut self, generation: u64) {
        self.stored(generation, u64::MAX);
    }
}

/// Cuts one stream of a container into lines of the log file.
#[derive(Debug)]
pub struct LineCutter {
    stream: &'static str,
    pending: Vec<u8>,
}

impl LineCutter {
    /// For `stdout` or `stderr`.
    pub fn new(stream: &'static str) -> Self {
        Self {
            stream,
            pending: Vec::new(),
        }
    }

    /// Takes bytes as they came, writes every line that they complete.
    pub fn push(&mut self, bytes: &[u8], now: Timestamp, out: &mut Vec<u8>) {
        // Once, not for each line: whoever writes lines without end is not to cost more than that.
        let prefix = self.head(now);
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, complete) = match piece.split_last() {
                Some((b'\n', text)) => (text, true),
                _ => (piece, false),
            };
            let mut text = text;
            while self.pending.len() + text.len() > MAX_TEXT {
                let (head, tail) = text.split_at(MAX_TEXT - self.pending.len());
                self.pending.extend_from_slice(head);
                self.write(&prefix, b'P', out);
                text = tail;
            }
            self.pending.extend_from_slice(text);
            if complete {
                self.write(&prefix, b'F', out);
            }
        }
    }

    /// Writes what is left at the end of the stream.
    pub fn finish(&mut self, now: Timestamp, out: &mut Vec<u8>) {
        if !self.pending.is_empty() {
            let prefix = self.head(now);
            self.write(&prefix, b'P', out);
        }
    }

    fn head(&self, now: Timestamp) -> String {
        format!("{now:.9} {} ", self.stream)
    }

    fn write(&mut self, head: &str, tag: u8, out: &mut Vec<u8>) {
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(&[tag, b' ']);
        out.append(&mut self.pending);
        out.push(b'\n');
    }
}

/// What a client wants of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    /// Only the last so many lines.
    pub tail: Option<usize>,
    /// Only lines of this time or later.
    pub since: Option<Timestamp>,
    /// Stop after so many bytes.
    pub limit: Option<usize>,
    /// Prefix each line by its time.
    pub timestamps: bool,
}

/// Answers a question line by line.
#[derive(Debug)]
pub struct Answer {
    query: Query,
    left: Option<usize>,
    /// The last line was a part, so the next one continues it and gets no time.
    continued: bool,
}

impl Answer {
    /// Begins an answer. `tail` is not its business: the reader begins there.
    pub fn new(query: Query) -> Self {
        Self {
            left: query.limit,
            query,
            continued: false,
        }
    }

    /// Whether nothing more may be written.
    pub fn is_full(&self) -> bool {
        self.left == Some(0)
    }

    /// Writes what the client gets for one line of the file (without its newline).
    ///
    /// A line that is not in the format is passed over.
    pub fn line(&mut self, line: &[u8], out: &mut Vec<u8>) {
        let mut fields = line.splitn(4, |&byte| byte == b' ');
        let (Some(time), Some(_stream), Some(tag), Some(text)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            return;
        };
        if let Some(since) = self.query.since {
            let time: Option<Timestamp> =
                std::str::from_utf8(time).ok().and_then(|t| t.parse().ok());
            if time.is_none_or(|time| time < since) {
                return;
            }
        }
        if self.query.timestamps && !self.continued {
            self.write(time, out);
            self.write(b" ", out);
        }
        self.write(text, out);
        self.continued = tag == b"P";
        if !self.continued {
            self.write(b"\n", out);
        }
    }

    fn write(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let bytes = match &mut self.left {
            None => bytes,
            Some(left) => {
                let allowed = &bytes[..bytes.len().min(*left)];
                *left -= allowed.len();
                allowed
            }
        };
        out.extend_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    fn answer(file: &[u8], query: Query) -> Vec<u8> {
        let mut answer = Answer::new(query);
        let mut out = Vec::new();
        for line in file
            .split(|&byte| byte == b'\n')
            .filter(|line| !line.is_empty())
        {
            answer.line(line, &mut out);
        }
        out
    }

    #[test]
    fn a_line_is_in_the_format() {
        let mut out = Vec::new();
        let mut cutter = LineCutter::new("stdout");
        cutter.push(b"hel", at(0), &mut out);
        cutter.push(b"lo\nrest", at(1), &mut out);
        cutter.finish(at(2), &mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "1970-01-01T00:00:01.000000000Z stdout F hello\n\
             1970-01-01T00:00:02.000000000Z stdout P rest\n"
        );
    }

    #[test]
    fn times_since_and_limits() {
        let mut file = Vec::new();
        let mut cutter = LineCutter::new("stderr");
        for second in 0..3 {
            cutter.push(format!("line {second}\n").as_bytes(), at(second), &mut file);
        }
        let ask = |query| String::from_utf8(answer(&file, query)).unwrap();
        let since = Query {
            since: Some(at(2)),
            timestamps: true,
            ..Query::default()
        };
        assert_eq!(ask(since), "1970-01-01T00:00:02.000000000Z line 2\n");
        let limit = Query {
            limit: Some(9),
            ..Query::default()
        };
        assert_eq!(ask(limit), "line 0\nli");
    }

    #[test]
    fn the_files_of_a_pod_stay_within_its_limit() {
        assert_eq!(file_limit(0), MAX_FILE);
        assert_eq!(file_limit(4), MAX_FILE);
        for containers in 1..1000 {
            let files = (containers * RUNS * FILES) as u64;
            assert!(file_limit(containers) * files <= POD_LIMIT);
            assert!(file_limit(containers) >= 40 << 10, "a line always fits");
        }
    }

    proptest! {
        /// Whole lines, and none is left over if there is a fresh file for it.
        #[test]
        fn lines_are_not_divided(lines in prop::collection::vec("[a-z]{0,9}", 1..9), room in 0usize..40, fresh: bool) {
            let lines: Vec<u8> = lines.iter().flat_map(|line| format!("{line}\n").into_bytes()).collect();
            let taken = whole_lines(&lines, room, fresh);
            prop_assert!(taken <= lines.len());
            prop_assert!(taken == 0 || lines[taken - 1] == b'\n');
            prop_assert!(!fresh || taken > 0);
            let first = lines.iter().position(|&byte| byte == b'\n').unwrap() + 1;
            prop_assert!(taken <= room || taken == first);
        }

        /// What a container wrote is what a client reads, however the writes were cut.
        #[test]
        fn logs_come_back(text in prop::collection::vec(prop::sample::select(vec![b'a', b'\n', 0xff]), 0..200), cut in 1usize..50, long in 0usize..3) {
            let mut text = text;
            text.splice(0..0, vec![b'x'; long * MAX_TEXT]);
            let (mut file, mut cutter) = (Vec::new(), LineCutter::new("stdout"));
            for piece in text.chunks(cut * 97) {
                cutter.push(piece, at(0), &mut file);
            }
            cutter.finish(at(0), &mut file);
            prop_assert_eq!(answer(&file, Query::default()), text);
        }

        #[test]
        fn garbage_is_passed_over(line in prop::collection::vec(any::<u8>(), 0..60)) {
            let mut out = Vec::new();
            Answer::new(Query { since: Some(at(0)), timestamps: true, ..Query::default() }).line(&line, &mut out);
            prop_assert!(out.len() <= line.len() + 2);
        }
    }
}
