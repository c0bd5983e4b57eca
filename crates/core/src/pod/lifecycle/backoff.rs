//! Waits between restarts of a container.

use jiff::{SignedDuration, Timestamp};

/// The kubelet's `backOffPeriod`.
const FIRST: SignedDuration = SignedDuration::from_secs(10);
/// The kubelet's `MaxContainerBackOff`.
const LONGEST: SignedDuration = SignedDuration::from_secs(300);
/// A container that ran this long starts over: twice the longest wait.
const RESET: SignedDuration = SignedDuration::from_secs(600);

/// The wait before the next restart: none, then 10 s, doubled up to 5 min.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backoff {
    wait: Option<SignedDuration>,
}

impl Backoff {
    /// How long to wait after an exit, and the back-off after that restart.
    #[must_use]
    pub fn after_exit(
        self,
        started_at: Option<Timestamp>,
        finished_at: Timestamp,
    ) -> (SignedDuration, Self) {
        let ran_long = started_at.is_some_and(|start| finished_at.duration_since(start) >= RESET);
        let wait = if ran_long { None } else { self.wait };
        let next = wait.map_or(FIRST, |wait| (wait * 2).min(LONGEST));
        (
            wait.unwrap_or(SignedDuration::ZERO),
            Self { wait: Some(next) },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn waits_double_up_to_five_minutes() {
        let exit = Timestamp::UNIX_EPOCH;
        let mut backoff = Backoff::default();
        let waits: Vec<_> = (0..8)
            .map(|_| {
                let (wait, next) = backoff.after_exit(Some(exit), exit);
                backoff = next;
                wait.as_secs()
            })
            .collect();
        assert_eq!(waits, [0, 10, 20, 40, 80, 160, 300, 300]);
    }

    proptest! {
        /// Whatever happened before, a long run makes the next restart immediate.
        #[test]
        fn a_long_run_resets(crashes in 0usize..20, ran in 600i64..100_000) {
            let start = Timestamp::UNIX_EPOCH;
            let mut backoff = Backoff::default();
            for _ in 0..crashes {
                backoff = backoff.after_exit(Some(start), start).1;
            }
            let end = start + SignedDuration::from_secs(ran);
            prop_assert_eq!(backoff.after_exit(Some(start), end).0, SignedDuration::ZERO);
        }
    }
}
