//! How many VMs a host keeps ready, of which shapes: as many as were asked for lately.
//!
//! A start that finds none is only slower, so the pool may be small: it holds, for each shape, the
//! most that were taken within any [`BURST`] of the last [`MEMORY`], as far as the limit goes. Shapes
//! that were asked for last come first. A host that starts nothing keeps nothing.

use jiff::Timestamp;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// For how long a start is remembered.
const MEMORY: Duration = Duration::from_mins(10);
/// Starts within this time count as one burst: about as long as it takes to fill the pool again.
const BURST: Duration = Duration::from_secs(10);
/// Starts that are remembered; more than any pool holds.
const STARTS: usize = 256;

/// What was asked for lately.
#[derive(Clone, Debug)]
pub struct Demand<S> {
    starts: VecDeque<(Timestamp, S)>,
}

impl<S> Default for Demand<S> {
    fn default() -> Self {
        Self {
            starts: VecDeque::new(),
        }
    }
}

impl<S: Copy + Ord> Demand<S> {
    /// Notes that a VM of this shape was asked for.
    pub fn started(&mut self, shape: S, now: Timestamp) {
        if self.starts.len() == STARTS {
            self.starts.pop_front();
        }
        self.starts.push_back((now, shape));
    }

    /// How many to keep ready, `limit` in all.
    pub fn wanted(&mut self, limit: usize, now: Timestamp) -> BTreeMap<S, usize> {
        let is_recent =
            |at: &Timestamp, within: Duration| now.duration_since(*at).unsigned_abs() < within;
        self.starts.retain(|(at, _)| is_recent(at, MEMORY));
        let mut wanted = BTreeMap::new();
        let mut free = limit;
        for (_, shape) in self.starts.iter().rev() {
            if free == 0 || wanted.contains_key(shape) {
                continue;
            }
            let count = self.burst(*shape).min(free);
            free -= count;
            wanted.insert(*shape, count);
        }
        wanted
    }

    /// The most starts of a shape within any one burst.
    fn burst(&self, shape: S) -> usize {
        let times: Vec<Timestamp> = self
            .starts
            .iter()
            .filter(|(_, started)| *started == shape)
            .map(|(at, _)| *at)
            .collect();
        let within = |first: &Timestamp| {
            let end = times
                .iter()
                .filter(|at| *at >= first && at.duration_since(*first).unsigned_abs() < BURST);
            end.count()
        };
        times.iter().map(within).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + second).unwrap()
    }

    fn demand(starts: &[(i64, char)]) -> Demand<char> {
        let mut demand = Demand::default();
        for (second, shape) in starts {
            demand.started(*shape, at(*second));
        }
        demand
    }

    #[test]
    fn as_many_as_came_at_once() {
        let starts = [(0, 'a'), (1, 'a'), (60, 'a'), (61, 'b')];
        let wanted = demand(&starts).wanted(8, at(70));
        assert_eq!(wanted, BTreeMap::from([('a', 2), ('b', 1)]));
    }

    #[test]
    fn the_last_come_first() {
        let starts = [(0, 'a'), (0, 'a'), (5, 'b')];
        let wanted = demand(&starts).wanted(2, at(6));
        assert_eq!(wanted, BTreeMap::from([('a', 1), ('b', 1)]));
        assert_eq!(demand(&starts).wanted(0, at(6)), BTreeMap::new());
    }

    #[test]
    fn an_unused_host_keeps_none() {
        let mut demand = demand(&[(0, 'a')]);
        assert_eq!(demand.wanted(4, at(599)).len(), 1);
        assert_eq!(demand.wanted(4, at(601)), BTreeMap::new());
        // Even if the clock is set back.
        assert!(demand.starts.is_empty());
    }

    proptest! {
        /// Never more than allowed, never a shape that nobody asked for, never an empty entry.
        #[test]
        fn the_limit_holds(starts in prop::collection::vec((0..2000i64, 0..5u8), 0..300), limit in 0..10usize, now in 0..3000i64) {
            let mut demand = Demand::default();
            for (second, shape) in &starts {
                demand.started(*shape, at(*second));
            }
            let wanted = demand.wanted(limit, at(now));
            prop_assert!(wanted.values().sum::<usize>() <= limit);
            prop_assert!(wanted.values().all(|count| *count > 0));
            prop_assert!(wanted.keys().all(|shape| starts.iter().any(|(_, started)| started == shape)));
        }
    }
}
