//! One of several replicas acts: the one that holds a `Lease`, as upstream's controllers do it.
//!
//! No two clocks are compared. A lease has run out for others when it has not changed for its whole
//! duration by their own clock; its holder stops to act well before that by its own.

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Api;
use kube::api::PostParams;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long others wait for a silent holder. With [`PERIOD`] it bounds a take-over: 12 seconds.
const DURATION: Duration = Duration::from_secs(10);
/// How long a holder acts after its last renewal: less, so that what it just sent has arrived.
const HOLD: Duration = Duration::from_secs(7);
/// Time between looks at the lease.
const PERIOD: Duration = Duration::from_secs(2);

/// Who stands for election, and where.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The lease's namespace.
    pub namespace: String,
    /// The lease's name.
    pub name: String,
    /// This replica's name. One that comes back by the same name goes on at once.
    pub identity: String,
}

/// Until when a replica acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hold {
    until: Instant,
    /// Counts the times that it began to act.
    term: u64,
}

impl Hold {
    fn lasts(self, now: Instant) -> bool {
        now < self.until
    }
}

/// The hold after a renewal. One that had run out has not gone on: what came due meanwhile was not done.
fn renewed(before: Option<Hold>, terms: &mut u64, until: Instant, now: Instant) -> Hold {
    let term = if let Some(before) = before.filter(|before| before.lasts(now)) {
        before.term
    } else {
        *terms += 1;
        *terms
    };
    Hold { until, term }
}

/// Whether this replica acts. Clones share it.
#[derive(Debug, Clone)]
pub struct Leadership {
    hold: watch::Receiver<Option<Hold>>,
    /// The last time that it began, as [`Leadership::begins`] told it.
    told: u64,
}

impl Leadership {
    /// Whether this replica may act now. To be asked before each act: a process may have been frozen.
    pub fn holds(&self) -> bool {
        self.hold
            .borrow()
            .is_some_and(|hold| hold.lasts(Instant::now()))
    }

    /// Waits until this replica begins to act, be it again. What it was to do before is not done. Gives up with
    /// the election.
    pub async fn begins(&mut self) -> bool {
        let told = self.told;
        let another = |hold: &Option<Hold>| hold.is_some_and(|hold| hold.term != told);
        let Ok(hold) = self.hold.wait_for(another).await else {
            return false;
        };
        self.told = hold.map_or(told, |hold| hold.term);
        true
    }
}

/// The lease as this replica knows it: its version, and since when it is unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    version: Option<String>,
    since: Instant,
}

/// What a replica does about the lease it found.
#[derive(Debug, PartialEq, Eq)]
enum Move {
    /// There is none: be the first.
    Create,
    /// It is this replica's, nobody's, or has run out.
    Take,
    /// Another has it.
    Wait,
}

fn decide(known: &mut Option<Known>, lease: Option<&Lease>, me: &str, now: Instant) -> Move {
    let Some(lease) = lease else {
        return Move::Create;
    };
    let version = lease.metadata.resource_version.clone();
    let since = match known {
        Some(known) if known.version == version => known.since,
        Some(_) | None => now,
    };
    *known = Some(Known { version, since });
    let holder = lease
        .spec
        .as_ref()
        .and_then(|s| s.holder_identity.as_deref());
    match holder {
        Some(holder) if holder != me && !holder.is_empty() && now < since + DURATION => Move::Wait,
        Some(_) | None => Move::Take,
    }
}

/// Stands for election; the future does so until the token is cancelled, and then lets others act.
pub fn stand(
    api: Api<Lease>,
    candidate: Candidate,
    shutdown: CancellationToken,
) -> (Leadership, impl Future<Output = ()>) {
    let (sender, receiver) = watch::channel(None);
    let work = async move {
        let (mut known, mut terms) = (None, 0);
        while !shutdown.is_cancelled() {
            // From before the request: others count from when they see it, which is later.
            let asked = Instant::now();
            let outcome = tokio::time::timeout(PERIOD, attempt(&api, &candidate, &mut known)).await;
            sender.send_modify(|hold| {
                let (before, now) = (*hold, Instant::now());
                *hold = match outcome {
                    Ok(Ok(true)) => Some(renewed(before, &mut terms, asked + HOLD, now)),
                    Ok(Ok(false)) => None,
                    // Nothing is known; what was held runs out by itself.
                    Ok(Err(_)) | Err(_) => before.filter(|before| before.lasts(now)),
                };
                if hold.map(|hold| hold.term) != before.map(|before| before.term) {
                    tracing::info!(lease = %candidate.name, identity = %candidate.identity, acts = hold.is_some(), "election");
                }
            });
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = tokio::time::sleep(PERIOD) => {}
            }
        }
        if sender.send_replace(None).is_some() {
            let released = tokio::time::timeout(PERIOD, give_up(&api, &candidate)).await;
            if !matches!(released, Ok(Ok(()))) {
                tracing::warn!(lease = %candidate.name, "not released; others wait until it runs out");
            }
        }
    };
    let leadership = Leadership {
        hold: receiver,
        told: 0,
    };
    (leadership, work)
}

