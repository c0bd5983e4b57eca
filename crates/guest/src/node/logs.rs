//! Log files of containers: two files for each run, the older one kept when the newer is full.
//!
//! Lines are in the CRI format (`monopod_core::pod::log`). A follower is woken by a change of the
//! log's progress, the shipper by a bell that all logs share.

use bytes::Bytes;
use monopod_core::pod::log::{LineCutter, Progress, Query, whole_lines};
use monopod_kubelet::log::{Sending, next_line, seek_tail};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::sync::{Notify, broadcast, mpsc, watch};

/// Bytes read from a container at once.
const READ: usize = 32 * 1024;

/// What a container wrote just now, for attached clients.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    /// Whether to standard error.
    pub(crate) stderr: bool,
    /// What.
    pub(crate) bytes: Bytes,
}

/// The log of one run of a container. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    path: PathBuf,
    /// A file of this size is set aside.
    limit: u64,
    file: Arc<Mutex<File>>,
    progress: watch::Sender<Progress>,
    bell: Arc<Notify>,
}

impl Log {
    /// Creates the log. The bell rings when there is more of it.
    pub(crate) fn create(path: PathBuf, limit: u64, bell: Arc<Notify>) -> io::Result<Self> {
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        Ok(Self {
            file: Arc::new(Mutex::new(create(&path)?)),
            path,
            limit,
            progress: watch::Sender::new(Progress::default()),
            bell,
        })
    }

    /// How far it is.
    pub(crate) fn progress(&self) -> Progress {
        *self.progress.borrow()
    }

    /// Deletes the files; readers that have them open may go on.
    pub(crate) fn delete(&self) {
        for path in [self.path.clone(), older(&self.path)] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%error, "a log was not deleted");
                }
                Ok(()) | Err(_) => {}
            }
        }
    }

    /// Says that nothing more will come.
    pub(crate) fn close(&self) {
        self.progress.send_modify(|progress| progress.closed = true);
        self.bell.notify_one();
    }

    /// Appends whole lines. What comes after the end is of processes that the log does not await.
    fn append(&self, mut lines: &[u8]) -> io::Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let mut progress = self.progress();
        while !lines.is_empty() && !progress.closed {
            let room = self.limit.saturating_sub(progress.current);
            let room = usize::try_from(room).unwrap_or(usize::MAX);
            let length = whole_lines(lines, room, progress.current == 0);
            if length == 0 {
                fs::rename(&self.path, older(&self.path))?;
                *file = create(&self.path)?;
                progress.generation += 1;
                progress.before = progress.current;
                progress.current = 0;
            } else {
                let (now, later) = lines.split_at(length);
                file.write_all(now)?;
                progress.current += length as u64;
                lines = later;
            }
            self.progress.send_replace(progress);
        }
        drop(file);
        self.bell.notify_one();
        Ok(())
    }

    /// Reads a piece of one of the files; none if the file is gone.
    pub(crate) fn read(
        &self,
        generation: u64,
        offset: u64,
        length: usize,
    ) -> io::Result<Option<Vec<u8>>> {
        // Held, so that no file is set aside meanwhile.
        let _file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let progress = self.progress();
        let path = if generation == progress.generation {
            self.path.clone()
        } else if generation + 1 == progress.generation {
            older(&self.path)
        } else {
            return Ok(None);
        };
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        file.seek(SeekFrom::Start(offset))?;
        let mut bytes = Vec::with_capacity(length);
        file.take(length as u64).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    /// Copies a stream of a container into the log until it ends.
    pub(crate) async fn copy(
        self,
        mut stream: impl AsyncRead + Unpin,
        stderr: bool,
        attached: broadcast::Sender<Output>,
    ) {
        let mut cutter = LineCutter::new(if stderr { "stderr" } else { "stdout" });
        let mut buffer = vec![0; READ];
        let mut lines = Vec::new();
        loop {
            // A terminal whose last process ended gives an error instead of an end.
            let length = stream.read(&mut buffer).await.unwrap_or(0);
            let now = jiff::Timestamp::now();
            if length == 0 {
                cutter.finish(now, &mut lines);
            } else {
                cutter.push(&buffer[..length], now, &mut lines);
                let bytes = Bytes::copy_from_slice(&buffer[..length]);
                // No one may be attached.
                let _receivers = attached.send(Output { stderr, bytes }).unwrap_or(0);
            }
            if let Err(error) = self.append(&lines) {
                tracing::error!(%error, "a container's output was lost");
            }
            lines.clear();
            if length == 0 {
                return;
            }
            // Whoever writes without end is not to keep the node from everything else.
            tokio::task::yield_now().await;
        }
    }

    /// Sends what a query asks for, and follows the log if it is to.
    ///
    /// Ends when the log is closed, the limit is reached or the receiver is gone.
    pub(crate) async fn answer(
        self,
        query: Query,
        follow: bool,
        out: mpsc::Sender<Bytes>,
    ) -> io::Result<()> {
        let mut progress = self.progress.subscribe();
        let tail = query.tail;
        let mut sending = Sending::new(query, out);
        let (mut files, mut seen) = self.open(&mut progress)?;
        if let Some(tail) = tail {
            seek_tail(&mut files, tail)?;
        }
        let current = files.pop();
        for file in files {
            if !sending.lines(&mut BufReader::new(file)).await? {
                return Ok(());
            }
        }
        let Some(current) = current else {
            return Ok(());
        };
        let mut reader = BufReader::new(current);
        loop {
            if !sending.lines(&mut reader).await? || !follow || seen.closed {
                return Ok(());
            }
            tokio::select! {
                changed = progress.changed() => if changed.is_err() { return Ok(()) },
                () = sending.closed() => return Ok(()),
            }
            let now = *progress.borrow_and_update();
            if now.generation != seen.generation {
                // What was written to the old file after it was read last.
                if !sending.lines(&mut reader).await? {
                    return Ok(());
                }
                reader = BufReader::new(File::open(&self.path)?);
            }
            seen = now;
        }
    }

    /// The files, the older one first, and how far they are.
    fn open(&self, progress: &mut watch::Receiver<Progress>) -> io::Result<(Vec<File>, Progress)> {
        // Held, so that no file is set aside meanwhile.
        let _file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = *progress.borrow_and_update();
        let mut files = Vec::with_capacity(2);
        if seen.generation > 0 {
            files.push(File::open(older(&self.path))?);
        }
        files.push(File::open(&self.path)?);
        Ok((files, seen))
    }

    /// The end of the log as text, for a termination message: at most so many lines and bytes.
    pub(crate) fn tail(&self, lines: usize, bytes: usize) -> io::Result<String> {
        let (mut files, _) = self.open(&mut self.progress.subscribe())?;
        seek_tail(&mut files, lines)?;
        let mut answer = monopod_core::pod::log::Answer::new(Query::default());
        let mut text = Vec::new();
        for file in files {
            let mut reader = BufReader::new(file);
            while let Some(line) = next_line(&mut reader)? {
                answer.line(&line, &mut text);
            }
        }
        let start = text.len().saturating_sub(bytes);
        Ok(String::from_utf8_lossy(&text[start..]).into_owned())
    }
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .open(path)
}

