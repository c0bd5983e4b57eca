//! Frames of SPDY/3.1 as port-forward clients send them, as functions of bytes.
//!
//! Control frame: `0x8003`, type (2), flags (1), length (3), body. Data frame: stream (4), flags
//! (1), length (3), bytes. Header blocks are compressed with one context for the connection, which
//! starts from the protocol's dictionary. There is no flow control: Go's implementation neither
//! sends nor honours it.

use bytes::Bytes;
use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_HAS_MORE_INPUT;
use miniz_oxide::inflate::core::{DecompressorOxide, TINFL_LZ_DICT_SIZE, decompress};
use std::collections::BTreeMap;

/// The protocol's dictionary (SPDY/3, section 2.6.10.1); Adler-32 `e3c6a7c2`.
const DICTIONARY: &[u8] = include_bytes!("spdy_dictionary.bin");
/// zlib header with the dictionary's Adler-32: what the client's first header block begins with.
const ZLIB_HEADER: [u8; 6] = [0x78, 0xf9, 0xe3, 0xc6, 0xa7, 0xc2];
/// Largest frame that is taken; clients copy 32 KiB at once.
const MAX_FRAME: usize = 1 << 20;
/// Largest header block, decompressed.
const MAX_HEADERS: usize = 16 << 10;
/// No headers, as stored blocks: the reply's block after its stream's number.
const NO_HEADERS: [u8; 14] = [
    0x00, 0x04, 0x00, 0xfb, 0xff, 0, 0, 0, 0, 0x00, 0x00, 0x00, 0xff, 0xff,
];

const FIN: u8 = 1;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
/// Status of a stream that is given up.
const CANCEL: u32 = 5;

/// Why a byte stream cannot be gone on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SpdyError {
    /// A frame above the limit.
    #[error("a frame of {0} bytes is larger than the limit of {MAX_FRAME}")]
    TooLarge(usize),
    /// Another protocol version, or a frame that is too short.
    #[error("the frame is malformed")]
    Malformed,
    /// A header block that cannot be decompressed, or is too large.
    #[error("the header block is malformed")]
    Headers,
}

/// A frame of the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A new stream.
    Open {
        /// Its number.
        stream: u32,
        /// Its headers.
        headers: BTreeMap<String, String>,
    },
    /// Bytes on a stream.
    Data {
        /// Its number.
        stream: u32,
        /// Bytes.
        bytes: Bytes,
        /// Whether these are the last.
        last: bool,
    },
    /// A stream is given up.
    Reset {
        /// Its number.
        stream: u32,
    },
    /// To be answered with the same number.
    Ping(u32),
    /// The client leaves.
    GoAway,
}

/// Cuts a byte stream into frames.
pub(crate) struct Decoder {
    buffer: Vec<u8>,
    inflate: Box<DecompressorOxide>,
    window: Vec<u8>,
    position: usize,
    begun: bool,
}

impl Decoder {
    /// At the beginning of a connection.
    pub(crate) fn new() -> Self {
        let mut window = vec![0; TINFL_LZ_DICT_SIZE];
        window[..DICTIONARY.len()].copy_from_slice(DICTIONARY);
        Self {
            buffer: Vec::new(),
            inflate: Box::default(),
            window,
            position: DICTIONARY.len(),
            begun: false,
        }
    }

