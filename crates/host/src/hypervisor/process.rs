//! A process that is watched and killed by a descriptor, never by a number that may be reused.

use super::record::ProcessId;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A running process.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) id: ProcessId,
    descriptor: Arc<AsyncFd<OwnedFd>>,
}

impl Process {
    /// The process with this number, whichever it is; none if there is none.
    pub(super) fn with_pid(pid: i32) -> std::io::Result<Option<Self>> {
        let Some(raw) = Pid::from_raw(pid).filter(|_| pid > 1) else {
            return Ok(None);
        };
        let descriptor = match rustix::process::pidfd_open(raw, PidfdFlags::empty()) {
            Ok(descriptor) => descriptor,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Read after the descriptor was opened: the number cannot have been reused since.
        let Some(start_time) = start_time(pid) else {
            return Ok(None);
        };
        Ok(Some(Self {
            id: ProcessId { pid, start_time },
            descriptor: Arc::new(watch(descriptor)?),
        }))
    }

    /// Exactly this process, if it still runs.
    pub(super) fn recorded(id: ProcessId) -> std::io::Result<Option<Self>> {
        Ok(Self::with_pid(id.pid)?.filter(|process| process.id == id))
    }

    /// The process of this program that has this word among its arguments.
    pub(super) fn with_argument(program: &str, word: &str) -> std::io::Result<Option<Self>> {
        let has = |(_, words): &(i32, Vec<Vec<u8>>)| words.iter().any(|w| w == word.as_bytes());
        let found = of_program(program)?.into_iter().find(has);
        found.map_or(Ok(None), |(pid, _)| Self::with_pid(pid))
    }

    /// The processes of this program whose root is one of the directories in `parent`, with their arguments. None if
    /// `parent` is not there.
    pub(super) fn rooted_in(
        program: &str,
        parent: &Path,
    ) -> std::io::Result<Vec<(Self, Vec<String>)>> {
        let mut roots = BTreeSet::new();
        let entries = match std::fs::read_dir(parent) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        for entry in entries {
            let metadata = entry?.metadata()?;
            roots.insert((metadata.dev(), metadata.ino()));
        }
        let mut found = Vec::new();
        for (pid, words) in of_program(program)? {
            let Some(process) = Self::with_pid(pid)? else {
                continue;
            };
            // One that is ending has no root any more.
            let root = Path::new("/proc").join(pid.to_string()).join("root");
            let root = std::fs::metadata(root);
            if root.is_ok_and(|root| roots.contains(&(root.dev(), root.ino()))) {
                let words = words.iter().map(|word| String::from_utf8_lossy(word));
                found.push((process, words.map(String::from).collect()));
            }
        }
        Ok(found)
    }

    /// Ends the process at once. That it is gone already is fine.
    pub(super) fn kill(&self) -> std::io::Result<()> {
        match rustix::process::pidfd_send_signal(self.descriptor.get_ref(), Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the end of the process, and collects it if it is our child.
    pub(super) async fn exited(&self) -> std::io::Result<()> {
        // A process descriptor becomes readable at the end and stays so.
        self.descriptor.readable().await?.retain_ready();
        let id = WaitId::PidFd(self.descriptor.get_ref().as_fd());
        match rustix::process::waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(_) | Err(rustix::io::Errno::CHILD) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Numbers and arguments of a program's processes.
fn of_program(program: &str) -> std::io::Result<Vec<(i32, Vec<Vec<u8>>)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // Processes come and go while we read.
        let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut arguments = arguments.split(|&byte| byte == 0).map(<[u8]>::to_vec);
        if arguments.next().as_deref() == Some(program.as_bytes()) {
            found.push((pid, arguments.collect()));
        }
    }
    Ok(found)
}

#[expect(
    unsafe_code,
    reason = "tokio asks for a promise that the descriptor does not change"
)]
fn watch(descriptor: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` keeps its one open descriptor until it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?)
}

/// Start time of a process that runs; none for one that is gone or only waits to be collected.
fn start_time(pid: i32) -> Option<u64> {
    let stat =
        std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    parse_start_time(&stat)
}

/// Field 22 of `/proc/<pid>/stat`; field 3 is the state, 20 the number of threads. Field 2, the name, may hold anything, but ends with the last `)`.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    let threads: u32 = fields.nth(16)?.parse().ok()?;
    // A process whose first thread has ended is shown so too while its others go on.
    if state == "X" || (state == "Z" && threads < 2) {
        return None;
    }
    fields.nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_whatever_the_name() {
        let stat = |name: &str, state: &str, threads: u8| {
            format!(
                "7 ({name}) {state} 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 {threads} 0 4711 9 10"
            )
        };
        assert_eq!(parse_start_time(&stat("qemu", "S", 1)), Some(4711));
        assert_eq!(parse_start_time(&stat("a) Z 1 (b", "S", 1)), Some(4711));
        assert_eq!(parse_start_time(&stat("qemu", "Z", 1)), None);
        // Its guest has ended QEMU's first thread, and lives on.
        assert_eq!(parse_start_time(&stat("qemu", "Z", 3)), Some(4711));
        assert_eq!(parse_start_time("7 (qemu) S"), None);
        assert_eq!(parse_start_time(""), None);
    }

    #[tokio::test]
    async fn a_child_is_found_killed_and_collected() {
        let word = format!("monopod-test-{}", std::process::id());
        let mut child = std::process::Command::new("sh")
            .args(["-c", "read -r line", &word])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let process = Process::with_pid(pid).unwrap().unwrap();
        // The arguments appear a moment after the program was started.
        let found = tokio::time::timeout(std::time::Duration::from_secs(10), async {
            loop {
                match Process::with_argument("sh", &word).unwrap() {
                    Some(found) => break found,
                    None => tokio::task::yield_now().await,
                }
            }
        });
        assert_eq!(found.await.unwrap().id, process.id);
        assert_eq!(
            Process::recorded(process.id).unwrap().map(|p| p.id),
            Some(process.id)
        );
        let later = ProcessId {
            start_time: process.id.start_time + 1,
            ..process.id
        };
        assert!(Process::recorded(later).unwrap().is_none());
        process.kill().unwrap();
        process.exited().await.unwrap();
        process.kill().unwrap();
        assert!(Process::with_pid(pid).unwrap().is_none());
        // Collected above, so there is nothing left to wait for.
        assert!(child.wait().is_err());
    }
}
