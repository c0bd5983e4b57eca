//! What happens in which order: drawn from a seed, made shorter when it breaks something, and kept.

use super::control::Step;
use crate::execute::Subject;
use jiff::SignedDuration;
use monopod_api::labels;
use monopod_core::lifecycle::Effect;
use monopod_core::profiles;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Fate {
    Done,
    /// It never arrives.
    Lost,
    /// It is carried out, and its sender believes that it was not.
    ReplyLost,
    /// The same, but it is carried out this many milliseconds later.
    Late(u16),
}

/// Something that happens. Numbers choose among what there is; what cannot be is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Action {
    /// Milliseconds pass.
    Time(u32),
    /// A control process does one of the things that it can do.
    Control(u8, u8, Fate),
    /// A machine does.
    Machine(u8, u8, Fate),
    /// Everybody does what there is to do, so many times.
    Everybody(u8),
    /// The node controller and the garbage collector of pods look around.
    Upstream,
    CreatePod(u8),
    DeletePod(u8),
    FinishPod(u8),
    ControlCrashes(u8),
    LeaderChanges,
    HostCrashes(u8),
    MachineLost(u8),
    MachineBack(u8),
    CutOff(u8),
    Healed(u8),
    VmDies(u8),
    VmStuck(u8),
    WatchBreaks(u8, u8),
    ApiAway(u16),
    ClockSkew(u8, i8),
    DeleteEnvironment(u8),
    DeleteInterface(u8),
    DeleteNode(u8),
    DeleteHost(u8),
    DeleteLease(u8),
    Cordon(u8),
    RoleGone,
    RoleBack,
    DeleteProfile,
    ProfileBack,
    /// Of an environment, and it with them.
    TakeFinalizersOff(u8),
}

/// Faults put into the model's own shell, to show that the invariants notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Sabotage {
    #[default]
    None,
    BindBeforeReady,
    NoHostFinalizer,
    StartWithoutLooking,
    KeepNode,
    KeepRemains,
    DrainAtOnce,
}

impl Sabotage {
    pub(super) const ALL: [Self; 6] = [
        Self::BindBeforeReady,
        Self::NoHostFinalizer,
        Self::StartWithoutLooking,
        Self::KeepNode,
        Self::KeepRemains,
        Self::DrainAtOnce,
    ];

    /// Spoils what control decided.
    pub(super) fn effects(self, subject: &Subject, effects: &mut VecDeque<Step>) {
        let is = |wanted: fn(&Effect) -> bool| {
            let found = |step: &Step| matches!(step, Step::Pod(effect) if wanted(effect));
            effects.iter().position(found)
        };
        match self {
            Self::BindBeforeReady => {
                let node = subject.environment.as_ref().map(|e| e.spec.node.clone());
                let bound = subject
                    .pod
                    .as_ref()
                    .and_then(|p| p.spec.as_ref()?.node_name.clone());
                if let (Some(node), None) = (node, bound) {
                    effects.push_back(Step::Pod(Effect::Bind { node }));
                }
            }
            Self::NoHostFinalizer => {
                for step in effects {
                    if let Step::Pod(Effect::CreateEnvironment(new)) = step {
                        let all = new.metadata.finalizers.get_or_insert_default();
                        all.retain(|f| f != labels::HOST_FINALIZER);
                    }
                }
            }
            Self::KeepNode => {
                if let Some(at) = is(|e| matches!(e, Effect::DeleteNode)) {
                    effects.remove(at);
                }
            }
            Self::KeepRemains => effects.retain(|step| !matches!(step, Step::Clear { .. })),
            Self::DrainAtOnce => {
                for step in effects {
                    if let Step::Profile(profiles::Effect::Evict(pod)) = step {
                        *step = Step::Profile(profiles::Effect::Delete(pod.clone()));
                    }
                }
            }
            Self::None | Self::StartWithoutLooking => {}
        }
    }
}

pub(super) type Schedule = Vec<Action>;

/// The schedule of a seed.
pub(super) fn draw(seed: u64) -> Schedule {
    let mut random = StdRng::seed_from_u64(seed);
    let length = random.random_range(20..160);
    let mut schedule = vec![Action::CreatePod(random.random())];
    schedule.extend((0..length).map(|_| action(&mut random)));
    schedule
}

fn action(random: &mut StdRng) -> Action {
    let (a, b) = (random.random(), random.random());
    match random.random_range(0..209) {
        0..60 => Action::Control(a, b, fate(random)),
        60..105 => Action::Machine(a, b, fate(random)),
        105..120 => Action::Everybody(random.random_range(1..40)),
        120..136 => Action::Time(random.random_range(1..3000)),
        136..141 => Action::Time(random.random_range(3000..70_000)),
        141..143 => Action::Time(random.random_range(70_000..400_000)),
        143..148 => Action::Upstream,
        148..155 => Action::CreatePod(a),
        155..160 => Action::DeletePod(a),
        160..162 => Action::FinishPod(a),
        162..166 => Action::ControlCrashes(a),
        166 => Action::LeaderChanges,
        167..170 => Action::HostCrashes(a),
        170 => Action::MachineLost(a),
        171..173 => Action::MachineBack(a),
        173..175 => Action::CutOff(a),
        175..179 => Action::Healed(a),
        179..181 => Action::VmDies(a),
        181 => Action::VmStuck(a),
        182..187 => Action::WatchBreaks(a, b),
        187..189 => Action::ApiAway(random.random_range(1..240)),
        189 => Action::ClockSkew(a, random.random()),
        190..192 => Action::DeleteEnvironment(a),
        192..194 => Action::DeleteInterface(a),
        194..196 => Action::DeleteNode(a),
        196 => Action::Cordon(a),
        197 => Action::RoleGone,
        198..200 => Action::DeleteHost(a),
        200..202 => Action::DeleteLease(a),
        202 => Action::DeleteProfile,
        203..205 => Action::ProfileBack,
        205..207 => Action::TakeFinalizersOff(a),
        _ => Action::RoleBack,
    }
}

fn fate(random: &mut StdRng) -> Fate {
    match random.random_range(0..40) {
        0 => Fate::Lost,
        1 => Fate::ReplyLost,
        2 => Fate::Late(random.random_range(1..3000)),
        _ => Fate::Done,
    }
}

/// The shortest schedule that breaks still, by leaving out ever smaller parts.
pub(super) fn shrink(mut schedule: Schedule, breaks: impl Fn(&[Action]) -> bool) -> Schedule {
    let mut size = schedule.len() / 2;
    while size > 0 {
        let mut at = 0;
        while at < schedule.len() {
            let mut shorter = schedule.clone();
            shorter.drain(at..(at + size).min(schedule.len()));
            if breaks(&shorter) {
                schedule = shorter;
            } else {
                at += size;
            }
        }
        size /= 2;
    }
    schedule
}

impl Fate {
    pub(super) fn delay(milliseconds: u16) -> SignedDuration {
        SignedDuration::from_millis(milliseconds.into())
    }
}
