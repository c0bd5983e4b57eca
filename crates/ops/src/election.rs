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

/// Whether this replica acts. Clones share it.
#[derive(Debug, Clone)]
pub struct Leadership(watch::Receiver<Option<Instant>>);

impl Leadership {
    /// Whether this replica may act now. To be asked before each act: a process may have been frozen.
    pub fn holds(&self) -> bool {
        self.0.borrow().is_some_and(|until| Instant::now() < until)
    }

    /// Waits until this replica has become the one that acts. Gives up with the election.
    pub async fn begins(&mut self) -> bool {
        self.0.wait_for(Option::is_some).await.is_ok()
    }

    /// Waits until it is not any more, or the election is over.
    pub async fn ends(&mut self) {
        // An error is the end of the election.
        drop(self.0.wait_for(Option::is_none).await);
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
        let mut known = None;
        while !shutdown.is_cancelled() {
            // From before the request: others count from when they see it, which is later.
            let asked = Instant::now();
            let outcome = tokio::time::timeout(PERIOD, attempt(&api, &candidate, &mut known)).await;
            let held = *sender.borrow();
            let new = match outcome {
                Ok(Ok(true)) => Some(asked + HOLD),
                Ok(Ok(false)) => None,
                // Nothing is known; what was held runs out by itself.
                Ok(Err(_)) | Err(_) => held.filter(|until| Instant::now() < *until),
            };
            if new.is_some() != held.is_some() {
                tracing::info!(lease = %candidate.name, identity = %candidate.identity, acts = new.is_some(), "election");
            }
            sender.send_replace(new);
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
    (Leadership(receiver), work)
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
        until: Option<Instant>,
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
            replica.until = None;
            if chosen != Move::Wait && version(&self.lease) == version(&read) {
                let mut new = held(read, &candidate(n));
                self.version += 1;
                new.metadata.resource_version = Some(self.version.to_string());
                self.lease = Some(new);
                replica.until = Some(asked + HOLD);
            }
        }

        fn acting(&self) -> usize {
            let untils = self.replicas.iter().filter_map(|r| r.until);
            untils.filter(|until| self.now < *until).count()
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
