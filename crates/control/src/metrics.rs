//! What this control process did, in figures. Label values are closed sets.

use crate::execute::CATEGORIES;
use jiff::Timestamp;
use monopod_core::lifecycle::{Cause, Failure};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// What became of a pod of a profile that is being deleted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Drained {
    /// It was evicted.
    Evicted,
    /// It was not, mostly as its disruption budget has no room.
    Held,
    /// It was deleted, as the deadline was over.
    Deleted,
}

impl Drained {
    const ALL: [Self; 3] = [Self::Evicted, Self::Held, Self::Deleted];

    fn name(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::Held => "held",
            Self::Deleted => "deleted",
        }
    }
}

/// 10 ms to 82 s, the span between an idle machine's best phase and the provisioning limit.
fn histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.01, 2.0, 14))
}

/// What is counted as it is done.
#[derive(Clone)]
pub(crate) struct Metrics {
    phases: Family<Phase, Histogram, fn() -> Histogram>,
    effect_failures: Family<Category, Counter>,
    refusals: Family<Reason, Counter>,
    failures: Family<Category, Counter>,
    drained: Family<Outcome, Counter>,
    /// Attempts to provision after one that failed.
    pub(crate) retries: Counter,
    /// Pods that failed as their VM died.
    pub(crate) lost: Counter,
    /// Pods that were deleted as their node did not end them.
    pub(crate) overruled: Counter,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Category {
    category: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

impl Metrics {
    /// Registers all of them, each label with its zero: a rate needs a beginning.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let this = Self {
            phases: Family::new_with_constructor(histogram as fn() -> Histogram),
            effect_failures: Family::default(),
            refusals: Family::default(),
            failures: Family::default(),
            drained: Family::default(),
            retries: Counter::default(),
            lost: Counter::default(),
            overruled: Counter::default(),
        };
        for category in CATEGORIES {
            drop(this.effect_failures.get_or_create(&Category { category }));
        }
        for reason in Cause::ALL.map(Cause::name) {
            drop(this.refusals.get_or_create(&Reason { reason }));
        }
        for category in Failure::ALL.map(Failure::name) {
            drop(this.failures.get_or_create(&Category { category }));
        }
        for outcome in Drained::ALL.map(Drained::name) {
            drop(this.drained.get_or_create(&Outcome { outcome }));
        }
        registry.register(
            "start_phase_seconds",
            "Time that a phase of a pod's start took",
            this.phases.clone(),
        );
        registry.register(
            "effect_failures",
            "Effects that failed and are decided anew",
            this.effect_failures.clone(),
        );
        registry.register(
            "placement_refusals",
            "How often a pod was told why it waits, by reason",
            this.refusals.clone(),
        );
        registry.register(
            "provisioning_failures",
            "Attempts to provision that were given up, by what was missing",
            this.failures.clone(),
        );
        registry.register(
            "provisioning_retries",
            "Attempts to provision for a pod for which one failed before",
            this.retries.clone(),
        );
        registry.register(
            "environments_lost",
            "Pods that failed because their VM died",
            this.lost.clone(),
        );
        registry.register(
            "pods_overruled",
            "Pods that were deleted because their node did not end them in time",
            this.overruled.clone(),
        );
        registry.register(
            "profile_drains",
            "Pods of profiles that are being deleted, by what became of the attempt to evict them",
            this.drained.clone(),
        );
        this
    }

    /// A phase of a start is done, which was begun then.
    pub(crate) fn phase(&self, phase: &'static str, since: Timestamp) {
        let seconds = Timestamp::now().duration_since(since).as_secs_f64();
        self.phases
            .get_or_create(&Phase { phase })
            .observe(seconds.max(0.0));
    }

    /// An effect failed.
    pub(crate) fn effect_failed(&self, category: &'static str) {
        self.effect_failures
            .get_or_create(&Category { category })
            .inc();
    }

    /// A pod was told why it waits.
    pub(crate) fn refused(&self, cause: Cause) {
        let reason = cause.name();
        self.refusals.get_or_create(&Reason { reason }).inc();
    }

    /// An attempt to provision was given up.
    pub(crate) fn failed(&self, failure: Failure) {
        let category = failure.name();
        self.failures.get_or_create(&Category { category }).inc();
    }

    /// Something became of a pod whose profile is being deleted.
    pub(crate) fn drained(&self, drained: Drained) {
        let outcome = drained.name();
        self.drained.get_or_create(&Outcome { outcome }).inc();
    }
}
