//! Processes: what they use, which there are, and their end.

use rustix::process::{Pid, Signal, kill_process};
use std::process::Child;
use std::time::Duration;

/// The kernel shows hundredths of a second, whatever its own clock is (`USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

/// CPU time that a process has used with all its threads; none if there is no such process.
pub fn cpu_time(pid: i32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields 14 and 15. Field 2, the name, may hold anything, but ends with the last `)`.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u32>().ok();
    Some(TICK * (ticks()? + ticks()?))
}

/// All processes of this machine.
pub(crate) fn all() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").expect("proc").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// A process's arguments, each ended by a NUL; nothing if there is no such process.
pub fn command_line(pid: i32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).into_owned()
}

/// How many processes have a word in their command line, beside this one.
///
/// # Panics
/// If there is no `/proc`.
pub fn processes_with(word: &str) -> usize {
    all()
        .filter(|pid| u32::try_from(*pid) != Ok(std::process::id()))
        .filter(|pid| command_line(*pid).contains(word))
        .count()
}

/// Kills a process.
///
/// # Panics
/// If there is no such process.
#[track_caller]
pub fn kill(pid: i32) {
    signal(pid, Signal::KILL);
}

/// Freezes a process for good.
///
/// # Panics
/// If there is no such process.
#[track_caller]
pub fn freeze(pid: i32) {
    signal(pid, Signal::STOP);
}

/// A process of the test, which ends with it.
#[derive(Debug)]
pub struct Ended(pub Child);

impl Drop for Ended {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A frozen process, which goes on after the test.
#[derive(Debug)]
pub struct Frozen(i32);

impl Frozen {
    /// Freezes a process.
    ///
    /// # Panics
    /// If there is no such process.
    pub fn new(pid: i32) -> Self {
        freeze(pid);
        Self(pid)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        signal(self.0, Signal::CONT);
    }
}

#[track_caller]
fn signal(pid: i32, signal: Signal) {
    let pid = Pid::from_raw(pid).expect("not zero");
    kill_process(pid, signal).expect("it is there");
}
