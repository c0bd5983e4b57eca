//! What a host does for an environment's VM when it begins, and what the VM's end means.

use monopod_api::environment::EnvironmentPhase;
use monopod_wire::Ended;

/// What a host finds of an environment's VM on its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Nothing: no VM ever had the environment's name here.
    Nothing,
    /// A record of a VM that does not run any more.
    Ended,
    /// A VM that runs.
    Running,
}

/// How an owner begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// Start the one VM that the environment ever has.
    Start,
    /// Take over the VM that a former host process started.
    Adopt,
    /// The VM was there once and is gone: the environment has failed.
    Lost,
    /// The environment is over.
    Nothing,
}

/// Decides how an owner begins. A VM is never started a second time: `Ended` is a VM too, and so
/// is one that the stored phase knows of.
pub fn begin(stored: EnvironmentPhase, found: Found) -> Begin {
    if stored.is_terminal() {
        return Begin::Nothing;
    }
    match found {
        Found::Running => Begin::Adopt,
        Found::Nothing if stored <= EnvironmentPhase::Booting => Begin::Start,
        Found::Nothing | Found::Ended => Begin::Lost,
    }
}

/// Whether an environment enters a phase: only later ones, and none after its end.
pub fn enters(current: EnvironmentPhase, next: EnvironmentPhase) -> bool {
    next > current && !current.is_terminal()
}

/// What the end of a VM means: none if the pod finished, else why it failed.
///
/// What its guest said before counts most. `unplugged` is whether it was ended because its tap was
/// gone, which it is, too, while a VM ends by itself.
pub fn failure(said: Option<Ended>, unplugged: bool) -> Option<String> {
    match said {
        Some(Ended::PodFinished) => None,
        Some(Ended::Failed { message }) => Some(message),
        Some(Ended::Stopped) | None if unplugged => {
            Some("somebody removed the tap of the VM's network interface".to_owned())
        }
        Some(Ended::Stopped) | None => Some("the VM died".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EnvironmentPhase::{Booting, Failed, Finished, Joining, Registered, Requested, Running};

    #[test]
    fn a_pod_that_finished_is_not_lost_whatever_became_of_its_vm() {
        for unplugged in [false, true] {
            assert_eq!(failure(Some(Ended::PodFinished), unplugged), None);
            let message = "no disk".to_owned();
            assert_eq!(
                failure(
                    Some(Ended::Failed {
                        message: message.clone()
                    }),
                    unplugged
                ),
                Some(message)
            );
            for said in [None, Some(Ended::Stopped)] {
                let failure = failure(said, unplugged).expect("lost");
                assert_eq!(failure.contains("tap"), unplugged, "{failure}");
            }
        }
    }

    #[test]
    fn a_vm_starts_at_most_once() {
        let phases = [
            Requested, Booting, Joining, Registered, Running, Finished, Failed,
        ];
        for stored in phases {
            for found in [Found::Nothing, Found::Ended, Found::Running] {
                let expected = match (stored, found) {
                    (Finished | Failed, _) => Begin::Nothing,
                    (_, Found::Running) => Begin::Adopt,
                    (Requested | Booting, Found::Nothing) => Begin::Start,
                    _was_there => Begin::Lost,
                };
                assert_eq!(begin(stored, found), expected, "{stored:?} {found:?}");
            }
            for next in phases {
                assert_eq!(
                    enters(stored, next),
                    next > stored && !matches!(stored, Finished | Failed)
                );
            }
        }
    }
}
