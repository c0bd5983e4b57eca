//! What a container may use, and its pod as a whole, as control groups have it.

use crate::quantity::{self, InvalidQuantity};
use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// Limits of one control group. What is none is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Thousandths of a CPU.
    pub cpu_millis: Option<u64>,
    /// Requested thousandths of a CPU, the group's share if they are scarce.
    pub cpu_share_millis: Option<u64>,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
}

/// The kernel's period for CPU limits, in microseconds; its default.
const CPU_PERIOD: u64 = 100_000;
/// The kernel's least quota, in microseconds.
const LEAST_QUOTA: u64 = 1000;

impl Limits {
    /// Microseconds of CPU time in each of [`Limits::period`].
    pub fn quota(self) -> Option<u64> {
        let quota = |millis: u64| millis.saturating_mul(CPU_PERIOD) / 1000;
        self.cpu_millis.map(|millis| quota(millis).max(LEAST_QUOTA))
    }

    /// Microseconds that a quota is for.
    pub fn period() -> u64 {
        CPU_PERIOD
    }

    /// The share in version 1's unit, of which a CPU has 1024, as the OCI's specification wants it.
    pub fn shares(self) -> Option<u64> {
        let shares = |millis: u64| millis.saturating_mul(1024) / 1000;
        self.cpu_share_millis
            .map(|millis| shares(millis).clamp(2, 262_144))
    }

    /// The same share in version 2's unit, by the kubelet's formula.
    pub fn weight(self) -> Option<u64> {
        self.shares()
            .map(|shares| 1 + (shares - 2) * 9999 / 262_142)
    }
}

/// Limits of a container: its own, or else its pod's.
///
/// A CPU limit above what the VM has is no limit, and nothing that the kernel need be asked for.
pub fn of_container(
    spec: &PodSpec,
    container: &Container,
    vm_millis: u64,
) -> Result<Limits, InvalidQuantity> {
    let own = container.resources.as_ref();
    let pods = spec.resources.as_ref();
    let own_limits = own.and_then(|r| r.limits.as_ref());
    let limits = [own_limits, pods.and_then(|r| r.limits.as_ref())];
    let requests = [own.and_then(|r| r.requests.as_ref()), own_limits];
    Ok(Limits {
        cpu_millis: first(&limits, "cpu", quantity::millis)?.map(|millis| millis.min(vm_millis)),
        cpu_share_millis: first(&requests, "cpu", quantity::millis)?,
        memory_bytes: first(&limits, "memory", quantity::units)?,
    })
}

/// Limits of the pod itself, with the overhead of its runtime class; none if it asks for none of its own.
pub fn of_pod(spec: &PodSpec, vm_millis: u64) -> Result<Option<Limits>, InvalidQuantity> {
    let Some(resources) = &spec.resources else {
        return Ok(None);
    };
    let overhead = [spec.overhead.as_ref()];
    let cpu_overhead = first(&overhead, "cpu", quantity::millis)?.unwrap_or(0);
    let memory_overhead = first(&overhead, "memory", quantity::units)?.unwrap_or(0);
    let limits = [resources.limits.as_ref()];
    let requests = [resources.requests.as_ref(), resources.limits.as_ref()];
    let cpu = |amount: u64| amount.saturating_add(cpu_overhead);
    Ok(Some(Limits {
        cpu_millis: first(&limits, "cpu", quantity::millis)?
            .map(|millis| cpu(millis).min(vm_millis)),
        cpu_share_millis: first(&requests, "cpu", quantity::millis)?.map(cpu),
        memory_bytes: first(&limits, "memory", quantity::units)?
            .map(|bytes| bytes.saturating_add(memory_overhead)),
    }))
}

type Quantities = BTreeMap<String, Quantity>;

