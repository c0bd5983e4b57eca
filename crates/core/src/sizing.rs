//! The size of the VM that a pod needs.

use crate::quantity::{self, InvalidQuantity};
use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use monopod_api::profile::Sizing;
use monopod_api::size::Size;
use std::collections::BTreeMap;

/// Memory in MiB that Fargate adds for the kubelet and the container runtime (its user guide).
pub const RUNTIME_MEMORY_MIB: u64 = 256;
/// Scratch disk in GiB of a pod that asks for no more (the user guide).
pub const DEFAULT_SCRATCH_GIB: u64 = 20;
/// Largest request of ephemeral storage in GiB (the user guide).
pub const MAX_SCRATCH_GIB: u64 = 175;

/// What a pod's VM must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Requirement {
    /// vCPUs and memory.
    pub size: Size,
    /// GiB of the scratch disk.
    pub scratch_gib: u32,
}

/// Why no size fits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizingError {
    /// Larger than the largest size.
    #[error("{}", monopod_api::messages::POD_TOO_LARGE_MESSAGE)]
    TooLarge,
    /// A request that is no quantity. The API server lets none pass.
    #[error(transparent)]
    Invalid(#[from] InvalidQuantity),
}

/// Amounts of what a VM is sized by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// Thousandths of a vCPU.
    pub cpu_millis: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of ephemeral storage.
    pub storage_bytes: u64,
}

impl Amount {
    fn plus(self, other: Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis.saturating_add(other.cpu_millis),
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            storage_bytes: self.storage_bytes.saturating_add(other.storage_bytes),
        }
    }

    fn or_more(self, other: Self) -> Self {
        Self {
            cpu_millis: self.cpu_millis.max(other.cpu_millis),
            memory_bytes: self.memory_bytes.max(other.memory_bytes),
            storage_bytes: self.storage_bytes.max(other.storage_bytes),
        }
    }
}

/// One line of the sum that leads to a size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// For people.
    pub what: String,
    /// What it asks for, or what it comes to so far.
    pub amount: Amount,
}

/// The smallest size that holds the pod's requests and the runtime's own memory.
pub fn requirement(spec: &PodSpec, sizing: Sizing) -> Result<Requirement, SizingError> {
    fitting(sum(spec, &mut |_step| {})?, sizing)
}

/// The same with the sum that leads to it, which is complete also when no size fits.
pub fn explain(spec: &PodSpec, sizing: Sizing) -> (Vec<Step>, Result<Requirement, SizingError>) {
    let mut steps = Vec::new();
    let total = sum(spec, &mut |step| steps.push(step));
    (steps, total.and_then(|total| fitting(total, sizing)))
}

/// What the pod needs over its life: the larger of any init step and of what runs together.
///
/// Sidecars (init containers that restart always) run beside everything after them. Requests of the
/// pod itself stand in place of its containers' (KEP 2837); the overhead of its `RuntimeClass` and the
/// runtime's own memory come on top.
fn sum(spec: &PodSpec, tell: &mut dyn FnMut(Step)) -> Result<Amount, SizingError> {
    let mut step = |what: String, amount: Amount| tell(Step { what, amount });
    let (mut sidecars, mut init) = (Amount::default(), Amount::default());
    for container in spec.init_containers.iter().flatten() {
        let own = amount(container)?;
        if container.restart_policy.as_deref() == Some("Always") {
            step(format!("sidecar {}", container.name), own);
            sidecars = sidecars.plus(own);
            init = init.or_more(sidecars);
        } else {
            step(format!("init container {}, by itself", container.name), own);
            init = init.or_more(sidecars.plus(own));
        }
    }
    let mut running = sidecars;
    for container in &spec.containers {
        let own = amount(container)?;
        step(format!("container {}", container.name), own);
        running = running.plus(own);
    }
    let mut total = running.or_more(init);
    step(
        "all that run together, or the largest init step".to_owned(),
        total,
    );
    let resources = spec.resources.as_ref();
    let (requests, limits) = (
        resources.and_then(|r| r.requests.as_ref()),
        resources.and_then(|r| r.limits.as_ref()),
    );
    let pods_own = total_of(requests, limits)?;
    if pods_own != Amount::default() {
        let given = |own: u64, summed: u64| if own == 0 { summed } else { own };
        total = Amount {
            cpu_millis: given(pods_own.cpu_millis, total.cpu_millis),
            memory_bytes: given(pods_own.memory_bytes, total.memory_bytes),
            storage_bytes: given(pods_own.storage_bytes, total.storage_bytes),
        };
        step(
            "with the pod's own requests in their place".to_owned(),
            total,
        );
    }
    if let Some(overhead) = &spec.overhead {
        let overhead = total_of(Some(overhead), None)?;
        step("overhead of the runtime class".to_owned(), overhead);
        total = total.plus(overhead);
    }
    let runtime = Amount {
        memory_bytes: RUNTIME_MEMORY_MIB << 20,
        ..Amount::default()
    };
    step("kubelet and container runtime".to_owned(), runtime);
    total = total.plus(runtime);
    step("in all".to_owned(), total);
    Ok(total)
}

