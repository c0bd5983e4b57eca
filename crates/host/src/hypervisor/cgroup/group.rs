//! The groups of one VM: one in each hierarchy that limits something.

use crate::files::absent_is_fine;
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Length of the periods over which CPU time is measured, in microseconds. Answers wait for the
/// rest of one: with 20 ms a quarter of a vCPU answers within 10 ms where 100 ms take 28
/// (`vm-disks.md`, section 8).
const PERIOD: u64 = 20_000;
/// The least that a quota can be, in microseconds; below it the period becomes longer.
const LEAST_QUOTA: u64 = 1_000;
/// Weight of a whole CPU in version 1 and 2, as they define it.
const WEIGHTS: (u64, u64) = (1024, 100);
/// The last process leaves its group a moment after its end.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often another VM's end may come in between.
const OTHERS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(2);

/// A VM's groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::hypervisor) struct Group {
    directories: Vec<PathBuf>,
}

/// Limits that hold from the first instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::hypervisor) struct Bounds {
    pub(in crate::hypervisor) memory_bytes: u64,
    pub(in crate::hypervisor) threads: u64,
}

// The files by which something is limited, in version 2 and 1.
const MEMORY: [&str; 2] = ["memory.max", "memory.limit_in_bytes"];
const THREADS: [&str; 1] = ["pids.max"];
const CPU: [&str; 2] = ["cpu.max", "cpu.cfs_quota_us"];

impl Group {
    pub(in crate::hypervisor) fn new(directories: impl IntoIterator<Item = PathBuf>) -> Self {
        Self {
            directories: directories.into_iter().collect(),
        }
    }

    /// Where they are, to be recorded.
    pub(in crate::hypervisor) fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// Makes the groups. What an earlier VM of this name left is removed first.
    pub(super) fn make(&self) -> Result<()> {
        self.remove_now()?;
        self.directories.iter().try_for_each(|group| make(group))
    }

    /// Makes the groups with their limits, and opens the lists by which a process joins them.
    pub(in crate::hypervisor) fn open(&self, bounds: Bounds) -> Result<Vec<File>> {
        self.make()?;
        self.bound(bounds)?;
        let lists = self
            .directories
            .iter()
            .map(|group| group.join("cgroup.procs"));
        lists
            .map(|list| File::options().write(true).open(list))
            .collect()
    }

    fn bound(&self, bounds: Bounds) -> Result<()> {
        self.write(&MEMORY, &bounds.memory_bytes)?;
        // A VM's memory is not swapped out, as a kubelet's pods' is not. Absent without swap.
        self.write(&["memory.swap.max"], &0)?;
        self.write(&["memory.memsw.limit_in_bytes"], &bounds.memory_bytes)?;
        self.write(&THREADS, &bounds.threads)
    }

    /// Holds the VM to its share of the CPUs, in thousandths of one.
    pub(in crate::hypervisor) fn limit_cpu(&self, millis: u32) -> Result<()> {
        let (quota, period) = quota(millis);
        let millis = u64::from(millis);
        self.write(&["cpu.cfs_period_us"], &period)?;
        self.write(&["cpu.cfs_quota_us"], &quota)?;
        self.write(&["cpu.max"], &format!("{quota} {period}"))?;
        let weight = |whole| millis * whole / 1000;
        self.weigh((weight(WEIGHTS.0), weight(WEIGHTS.1)))
    }

    /// Lets everything else on the machine come first, or no more so.
    pub(in crate::hypervisor) fn stand_back(&self, back: bool) -> Result<()> {
        self.weigh(if back { (0, 0) } else { WEIGHTS })
    }

    /// Sets what the VM counts beside others, in version 1 and 2, as far as the kernel takes it.
    fn weigh(&self, (shares, weight): (u64, u64)) -> Result<()> {
        self.write(&["cpu.shares"], &shares.clamp(2, 262_144))?;
        self.write(&["cpu.weight"], &weight.clamp(1, 10_000))
    }

