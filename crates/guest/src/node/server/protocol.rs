//! The messages of exec and attach: channels in WebSocket messages, as functions of bytes.
//!
//! | subprotocol | payload | end of input | status |
//! |---|---|---|---|
//! | `v5.channel.k8s.io` | binary | `[255, 0]` | JSON |
//! | `v4.channel.k8s.io`, `v4.base64.channel.k8s.io` | binary, base64 | none | JSON |
//! | `channel.k8s.io`, none, `base64.channel.k8s.io` | binary, base64 | none | text, only of errors |

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;

/// Channel numbers, the first byte of each message.
pub(crate) const STDIN: u8 = 0;
pub(crate) const STDOUT: u8 = 1;
pub(crate) const STDERR: u8 = 2;
pub(crate) const STATUS: u8 = 3;
pub(crate) const RESIZE: u8 = 4;
const CLOSE: u8 = 255;

/// How a session is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Protocol {
    /// The subprotocol's name, empty for none.
    pub(crate) name: &'static str,
    version: u8,
    base64: bool,
}

/// All subprotocols, best first.
const PROTOCOLS: [Protocol; 6] = [
    Protocol {
        name: "v5.channel.k8s.io",
        version: 5,
        base64: false,
    },
    Protocol {
        name: "v4.channel.k8s.io",
        version: 4,
        base64: false,
    },
    Protocol {
        name: "v4.base64.channel.k8s.io",
        version: 4,
        base64: true,
    },
    Protocol {
        name: "channel.k8s.io",
        version: 1,
        base64: false,
    },
    Protocol {
        name: "base64.channel.k8s.io",
        version: 1,
        base64: true,
    },
    Protocol {
        name: "",
        version: 1,
        base64: false,
    },
];

/// Something from the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Incoming {
    /// Bytes for the process.
    Stdin(Bytes),
    /// No more bytes for the process.
    EndOfStdin,
    /// The terminal's size in columns and rows.
    Resize(u16, u16),
    /// Nothing to do: an empty message, or a channel that clients do not write to.
    Nothing,
}

/// How the process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It ended with this code.
    Exited(i32),
    /// It could not be run.
    Failed(String),
}

/// A message for the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outgoing {
    /// As a binary message.
    Binary(Vec<u8>),
    /// As a text message.
    Text(String),
}

impl Protocol {
    /// The first of the client's subprotocols that is known. A client may name none.
    pub(crate) fn choose<'a>(offered: impl Iterator<Item = &'a str>) -> Option<Self> {
        let mut any = false;
        for name in offered.flat_map(|list| list.split(',')).map(str::trim) {
            any = true;
            if let Some(known) = PROTOCOLS.into_iter().find(|p| p.name == name) {
                return Some(known);
            }
        }
        (!any).then(|| PROTOCOLS[PROTOCOLS.len() - 1])
    }

    /// A message on a channel.
    pub(crate) fn encode(self, channel: u8, bytes: &[u8]) -> Outgoing {
        if self.base64 {
            return Outgoing::Text(format!("{channel}{}", STANDARD.encode(bytes)));
        }
        let mut message = Vec::with_capacity(bytes.len() + 1);
        message.push(channel);
        message.extend_from_slice(bytes);
        Outgoing::Binary(message)
    }

    /// A message of the client. Whatever is not understood is nothing.
    pub(crate) fn decode(self, message: &[u8]) -> Incoming {
        let Some((&first, rest)) = message.split_first() else {
            return Incoming::Nothing;
        };
        let (channel, bytes) = if self.base64 {
            match STANDARD.decode(rest) {
                Ok(bytes) => (first.wrapping_sub(b'0'), Bytes::from(bytes)),
                Err(_) => return Incoming::Nothing,
            }
        } else {
            (first, Bytes::copy_from_slice(rest))
        };
        match channel {
            STDIN if bytes.is_empty() => Incoming::Nothing,
            STDIN => Incoming::Stdin(bytes),
            RESIZE => resize(&bytes),
            CLOSE if self.version >= 5 && bytes.first() == Some(&STDIN) => Incoming::EndOfStdin,
            _ => Incoming::Nothing,
        }
    }

    /// What goes on the status channel at the end; nothing if nothing must.
    pub(crate) fn status(self, outcome: &Outcome) -> Option<Vec<u8>> {
        if self.version < 4 {
            return match outcome {
                Outcome::Exited(0) => None,
                Outcome::Exited(code) => {
                    Some(format!("command terminated with exit code {code}").into_bytes())
                }
                Outcome::Failed(message) => Some(message.clone().into_bytes()),
            };
        }
        let status = match outcome {
            Outcome::Exited(0) => json!({"metadata": {}, "status": "Success"}),
            Outcome::Exited(code) => json!({
                "metadata": {},
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": format!("command terminated with non-zero exit code: exit status {code}"),
                "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
            }),
            Outcome::Failed(message) => json!({
                "metadata": {},
                "status": "Failure",
                "reason": "InternalError",
                "message": format!("Internal error occurred: {message}"),
                "details": {"causes": [{"message": message}]},
                "code": 500,
            }),
        };
        Some(status.to_string().into_bytes())
    }
}