fn amount(container: &Container) -> Result<Amount, InvalidQuantity> {
    let resources = container.resources.as_ref();
    total_of(
        resources.and_then(|r| r.requests.as_ref()),
        resources.and_then(|r| r.limits.as_ref()),
    )
}

type Quantities = BTreeMap<String, Quantity>;

fn total_of(
    requests: Option<&Quantities>,
    limits: Option<&Quantities>,
) -> Result<Amount, InvalidQuantity> {
    // The API server copies a limit that has no request; a pod read elsewhere may lack that.
    let of = |resource: &str, parse: fn(&Quantity) -> Result<u64, InvalidQuantity>| {
        let found = requests
            .and_then(|r| r.get(resource))
            .or_else(|| limits.and_then(|l| l.get(resource)));
        found.map_or(Ok(0), parse)
    };
    Ok(Amount {
        cpu_millis: of("cpu", quantity::millis)?,
        memory_bytes: of("memory", quantity::units)?,
        storage_bytes: of("ephemeral-storage", quantity::units)?,
    })
}

/// The smallest size with at least this much.
fn fitting(total: Amount, sizing: Sizing) -> Result<Requirement, SizingError> {
    let memory_mib = total.memory_bytes.div_ceil(1 << 20);
    let size = match sizing {
        Sizing::Table => Size::fitting(total.cpu_millis, memory_mib),
        Sizing::Exact => Size::exact(total.cpu_millis, memory_mib),
    };
    let size = size.ok_or(SizingError::TooLarge)?;
    let storage = total.storage_bytes.div_ceil(1 << 30);
    if storage > MAX_SCRATCH_GIB {
        return Err(SizingError::TooLarge);
    }
    // Fargate provisions a tenth and 5 GiB more than asked for; 100 GiB gives 115 GiB.
    let scratch = if storage == 0 {
        0
    } else {
        storage + storage.div_ceil(10) + 5
    };
    let scratch_gib = u32::try_from(scratch.max(DEFAULT_SCRATCH_GIB))
        .map_err(|_impossible| SizingError::TooLarge)?;
    Ok(Requirement { size, scratch_gib })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn requirement(spec: &PodSpec) -> Result<Requirement, SizingError> {
        super::requirement(spec, Sizing::Table)
    }

    fn spec(value: serde_json::Value) -> PodSpec {
        serde_json::from_value(value).expect("a pod spec")
    }

    fn asking(cpu: &str, memory: &str) -> serde_json::Value {
        json!({"name": "c", "resources": {"requests": {"cpu": cpu, "memory": memory}}})
    }

    #[test]
    fn the_user_guides_example() {
        let required =
            requirement(&spec(json!({"containers": [asking("1", "8Gi")]}))).expect("fits");
        assert_eq!(required.size.to_string(), "2vCPU 9GB");
        let nothing = requirement(&spec(json!({"containers": [{"name": "c"}]}))).expect("fits");
        assert_eq!(nothing.size.to_string(), "0.25vCPU 0.5GB");
        assert_eq!(nothing.scratch_gib, 20);
    }

    #[test]
    fn init_containers_count_by_their_peak_and_sidecars_beside_the_others() {
        let sidecar = json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "300m"}}});
        let required = requirement(&spec(json!({
            "initContainers": [asking("900m", "1Gi"), sidecar],
            "containers": [asking("300m", "100Mi"), asking("300m", "100Mi")],
        })))
        .expect("fits");
        assert_eq!(
            (required.size.cpu_millis, required.size.memory_mib),
            (1000, 2048)
        );
    }

    #[test]
    fn storage_is_rounded_up_as_fargate_does() {
        let with = |gib: u32| {
            requirement(&spec(
                json!({"containers": [{"name": "c", "resources": {"requests": {"ephemeral-storage": format!("{gib}Gi")}}}]}),
            ))
        };
        assert_eq!(with(100).expect("fits").scratch_gib, 115);
        assert_eq!(with(176), Err(SizingError::TooLarge));
    }

    #[test]
    fn the_pods_own_requests_and_its_overhead_count() {
        let (steps, required) = explain(
            &spec(json!({
                "resources": {"requests": {"cpu": "1500m"}}, "overhead": {"memory": "1Gi"},
                "containers": [asking("4", "3Gi")],
            })),
            Sizing::Table,
        );
        let required = required.expect("fits");
        assert_eq!(required.size.to_string(), "2vCPU 5GB");
        let lines: Vec<&str> = steps.iter().map(|step| step.what.as_str()).collect();
        assert_eq!(
            lines,
            [
                "container c",
                "all that run together, or the largest init step",
                "with the pod's own requests in their place",
                "overhead of the runtime class",
                "kubelet and container runtime",
                "in all"
            ]
        );
        let (steps, required) = explain(
            &spec(json!({"containers": [asking("17", "1Gi")]})),
            Sizing::Table,
        );
        assert_eq!(required, Err(SizingError::TooLarge));
        assert_eq!(steps.last().expect("a sum").amount.cpu_millis, 17_000);
    }

    proptest! {
        /// More of anything is never smaller in anything, and the order of the containers does not matter.
        #[test]
        fn the_size_grows_with_the_requests(
            mut asked in prop::collection::vec((0u64..3000, 0u64..20_000, 0u64..60), 1..5),
            more in (0u64..3000, 0u64..20_000, 0u64..60),
            exact: bool,
        ) {
            let sizing = if exact { Sizing::Exact } else { Sizing::Table };
            let of = |asked: &[(u64, u64, u64)]| {
                let containers: Vec<_> = asked.iter().map(|(cpu, memory, storage)| json!({"name": "c", "resources": {"requests":
                    {"cpu": format!("{cpu}m"), "memory": format!("{memory}Mi"), "ephemeral-storage": format!("{storage}Gi")}}})).collect();
                super::requirement(&spec(json!({ "containers": containers })), sizing)
            };
            let before = of(&asked);
            asked.reverse();
            prop_assert_eq!(of(&asked), before.clone());
            let first = &mut asked[0];
            *first = (first.0 + more.0, first.1 + more.1, first.2 + more.2);
            match (before, of(&asked)) {
                (Ok(before), Ok(after)) => {
                    prop_assert!(after.size.cpu_millis >= before.size.cpu_millis);
                    // The table gives the least memory of the next larger vCPU count, which may be less.
                    prop_assert!(after.size >= before.size);
                    prop_assert!(after.scratch_gib >= before.scratch_gib);
                    prop_assert!(!exact || after.size.memory_mib >= before.size.memory_mib);
                }
                (Err(_), after) => prop_assert!(after.is_err()),
                (Ok(_), Err(error)) => prop_assert_eq!(error, SizingError::TooLarge),
            }
        }

        /// An exact size holds what was asked for, with less to spare than the steps of the sizes.
        #[test]
        fn an_exact_size_is_what_was_asked_for(cpu in 0u64..20_000, memory in 0u64..130_000) {
            let pod = spec(json!({ "containers": [asking(&format!("{cpu}m"), &format!("{memory}Mi"))] }));
            let need = memory + RUNTIME_MEMORY_MIB;
            match super::requirement(&pod, Sizing::Exact) {
                Ok(Requirement { size, .. }) => {
                    prop_assert_eq!(u64::from(size.cpu_millis), cpu.max(250));
                    let given = u64::from(size.memory_mib);
                    prop_assert!(given >= need && (given < need + 128 || given == 512));
                }
                Err(_) => prop_assert!(cpu > 16_000 || need > 120 * 1024),
            }
        }

        /// The size always holds what was asked for, and none smaller does.
        #[test]
        fn the_size_is_the_smallest_that_fits(cpus in prop::collection::vec(0u64..6000, 1..4), memory in 0u64..40_000) {
            let containers: Vec<_> = cpus.iter().map(|cpu| asking(&format!("{cpu}m"), "0")).chain([asking("0", &format!("{memory}Mi"))]).collect();
            let (cpu, need) = (cpus.iter().sum::<u64>(), memory + RUNTIME_MEMORY_MIB);
            let holds = |size: &Size| u64::from(size.cpu_millis) >= cpu && u64::from(size.memory_mib) >= need;
            match requirement(&spec(json!({ "containers": containers }))) {
                Ok(required) => {
                    prop_assert!(holds(&required.size));
                    prop_assert!(Size::all().take_while(|size| *size != required.size).all(|size| !holds(&size)));
                }
                Err(_) => prop_assert!(!Size::all().any(|size| holds(&size))),
            }
        }
    }
}
