//! Figures of the host process. Label values come from closed sets, never from a guest.

use crate::registry::PullError;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Names of the figures that a guest reports; others are dropped.
const GUEST_FIGURES: [&str; 3] = [
    "memory_available_bytes",
    "cpu_usage_usec",
    "containers_running",
];

#[derive(Clone)]
pub(crate) struct Metrics {
    phases: Family<Phase, Histogram, fn() -> Histogram>,
    guests: Family<Figure, Gauge>,
    pub(crate) vms: Gauge,
    pub(crate) pool: Gauge,
    failures: Family<Failed, Counter>,
    pulls: Family<Pull, Counter>,
    pub(crate) proxy_starts: Counter,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Failed {
    category: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Pull {
    outcome: &'static str,
}

/// What ended an environment before its pod did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VmFailure {
    /// Its VM could not be started.
    NotStarted,
    /// A restarted host process could not take its VM over.
    NotAdopted,
    /// Its VM was gone when the host process started.
    Gone,
    /// Its VM died.
    Died,
    /// Its guest gave up, and said why.
    Guest,
    /// Somebody removed its tap.
    Unplugged,
    /// Its guest speaks another version.
    Incompatible,
}

impl VmFailure {
    const ALL: [Self; 7] = [
        Self::NotStarted,
        Self::NotAdopted,
        Self::Gone,
        Self::Died,
        Self::Guest,
        Self::Unplugged,
        Self::Incompatible,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::NotStarted => "not_started",
            Self::NotAdopted => "not_adopted",
            Self::Gone => "gone",
            Self::Died => "died",
            Self::Guest => "guest",
            Self::Unplugged => "unplugged",
            Self::Incompatible => "incompatible",
        }
    }
}

/// How a pull ends, beside the categories of its errors.
const PULLED: &str = "pulled";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Figure {
    environment: String,
    figure: &'static str,
}

/// 5 ms to 60 s: from the shortest step that is worth a look to what a start may take at most.
fn histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.005, 1.6, 21))
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            phases: Family::new_with_constructor(histogram as fn() -> Histogram),
            guests: Family::default(),
            vms: Gauge::default(),
            pool: Gauge::default(),
            failures: Family::default(),
            pulls: Family::default(),
            proxy_starts: Counter::default(),
        };
        registry.register(
            "start_phase_seconds",
            "Seconds that a step of a pod's start took, by the names of the environment's timeline; total is all of it",
            metrics.phases.clone(),
        );
        registry.register(
            "guest_figure",
            "Figures that guests report, by environment",
            metrics.guests.clone(),
        );
        registry.register("vms", "VMs that run", metrics.vms.clone());
        registry.register(
            "pool_vms",
            "VMs that are ready before they are needed",
            metrics.pool.clone(),
        );
        registry.register(
            "vm_failures",
            "VMs that could not be started or died, by what happened",
            metrics.failures.clone(),
        );
        registry.register(
            "image_pulls",
            "Images that registries were asked for, once for each pod and try, by outcome",
            metrics.pulls.clone(),
        );
        // From the beginning, so that an increase from zero is seen.
        for category in VmFailure::ALL.map(VmFailure::name) {
            drop(metrics.failures.get_or_create(&Failed { category }));
        }
        for outcome in [&[PULLED], &PullError::CATEGORIES[..]].concat() {
            drop(metrics.pulls.get_or_create(&Pull { outcome }));
        }
        registry.register(
            "kube_proxy_starts",
            "How often kube-proxy was started",
            metrics.proxy_starts.clone(),
        );
        metrics
    }

    /// Counts what a step of the start took.
    pub(crate) fn phase(&self, phase: &'static str, seconds: f64) {
        self.phases
            .get_or_create(&Phase { phase })
            .observe(seconds.max(0.0));
    }

    /// Counts an environment that failed.
    pub(crate) fn failed(&self, category: VmFailure) {
        let category = category.name();
        self.failures.get_or_create(&Failed { category }).inc();
    }

    /// Counts a pull that ended.
    pub(crate) fn pulled<T>(&self, pull: &Result<T, PullError>) {
        let outcome = pull.as_ref().err().map_or(PULLED, PullError::category);
        self.pulls.get_or_create(&Pull { outcome }).inc();
    }

    /// Keeps a guest's figure, if it is one of ours.
    pub(crate) fn guest(&self, environment: &str, figure: &str, value: u64) {
        if let Some(figure) = GUEST_FIGURES.into_iter().find(|known| *known == figure) {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            self.guests
                .get_or_create(&Figure {
                    environment: environment.to_owned(),
                    figure,
                })
                .set(value);
        }
    }

    /// Drops the figures of an environment that is gone.
    pub(crate) fn forget(&self, environment: &str) {
        for figure in GUEST_FIGURES {
            self.guests.remove(&Figure {
                environment: environment.to_owned(),
                figure,
            });
        }
    }
}
