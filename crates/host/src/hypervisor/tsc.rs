//! The frequency of the machine's time stamp counter, which the emulated guest sees unchanged.

use std::time::{Duration, Instant};

/// How long one measurement takes. 20 ms give an error below 0.01 %.
const MEASURE: Duration = Duration::from_millis(20);

/// Measures the counter: the median of three, as the machine may be busy.
pub(super) fn khz() -> u64 {
    let mut measured = [once(), once(), once()];
    measured.sort_unstable();
    measured[1]
}

fn once() -> u64 {
    let (start, first) = (Instant::now(), counter());
    std::thread::sleep(MEASURE);
    let (elapsed, last) = (start.elapsed(), counter());
    let cycles = u128::from(last.wrapping_sub(first));
    u64::try_from(cycles * 1_000_000 / elapsed.as_nanos().max(1)).unwrap_or(0)
}

#[expect(unsafe_code, reason = "an instruction of the processor")]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_counter_is_that_of_a_processor() {
        let khz = super::khz();
        assert!((500_000..10_000_000).contains(&khz), "{khz}");
    }
}
