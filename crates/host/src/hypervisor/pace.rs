//! How fast a VM may make the host work for it. It waits when it is faster, and nobody else does.

use std::time::Duration;
use tokio::time::Instant;

/// A rate, and how much may come at once.
#[derive(Debug)]
pub(super) struct Pace {
    per_second: u32,
    burst: Duration,
    /// When everything so far would have come at the rate.
    due: Instant,
}

impl Pace {
    /// So much in each second; what was not used of the last one may come at once.
    pub(super) fn new(per_second: u32, now: Instant) -> Self {
        Self {
            per_second,
            burst: Duration::from_secs(1),
            due: now,
        }
    }

    /// Counts, and waits if that was too much.
    pub(super) async fn spend(&mut self, cost: usize) {
        if let Some(until) = self.count(cost, Instant::now()) {
            tokio::time::sleep_until(until).await;
        }
    }

    /// Counts. Gives the time before which nothing more should come.
    fn count(&mut self, cost: usize, now: Instant) -> Option<Instant> {
        let cost = u32::try_from(cost).unwrap_or(u32::MAX);
        let takes = Duration::from_secs(1) * cost / self.per_second;
        self.due = self.due.max(now) + takes;
        let until = self.due.checked_sub(self.burst)?;
        (until > now).then_some(until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whoever waits as told never gets more than a burst and the rate.
        #[test]
        fn no_more_than_the_rate(steps in prop::collection::vec((1usize..5000, 0u64..3000), 1..50)) {
            let start = Instant::now();
            let mut pace = Pace::new(1000, start);
            let (mut now, mut spent) = (start, 0);
            for (cost, idle) in steps {
                let wait = pace.count(cost, now);
                spent += cost as u128;
                now = wait.unwrap_or(now);
                // A thousand in a second, and those of the first one at once.
                prop_assert!(spent <= 1001 + (now - start).as_millis(), "{spent}");
                now += Duration::from_millis(idle);
            }
        }
    }

    #[test]
    fn the_slow_never_wait() {
        let mut now = Instant::now();
        let mut pace = Pace::new(1000, now);
        for _ in 0..100 {
            assert_eq!(pace.count(900, now), None);
            now += Duration::from_secs(1);
        }
        assert_eq!(pace.count(100, now), None);
        assert!(pace.count(1800, now).is_some());
    }
}
