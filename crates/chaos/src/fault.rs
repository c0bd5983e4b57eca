//! What can go wrong, and when.

use clap::ValueEnum;
use std::fmt;
use std::time::Duration;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// Control is killed.
    Control,
    /// The host process of the pod's machine is killed.
    Host,
    /// The pod's VM is killed.
    Vm,
    /// etcd is killed.
    Etcd,
    /// The API server is killed.
    ApiServer,
    /// The API server answers nobody for two minutes.
    ApiServerFrozen,
    /// The pod's machine, which is not the API server's, is off the network for two minutes.
    HostCutOff,
}

impl Fault {
    pub(crate) const ALL: [Self; 7] = [
        Self::Control,
        Self::Host,
        Self::Vm,
        Self::Etcd,
        Self::ApiServer,
        Self::ApiServerFrozen,
        Self::HostCutOff,
    ];

    /// When it makes a difference.
    pub(crate) fn phases(self) -> &'static [Phase] {
        match self {
            Self::Vm => &[Phase::Booting, Phase::Running, Phase::Ending],
            Self::ApiServerFrozen | Self::HostCutOff => &[Phase::Running],
            Self::Control | Self::Host | Self::Etcd | Self::ApiServer => &[
                Phase::Created,
                Phase::Booting,
                Phase::Running,
                Phase::Ending,
            ],
        }
    }

    /// How long it lasts, if it does not end at once.
    pub(crate) fn lasts(self) -> Duration {
        match self {
            Self::ApiServerFrozen | Self::HostCutOff => Duration::from_mins(2),
            _at_once => Duration::ZERO,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Control => "control killed",
            Self::Host => "host process killed",
            Self::Vm => "the pod's VM killed",
            Self::Etcd => "etcd killed",
            Self::ApiServer => "API server killed",
            Self::ApiServerFrozen => "API server frozen for 2 minutes",
            Self::HostCutOff => "machine cut off for 2 minutes",
        })
    }
}

/// Where the pod is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Phase {
    /// A moment after its creation.
    Created,
    /// Its environment is there, and its node is not.
    Booting,
    /// It is Ready.
    Running,
    /// Its deletion was asked for, and it takes some seconds to end.
    Ending,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created => "created",
            Self::Booting => "booting",
            Self::Running => "running",
            Self::Ending => "ending",
        })
    }
}
