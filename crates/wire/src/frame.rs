//! Frames on a byte stream.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Largest body of a frame in bytes. The largest message, an image's configuration, stays far below.
pub const MAX_FRAME: usize = 1 << 20;
const HEADER: usize = 4;

/// Why bytes are not a frame. The stream cannot be used further and must be closed.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The other side announced a body above the limit, or we were about to.
    #[error("frame of {length} bytes is larger than the limit of {MAX_FRAME}")]
    TooLarge {
        /// Announced length in bytes.
        length: usize,
    },
    /// The body is not a message.
    #[error("frame is not a message")]
    Malformed(#[source] serde_json::Error),
}

/// One message as a frame.
pub fn encode<M: Serialize>(message: &M) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; HEADER];
    serde_json::to_writer(&mut frame, message).map_err(FrameError::Malformed)?;
    let length = frame.len() - HEADER;
    match u32::try_from(length) {
        Ok(header) if length <= MAX_FRAME => frame[..HEADER].copy_from_slice(&header.to_be_bytes()),
        _ => return Err(FrameError::TooLarge { length }),
    }
    Ok(frame)
}

/// Cuts a byte stream into messages. Holds at most one frame and what was pushed with its end.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    /// Adds bytes as they came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, or none until more bytes come.
    #[expect(
        clippy::should_implement_trait,
        reason = "the type of the message is the caller's, each time"
    )]
    pub fn next<M: DeserializeOwned>(&mut self) -> Result<Option<M>, FrameError> {
        let Some(header) = self.buffer.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let length = usize::try_from(u32::from_be_bytes(*header)).unwrap_or(usize::MAX);
        if length > MAX_FRAME {
            return Err(FrameError::TooLarge { length });
        }
        let Some(body) = self.buffer.get(HEADER..HEADER + length) else {
            return Ok(None);
        };
        let message = serde_json::from_slice(body).map_err(FrameError::Malformed);
        self.buffer.drain(..HEADER + length);
        message.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GuestMessage, GuestPhase, Hello, HostMessage, LogFile, LogPiece, Stage};
    use proptest::prelude::*;

    proptest! {
        /// However the stream is cut, the same messages come out.
        #[test]
        fn any_cut_gives_the_same_messages(epochs in prop::collection::vec(any::<u64>(), 0..8), cut in 1usize..64) {
            let messages: Vec<_> = epochs.iter()
                .map(|&epoch| GuestMessage::Hello(Hello { version: 1, epoch, stage: Stage::Ready }))
                .collect();
            let stream: Vec<u8> = messages.iter().flat_map(|m| encode(m).expect("small")).collect();
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            for piece in stream.chunks(cut) {
                decoder.push(piece);
                while let Some(message) = decoder.next::<GuestMessage>().expect("well-formed") {
                    seen.push(message);
                }
            }
            prop_assert_eq!(seen, messages);
        }

        /// Whatever comes, however it is cut, gives messages, an error or nothing, never a panic.
        /// Between two reads no more is held than a frame.
        #[test]
        fn hostile_bytes_are_refused(pieces in prop::collection::vec(hostile(), 0..20), cut in 1usize..(64 << 10)) {
            let stream = pieces.concat();
            let mut decoder = Decoder::default();
            'stream: for piece in stream.chunks(cut) {
                decoder.push(piece);
                loop {
                    match decoder.next::<GuestMessage>() {
                        Ok(Some(_)) => {}
                        Ok(None) => break,
                        Err(_) => break 'stream,
                    }
                }
                prop_assert!(decoder.buffer.len() < HEADER + MAX_FRAME);
                // A vector grows to twice of what it holds, and keeps that.
                prop_assert!(decoder.buffer.capacity() <= 2 * (HEADER + MAX_FRAME + cut));
            }
        }
    }

    /// Noise, headers without their bodies, and messages with bytes changed.
    fn hostile() -> impl Strategy<Value = Vec<u8>> {
        let limit = u32::try_from(MAX_FRAME).expect("it is sent as one");
        let lengths = prop_oneof![0..300_u32, Just(limit), Just(limit + 1), Just(u32::MAX),];
        let messages = prop_oneof![
            Just(GuestMessage::Ready),
            any::<u64>().prop_map(|time_ns| GuestMessage::Phase(GuestPhase {
                name: "\u{0}é".repeat(50),
                time_ns
            })),
            prop::collection::vec(any::<u8>(), 0..1000).prop_map(|bytes| {
                let (file, offset) = (LogFile::default(), u64::MAX);
                GuestMessage::Log(Box::new(LogPiece {
                    file,
                    offset,
                    bytes,
                }))
            }),
        ];
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..300),
            lengths.prop_map(|length| length.to_be_bytes().to_vec()),
            Just(vec![b'['; 200_000]),
            (messages, changes).prop_map(|(message, changes)| {
                let mut frame = encode(&message).expect("small");
                for (at, byte) in changes {
                    let at = at.index(frame.len());
                    frame[at] = byte;
                }
                frame
            }),
        ]
    }

    #[test]
    fn a_message_of_a_later_version_survives() {
        let body = br#"{"type":"teleport","to":"elsewhere"}"#;
        let mut decoder = Decoder::default();
        decoder.push(&u32::try_from(body.len()).unwrap().to_be_bytes());
        decoder.push(body);
        assert_eq!(
            decoder.next::<HostMessage>().unwrap(),
            Some(HostMessage::Unknown)
        );
    }

    #[test]
    fn an_oversized_frame_is_refused_before_it_is_read() {
        let mut decoder = Decoder::default();
        decoder.push(&u32::MAX.to_be_bytes());
        assert!(matches!(
            decoder.next::<GuestMessage>(),
            Err(FrameError::TooLarge { .. })
        ));
    }
}
