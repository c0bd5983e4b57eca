//! Copies what a VM prints into files of bounded size, at a bounded rate: its console, its log
//! port, and the error messages of its process.

use super::pace::Pace;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::UnixStream;
use tokio::time::Instant;

/// Largest file. The one before it is kept too, as `<name>.old`.
const LIMIT: u64 = 4 << 20;
/// Bytes per second that are read of what a VM prints. A boot prints some kilobytes; whoever prints
/// more than this waits.
const RATE: u32 = 256 << 10;
/// Pause before a lost connection is made again.
const PAUSE: Duration = Duration::from_millis(100);

/// Copies until it is dropped. A connection that exists already is used first.
pub(super) async fn copy(mut connection: Option<UnixStream>, socket: PathBuf, file: PathBuf) {
    loop {
        let stream = match connection.take() {
            Some(stream) => Ok(stream),
            None => UnixStream::connect(&socket).await,
        };
        if let Ok(stream) = stream
            && let Err(error) = drain(stream, &file).await
        {
            tracing::warn!(file = %file.display(), %error, "output of a VM cannot be kept");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Copies to the end of a stream.
pub(super) async fn drain(mut stream: impl AsyncRead + Unpin, path: &Path) -> std::io::Result<()> {
    let mut file = open(path)?;
    let mut length = file.metadata()?.len();
    let mut buffer = vec![0; 16 << 10];
    let mut pace = Pace::new(RATE, Instant::now());
    loop {
        let read = match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return Ok(()),
            Ok(read) => read,
        };
        if length > LIMIT {
            std::fs::rename(path, path.with_extension("old"))?;
            file = open(path)?;
            length = 0;
        }
        // Small and into the page cache: not worth another thread.
        file.write_all(&buffer[..read])?;
        length += read as u64;
        pace.spend(read).await;
    }
}

fn open(path: &Path) -> std::io::Result<std::fs::File> {
    std::fs::File::options()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::io::AsyncWriteExt;

    /// A minute of flooding leaves what the rate allows, in files that do not grow beyond the limit.
    #[tokio::test(start_paused = true)]
    async fn a_flood_is_read_slowly_and_kept_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console.log");
        let (mut guest, host) = tokio::io::duplex(64 << 10);
        let copied = tokio::spawn({
            let path = path.clone();
            async move { drain(host, &path).await }
        });
        let flood = vec![b'x'; 64 << 10];
        let mut written = 0;
        let flooding = async {
            loop {
                written += guest.write(&flood).await.unwrap();
            }
        };
        let end: Result<(), _> = tokio::time::timeout(Duration::from_mins(1), flooding).await;
        assert!(end.is_err());
        let rate = RATE as usize;
        assert!((55 * rate..63 * rate).contains(&written), "{written}");
        let size = |path: &Path| path.metadata().unwrap().len();
        assert!(size(&path) <= LIMIT + (16 << 10));
        assert!(size(&path.with_extension("old")) <= LIMIT + (16 << 10));
        copied.abort();
    }
}
