//! What a pod's events say of its images, in the kubelet's words. A long pull says how far it is.

use super::{Event, Told};
use jiff::{SignedDuration, Timestamp};
use monopod_wire::Pulled;
use std::collections::BTreeMap;

/// Time between two events of one pull.
const PERIOD: SignedDuration = SignedDuration::from_secs(10);

fn event(container: &str, reason: &'static str, message: String) -> Event {
    Event {
        warning: false,
        reason,
        message,
        container: Some(container.to_owned()),
    }
}

/// The event of an image that is being pulled, if it is time for one.
pub(super) fn progress(
    pulls: &mut BTreeMap<String, Told>,
    container: &str,
    image: &str,
    (done, total): (u64, u64),
    now: Timestamp,
) -> Option<Event> {
    let told = Told {
        at: now,
        pulled: false,
    };
    let Some(before) = pulls.insert(image.to_owned(), told) else {
        let message = format!("Pulling image \"{image}\"");
        return Some(event(container, "Pulling", message));
    };
    if total == 0 || before.pulled || now.duration_since(before.at) < PERIOD {
        pulls.insert(image.to_owned(), before);
        return None;
    }
    let message = format!(
        "Pulling image \"{image}\": {} of {}",
        size(done.min(total)),
        size(total)
    );
    Some(event(container, "Pulling", message))
}

/// The events of an image that a container is about to use. That it was pulled is told once.
pub(super) fn present(
    pulls: &mut BTreeMap<String, Told>,
    container: &str,
    image: &str,
    pulled: Option<&Pulled>,
    now: Timestamp,
) -> Vec<Event> {
    let before = pulls.get(image).copied();
    let Some(pulled) = pulled.filter(|_| before.is_none_or(|told| !told.pulled)) else {
        let message = format!("Container image \"{image}\" already present on machine");
        return vec![event(container, "Pulled", message)];
    };
    let mut events = Vec::new();
    if before.is_none() {
        let message = format!("Pulling image \"{image}\"");
        events.push(event(container, "Pulling", message));
    }
    let told = Told {
        at: now,
        pulled: true,
    };
    pulls.insert(image.to_owned(), told);
    let message = format!(
        "Successfully pulled image \"{image}\" in {} ({} including waiting). Image size: {} bytes.",
        duration(pulled.pull_ms),
        duration(pulled.total_ms.max(pulled.pull_ms)),
        pulled.size
    );
    events.push(event(container, "Pulled", message));
    events
}

/// As Go prints a duration in milliseconds: `512ms`, `3.2s`, `1m3.2s`.
fn duration(milliseconds: u64) -> String {
    let (minutes, rest) = (milliseconds / 60_000, milliseconds % 60_000);
    let fraction = format!("{:03}", rest % 1000);
    let fraction = match fraction.trim_end_matches('0') {
        "" => String::new(),
        digits => format!(".{digits}"),
    };
    match (minutes, rest) {
        (0, 0) => "0s".to_owned(),
        (0, ..1000) => format!("{rest}ms"),
        (0, _) => format!("{}{fraction}s", rest / 1000),
        (..60, _) => format!("{minutes}m{}{fraction}s", rest / 1000),
        _ => format!(
            "{}h{}m{}{fraction}s",
            minutes / 60,
            minutes % 60,
            rest / 1000
        ),
    }
}

/// In mebibytes, with tenths.
fn size(bytes: u64) -> String {
    let tenths = bytes / ((1 << 20) / 10);
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::UNIX_EPOCH + SignedDuration::from_secs(second)
    }

    #[test]
    fn the_words_are_the_kubelets() {
        let mut pulls = BTreeMap::new();
        let mut told = |second, done| {
            progress(&mut pulls, "c", "x", (done, 90 << 20), at(second)).map(|e| e.message)
        };
        assert_eq!(told(0, 0).as_deref(), Some("Pulling image \"x\""));
        assert_eq!(told(9, 1 << 20), None);
        assert_eq!(
            told(10, 31 << 19).as_deref(),
            Some("Pulling image \"x\": 15.5 MiB of 90.0 MiB")
        );
        assert_eq!(told(11, 32 << 20), None);
        let pulled = Pulled {
            pull_ms: 3200,
            total_ms: 63_040,
            size: 7,
        };
        let mut present = |second| -> Vec<String> {
            let events = present(&mut pulls, "c", "x", Some(&pulled), at(second));
            events.into_iter().map(|e| e.message).collect()
        };
        assert_eq!(
            present(12),
            [
                "Successfully pulled image \"x\" in 3.2s (1m3.04s including waiting). Image size: 7 bytes."
            ]
        );
        assert_eq!(
            present(13),
            ["Container image \"x\" already present on machine"]
        );
        assert_eq!(duration(0), "0s");
        assert_eq!(duration(45), "45ms");
        assert_eq!(duration(3_600_000), "1h0m0s");
    }

    proptest! {
        /// However often the host tells of it, a pull makes one event in ten seconds at most.
        #[test]
        fn events_are_few(steps in prop::collection::vec((0i64..4, 0u64..100), 1..100)) {
            let (mut pulls, mut now, mut times) = (BTreeMap::new(), 0, Vec::new());
            for (seconds, done) in steps {
                now += seconds;
                if progress(&mut pulls, "c", "x", (done, 99), at(now)).is_some() {
                    times.push(now);
                }
            }
            prop_assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= 10));
        }
    }
}
