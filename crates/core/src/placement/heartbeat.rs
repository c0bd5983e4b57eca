//! Whether a host answers, by its lease.

use jiff::{SignedDuration, Timestamp};

/// How long a host may leave its lease as it is until nothing is placed there: as upstream's nodes.
pub const LEASE: SignedDuration = SignedDuration::from_secs(40);

/// A host's lease as it was seen. Its own clock may be wrong: only the change of its time counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    renewed: Option<Timestamp>,
    since: Timestamp,
}

impl Heartbeat {
    /// The lease says that it was renewed then; `before` is what was known of it.
    pub fn seen(before: Option<Self>, renewed: Option<Timestamp>, now: Timestamp) -> Self {
        match before {
            Some(before) if before.renewed == renewed => before,
            Some(_) | None => Self {
                renewed,
                since: now,
            },
        }
    }

    /// Whether the host is there.
    pub fn answers(self, now: Timestamp) -> bool {
        now < self.since + LEASE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_counts_by_its_changes_alone() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        // Its clock is years behind.
        let first = Heartbeat::seen(None, Some(at(5)), at(1_000_000));
        assert!(first.answers(at(1_000_039)) && !first.answers(at(1_000_040)));
        let again = Heartbeat::seen(Some(first), Some(at(5)), at(1_000_030));
        assert_eq!(again, first, "listed again, not renewed");
        let renewed = Heartbeat::seen(Some(first), Some(at(4)), at(1_000_030));
        assert!(renewed.answers(at(1_000_069)) && !renewed.answers(at(1_000_070)));
    }
}
