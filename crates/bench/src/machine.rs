//! What the figures were taken on.

use serde::Serialize;
use std::fs::read_to_string;

/// The machine at the beginning of a run.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Machine {
    pub(crate) cores: usize,
    pub(crate) processor: String,
    pub(crate) memory_mib: u64,
    pub(crate) kernel: String,
    /// What runs the VMs, and why.
    pub(crate) accelerator: String,
    /// Average number of processes that wanted to run in the minute before.
    pub(crate) load_before: f64,
    pub(crate) load_after: f64,
}

impl Machine {
    /// Looks at this machine.
    pub(crate) fn here(accelerator: String) -> Self {
        let cpus = read_to_string("/proc/cpuinfo").unwrap_or_default();
        let memory = read_to_string("/proc/meminfo").unwrap_or_default();
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            processor: field(&cpus, "model name").to_owned(),
            memory_mib: field(&memory, "MemTotal")
                .trim_end_matches(" kB")
                .parse::<u64>()
                .unwrap_or_default()
                / 1024,
            kernel: read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            accelerator,
            load_before: load(),
            load_after: 0.0,
        }
    }

    /// Keeps how busy the machine was at the end.
    pub(crate) fn ended(&mut self) {
        self.load_after = load();
    }
}

fn field<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map_or("", |(_, value)| value.trim())
}

fn load() -> f64 {
    let text = read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ')
        .next()
        .and_then(|first| first.parse().ok())
        .unwrap_or_default()
}
