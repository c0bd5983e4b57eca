//! What processes use, from `/proc`.

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