    /// What can be limited: `memory`, `threads`, `cpu`.
    pub(super) fn can(&self) -> Vec<&'static str> {
        [
            ("memory", &MEMORY[..]),
            ("threads", &THREADS),
            ("cpu", &CPU),
        ]
        .into_iter()
        .filter(|(_, files)| self.files(files).next().is_some())
        .map(|(name, _)| name)
        .collect()
    }

    /// Removes the groups once nothing runs in them.
    pub(in crate::hypervisor) async fn remove(&self) -> Result<()> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            match self.remove_now() {
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                    if tokio::time::Instant::now() >= deadline {
                        return Err(error);
                    }
                    tokio::time::sleep(PAUSE).await;
                }
                done => return done,
            }
        }
    }

    pub(super) fn remove_now(&self) -> Result<()> {
        for group in &self.directories {
            absent_is_fine(std::fs::remove_dir(group))?;
            if let Some(parent) = group.parent() {
                super::remove_parent(parent);
            }
        }
        Ok(())
    }

    /// Writes a value to these files, wherever there are any.
    fn write(&self, files: &[&str], value: &impl ToString) -> Result<()> {
        let value = value.to_string();
        self.files(files).try_for_each(|file| {
            let name = |error: Error| {
                let text = format!("{}: {error}", file.display());
                Error::new(error.kind(), text)
            };
            std::fs::write(&file, &value).map_err(name)
        })
    }

    fn files<'a>(&'a self, names: &'a [&str]) -> impl Iterator<Item = PathBuf> + 'a {
        let all = self
            .directories
            .iter()
            .flat_map(|group| names.iter().map(|name| group.join(name)));
        all.filter(|file: &PathBuf| Path::exists(file))
    }
}

/// Makes a group, and the one that it is in.
fn make(group: &Path) -> Result<()> {
    let mut others = 0;
    loop {
        let parent = group.parent().map_or(Ok(()), super::make_parent);
        match parent.and_then(|()| std::fs::create_dir(group)) {
            // Somebody else has just removed the last group that was there.
            Err(error) if is_gone(&error) && others < OTHERS => others += 1,
            made => return made,
        }
    }
}

fn is_gone(error: &Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

/// CPU time and the period in which it may be used, in microseconds.
fn quota(millis: u32) -> (u64, u64) {
    let millis = u64::from(millis.max(1));
    let period = PERIOD.max((LEAST_QUOTA * 1000).div_ceil(millis));
    (period * millis / 1000, period)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// A directory with the files of a group. What the kernel does with them is seen elsewhere.
    fn group(files: &[&str]) -> (tempfile::TempDir, Group) {
        let directory = tempfile::tempdir().unwrap();
        for file in files {
            std::fs::write(directory.path().join(file), "").unwrap();
        }
        let group = Group::new([directory.path().to_owned()]);
        (directory, group)
    }

    fn content(directory: &Path) -> BTreeMap<String, String> {
        let entries = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
        let read = |entry: std::fs::DirEntry| {
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read_to_string(entry.path()).unwrap())
        };
        entries.map(read).collect()
    }

    const BOUNDS: Bounds = Bounds {
        memory_bytes: 1 << 30,
        threads: 81,
    };

    fn texts<const N: usize>(list: [(&str, &str); N]) -> BTreeMap<String, String> {
        list.map(|(name, text)| (name.to_owned(), text.to_owned()))
            .into()
    }

    #[test]
    fn version_2() {
        let files = [
            "cpu.max",
            "cpu.weight",
            "memory.max",
            "memory.swap.max",
            "pids.max",
        ];
        let (directory, group) = group(&files);
        assert_eq!(group.can(), ["memory", "threads", "cpu"]);
        group.bound(BOUNDS).unwrap();
        group.limit_cpu(1500).unwrap();
        let expected = [
            ("cpu.max", "30000 20000"),
            ("cpu.weight", "150"),
            ("memory.max", "1073741824"),
            ("memory.swap.max", "0"),
            ("pids.max", "81"),
        ];
        assert_eq!(content(directory.path()), texts(expected));
    }

    #[test]
    fn version_1() {
        let files = [
            "cpu.cfs_quota_us",
            "cpu.cfs_period_us",
            "cpu.shares",
            "memory.limit_in_bytes",
        ];
        let (directory, group) = group(&files);
        assert_eq!(group.can(), ["memory", "cpu"]);
        group.bound(BOUNDS).unwrap();
        group.limit_cpu(250).unwrap();
        let expected = [
            ("cpu.cfs_period_us", "20000"),
            ("cpu.cfs_quota_us", "5000"),
            ("cpu.shares", "256"),
            ("memory.limit_in_bytes", "1073741824"),
        ];
        assert_eq!(content(directory.path()), texts(expected));
    }

    #[test]
    fn a_quota_is_never_below_what_the_kernel_takes() {
        assert_eq!(quota(250), (5_000, 20_000));
        assert_eq!(quota(16_000), (320_000, 20_000));
        for millis in 0..100 {
            let (quota, period) = quota(millis);
            assert!(
                (1_000..=20_000).contains(&quota) && period <= 1_000_000,
                "{millis}"
            );
        }
    }
}
