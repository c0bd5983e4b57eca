//! Why a pod waits and why an attempt failed: closed sets, which metrics count.

use crate::placement::{NoHost, Refusal};
use monopod_api::messages;

/// Why a pod waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// It asks for what no Fargate pod has.
    Unsupported,
    /// It asks for more than the largest size.
    TooLarge,
    /// Its profile cannot launch it, or is not there.
    Profile,
    /// No node is what it requires of its node.
    Selector,
    /// Its topology spread constraints.
    Spread,
    /// No pod that it wants is near.
    Affinity,
    /// It avoids a pod, or a pod avoids it.
    AntiAffinity,
    /// No address is free.
    Address,
    /// No host has room, or none takes pods.
    Capacity,
    /// The last attempt failed, and the next one is not due.
    Provisioning,
    /// The host of the last attempt does not answer, and may still run its VM.
    Host,
}

impl Cause {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Unsupported,
        Self::TooLarge,
        Self::Profile,
        Self::Selector,
        Self::Spread,
        Self::Affinity,
        Self::AntiAffinity,
        Self::Address,
        Self::Capacity,
        Self::Provisioning,
        Self::Host,
    ];

    /// As metrics name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unsupported => "unsupported",
            Self::TooLarge => "too_large",
            Self::Profile => "profile",
            Self::Selector => "selector",
            Self::Spread => "spread",
            Self::Affinity => "affinity",
            Self::AntiAffinity => "anti_affinity",
            Self::Address => "address",
            Self::Capacity => "capacity",
            Self::Provisioning => "provisioning",
            Self::Host => "host",
        }
    }

    /// The reason of the pod's condition.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Unsupported => messages::POD_UNSUPPORTED,
            Self::TooLarge => messages::POD_TOO_LARGE,
            _other => "Unschedulable",
        }
    }
}

/// What is wrong with the pod itself counts first, then what others mean for it, then what there is too little of.
impl From<&NoHost> for Cause {
    fn from(no: &NoHost) -> Self {
        let (mut all, mut any) = (no.reasons.keys(), no.reasons.keys());
        if !no.unmet.is_empty() && all.all(|r| matches!(r, Refusal::Zone | Refusal::Selector)) {
            return Self::Selector;
        }
        match any.find(|reason| reason.is_about_others()) {
            Some(Refusal::Affinity) => Self::Affinity,
            Some(Refusal::AntiAffinity | Refusal::ExistingAntiAffinity) => Self::AntiAffinity,
            Some(_) => Self::Spread,
            None if no.reasons.contains_key(&Refusal::Address) => Self::Address,
            None => Self::Capacity,
        }
    }
}

/// Why an attempt to provision was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The host has not begun.
    HostIdle,
    /// The VM did not get ready.
    VmNotReady,
    /// The guest did not register its node.
    NodeNotRegistered,
    /// The node did not get Ready.
    NodeNotReady,
    /// All together took too long.
    TooSlow,
    /// The interface is not there any more.
    InterfaceGone,
    /// The host says that the VM failed or ended.
    VmEnded,
}

impl Failure {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::HostIdle,
        Self::VmNotReady,
        Self::NodeNotRegistered,
        Self::NodeNotReady,
        Self::TooSlow,
        Self::InterfaceGone,
        Self::VmEnded,
    ];

    /// As metrics name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::HostIdle => "host_idle",
            Self::VmNotReady => "vm_not_ready",
            Self::NodeNotRegistered => "node_not_registered",
            Self::NodeNotReady => "node_not_ready",
            Self::TooSlow => "too_slow",
            Self::InterfaceGone => "interface_gone",
            Self::VmEnded => "vm_ended",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn names_are_unique_and_fit_for_a_label() {
        let names: Vec<&str> = Cause::ALL
            .map(Cause::name)
            .into_iter()
            .chain(Failure::ALL.map(Failure::name))
            .collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 18);
        let plain = |name: &&str| name.chars().all(|c| c == '_' || c.is_ascii_lowercase());
        assert!(names.iter().all(plain), "{names:?}");
    }

    #[test]
    fn what_can_be_changed_for_the_pod_comes_first() {
        use Refusal::{Address, AntiAffinity, Memory, Selector, Silent, Spread, Zone};
        for (reasons, cause) in [
            (&[][..], Cause::Capacity),
            (&[Zone], Cause::Capacity),
            (&[Zone, Selector], Cause::Selector),
            (&[Selector, Memory], Cause::Capacity),
            (&[Silent, Memory, AntiAffinity], Cause::AntiAffinity),
            (&[Address, Spread], Cause::Spread),
            (&[Address, Memory], Cause::Address),
        ] {
            let is_unmet = reasons.contains(&Selector);
            let no = NoHost {
                reasons: reasons.iter().map(|r| (*r, 1)).collect::<BTreeMap<_, _>>(),
                unmet: is_unmet.then(|| "it".to_owned()).into_iter().collect(),
            };
            assert_eq!(Cause::from(&no), cause, "{reasons:?}");
        }
    }
}
