//! What the processes of VMs are held to on this machine.

/// What control groups limit here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Of `cpu`, `memory` and `threads` those that are limited, in this order.
    pub set: Vec<&'static str>,
    /// Why some are not, for people.
    pub reason: Option<String>,
}

impl Limits {
    /// Says what is missing, if anything is, and what was in the way.
    pub(super) fn explain(&mut self, problems: &str) {
        let missing = ["cpu", "memory", "threads"];
        let missing: Vec<_> = missing
            .into_iter()
            .filter(|name| !self.set.contains(name))
            .collect();
        if missing.is_empty() {
            self.reason = None;
            return;
        }
        let missing = missing.join(", ");
        let because = match problems {
            "" => "no control group here limits them".to_owned(),
            problems => problems.to_owned(),
        };
        self.reason = Some(format!("VMs are not limited in {missing}: {because}"));
    }
}
