//! What can go wrong, and when.

use clap::ValueEnum;
use std::fmt;
use std::time::Duration;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// The control process that acts is killed; another takes over.
    Control,
    /// The control process that acts does nothing for half a minute, and goes on where it was.
    ControlFrozen,
    /// The host process of the pod's machine is killed.
    Host,
    /// The pod's VM is killed.
    Vm,
    /// The pod's VM stops for good, without an end: it never says READY, never registers, stops renewing, or never ends
    /// its pod.
    VmFrozen,
    /// etcd is killed.
    Etcd,
    /// The API server is killed.
    ApiServer,
    /// The API server answers nobody for two minutes.
    ApiServerFrozen,
    /// The pod's machine, which is not the API server's, is off the network for two minutes.
    HostCutOff,
    /// The disk of the pod's machine has no room for a minute.
    DiskFull,
}

impl Fault {
    pub(crate) const ALL: [Self; 10] = [
        Self::Control,
        Self::ControlFrozen,
        Self::Host,
        Self::Vm,
        Self::VmFrozen,
        Self::Etcd,
        Self::ApiServer,
        Self::ApiServerFrozen,
        Self::HostCutOff,
        Self::DiskFull,
    ];

    /// When it makes a difference.
    pub(crate) fn phases(self) -> &'static [Phase] {
        match self {
            Self::Vm | Self::VmFrozen | Self::HostCutOff => &[
                Phase::Booting,
                Phase::Joining,
                Phase::Running,
                Phase::Ending,
            ],
            Self::ApiServerFrozen => &[Phase::Running],
            Self::DiskFull => &[Phase::Created, Phase::Running],
            Self::Control | Self::ControlFrozen | Self::Host | Self::Etcd | Self::ApiServer => &[
                Phase::Created,
                Phase::Booting,
                Phase::Joining,
                Phase::Running,
                Phase::Ending,
            ],
        }
    }

    /// How long it lasts, if it does not end at once.
    pub(crate) fn lasts(self) -> Duration {
        match self {
            Self::ApiServerFrozen | Self::HostCutOff => Duration::from_mins(2),
            Self::DiskFull => Duration::from_mins(1),
            Self::ControlFrozen => Duration::from_secs(30),
            _at_once => Duration::ZERO,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Control => "acting control killed",
            Self::ControlFrozen => "acting control frozen for 30 s",
            Self::Host => "host process killed",
            Self::Vm => "the pod's VM killed",
            Self::VmFrozen => "the pod's VM frozen for good",
            Self::Etcd => "etcd killed",
            Self::ApiServer => "API server killed",
            Self::ApiServerFrozen => "API server frozen for 2 minutes",
            Self::HostCutOff => "machine cut off for 2 minutes",
            Self::DiskFull => "disk of the machine full for 1 minute",
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
    /// Its VM belongs to it, and has not registered its node.
    Joining,
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
            Self::Joining => "joining",
            Self::Running => "running",
            Self::Ending => "ending",
        })
    }
}
