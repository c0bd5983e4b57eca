//! When certificates are renewed, and which authority the webhook's is signed by.
//!
//! A certificate is renewed after two thirds of its life. The webhook's authority is followed by another
//! at that time, and no call fails meanwhile, as trust comes first and goes last:
//!
//! ```text
//!  authority   |made, trusted ──── signs ─────────────|next is made|next signs|ends, forgotten
//!  its life    0                                     2/3          3/4         1
//! ```
//!
//! What it signs lasts a quarter of its life at most, so nothing of it is served when it ends.

use jiff::{SignedDuration, Timestamp};

/// A third of a certificate's life is left for its renewal, whatever is away for so long.
const RENEWED_AFTER: (i32, i32) = (2, 3);
/// Share of an authority's life for which it is trusted before it signs: however late an API server
/// hears of it, as long as this is more than its watch is behind.
const KNOWN_AFTER: i32 = 12;
/// Share of an authority's life that a certificate of it lasts.
const SIGNED_FOR: i32 = 4;
/// The longest that the webhook's certificate lasts: nothing outside depends on it, so it may be short.
const LONGEST_SERVED: SignedDuration = SignedDuration::from_hours(7 * 24);

/// From when until when something is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// Its first moment.
    pub from: Timestamp,
    /// Its last.
    pub until: Timestamp,
}

impl Validity {
    /// When it is to be renewed.
    pub fn renew_at(self) -> Timestamp {
        let (part, of) = RENEWED_AFTER;
        self.after(self.life() / of * part)
    }

    /// What a certificate has that this authority signs now.
    #[must_use]
    pub fn signs(self, now: Timestamp) -> Self {
        let lasts = (self.life() / SIGNED_FOR).min(LONGEST_SERVED);
        let until = now.checked_add(lasts).unwrap_or(self.until);
        Self {
            from: now,
            until: until.min(self.until),
        }
    }

    fn life(self) -> SignedDuration {
        self.until.duration_since(self.from)
    }

    fn is_known(self, now: Timestamp) -> bool {
        now >= self.after(self.life() / KNOWN_AFTER)
    }

    fn after(self, duration: SignedDuration) -> Timestamp {
        self.from.checked_add(duration).unwrap_or(self.until)
    }
}

/// An authority for the webhook, as it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Authority {
    /// Its life.
    pub validity: Validity,
    /// Whether the API server is told to trust it.
    pub is_published: bool,
}

/// What to do about the webhook's authorities, which are named by their place in the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Whether the replica that acts makes another.
    pub make: bool,
    /// Those to be trusted; the others have ended and are forgotten.
    pub trusted: Vec<usize>,
    /// The one that each replica has its certificate of.
    pub signer: Option<usize>,
}

