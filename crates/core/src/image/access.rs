//! Whether a stored image may be used by a pod, or a registry must be asked first.
//!
//! The model is the kubelet's `KubeletEnsureSecretPulledImages`: an image that was pulled with
//! credentials is used only by pods whose credentials were shown to reach it under that name.
//! What an operator loaded, and what the registry gives to anybody, is for every pod.

use super::reference::Reference;
use monopod_api::environment::PullPolicy;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Credentials that are remembered per image and name. The oldest proof costs one question to the
/// registry when it is forgotten.
const REMEMBERED: usize = 64;
/// Names that are remembered per image.
const NAMES: usize = 64;

/// Who is known to reach an image under one name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Proof {
    /// The registry gives it to anybody.
    #[serde(default)]
    pub anonymous: bool,
    /// Fingerprints of credentials that reached it.
    #[serde(default)]
    pub fingerprints: BTreeSet<String>,
}

/// What is known of a stored image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Access {
    /// An operator loaded it.
    #[serde(default)]
    pub loaded: bool,
    /// By the name it was pulled under, without tag and digest.
    #[serde(default)]
    pub proofs: BTreeMap<String, Proof>,
}

impl Access {
    /// Remembers that the image was reached under a name, by credentials or without any.
    pub fn prove(&mut self, name: &str, fingerprint: Option<&str>) {
        if !self.proofs.contains_key(name) && self.proofs.len() >= NAMES {
            self.proofs.pop_first();
        }
        let proof = self.proofs.entry(name.to_owned()).or_default();
        match fingerprint {
            None => proof.anonymous = true,
            Some(fingerprint) => {
                if proof.fingerprints.len() >= REMEMBERED {
                    proof.fingerprints.pop_first();
                }
                proof.fingerprints.insert(fingerprint.to_owned());
            }
        }
    }

    /// Whether a pod with these credentials is known to reach it under this name.
    pub fn is_proven(&self, name: &str, offered: &[String]) -> bool {
        self.loaded
            || self.proofs.get(name).is_some_and(|proof| {
                proof.anonymous || offered.iter().any(|f| proof.fingerprints.contains(f))
            })
    }

    /// Whether a registry's word for a name is enough to use the stored content under it.
    ///
    /// A registry that knows only the manifest must not be given the layers: content that was
    /// never had under this name, and is not everybody's, is downloaded as if it were not here.
    pub fn covers(&self, name: &str) -> bool {
        self.loaded || self.proofs.contains_key(name) || self.proofs.values().any(|p| p.anonymous)
    }
}

/// What to do about an image that a pod needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Use what is stored.
    Use,
    /// Ask a registry what the reference means and whether these credentials reach it, and
    /// download it if it is not stored.
    Ask,
    /// Neither.
    Refuse(Refusal),
}

/// Why an image is neither used nor pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// `imagePullPolicy: Never`, and it is not stored.
    NeverPulled,
    /// `imagePullPolicy: Never`, and nothing shows that this pod may use what is stored.
    NotProven,
    /// Its name says that no registry has it.
    Local,
}

impl Refusal {
    /// The reason that the waiting container shows, and what it says.
    pub fn explain(self, reference: &str) -> (&'static str, String) {
        match self {
            Self::NeverPulled => (
                "ErrImageNeverPull",
                format!("Container image \"{reference}\" is not present with pull policy of Never"),
            ),
            Self::NotProven => (
                "ErrImageNeverPull",
                format!(
                    "Container image \"{reference}\" is present with pull policy of Never but does not have the proper credentials to access the image"
                ),
            ),
            Self::Local => (
                "ErrImagePull",
                format!(
                    "{reference} is not on this host, and images of monopod.local are in no registry: load it with `monopod image load`"
                ),
            ),
        }
    }
}

/// Decides for one reference. `stored` is what the host has under it, `offered` the fingerprints
/// of the pod's credentials for it.
pub fn plan(
    policy: PullPolicy,
    reference: &Reference,
    stored: Option<&Access>,
    offered: &[String],
) -> Plan {
    if reference.is_local() {
        return match stored {
            Some(_) => Plan::Use,
            None => Plan::Refuse(Refusal::Local),
        };
    }
    let proven = stored.is_some_and(|access| access.is_proven(&reference.name, offered));
    match (policy, stored) {
        (PullPolicy::IfNotPresent | PullPolicy::Never, Some(_)) if proven => Plan::Use,
        (PullPolicy::Always | PullPolicy::IfNotPresent, _) => Plan::Ask,
        (PullPolicy::Never, Some(_)) => Plan::Refuse(Refusal::NotProven),
        (PullPolicy::Never, None) => Plan::Refuse(Refusal::NeverPulled),
    }
}

