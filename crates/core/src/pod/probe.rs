//! When a probe has decided: counting successes and failures against thresholds.

use k8s_openapi::api::core::v1::{Container, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// What a probe is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Whether the container has started; the others wait for it.
    Startup,
    /// Whether it must be restarted.
    Liveness,
    /// Whether it may get traffic.
    Readiness,
}

impl Purpose {
    /// As events have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// Seconds and counts of a probe, with the API's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Before the first attempt.
    pub initial_delay: u64,
    /// Between attempts.
    pub period: u64,
    /// Of one attempt.
    pub timeout: u64,
    /// Successes in a row that decide.
    pub successes: u32,
    /// Failures in a row that decide.
    pub failures: u32,
}

impl Timing {
    /// Of a probe.
    pub fn of(probe: &Probe) -> Self {
        let at_least_one = |value: Option<i32>, default| {
            value
                .and_then(|value| u32::try_from(value).ok())
                .filter(|&value| value > 0)
                .unwrap_or(default)
        };
        Self {
            initial_delay: probe
                .initial_delay_seconds
                .and_then(|value| u64::try_from(value).ok())
                .unwrap_or(0),
            period: at_least_one(probe.period_seconds, 10).into(),
            timeout: at_least_one(probe.timeout_seconds, 1).into(),
            successes: at_least_one(probe.success_threshold, 1),
            failures: at_least_one(probe.failure_threshold, 3),
        }
    }
}

/// The attempts of a probe so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    last: Option<bool>,
    run: u32,
}

impl Count {
    /// Takes in an attempt. Returns what is decided by it, if anything is.
    pub fn record(&mut self, succeeded: bool, timing: &Timing) -> Option<bool> {
        self.run = if self.last == Some(succeeded) {
            self.run.saturating_add(1)
        } else {
            1
        };
        self.last = Some(succeeded);
        let threshold = if succeeded {
            timing.successes
        } else {
            timing.failures
        };
        (self.run >= threshold).then_some(succeeded)
    }
}

/// The number of a port that a probe or hook names.
pub fn port(container: &Container, port: &IntOrString) -> Option<u16> {
    let number = match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => name.parse().ok().or_else(|| {
            container
                .ports
                .iter()
                .flatten()
                .find(|port| port.name.as_ref() == Some(name))
                .map(|port| port.container_port)
        }),
    };
    number
        .and_then(|number| u16::try_from(number).ok())
        .filter(|&number| number > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    proptest! {
        /// A decision is exactly what the last attempts say, as many as its threshold.
        #[test]
        fn the_last_attempts_decide(attempts in prop::collection::vec(any::<bool>(), 1..30), successes in 1u32..4, failures in 1u32..4) {
            let timing = Timing { initial_delay: 0, period: 1, timeout: 1, successes, failures };
            let mut count = Count::default();
            for end in 1..=attempts.len() {
                let last = attempts[end - 1];
                let threshold = if last { successes } else { failures } as usize;
                let decided = end >= threshold && attempts[end - threshold..end].iter().all(|&a| a == last);
                prop_assert_eq!(count.record(last, &timing), decided.then_some(last));
            }
        }
    }

    #[test]
    fn defaults_and_ports() {
        let timing = Timing::of(&Probe {
            period_seconds: Some(0),
            ..Probe::default()
        });
        assert_eq!((timing.period, timing.timeout, timing.failures), (10, 1, 3));
        let container: Container = serde_json::from_value(
            json!({"name": "c", "ports": [{"name": "web", "containerPort": 8080}]}),
        )
        .unwrap();
        let named = |name: &str| port(&container, &IntOrString::String(name.to_owned()));
        assert_eq!(named("web"), Some(8080));
        assert_eq!(named("81"), Some(81));
        assert_eq!(named("none"), None);
        assert_eq!(port(&container, &IntOrString::Int(-1)), None);
    }
}