/// The first amount that is there and more than nothing.
fn first(
    lists: &[Option<&Quantities>],
    name: &str,
    parse: fn(&Quantity) -> Result<u64, InvalidQuantity>,
) -> Result<Option<u64>, InvalidQuantity> {
    for quantity in lists.iter().flatten().filter_map(|list| list.get(name)) {
        let amount = parse(quantity)?;
        if amount > 0 {
            return Ok(Some(amount));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    const MIB: u64 = 1 << 20;

    fn limits(pod: &Value, container: &Value, vm: u64) -> (Option<Limits>, Limits) {
        let spec = json!({
            "resources": pod["resources"], "overhead": pod["overhead"],
            "containers": [{"name": "c", "resources": container}],
        });
        let spec: PodSpec = serde_json::from_value(spec).expect("a spec");
        let own = of_container(&spec, &spec.containers[0], vm).expect("quantities");
        (of_pod(&spec, vm).expect("quantities"), own)
    }

    fn expected(cpu: u64, share: u64, memory: u64) -> Limits {
        let some = |amount: u64| Some(amount).filter(|&amount| amount > 0);
        Limits {
            cpu_millis: some(cpu),
            cpu_share_millis: some(share),
            memory_bytes: some(memory * MIB),
        }
    }

    #[test]
    fn a_pods_own_limits_are_its_groups_and_stand_in_for_its_containers() {
        let none = json!({});
        let own = json!({"requests": {"cpu": "100m"}, "limits": {"cpu": "200m", "memory": "64Mi"}});
        let pods = json!({"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "256Mi"}}});
        let cases = [
            ("nothing", json!({}), &none, None, expected(0, 0, 0)),
            (
                "a container's alone",
                json!({}),
                &own,
                None,
                expected(200, 100, 64),
            ),
            (
                "the pod's alone",
                pods.clone(),
                &none,
                Some(expected(1000, 500, 256)),
                expected(1000, 0, 256),
            ),
            (
                "both",
                pods,
                &own,
                Some(expected(1000, 500, 256)),
                expected(200, 100, 64),
            ),
            (
                "limits alone are requests",
                json!({"resources": {"limits": {"cpu": "1"}}}),
                &none,
                Some(expected(1000, 1000, 0)),
                expected(1000, 0, 0),
            ),
            (
                "requests alone limit nothing",
                json!({"resources": {"requests": {"cpu": "300m", "memory": "1Gi"}}}),
                &none,
                Some(expected(0, 300, 0)),
                expected(0, 0, 0),
            ),
            (
                "more than the VM has",
                json!({"resources": {"limits": {"cpu": "64"}}}),
                &none,
                Some(expected(2000, 64_000, 0)),
                expected(2000, 0, 0),
            ),
            (
                "the overhead of a runtime class",
                json!({"resources": {"limits": {"cpu": "1", "memory": "256Mi"}}, "overhead": {"cpu": "250m", "memory": "64Mi"}}),
                &none,
                Some(expected(1250, 1250, 320)),
                expected(1000, 0, 256),
            ),
        ];
        for (what, pod, container, of_pod, of_container) in cases {
            assert_eq!(
                limits(&pod, container, 2000),
                (of_pod, of_container),
                "{what}"
            );
        }
    }

    #[test]
    fn units_are_the_kernels() {
        let limits = |cpu, share| Limits {
            cpu_millis: Some(cpu),
            cpu_share_millis: Some(share),
            memory_bytes: None,
        };
        let got = |cpu, share| {
            let limits = limits(cpu, share);
            (limits.quota(), limits.shares(), limits.weight())
        };
        assert_eq!(got(250, 250), (Some(25_000), Some(256), Some(10)));
        assert_eq!(got(1, 1), (Some(1000), Some(2), Some(1)));
        assert_eq!(
            got(2000, 300_000),
            (Some(200_000), Some(262_144), Some(10_000))
        );
        let none = Limits::default();
        assert_eq!(
            (none.quota(), none.shares(), none.weight()),
            (None, None, None)
        );
    }

    proptest! {
        #[test]
        fn no_limit_is_more_than_the_vms_or_out_of_the_kernels_range(cpu in 0u64..200_000, share in 0u64..1_000_000, vm in 250u64..16_000) {
            let text = |millis: u64| format!("{millis}m");
            let pod = json!({"resources": {"requests": {"cpu": text(share)}, "limits": {"cpu": text(cpu)}}});
            let (of_pod, own) = limits(&pod, &json!({}), vm);
            let of_pod = of_pod.expect("its own");
            prop_assert_eq!(own.cpu_millis, of_pod.cpu_millis);
            prop_assert_eq!(own.cpu_millis, Some(cpu.min(vm)).filter(|_| cpu > 0));
            prop_assert!(of_pod.quota().is_none_or(|quota| quota >= LEAST_QUOTA));
            prop_assert!(of_pod.weight().is_none_or(|weight| (1..=10_000).contains(&weight)));
        }
    }
}