fn resize(bytes: &[u8]) -> Incoming {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Size {
        width: u16,
        height: u16,
    }
    match serde_json::from_slice::<Size>(bytes) {
        Ok(size) => Incoming::Resize(size.width, size.height),
        Err(_) => Incoming::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn protocol(name: &str) -> Protocol {
        Protocol::choose([name].into_iter()).unwrap()
    }

    #[test]
    fn the_first_known_subprotocol_is_chosen() {
        let choose = |list: &[&'static str]| Protocol::choose(list.iter().copied()).map(|p| p.name);
        assert_eq!(
            choose(&["v5.channel.k8s.io, v4.channel.k8s.io"]),
            Some("v5.channel.k8s.io")
        );
        assert_eq!(
            choose(&["v9.channel.k8s.io", "channel.k8s.io"]),
            Some("channel.k8s.io")
        );
        assert_eq!(choose(&[]), Some(""));
        assert_eq!(choose(&["SPDY/3.1+portforward.k8s.io"]), None);
    }

    #[test]
    fn messages_of_clients() {
        let v5 = protocol("v5.channel.k8s.io");
        assert_eq!(
            v5.decode(b"\0abc"),
            Incoming::Stdin(Bytes::from_static(b"abc"))
        );
        assert_eq!(v5.decode(&[255, 0]), Incoming::EndOfStdin);
        assert_eq!(
            v5.decode(b"\x04{\"Width\":80,\"Height\":24}"),
            Incoming::Resize(80, 24)
        );
        for nothing in [&b""[..], b"\0", b"\x04{}", b"\x01x", &[255], &[255, 1]] {
            assert_eq!(v5.decode(nothing), Incoming::Nothing, "{nothing:?}");
        }
        assert_eq!(
            protocol("v4.channel.k8s.io").decode(&[255, 0]),
            Incoming::Nothing
        );
        let base64 = protocol("base64.channel.k8s.io");
        assert_eq!(
            base64.decode(b"0YWJj"),
            Incoming::Stdin(Bytes::from_static(b"abc"))
        );
        assert_eq!(base64.decode(b"0!"), Incoming::Nothing);
        assert_eq!(
            base64.encode(STDOUT, b"abc"),
            Outgoing::Text("1YWJj".to_owned())
        );
    }

    #[test]
    fn statuses() {
        let v5 = protocol("v5.channel.k8s.io");
        let text = |outcome| String::from_utf8(v5.status(&outcome).unwrap()).unwrap();
        assert!(text(Outcome::Exited(0)).contains("\"Success\""));
        assert!(text(Outcome::Exited(42)).contains("{\"message\":\"42\",\"reason\":\"ExitCode\"}"));
        assert!(text(Outcome::Failed("no".to_owned())).contains("Internal error occurred: no"));
        // The conformance test refuses anything on this channel after a success.
        assert_eq!(protocol("channel.k8s.io").status(&Outcome::Exited(0)), None);
        assert!(
            protocol("channel.k8s.io")
                .status(&Outcome::Exited(1))
                .is_some()
        );
    }
}
