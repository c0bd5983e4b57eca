//! What this machine has.

/// MiB of memory, from `/proc/meminfo`; none if that cannot be read.
pub(crate) fn memory_mib() -> Option<u32> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?
        .trim()
        .strip_suffix(" kB")?
        .parse()
        .ok()?;
    u32::try_from(kib / 1024).ok()
}

/// Thousandths of a CPU that this process may use.
pub(crate) fn cpu_millis() -> u32 {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    u32::try_from(cpus).unwrap_or(1).saturating_mul(1000)
}
