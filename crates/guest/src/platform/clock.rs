//! Whether the guest's clock is right, by the host's answers to its reports.
//!
//! A clock that is right says no later time when it asks than the host when it answers, and no
//! earlier one when the answer is there. How long either took does not matter: what is outside of
//! that span is wrong, by at least the difference. It happens when a VM was halted, whose clock
//! stands still, and slowly to a clock that is too fast or too slow.

use monopod_wire::HostTime;

/// Nanoseconds that a clock may be wrong by: a time that jumps is worse for a pod than a small error.
const TOLERANCE: u64 = 500_000_000;

/// What was asked last, and when.
#[derive(Debug, Default)]
pub(super) struct Clock {
    number: u64,
    /// The clock at that question; none once it was answered, or the clock is another one since.
    asked: Option<u64>,
}

impl Clock {
    /// The host is being asked. All times are nanoseconds since 1970. Gives the question's number.
    pub(super) fn ask(&mut self, now: u64) -> u64 {
        self.number += 1;
        self.asked = Some(now);
        self.number
    }

    /// The host answered. Gives the time to which the clock must be set, if it must.
    ///
    /// An answer to an earlier question still says that it is not earlier.
    pub(super) fn correction(&mut self, host: HostTime, now: u64) -> Option<u64> {
        let asked = self.asked.take_if(|_| host.number == self.number);
        let behind = host.time_ns.saturating_sub(now);
        let ahead = asked.unwrap_or(0).saturating_sub(host.time_ns);
        let time = if behind > TOLERANCE {
            host.time_ns
        } else if ahead > TOLERANCE {
            now.saturating_sub(ahead)
        } else {
            return None;
        };
        self.asked = None;
        Some(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;

    fn answer(number: u64, time_ns: u64) -> HostTime {
        HostTime { time_ns, number }
    }

    proptest! {
        /// However long question and answer take, whatever is lost, and however late answers are read.
        #[test]
        fn a_clock_that_is_right_stays(
            steps in prop::collection::vec((0..20 * SECOND, 0..4_u8), 1..40)
        ) {
            let (mut clock, mut now) = (Clock::default(), 1_000 * SECOND);
            let (mut questions, mut answers) = (Vec::new(), Vec::new());
            for (passed, step) in steps {
                now += passed;
                match step {
                    0 => questions.push(clock.ask(now)),
                    1 => answers.extend(questions.drain(..).map(|number| answer(number, now))),
                    2 => drop(answers.pop()),
                    _ if answers.is_empty() => {}
                    _ => prop_assert_eq!(clock.correction(answers.remove(0), now), None),
                }
            }
        }

        /// By no more than the way of the answer, or of the question; and it stays right.
        #[test]
        fn a_clock_that_is_wrong_becomes_right(
            error in prop_oneof![-900 * 1_000_000_000_i64..-41_000_000_000, 41_000_000_000..900 * 1_000_000_000_i64],
            there in 0..40 * SECOND,
            back in 0..40 * SECOND,
        ) {
            let guest = |host: u64| host.checked_add_signed(error).unwrap();
            let asked = 10_000 * SECOND;
            let host = asked + there;
            let now = host + back;
            let mut clock = Clock::default();
            let number = clock.ask(guest(asked));
            let set = clock.correction(answer(number, host), guest(now)).unwrap();
            let way = if error < 0 { back } else { there };
            prop_assert!(set.abs_diff(now) <= way);
            // The same once more says nothing about a clock that was set since.
            prop_assert_eq!(clock.correction(answer(number, host), now), None);
        }
    }
}