/// Whether the lease is this replica's now.
async fn attempt(
    api: &Api<Lease>,
    candidate: &Candidate,
    known: &mut Option<Known>,
) -> Result<bool, kube::Error> {
    let found = api.get_opt(&candidate.name).await?;
    let outcome = match decide(known, found.as_ref(), &candidate.identity, Instant::now()) {
        Move::Wait => return Ok(false),
        Move::Create => {
            api.create(&PostParams::default(), &held(None, candidate))
                .await
        }
        Move::Take => {
            let new = held(found, candidate);
            api.replace(&candidate.name, &PostParams::default(), &new)
                .await
        }
    };
    match outcome {
        Ok(_) => Ok(true),
        // Another was faster.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(error),
    }
}

/// The lease with this replica as its holder, based on the version that was read.
fn held(found: Option<Lease>, candidate: &Candidate) -> Lease {
    let now = MicroTime(Timestamp::now());
    let mut lease = found.unwrap_or_else(|| Lease {
        metadata: ObjectMeta {
            name: Some(candidate.name.clone()),
            namespace: Some(candidate.namespace.clone()),
            ..ObjectMeta::default()
        },
        spec: None,
    });
    let spec = lease.spec.get_or_insert_default();
    if spec.holder_identity.as_ref() != Some(&candidate.identity) {
        spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |n| n.saturating_add(1)));
        spec.acquire_time = Some(now.clone());
    }
    spec.holder_identity = Some(candidate.identity.clone());
    spec.lease_duration_seconds = i32::try_from(DURATION.as_secs()).ok();
    spec.renew_time = Some(now);
    lease
}

async fn give_up(api: &Api<Lease>, candidate: &Candidate) -> Result<(), kube::Error> {
    let Some(mut lease) = api.get_opt(&candidate.name).await? else {
        return Ok(());
    };
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    if spec.holder_identity.as_ref() == Some(&candidate.identity) {
        spec.holder_identity = Some(String::new());
        api.replace(&candidate.name, &PostParams::default(), &lease)
            .await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidate(n: usize) -> Candidate {
        Candidate {
            namespace: "kube-system".to_owned(),
            name: "monopod-control".to_owned(),
            identity: format!("control-{n}"),
        }
    }

    /// What happens to one of the replicas.
    #[derive(Debug, Clone, Copy)]
    enum Happening {
        /// It reads the lease, and may be frozen then.
        Reads(usize),
        /// It writes what it made of what it had read.
        Writes(usize),
        Time(u64),
    }

    fn happening() -> impl Strategy<Value = Happening> {
        prop_oneof![
            4 => (0usize..3).prop_map(Happening::Reads),
            4 => (0usize..3).prop_map(Happening::Writes),
            3 => (1u64..4000).prop_map(Happening::Time),
        ]
    }

    #[derive(Default, Clone)]
    struct Replica {
        known: Option<Known>,
        /// When it read the lease, and what it read.
        read: Option<(Instant, Option<Lease>)>,
        hold: Option<Hold>,
        terms: u64,
        /// Whether it was asked, since it began, and might not act.
        refused: bool,
    }

    /// The store, and the replicas.
    struct Cluster {
        now: Instant,
        lease: Option<Lease>,
        version: u64,
        replicas: [Replica; 3],
    }

    impl Cluster {
        fn reads(&mut self, n: usize) {
            self.replicas[n].read = Some((self.now, self.lease.clone()));
        }

        fn writes(&mut self, n: usize) {
            let Some((asked, read)) = self.replicas[n].read.take() else {
                return;
            };
            let version =
                |lease: &Option<Lease>| lease.as_ref().map(|l| l.metadata.resource_version.clone());
            let replica = &mut self.replicas[n];
            let chosen = decide(
                &mut replica.known,
                read.as_ref(),
                &candidate(n).identity,
                self.now,
            );
            let before = replica.hold.take();
            if chosen != Move::Wait && version(&self.lease) == version(&read) {
                let mut new = held(read, &candidate(n));
                self.version += 1;
                new.metadata.resource_version = Some(self.version.to_string());
                self.lease = Some(new);
                let hold = renewed(before, &mut replica.terms, asked + HOLD, self.now);
                let again = before.is_none_or(|before| before.term != hold.term);
                assert!(again || !replica.refused, "what it did not do is forgotten");
                replica.refused = false;
                replica.hold = Some(hold);
            }
        }

        /// Something comes due everywhere.
        fn asks(&mut self) {
            for replica in &mut self.replicas {
                replica.refused |= replica.hold.is_none_or(|hold| !hold.lasts(self.now));
            }
        }

        fn acting(&self) -> usize {
            let holds = self.replicas.iter().filter_map(|r| r.hold);
            holds.filter(|hold| hold.lasts(self.now)).count()
        }
    }

    proptest! {
        #[test]
        fn two_never_act_at_once_and_one_does_in_the_end(schedule in prop::collection::vec(happening(), 0..200)) {
            let mut cluster = Cluster { now: Instant::now(), lease: None, version: 0, replicas: Default::default() };
            for event in schedule {
                match event {
                    Happening::Time(milliseconds) => cluster.now += Duration::from_millis(milliseconds),
                    Happening::Reads(n) => cluster.reads(n),
                    Happening::Writes(n) => cluster.writes(n),
                }
                prop_assert!(cluster.acting() <= 1);
                cluster.asks();
            }
            // The first replica stays away from now on: another acts within 15 seconds.
            let end = cluster.now + Duration::from_secs(15);
            while cluster.now < end {
                for n in [1, 2] {
                    cluster.reads(n);
                    cluster.writes(n);
                }
                cluster.now += PERIOD;
            }
            prop_assert_eq!(cluster.acting(), 1);
        }
    }
}
