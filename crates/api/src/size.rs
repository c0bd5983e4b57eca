//! The sizes that a pod can run on: a vCPU count with a memory size.
//!
//! The table is EKS Fargate's ("Pod CPU and memory" of its user guide).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A size from the table: thousandths of a vCPU and MiB of memory.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "camelCase")]
pub struct Size {
    /// Thousandths of a vCPU.
    pub cpu_millis: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
}

const GIB: u32 = 1024;

/// Rows of the table: thousandths of a vCPU, then smallest, largest and step in MiB.
const ROWS: [(u32, u32, u32, u32); 7] = [
    (250, GIB / 2, 2 * GIB, 0), // 0.5, 1, 2: each the double of the one before
    (500, GIB, 4 * GIB, GIB),
    (1000, 2 * GIB, 8 * GIB, GIB),
    (2000, 4 * GIB, 16 * GIB, GIB),
    (4000, 8 * GIB, 30 * GIB, GIB),
    (8000, 16 * GIB, 60 * GIB, 4 * GIB),
    (16000, 32 * GIB, 120 * GIB, 8 * GIB),
];

impl Size {
    /// What a pod has that asks for nothing.
    pub const SMALLEST: Self = Self {
        cpu_millis: ROWS[0].0,
        memory_mib: ROWS[0].1,
    };

    /// Every size, smallest first.
    pub fn all() -> impl Iterator<Item = Self> {
        ROWS.into_iter().flat_map(|(cpu_millis, min, max, step)| {
            std::iter::successors(Some(min), move |&memory| {
                let next = if step == 0 { memory * 2 } else { memory + step };
                (next <= max).then_some(next)
            })
            .map(move |memory_mib| Self {
                cpu_millis,
                memory_mib,
            })
        })
    }

    /// The smallest size with at least this much, or none if there is no such size.
    pub fn fitting(cpu_millis: u64, memory_mib: u64) -> Option<Self> {
        Self::all().find(|size| {
            u64::from(size.cpu_millis) >= cpu_millis && u64::from(size.memory_mib) >= memory_mib
        })
    }

    /// This much and no more, if the table's largest size has it; never less than its smallest.
    ///
    /// Memory is rounded up to 128 MiB, since each size of memory needs a VM template of its own.
    pub fn exact(cpu_millis: u64, memory_mib: u64) -> Option<Self> {
        let (smallest, largest) = (Self::SMALLEST, Self::all().last()?);
        let size = Self {
            cpu_millis: u32::try_from(cpu_millis).ok()?.max(smallest.cpu_millis),
            memory_mib: u32::try_from(memory_mib.checked_next_multiple_of(128)?)
                .ok()?
                .max(smallest.memory_mib),
        };
        let fits = size.cpu_millis <= largest.cpu_millis && size.memory_mib <= largest.memory_mib;
        fits.then_some(size)
    }

    /// Whole virtual CPUs that the VM is given; a fraction is enforced by a quota.
    pub fn vcpus(self) -> u32 {
        self.cpu_millis.div_ceil(1000)
    }
}

/// As the annotation `CapacityProvisioned` has it: `0.25vCPU 0.5GB`.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpu = f64::from(self.cpu_millis) / 1000.0;
        let memory = f64::from(self.memory_mib) / f64::from(GIB);
        write!(f, "{cpu}vCPU {memory}GB")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_user_guide() {
        let gigabytes_of = |cpu| {
            Size::all()
                .filter(|size| size.cpu_millis == cpu)
                .map(|size| f64::from(size.memory_mib) / 1024.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(gigabytes_of(250), [0.5, 1.0, 2.0]);
        assert_eq!(gigabytes_of(500), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(gigabytes_of(4000).len(), 23);
        assert_eq!(
            gigabytes_of(8000),
            (4..=15).map(|n| f64::from(n * 4)).collect::<Vec<_>>()
        );
        assert_eq!(
            gigabytes_of(16000),
            (4..=15).map(|n| f64::from(n * 8)).collect::<Vec<_>>()
        );
    }

    /// What users of EKS Fargate measured, and the user guide's own example.
    #[test]
    fn requests_round_up_to_the_next_size() {
        for (cpu, memory, expected) in [
            (0, 256, "0.25vCPU 0.5GB"),
            (250, 1256, "0.25vCPU 2GB"),
            (255, 1256, "0.5vCPU 2GB"),
            (260, 2006, "0.5vCPU 2GB"),
            (255, 2056, "0.5vCPU 3GB"),
            (255, 10240 + 256, "2vCPU 11GB"),
            (1000, 8192 + 256, "2vCPU 9GB"),
        ] {
            let size = Size::fitting(cpu, memory).expect("within the table");
            assert_eq!(size.to_string(), expected, "{cpu}m {memory}Mi");
        }
        assert_eq!(Size::fitting(16001, 0), None);
        assert_eq!(Size::fitting(0, 120 * 1024 + 1), None);
    }
}
