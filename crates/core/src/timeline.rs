//! The timeline of a pod's start: what is kept of it, and how it is shown.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use monopod_api::timeline::{Step, StepTime};

/// Steps that are kept: each once, and one for each image that a pod may have.
const MOST: usize = 96;

/// Adds a step that is done, unless it is known already or there are too many, and gives what it took.
///
/// `began` is when it was begun; if nobody knows, it is when the last of the steps was done that
/// it waits for.
pub fn record(
    timeline: &mut Vec<StepTime>,
    step: Step,
    began: Option<Timestamp>,
    done: Timestamp,
    detail: Option<&str>,
) -> Option<SignedDuration> {
    let known = timeline
        .iter()
        .any(|entry| entry.step == step && entry.detail.as_deref() == detail);
    if known || timeline.len() >= MOST {
        return None;
    }
    let last = || {
        timeline
            .iter()
            .filter(|entry| waits_for(step).contains(&entry.step))
            .map(|entry| entry.done.0)
            .max()
    };
    let began = began.or_else(last).unwrap_or(done).min(done);
    timeline.push(StepTime {
        step,
        began: MicroTime(began),
        done: MicroTime(done),
        detail: detail.map(str::to_owned),
    });
    Some(done.duration_since(began))
}

/// What must be done before a step can begin.
fn waits_for(step: Step) -> &'static [Step] {
    match step {
        Step::Request => &[],
        Step::Vm | Step::Image | Step::Certificates => &[Step::Request],
        Step::Tap => &[Step::Vm],
        Step::Go => &[Step::Tap],
        Step::Network => &[Step::Go],
        Step::Disk => &[Step::Network],
        Step::Credentials => &[Step::Disk, Step::Certificates],
        Step::Registered => &[Step::Credentials],
        Step::PodAdmitted => &[Step::Registered],
        Step::ContainerStarted => &[Step::PodAdmitted, Step::Image],
        Step::Running => &[Step::ContainerStarted],
    }
}

/// A time that a guest tells, kept between the host's own times of what it was told before and
/// of this message.
pub fn guest_time(told_ns: u64, earliest: Option<Timestamp>, now: Timestamp) -> Timestamp {
    let told = Timestamp::from_nanosecond(i128::from(told_ns)).unwrap_or(now);
    told.max(earliest.unwrap_or(Timestamp::MIN)).min(now)
}

/// A row of a waterfall.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The step.
    pub step: Step,
    /// What it was about, if there may be several.
    pub detail: Option<String>,
    /// Milliseconds from the beginning of the start to that of the step.
    pub start_ms: f64,
    /// Milliseconds that the step took.
    pub duration_ms: f64,
    /// Characters that lie before its bar, and those of the bar; at least one.
    pub bar: (usize, usize),
}

/// Lays out a timeline by when the steps began, in bars on a line of so many characters.
pub fn waterfall(timeline: &[StepTime], width: usize) -> Vec<Row> {
    let begin = timeline.iter().map(|entry| entry.began.0).min();
    let end = timeline.iter().map(|entry| entry.done.0).max();
    let (Some(begin), Some(end)) = (begin, end) else {
        return Vec::new();
    };
    let total = milliseconds(end.duration_since(begin));
    let mut sorted: Vec<&StepTime> = timeline.iter().collect();
    sorted.sort_by_key(|entry| (entry.began.0, entry.done.0, entry.step));
    sorted
        .into_iter()
        .map(|entry| {
            let start_ms = milliseconds(entry.began.0.duration_since(begin));
            let duration_ms = milliseconds(entry.done.0.duration_since(entry.began.0)).max(0.0);
            let from = cells(start_ms, total, width).min(width.saturating_sub(1));
            let to = cells(start_ms + duration_ms, total, width).min(width);
            Row {
                step: entry.step,
                detail: entry.detail.clone(),
                start_ms,
                duration_ms,
                bar: (from, to.saturating_sub(from).max(1)),
            }
        })
        .collect()
}

