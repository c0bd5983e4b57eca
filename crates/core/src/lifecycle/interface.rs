//! The life of a network interface beside its environment.

use jiff::{SignedDuration, Timestamp};
use monopod_api::network::{InterfacePhase, NetworkInterface};

/// How long an address rests after its release, so that late packets and caches meet nobody.
pub const COOLING: SignedDuration = SignedDuration::from_secs(5);
/// How long an interface may be without its environment: control creates one right after the other.
const ORPHAN_LIMIT: SignedDuration = SignedDuration::from_secs(60);

/// What to do with an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InterfaceEffect {
    /// Leave it until this time, if there is one.
    Keep(Option<Timestamp>),
    /// Its environment is gone: start to cool.
    Cool,
    /// Its address may be used again.
    Delete,
}

/// Decides for one interface. `used`: there is an environment with this very interface.
///
/// An interface outlives its environment, whoever asks for its deletion: control's finalizer on it is
/// given up with [`InterfaceEffect::Delete`] alone.
pub fn decide_interface(
    interface: &NetworkInterface,
    used: bool,
    now: Timestamp,
) -> InterfaceEffect {
    let status = interface.status.clone().unwrap_or_default();
    if used {
        return InterfaceEffect::Keep(None);
    }
    match status.phase {
        InterfacePhase::Cooling => {
            let until = status.cooling_until.map_or(now, |t| t.0);
            if until <= now {
                InterfaceEffect::Delete
            } else {
                InterfaceEffect::Keep(Some(until))
            }
        }
        InterfacePhase::InUse => {
            let limit = interface
                .metadata
                .creation_timestamp
                .as_ref()
                .map_or(now, |t| t.0 + ORPHAN_LIMIT);
            if limit <= now {
                InterfaceEffect::Cool
            } else {
                InterfaceEffect::Keep(Some(limit))
            }
        }
    }
}
