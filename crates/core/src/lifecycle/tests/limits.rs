//! Each phase of an attempt has its time, after which the attempt is given up for its own reason.

use super::*;

/// The attempt is as it should be a moment before the limit, and is undone at it.
#[track_caller]
fn ends_at(cluster: &mut Cluster, seconds: i64, failure: Failure, words: &str) {
    let created = cluster
        .environment
        .as_ref()
        .and_then(|e| e.metadata.creation_timestamp.clone());
    let limit = created.expect("created").0 + SignedDuration::from_secs(seconds);
    assert_eq!(cluster.decide().wake, Some(limit), "{failure:?}");
    cluster.now = limit - SignedDuration::from_millis(1);
    let before = cluster.decide().effects;
    assert!(
        !before.contains(&Effect::DeleteEnvironment),
        "{failure:?}: {before:?}"
    );

    cluster.now = limit;
    let failures = cluster
        .attempts
        .as_ref()
        .map_or(0, |attempts| attempts.failures);
    cluster.step();
    let attempts = cluster.attempts.clone().expect("remembered");
    assert_eq!(
        (attempts.failures, attempts.failure),
        (failures + 1, failure)
    );
    assert_eq!(attempts.host, "host-1");
    let told = cluster.events.last().expect("an event");
    let next = format!("try {} is made at {:.0}", failures + 2, attempts.next);
    for part in [
        "Pod provisioning timed out (will retry) for pod: default/web",
        words,
        &next,
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let environment = cluster
        .environment
        .as_ref()
        .expect("until its host lets go");
    assert!(environment.metadata.deletion_timestamp.is_some());
    let nominated = cluster
        .pod
        .as_ref()
        .and_then(|p| p.status.as_ref()?.nominated_node_name.clone());
    assert_eq!(nominated, None);
}

fn requested() -> Cluster {
    let mut cluster = Cluster::new();
    cluster.step();
    // Nominated and annotated.
    cluster.step();
    cluster
}

#[test]
fn each_phase_has_its_time_and_its_failure() {
    ends_at(
        &mut requested(),
        60,
        Failure::HostIdle,
        "the host has not begun",
    );
    let cases = [
        (
            EnvironmentPhase::Booting,
            150,
            Failure::VmNotReady,
            "the VM is not ready",
        ),
        (
            EnvironmentPhase::Joining,
            150,
            Failure::NodeNotRegistered,
            "the node is not registered",
        ),
        (
            EnvironmentPhase::Registered,
            60,
            Failure::NodeNotReady,
            "the node is not Ready",
        ),
    ];
    for (phase, seconds, failure, words) in cases {
        let mut cluster = requested();
        cluster.now += SignedDuration::from_secs(20);
        cluster.host(phase);
        cluster.node = None;
        ends_at(&mut cluster, 20 + seconds, failure, words);
    }
}

#[test]
fn all_phases_together_have_a_time_and_so_has_a_missing_interface() {
    let mut cluster = requested();
    cluster.now += SignedDuration::from_secs(100);
    cluster.host(EnvironmentPhase::Joining);
    ends_at(
        &mut cluster,
        180,
        Failure::TooSlow,
        "the node was not ready after 3m",
    );

    let mut cluster = requested();
    cluster.interface = None;
    ends_at(
        &mut cluster,
        20,
        Failure::InterfaceGone,
        "is not there any more",
    );
}

/// A host whose clock is behind does not shorten a phase.
#[test]
fn a_phase_begins_no_sooner_than_its_environment() {
    let mut cluster = requested();
    cluster.now -= SignedDuration::from_hours(1);
    cluster.host(EnvironmentPhase::Booting);
    ends_at(
        &mut cluster,
        150,
        Failure::VmNotReady,
        "the VM is not ready",
    );
}