    /// Adds bytes as they came.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next frame that says something, or none until more bytes come.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Frame>, SpdyError> {
        loop {
            let Some((&word, &[flags, high, middle, low])) = self
                .buffer
                .first_chunk::<8>()
                .and_then(|head| head.first_chunk::<4>().zip(head.last_chunk::<4>()))
            else {
                return Ok(None);
            };
            let length = u32::from_be_bytes([0, high, middle, low]) as usize;
            if length > MAX_FRAME {
                return Err(SpdyError::TooLarge(length));
            }
            if self.buffer.len() < 8 + length {
                return Ok(None);
            }
            let body: Vec<u8> = self.buffer.drain(..8 + length).skip(8).collect();
            if word[0] & 0x80 == 0 {
                return Ok(Some(Frame::Data {
                    stream: u32::from_be_bytes(word),
                    bytes: body.into(),
                    last: flags & FIN != 0,
                }));
            }
            if word[..2] != [0x80, 3] {
                return Err(SpdyError::Malformed);
            }
            let kind = u16::from_be_bytes([word[2], word[3]]);
            if let Some(frame) = self.control(kind, &body)? {
                return Ok(Some(frame));
            }
        }
    }

    fn control(&mut self, kind: u16, body: &[u8]) -> Result<Option<Frame>, SpdyError> {
        let number = |body: &[u8]| {
            body.first_chunk::<4>()
                .map(|bytes| u32::from_be_bytes(*bytes) & 0x7fff_ffff)
                .ok_or(SpdyError::Malformed)
        };
        Ok(match kind {
            SYN_STREAM => {
                let block = body.get(10..).ok_or(SpdyError::Malformed)?;
                let headers = self.headers(block)?;
                Some(Frame::Open {
                    stream: number(body)?,
                    headers,
                })
            }
            RST_STREAM => Some(Frame::Reset {
                stream: number(body)?,
            }),
            PING => Some(Frame::Ping(number(body)?)),
            GOAWAY => Some(Frame::GoAway),
            // Settings, headers, window updates: nothing that matters here.
            _ => None,
        })
    }

    fn headers(&mut self, block: &[u8]) -> Result<BTreeMap<String, String>, SpdyError> {
        let block = if self.begun {
            block
        } else {
            self.begun = true;
            block.strip_prefix(&ZLIB_HEADER).ok_or(SpdyError::Headers)?
        };
        let text = self.inflate(block)?;
        parse_headers(&text).ok_or(SpdyError::Headers)
    }

    fn inflate(&mut self, mut block: &[u8]) -> Result<Vec<u8>, SpdyError> {
        let mut out = Vec::new();
        loop {
            let (status, read, written) = decompress(
                &mut self.inflate,
                block,
                &mut self.window,
                self.position,
                TINFL_FLAG_HAS_MORE_INPUT,
            );
            let end = self.position + written;
            out.extend_from_slice(&self.window[self.position..end]);
            self.position = end % TINFL_LZ_DICT_SIZE;
            block = &block[read..];
            if out.len() > MAX_HEADERS {
                return Err(SpdyError::Headers);
            }
            match status {
                TINFLStatus::HasMoreOutput => {}
                TINFLStatus::NeedsMoreInput if block.is_empty() => return Ok(out),
                _ => return Err(SpdyError::Headers),
            }
        }
    }
}

fn parse_headers(mut text: &[u8]) -> Option<BTreeMap<String, String>> {
    fn take<'a>(text: &mut &'a [u8]) -> Option<&'a [u8]> {
        let length = u32::from_be_bytes(*text.first_chunk::<4>()?) as usize;
        let value = text.get(4..4_usize.checked_add(length)?)?;
        *text = &text[4 + length..];
        Some(value)
    }
    let count = u32::from_be_bytes(*text.first_chunk::<4>()?);
    text = &text[4..];
    let mut headers = BTreeMap::new();
    for _ in 0..count {
        let name = String::from_utf8_lossy(take(&mut text)?).to_lowercase();
        let value = String::from_utf8_lossy(take(&mut text)?).into_owned();
        headers.insert(name, value);
    }
    Some(headers)
}

/// Writes frames.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    replied: bool,
}

impl Encoder {
    /// Accepts a stream.
    pub(crate) fn reply(&mut self, stream: u32) -> Vec<u8> {
        let mut body = stream.to_be_bytes().to_vec();
        if !self.replied {
            self.replied = true;
            body.extend_from_slice(&ZLIB_HEADER);
        }
        body.extend_from_slice(&NO_HEADERS);
        control(SYN_REPLY, &body)
    }
}

