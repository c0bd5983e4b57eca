//! Why a host cannot take a pod.

use std::collections::BTreeMap;

/// Why one host was not chosen, in the order in which it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The profile has no subnet in its zone.
    Zone,
    /// Its nodes are not what the pod requires of its node.
    Selector,
    /// It does not renew its lease.
    Silent,
    /// It says that it takes no VMs.
    NotReady,
    /// An operator keeps pods away.
    Cordoned,
    /// Its guests are built for another minor version of Kubernetes.
    Runtime,
    /// Not enough memory is free.
    Memory,
    /// Not enough CPU is free.
    Cpu,
    /// All addresses of the subnets in its zone are taken.
    Address,
    /// The pod's own constraint would be broken.
    Spread,
    /// The pod spreads over a label that its nodes do not have.
    SpreadLabel,
    /// No pod that this one wants is near.
    Affinity,
    /// A pod that this one avoids is near.
    AntiAffinity,
    /// A pod that avoids this one is near.
    ExistingAntiAffinity,
}

impl Refusal {
    /// For people, after a number of hosts: what concerns other pods in kube-scheduler's words.
    pub fn text(self) -> &'static str {
        match self {
            Self::Zone => "in no zone of the profile's subnets",
            Self::Selector => "node(s) didn't match Pod's node affinity/selector",
            Self::Silent => "does not answer",
            Self::NotReady => "not ready",
            Self::Cordoned => "cordoned",
            Self::Runtime => "guest runtime built for another Kubernetes version",
            Self::Memory => "not enough memory",
            Self::Cpu => "not enough cpu",
            Self::Address => "no free IP address in its zone",
            Self::Spread => "node(s) didn't match pod topology spread constraints",
            Self::SpreadLabel => {
                "node(s) didn't match pod topology spread constraints (missing required label)"
            }
            Self::Affinity => "node(s) didn't match pod affinity rules",
            Self::AntiAffinity => "node(s) didn't match pod anti-affinity rules",
            Self::ExistingAntiAffinity => {
                "node(s) didn't satisfy existing pods anti-affinity rules"
            }
        }
    }

    /// Whether it follows from where other pods are.
    pub fn is_about_others(self) -> bool {
        self >= Self::Spread
    }
}

/// Why no host was chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("0/{} hosts are available: {}", .reasons.values().sum::<usize>(), self.list())]
pub struct NoHost {
    /// How many hosts were refused for each reason.
    pub reasons: BTreeMap<Refusal, usize>,
    /// What nodes of one of them lack, if they were refused for it.
    pub unmet: Vec<String>,
}

impl NoHost {
    fn list(&self) -> String {
        let reasons = self.reasons.iter();
        let texts = reasons.map(|(reason, hosts)| format!("{hosts} {}", reason.text()));
        let list: Vec<String> = texts.collect();
        if list.is_empty() {
            return "there is no host".to_owned();
        }
        list.join(", ")
    }
}
