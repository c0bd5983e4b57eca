//! QEMU's control protocol: JSON lines, one command at a time.
//!
//! A jailed QEMU may have been taken over by its guest, so its answers are bounded in size and time.

use super::HypervisorError;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;

/// Most that is read until an answer is complete: it has some hundred bytes, and few events and late
/// answers come before it.
const ANSWER: usize = 1 << 20;
/// Longest wait for an answer; they take milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// A connection on which commands may be given.
#[derive(Debug)]
pub(super) struct Qmp {
    stream: UnixStream,
    buffer: Vec<u8>,
    id: u64,
}

#[derive(Debug, Deserialize)]
struct Answer {
    id: Option<u64>,
    #[serde(rename = "return")]
    returned: Option<Value>,
    error: Option<Failure>,
}

#[derive(Debug, Deserialize)]
struct Failure {
    desc: String,
}

impl Qmp {
    /// Greets QEMU.
    pub(super) async fn connect(stream: UnixStream) -> Result<Self, HypervisorError> {
        let mut qmp = Self {
            stream,
            buffer: Vec::new(),
            id: 0,
        };
        qmp.execute("qmp_capabilities", json!({}), None).await?;
        Ok(qmp)
    }

    /// Gives a command, with a descriptor if the command takes one, and waits for its answer.
    pub(super) async fn execute(
        &mut self,
        command: &'static str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Value, HypervisorError> {
        self.id += 1;
        let line = format!(
            "{}\n",
            json!({"execute": command, "arguments": arguments, "id": self.id})
        );
        let talk = async {
            self.send(line.as_bytes(), descriptor).await?;
            self.answer().await
        };
        let answer = tokio::time::timeout(PATIENCE, talk).await;
        let Ok(Ok(answer)) = answer else {
            return Err(HypervisorError::NoAnswer { command });
        };
        match answer.error {
            None => Ok(answer.returned.unwrap_or(Value::Null)),
            Some(failure) => Err(HypervisorError::Refused {
                command,
                message: failure.desc,
            }),
        }
    }

    async fn send(
        &mut self,
        line: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> std::io::Result<()> {
        let mut sent = 0;
        if let Some(descriptor) = descriptor {
            let socket = self.stream.as_fd();
            sent = self
                .stream
                .async_io(Interest::WRITABLE, || {
                    let rights = [descriptor];
                    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                    let mut control = SendAncillaryBuffer::new(&mut space);
                    control.push(SendAncillaryMessage::ScmRights(&rights));
                    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                    Ok(sendmsg(socket, &[IoSlice::new(line)], &mut control, flags)?)
                })
                .await?;
        }
        self.stream.write_all(&line[sent..]).await
    }

    /// The answer to the last command; events and answers to abandoned commands are skipped.
    async fn answer(&mut self) -> std::io::Result<Answer> {
        let mut room = ANSWER.saturating_sub(self.buffer.len());
        loop {
            while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                if let Ok(answer) = serde_json::from_slice::<Answer>(&line)
                    && answer.id == Some(self.id)
                {
                    return Ok(answer);
                }
            }
            match (&mut self.stream)
                .take(room as u64)
                .read_buf(&mut self.buffer)
                .await?
            {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                read => room -= read,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A QEMU that its guest took over: it answers the greeting, and then prints what it is given.
    async fn after(flood: &'static [u8]) -> Result<Value, HypervisorError> {
        let (host, mut taken) = UnixStream::pair().unwrap();
        let flooding = tokio::spawn(async move {
            let greeting = b"{\"QMP\": {}}\n{\"return\": {}, \"id\": 1}\n";
            taken.write_all(greeting).await.unwrap();
            let mut command = [0; 16];
            let mut read = 0;
            // The greeting's command, and the beginning of the next.
            while read < 100 {
                read += taken.read(&mut command).await.unwrap();
            }
            let mut written = 0;
            while taken.write_all(flood).await.is_ok() {
                written += flood.len();
            }
            written
        });
        let mut qmp = Qmp::connect(host).await?;
        let answer = qmp
            .execute("query-status", json!({"": "x".repeat(100)}), None)
            .await;
        assert!(qmp.buffer.len() <= ANSWER, "{}", qmp.buffer.len());
        drop(qmp);
        // What is more than an answer only filled the socket.
        assert!(flooding.await.unwrap() < 2 * ANSWER);
        answer
    }

    #[tokio::test]
    async fn what_is_no_answer_is_read_up_to_a_limit() {
        for flood in [
            &b"{\"event\": \"X\"}\n"[..],
            b"{\"return\": {}, \"id\": 1}\n",
            b"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
            b"\n",
            b"\xff\x00",
        ] {
            let answer = after(flood).await;
            assert!(
                matches!(answer, Err(HypervisorError::NoAnswer { .. })),
                "{answer:?}"
            );
        }
    }

    #[tokio::test]
    async fn events_before_an_answer_are_passed_over() {
        let answer = after(b"{\"event\": \"X\"}\n{\"return\": 7, \"id\": 2}\n").await;
        assert_eq!(answer.unwrap(), json!(7));
    }
}