/// Bytes on a stream, at most what fits into a frame.
pub(crate) fn data(stream: u32, bytes: &[u8], last: bool) -> Vec<u8> {
    let mut frame = stream.to_be_bytes().to_vec();
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes();
    frame.extend_from_slice(&[u8::from(last) * FIN, length[1], length[2], length[3]]);
    frame.extend_from_slice(bytes);
    frame
}

/// Gives a stream up.
pub(crate) fn reset(stream: u32) -> Vec<u8> {
    let body = [stream.to_be_bytes(), CANCEL.to_be_bytes()].concat();
    control(RST_STREAM, &body)
}

/// Answers a ping.
pub(crate) fn ping(number: u32) -> Vec<u8> {
    control(PING, &number.to_be_bytes())
}

fn control(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x80, 0x03];
    frame.extend_from_slice(&kind.to_be_bytes());
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX).to_be_bytes();
    frame.extend_from_slice(&[0, length[1], length[2], length[3]]);
    frame.extend_from_slice(body);
    frame
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Two header blocks as Go's zlib makes them in one connection.
    const ERROR_STREAM: &str = "78f9e3c6a7c202253a48f95b044aab4c16064092b308125b99a054cc68004e872545a989b9d0a2863515141100000000ffff";
    const DATA_STREAM: &str = "224b2ba8944a04000000ffff";

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len())
            .step_by(2)
            .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap())
            .collect()
    }

    fn open(stream: u32, block: &str) -> Vec<u8> {
        let head = [stream.to_be_bytes().to_vec(), vec![0; 6]].concat();
        control(SYN_STREAM, &[head, bytes(block)].concat())
    }

    /// The frames by which a client opens its first pair of streams to port 80.
    pub(crate) fn first_pair() -> Vec<u8> {
        [open(1, ERROR_STREAM), open(3, DATA_STREAM)].concat()
    }

    fn kind(frame: &Frame, name: &str) -> bool {
        matches!(frame, Frame::Open { headers, .. }
            if headers.get("streamtype").is_some_and(|t| t == name)
                && headers.get("port").is_some_and(|p| p == "80")
                && headers.get("requestid").is_some_and(|r| r == "0"))
    }

    #[test]
    fn header_blocks_share_one_context() {
        let mut decoder = Decoder::new();
        decoder.push(&first_pair());
        assert!(kind(&decoder.next_frame().unwrap().unwrap(), "error"));
        assert!(kind(&decoder.next_frame().unwrap().unwrap(), "data"));
        assert_eq!(decoder.next_frame().unwrap(), None);
    }

    #[test]
    fn other_frames() {
        let mut decoder = Decoder::new();
        decoder.push(
            &[
                data(3, b"abc", true),
                reset(1),
                control(4, b"settings"),
                ping(7),
            ]
            .concat(),
        );
        let mut next = || decoder.next_frame().unwrap().unwrap();
        assert_eq!(
            next(),
            Frame::Data {
                stream: 3,
                bytes: "abc".into(),
                last: true
            }
        );
        assert_eq!(next(), Frame::Reset { stream: 1 });
        assert_eq!(next(), Frame::Ping(7));
        decoder.push(&[0x80, 0x02, 0, 6, 0, 0, 0, 0]);
        assert_eq!(decoder.next_frame(), Err(SpdyError::Malformed));
    }

    proptest! {
        /// However the stream is cut, the same frames come out.
        #[test]
        fn any_cut(cut in 1usize..30) {
            let stream = [first_pair(), data(3, b"hello", false), data(3, b"", true)].concat();
            let mut decoder = Decoder::new();
            let mut count = 0;
            for piece in stream.chunks(cut) {
                decoder.push(piece);
                while decoder.next_frame().unwrap().is_some() {
                    count += 1;
                }
            }
            prop_assert_eq!(count, 4);
        }

        #[test]
        fn garbage_is_refused(stream in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut decoder = Decoder::new();
            decoder.push(&[open(1, ERROR_STREAM), control(SYN_STREAM, &stream), stream].concat());
            for _ in 0..100 {
                if !matches!(decoder.next_frame(), Ok(Some(_))) {
                    break;
                }
            }
        }
    }
}
