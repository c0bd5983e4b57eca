//! What a VM's process costs the host.

use std::time::Duration;

/// The kernel shows hundredths of a second, whatever its own clock is (`USER_HZ`).
const TICK: Duration = Duration::from_millis(10);

/// Memory and CPU time of a VM's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that only this process has; what its end would free.
    pub unique_bytes: u64,
    /// Bytes with each shared page divided among its users.
    pub proportional_bytes: u64,
    /// What all its threads have used, in user and system mode.
    pub cpu_time: Duration,
}

/// Reads `/proc/<pid>/smaps_rollup` and `/proc/<pid>/stat`.
pub(super) fn read(pid: i32) -> std::io::Result<Usage> {
    let text = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
    Ok(parse(&text("smaps_rollup")?, &text("stat")?))
}

/// In `stat` these are fields 14 and 15. Field 2, the name, may hold anything, but ends with the
/// last `)`.
fn parse(text: &str, stat: &str) -> Usage {
    let (_, fields) = stat.rsplit_once(')').unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks: u32 = ticks.filter_map(|field| field.parse::<u32>().ok()).sum();
    let kib = |field: &str| -> u64 {
        text.lines()
            .find_map(|line| {
                line.strip_prefix(field)?
                    .trim()
                    .strip_suffix(" kB")?
                    .parse()
                    .ok()
            })
            .unwrap_or(0)
    };
    Usage {
        unique_bytes: 1024 * (kib("Private_Clean:") + kib("Private_Dirty:")),
        proportional_bytes: 1024 * kib("Pss:"),
        cpu_time: TICK * ticks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_added_up() {
        let text = "5581-7ffe ---p 00000000 00:00 0 [rollup]\nRss:  9 kB\nPss:     4 kB\nPss_Anon: 3 kB\nPrivate_Clean:   1 kB\nPrivate_Dirty:   2 kB\n";
        let usage = Usage {
            unique_bytes: 3072,
            proportional_bytes: 4096,
            cpu_time: Duration::from_millis(4710),
        };
        let stat = "7 (a) 9 9 (b) S 1 7 7 0 -1 4194560 1 2 3 4 470 1 7 8 20 0 1 0 4711 9 10";
        assert_eq!(parse(text, stat), usage);
        assert_eq!(parse("Pss: x kB", "7 (a"), Usage::default());
    }
}
