//! How long to wait before trying again.

use jiff::SignedDuration;

/// Delays that double from the first up to the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// After the first failure.
    pub first: SignedDuration,
    /// Never more than this.
    pub last: SignedDuration,
}

impl Backoff {
    /// Of a VM's provisioning: soon at first, as most failures pass, and never hours.
    pub const PROVISIONING: Self = Self {
        first: SignedDuration::from_secs(2),
        last: SignedDuration::from_secs(120),
    };

    /// Of an image's pull: a pod starts by itself soon after the cause is gone.
    pub const PULLING: Self = Self {
        first: SignedDuration::from_secs(2),
        last: SignedDuration::from_secs(30),
    };

    /// Of a request for a certificate: Kubernetes keeps each that was denied for an hour.
    pub const CERTIFICATES: Self = Self {
        first: SignedDuration::from_secs(1),
        last: SignedDuration::from_mins(5),
    };

    /// The delay after this many failures, shortened by up to a third so that pods which failed
    /// together do not try together. `random` is any number.
    pub fn jittered(self, failures: u32, random: u64) -> SignedDuration {
        let delay = self.delay(failures);
        let thousandths = i32::try_from(random % 1000).unwrap_or(0);
        delay - delay / 3000 * thousandths
    }

    /// The delay after this many failures; none after zero.
    pub fn delay(self, failures: u32) -> SignedDuration {
        let Some(doublings) = failures.checked_sub(1) else {
            return SignedDuration::ZERO;
        };
        let factor = 1i32.checked_shl(doublings.min(30)).unwrap_or(i32::MAX);
        self.first
            .checked_mul(factor)
            .map_or(self.last, |delay| delay.min(self.last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn delays_grow_and_are_capped(failures in 0u32..200) {
            let backoff = Backoff::PROVISIONING;
            prop_assert!(backoff.delay(failures) <= backoff.delay(failures + 1));
            prop_assert!(backoff.delay(failures + 1) >= backoff.first);
            prop_assert!(backoff.delay(failures) <= backoff.last);
        }

        #[test]
        fn a_jittered_delay_is_two_thirds_of_it_at_least(failures in 0u32..200, random: u64) {
            let backoff = Backoff::PULLING;
            let (delay, jittered) = (backoff.delay(failures), backoff.jittered(failures, random));
            prop_assert!(jittered <= delay && jittered >= delay * 2 / 3);
        }
    }
}
