//! Carries the guest's own log lines to the host.
//!
//! Never stops a process that logs: what a slow host does not take is dropped and counted.

use crate::internal::LOG_PIPE;
use anyhow::Result;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};

/// Starts a thread that copies the log pipe to a port. The thread itself never logs.
pub(super) fn forward(mut port: File) -> Result<()> {
    rustix::io::ioctl_fionbio(&port, true)?;
    let mut pipe = File::open(LOG_PIPE)?;
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        let mut dropped = 0;
        while let Ok(length) = pipe.read(&mut buffer) {
            if dropped > 0
                && write(
                    &mut port,
                    format!("[{dropped} bytes of log dropped]\n").as_bytes(),
                )
            {
                dropped = 0;
            }
            if !write(&mut port, &buffer[..length]) {
                dropped += length;
            }
        }
    });
    Ok(())
}

/// Writes all of it or, if the host does not read, possibly only a part.
fn write(port: &mut File, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match port.write(bytes) {
            Ok(length) => bytes = &bytes[length..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
    true
}