fn milliseconds(duration: SignedDuration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// How many characters of the line a time is from its beginning.
fn cells(time: f64, total: f64, width: usize) -> usize {
    if total <= 0.0 {
        return 0;
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a part, from 0 to 1, of a terminal's width"
    )]
    let cells = ((time / total).clamp(0.0, 1.0) * width as f64).round() as usize;
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(1_000_000 + milliseconds).expect("a time")
    }

    /// A step with its begin, if known, its end, and what it must have taken.
    type Recorded = (Step, Option<i64>, i64, Option<i64>);

    #[test]
    fn a_step_begins_when_it_was_begun_or_when_the_last_of_those_before_was_done() {
        let table: [Recorded; 8] = [
            (Step::Request, Some(0), 10, Some(10)),
            (Step::Vm, Some(11), 15, Some(4)),
            (Step::Tap, None, 55, Some(40)),
            (Step::Image, Some(10), 200, Some(190)),
            (Step::Certificates, Some(10), 90, Some(80)),
            // Nothing of what it waits for is known.
            (Step::Disk, None, 80, Some(0)),
            // The certificates came after the node.
            (Step::Credentials, None, 100, Some(10)),
            // A step comes once.
            (Step::Tap, None, 300, None),
        ];
        let mut timeline = Vec::new();
        for (step, began, done, took) in table {
            let recorded = record(&mut timeline, step, began.map(at), at(done), None);
            assert_eq!(
                recorded.map(|d| d.as_millis()),
                took.map(i128::from),
                "{step:?}"
            );
        }
    }

    #[test]
    fn each_image_has_a_step_and_their_number_is_bounded() {
        let mut timeline = Vec::new();
        for image in 0..200 {
            let name = format!("image-{image}");
            let taken = record(&mut timeline, Step::Image, None, at(1), Some(&name));
            assert_eq!(taken.is_some(), image < 96);
        }
        assert_eq!(timeline.len(), MOST);
    }

    #[test]
    fn a_guest_cannot_leave_the_time_in_which_it_ran() {
        let told = |ms: i64| u64::try_from(at(ms).as_nanosecond()).expect("after 1970");
        let table = [
            (told(50), at(50)),
            (told(5), at(10)),
            (told(500), at(100)),
            (0, at(10)),
            (u64::MAX, at(100)),
        ];
        for (told, kept) in table {
            assert_eq!(guest_time(told, Some(at(10)), at(100)), kept);
        }
    }

    #[test]
    fn rows_are_in_the_order_of_their_begin_and_bars_show_their_time() {
        let mut timeline = Vec::new();
        record(&mut timeline, Step::Vm, Some(at(20)), at(60), None);
        record(&mut timeline, Step::Request, Some(at(0)), at(20), None);
        record(
            &mut timeline,
            Step::Image,
            Some(at(20)),
            at(20),
            Some("busybox"),
        );
        record(&mut timeline, Step::Running, Some(at(99)), at(100), None);
        let rows: Vec<(Step, f64, f64, (usize, usize))> = waterfall(&timeline, 10)
            .into_iter()
            .map(|row| (row.step, row.start_ms, row.duration_ms, row.bar))
            .collect();
        assert_eq!(
            rows,
            [
                (Step::Request, 0.0, 20.0, (0, 2)),
                (Step::Image, 20.0, 0.0, (2, 1)),
                (Step::Vm, 20.0, 40.0, (2, 4)),
                (Step::Running, 99.0, 1.0, (9, 1)),
            ]
        );
    }

    #[test]
    fn nothing_and_a_single_moment_have_a_layout_too() {
        assert_eq!(waterfall(&[], 10), []);
        let mut timeline = Vec::new();
        record(&mut timeline, Step::Request, None, at(0), None);
        assert_eq!(waterfall(&timeline, 10)[0].bar, (0, 1));
    }

    proptest! {
        #[test]
        fn a_bar_lies_on_its_line(times in prop::collection::vec((0i64..5000, 0i64..5000), 1..20), width in 1usize..200) {
            let mut timeline = Vec::new();
            for (at_step, (began, done)) in times.into_iter().enumerate() {
                record(&mut timeline, Step::Image, Some(at(began)), at(done), Some(&at_step.to_string()));
            }
            for row in waterfall(&timeline, width) {
                let (before, length) = row.bar;
                prop_assert!(length >= 1);
                prop_assert!(before + length <= width);
                prop_assert!(row.start_ms >= 0.0 && row.duration_ms >= 0.0);
            }
        }
    }
}