fn older(path: &Path) -> PathBuf {
    path.with_extension("log.1")
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn collect(mut out: mpsc::Receiver<Bytes>) -> String {
        let mut text = Vec::new();
        while let Some(bytes) = out.recv().await {
            text.extend_from_slice(&bytes);
        }
        String::from_utf8(text).unwrap()
    }

    const LIMIT: u64 = 64 << 10;

    fn log(directory: &tempfile::TempDir) -> Log {
        let path = directory.path().join("c/0.log");
        Log::create(path, LIMIT, Arc::default()).unwrap()
    }

    #[tokio::test]
    async fn followers_see_what_comes_and_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let log = log(&directory);
        let (attached, _) = broadcast::channel(4);
        log.clone()
            .copy(&b"one\ntwo\n"[..], false, attached.clone())
            .await;

        let (sender, receiver) = mpsc::channel(4);
        let follower = tokio::spawn(log.clone().answer(Query::default(), true, sender));
        let reader = tokio::spawn(collect(receiver));
        log.clone().copy(&b"three\n"[..], true, attached).await;
        log.close();
        follower.await.unwrap().unwrap();
        assert_eq!(reader.await.unwrap(), "one\ntwo\nthree\n");

        let (sender, receiver) = mpsc::channel(4);
        let tail = Query {
            tail: Some(2),
            ..Query::default()
        };
        log.clone().answer(tail, false, sender).await.unwrap();
        assert_eq!(collect(receiver).await, "two\nthree\n");
        assert_eq!(log.tail(80, 6).unwrap(), "three\n");
    }

    #[tokio::test]
    async fn a_full_file_is_set_aside_and_still_read() {
        let directory = tempfile::tempdir().unwrap();
        let log = log(&directory);
        let (attached, _) = broadcast::channel(4);
        let lines: Vec<String> = (0..3000).map(|n| format!("line {n}\n")).collect();
        let text = lines.concat();
        log.clone().copy(text.as_bytes(), false, attached).await;
        let progress = log.progress();
        assert!(progress.generation > 1 && progress.before <= LIMIT && progress.current <= LIMIT);
        for generation in [progress.generation - 1, progress.generation] {
            let piece = log.read(generation, 0, 1 << 20).unwrap().unwrap();
            assert_eq!(piece.last(), Some(&b'\n'));
            assert!(piece.len() as u64 <= LIMIT);
        }
        assert_eq!(log.read(progress.generation - 2, 0, 9).unwrap(), None);
        assert_eq!(log.read(0, u64::MAX >> 1, 9).unwrap(), None);
        let (sender, receiver) = mpsc::channel(64);
        log.clone()
            .answer(Query::default(), false, sender)
            .await
            .unwrap();
        let kept = collect(receiver).await;
        assert!(
            text.ends_with(&kept) && kept.len() > 10_000,
            "{}",
            kept.len()
        );
        log.delete();
        assert_eq!(log.read(progress.generation, 0, 9).unwrap(), None);
    }
}