#[cfg(test)]
mod tests {
    use super::super::reference::normalise;
    use super::*;
    use proptest::prelude::*;

    fn policies() -> impl Strategy<Value = PullPolicy> {
        prop_oneof![
            Just(PullPolicy::Always),
            Just(PullPolicy::IfNotPresent),
            Just(PullPolicy::Never)
        ]
    }

    fn stored(history: &[(u8, Option<u8>)]) -> Access {
        let mut access = Access::default();
        for (name, fingerprint) in history {
            let fingerprint = fingerprint.map(|f| format!("f{f}"));
            access.prove(&format!("r.io/{name}"), fingerprint.as_deref());
        }
        access
    }

    #[test]
    fn what_is_loaded_is_for_everybody_and_local_names_are_never_pulled() {
        let local = normalise("monopod.local/nginx").unwrap();
        let loaded = Access {
            loaded: true,
            ..Access::default()
        };
        for policy in [
            PullPolicy::Always,
            PullPolicy::IfNotPresent,
            PullPolicy::Never,
        ] {
            assert_eq!(plan(policy, &local, Some(&loaded), &[]), Plan::Use);
            assert_eq!(
                plan(policy, &local, None, &[]),
                Plan::Refuse(Refusal::Local)
            );
        }
        let other = normalise("nginx").unwrap();
        assert_eq!(
            plan(PullPolicy::Never, &other, Some(&loaded), &[]),
            Plan::Use
        );
        assert_eq!(
            plan(PullPolicy::Always, &other, Some(&loaded), &[]),
            Plan::Ask
        );
    }

    proptest! {
        /// Nothing private is used without a proof of exactly this name, whatever the policy.
        #[test]
        fn a_private_image_is_used_only_with_proof(
            policy in policies(),
            history in prop::collection::vec((0u8..3, prop::option::weighted(0.8, 0u8..4)), 0..6),
            offered in prop::collection::vec(0u8..4, 0..3),
        ) {
            let access = stored(&history);
            let fingerprints: Vec<String> = offered.iter().map(|f| format!("f{f}")).collect();
            let reference = normalise("r.io/0:1").unwrap();
            let open = history.iter().any(|(name, f)| *name == 0 && f.is_none());
            let shown = history.iter().any(|(name, f)| *name == 0 && f.is_some_and(|f| offered.contains(&f)));
            match plan(policy, &reference, Some(&access), &fingerprints) {
                Plan::Use => prop_assert!((open || shown) && policy != PullPolicy::Always),
                Plan::Ask => prop_assert!(policy == PullPolicy::Always || !(open || shown)),
                Plan::Refuse(why) => prop_assert!(policy == PullPolicy::Never && !(open || shown) && why == Refusal::NotProven),
            }
        }

        /// The content is given to another name only if everybody may have it.
        #[test]
        fn content_is_shared_between_names_only_if_it_is_public(
            history in prop::collection::vec((0u8..3, prop::option::weighted(0.9, 0u8..4)), 0..6),
        ) {
            let access = stored(&history);
            let public = history.iter().any(|(_, f)| f.is_none());
            prop_assert_eq!(access.covers("r.io/9"), public);
            prop_assert_eq!(access.covers("r.io/0"), public || history.iter().any(|(name, _)| *name == 0));
        }

        #[test]
        fn what_is_remembered_is_bounded(names in prop::collection::vec((0u16..200, 0u16..200), 0..400)) {
            let mut access = Access::default();
            for (name, fingerprint) in names {
                access.prove(&format!("n{name}"), Some(&format!("f{fingerprint}")));
                let (name, fingerprint) = (format!("n{name}"), format!("f{fingerprint}"));
                prop_assert!(access.is_proven(&name, &[fingerprint]), "the newest is known");
            }
            prop_assert!(access.proofs.len() <= NAMES);
            prop_assert!(access.proofs.values().all(|p| p.fingerprints.len() <= REMEMBERED));
        }
    }
}
