//! Pieces of containers' logs, on their way to the host's archive.
//!
//! A guest sends one piece and waits for what the host says it has. It goes on from there,
//! whatever got lost between: after a reconnect, or a restart of the host process, as well.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Largest piece in bytes: small enough that other messages wait little behind it.
pub const MAX_PIECE: usize = 32 << 10;

/// A file of a run of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogFile {
    /// Name of the container.
    pub container: String,
    /// Number of the run.
    pub attempt: u32,
    /// How often the run's file was set aside before this one.
    pub generation: u64,
}

/// A piece of a file. It may be empty, and then only says that the file exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogPiece {
    /// Of which file.
    #[serde(flatten)]
    pub file: LogFile,
    /// Where it begins.
    pub offset: u64,
    /// At most [`MAX_PIECE`] bytes.
    #[serde(serialize_with = "encode", deserialize_with = "decode")]
    pub bytes: Vec<u8>,
}

/// What the host has of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogStored {
    /// Of which file.
    #[serde(flatten)]
    pub file: LogFile,
    /// So many bytes; none if it takes nothing more of this file.
    pub length: Option<u64>,
}

fn encode<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&BASE64_STANDARD.encode(bytes))
}

fn decode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.len() > MAX_PIECE.div_ceil(3) * 4 {
        return Err(de::Error::custom("a piece of a log is too large"));
    }
    BASE64_STANDARD.decode(text).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Decoder, GuestMessage, HostMessage, encode};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_come_as_they_went(bytes in prop::collection::vec(any::<u8>(), 0..200), offset: u64, attempt: u32) {
            let file = LogFile { container: "c".to_owned(), attempt, generation: offset };
            let piece = GuestMessage::Log(Box::new(LogPiece { file, offset, bytes }));
            let mut decoder = Decoder::default();
            decoder.push(&encode(&piece).unwrap());
            prop_assert_eq!(decoder.next::<GuestMessage>().unwrap(), Some(piece));
        }
    }

    #[test]
    fn the_largest_piece_passes_and_a_larger_one_does_not() {
        for (length, passes) in [(MAX_PIECE, true), (MAX_PIECE + 3, false)] {
            let piece = LogPiece {
                file: LogFile::default(),
                offset: 0,
                bytes: vec![0xff; length],
            };
            let mut decoder = Decoder::default();
            decoder.push(&encode(&GuestMessage::Log(Box::new(piece))).unwrap());
            assert_eq!(decoder.next::<GuestMessage>().is_ok(), passes, "{length}");
        }
    }

    #[test]
    fn an_older_side_ignores_what_is_new() {
        #[derive(Debug, PartialEq, Deserialize)]
        #[serde(tag = "type", rename_all = "camelCase")]
        enum Older {
            Stop,
            #[serde(other)]
            Unknown,
        }
        let stored = LogStored {
            file: LogFile::default(),
            length: None,
        };
        for message in [HostMessage::LogStored(stored), HostMessage::LogsTaken] {
            let mut decoder = Decoder::default();
            decoder.push(&encode(&message).unwrap());
            assert_eq!(decoder.next::<Older>().unwrap(), Some(Older::Unknown));
        }
    }
}