/// Decides about the authorities that there are, oldest first.
pub fn decide(authorities: &[Authority], now: Timestamp) -> Decision {
    let alive = || {
        let all = authorities.iter().enumerate();
        all.filter(|(_, authority)| now < authority.validity.until)
    };
    let published = || alive().filter(|(_, authority)| authority.is_published);
    let mut known = published().filter(|(_, authority)| authority.validity.is_known(now));
    // Where none is known for long, the one that is known for longest is the best there is.
    let signer = known.next_back().or_else(|| published().next());
    let newest = alive().next_back();
    Decision {
        make: newest.is_none_or(|(_, authority)| now >= authority.validity.renew_at()),
        trusted: alive().map(|(place, _)| place).collect(),
        signer: signer.or(newest).map(|(place, _)| place),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIFE: i64 = 2400;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + seconds).expect("a time")
    }

    fn validity(from: i64, until: i64) -> Validity {
        Validity {
            from: at(from),
            until: at(until),
        }
    }

    fn authority(from: i64, is_published: bool) -> Authority {
        Authority {
            validity: validity(from, from + LIFE),
            is_published,
        }
    }

    #[test]
    fn an_authority_is_followed_before_it_ends() {
        let first = authority(0, true);
        let next = |is_published| authority(1600, is_published);
        let cases: &[(&str, &[Authority], i64, Decision)] = &[
            ("none yet", &[], 0, decision(true, &[], None)),
            (
                "not told yet",
                &[authority(0, false)],
                0,
                decision(false, &[0], Some(0)),
            ),
            (
                "the first signs at once",
                &[first],
                0,
                decision(false, &[0], Some(0)),
            ),
            ("not due", &[first], 1599, decision(false, &[0], Some(0))),
            ("due", &[first], 1600, decision(true, &[0], Some(0))),
            (
                "not trusted yet",
                &[first, next(false)],
                2399,
                decision(false, &[0, 1], Some(0)),
            ),
            (
                "trusted a moment ago",
                &[first, next(true)],
                1601,
                decision(false, &[0, 1], Some(0)),
            ),
            (
                "known to all",
                &[first, next(true)],
                1800,
                decision(false, &[0, 1], Some(1)),
            ),
            (
                "the first has ended",
                &[first, next(true)],
                2400,
                decision(false, &[1], Some(1)),
            ),
            (
                "the first has ended, and nobody acted",
                &[first, next(false)],
                2400,
                decision(false, &[1], Some(1)),
            ),
            ("all have ended", &[first], 2400, decision(true, &[], None)),
        ];
        for (what, authorities, now, expected) in cases {
            assert_eq!(&decide(authorities, at(*now)), expected, "{what}");
        }
    }

    fn decision(make: bool, trusted: &[usize], signer: Option<usize>) -> Decision {
        Decision {
            make,
            trusted: trusted.to_vec(),
            signer,
        }
    }

    /// Two replicas, of which now one acts and now the other, and an API server that hears late.
    #[derive(Default)]
    struct Cluster {
        stored: Vec<Validity>,
        published: Vec<Validity>,
        /// What the API server trusts, since when it was told.
        told: Vec<(i64, Vec<Validity>)>,
        /// Each replica's certificate, and its authority.
        served: [Option<(Validity, Validity)>; 2],
    }

    impl Cluster {
        fn look(&mut self, replica: usize, acts: bool, now: i64) {
            let decide = |cluster: &Self| {
                let seen: Vec<Authority> = cluster
                    .stored
                    .iter()
                    .map(|validity| Authority {
                        validity: *validity,
                        is_published: cluster.published.contains(validity),
                    })
                    .collect();
                decide(&seen, at(now))
            };
            let mut decided = decide(self);
            if acts {
                self.stored = decided.trusted.iter().map(|at| self.stored[*at]).collect();
                if decided.make {
                    self.stored.push(validity(now, now + LIFE));
                }
                if self.published != self.stored {
                    self.published.clone_from(&self.stored);
                    self.told.push((now, self.stored.clone()));
                }
                decided = decide(self);
            }
            let signer = decided.signer.map(|place| self.stored[place]);
            let current = self.served[replica];
            let stays =
                current.is_some_and(|(own, by)| Some(by) == signer && at(now) < own.renew_at());
            if !stays {
                self.served[replica] = signer.map(|by| (by.signs(at(now)), by));
            }
        }

        fn trusted(&self, now: i64, late: i64) -> &[Validity] {
            let heard = self.told.iter().rev().find(|(when, _)| when + late <= now);
            heard.map_or(&[], |(_, trusted)| trusted)
        }
    }

    proptest! {
        /// At every moment what either replica serves is valid and signed by who is trusted, though
        /// each looks only now and then and the API server hears of a change late.
        #[test]
        fn what_is_served_is_always_trusted(
            pauses in prop::collection::vec((1i64..120, any::<bool>(), any::<bool>()), 200..400),
            late in 0i64..190,
        ) {
            let mut cluster = Cluster::default();
            cluster.look(0, true, 0);
            cluster.look(1, false, 0);
            let mut next = [0i64; 2];
            let (mut now, mut leader) = (0, 0);
            for (pause, replica, acts) in pauses {
                let replica = usize::from(replica);
                // Whoever acts from now on begins with a look.
                if acts {
                    leader = replica;
                }
                // Both look at least every two minutes of forty, and so does the one that acts.
                now = (now + pause).min(next[0] + 120).min(next[1] + 120);
                for who in [replica, 1 - replica] {
                    if who == replica || next[who] + 120 <= now {
                        cluster.look(who, who == leader, now);
                        next[who] = now;
                    }
                }
                if now < late {
                    continue;
                }
                let trusted = cluster.trusted(now, late);
                for (own, by) in cluster.served.iter().flatten() {
                    prop_assert!(at(now) < own.until, "served after its end at {now}");
                    prop_assert!(own.until <= by.until);
                    prop_assert!(trusted.contains(by), "not trusted at {now}");
                }
                prop_assert!(cluster.stored.len() <= 2, "{:?}", cluster.stored);
            }
        }

        #[test]
        fn a_third_is_left_for_the_renewal(from in -1000i64..1000, life in 3i64..100_000_000) {
            let all = validity(from, from + life);
            let left = all.until.duration_since(all.renew_at());
            prop_assert!(left >= SignedDuration::from_secs(life) / 3);
            prop_assert!(all.renew_at() > all.from);
            let signed = all.signs(all.renew_at());
            prop_assert!(signed.until <= all.until && signed.until > signed.from);
        }
    }
}
