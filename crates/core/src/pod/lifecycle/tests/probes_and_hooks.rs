//! What probes and hooks do to containers and to the pod's conditions.

use super::*;

#[test]
fn an_unhealthy_container_is_stopped_and_restarted() {
    let mut scene = Scene::new(one("Always"));
    scene.step(0);
    scene.started("c", 0);
    scene.unhealthy("c", Unhealthy::Liveness, 1);
    assert_eq!(scene.step(1), ["stop c 30"]);
    scene.exited("c", 137, 2);
    assert_eq!(scene.step(2), ["start c 1"]);
}

#[test]
fn each_probe_has_its_own_grace_and_words() {
    let spec = json!({"containers": [{"name": "c", "image": "i",
        "livenessProbe": {"terminationGracePeriodSeconds": 7}, "startupProbe": {"terminationGracePeriodSeconds": 9}}]});
    for (why, grace, words) in [
        (
            Unhealthy::Liveness,
            7,
            "Container c failed liveness probe, will be restarted",
        ),
        (
            Unhealthy::Startup,
            9,
            "Container c failed startup probe, will be restarted",
        ),
        (Unhealthy::PostStart, 30, "FailedPostStartHook"),
    ] {
        let mut scene = Scene::new(pod("Always", spec.clone()));
        scene.step(0);
        scene.started("c", 0);
        scene.unhealthy("c", why, 1);
        let desired = Desired {
            pod: &scene.pod,
            images: &scene.images,
            prepared: true,
        };
        let effects = step(&mut scene.state, &desired, at(1)).effects;
        assert!(
            effects.iter().any(|e| matches!(e, Effect::Stop { grace_seconds, held: false, .. } if *grace_seconds == grace)),
            "{effects:?}"
        );
        assert!(
            effects.iter().any(
                |e| matches!(e, Effect::Event(e) if e.reason == "Killing" && e.message == words)
            )
        );
    }
}

#[test]
fn a_pre_stop_hook_counts_in_the_grace_but_leaves_two_seconds() {
    let stopping = || {
        let mut scene = Scene::new(one("Always"));
        scene.step(0);
        scene.started("c", 0);
        scene.delete(5);
        assert_eq!(scene.step(1), ["stop c 5"]);
        scene
    };
    // A short hook: what is left of the grace is the container's.
    let mut scene = stopping();
    scene.signalled("c", 3);
    assert_eq!(scene.step(5), [""; 0]);
    assert_eq!(scene.step(6), ["kill c"]);
    // It took all of it.
    let mut scene = stopping();
    scene.step(6);
    scene.signalled("c", 6);
    assert_eq!(scene.step(7), [""; 0]);
    assert_eq!(scene.step(8), ["kill c"]);
    // It never ends.
    let mut scene = stopping();
    assert_eq!(scene.step(7), [""; 0]);
    assert_eq!(scene.step(8), ["kill c"]);
}

#[test]
fn hooks_of_sidecars_run_at_once_and_their_signals_in_reverse_order() {
    let new = || {
        let mut scene = Scene::new(pod(
            "Always",
            json!({
            "initContainers": [{"name": "s1", "image": "i", "restartPolicy": "Always"}, {"name": "s2", "image": "i", "restartPolicy": "Always"}],
            "containers": [{"name": "c", "image": "i"}]}),
        ));
        for name in ["s1", "s2", "c"] {
            assert_eq!(scene.step(0), [format!("start {name} 0")]);
            scene.started(name, 0);
        }
        scene.delete(10);
        assert_eq!(
            scene.step(1),
            ["stop c 10", "stop s2 10 held", "stop s1 10 held"]
        );
        scene
    };
    let mut scene = new();
    scene.exited("c", 0, 2);
    assert_eq!(scene.step(2), ["release s2"]);
    scene.exited("s2", 0, 3);
    assert_eq!(scene.step(3), ["release s1"]);
    scene.exited("s1", 0, 4);
    assert_eq!(scene.step(4), ["finish Deleted"]);
    // When the grace period is over, all get theirs.
    let mut scene = new();
    scene.signalled("c", 1);
    assert_eq!(scene.step(10), [""; 0]);
    assert_eq!(scene.step(11), ["release s2", "release s1", "kill c"]);
    scene.signalled("s1", 11);
    scene.signalled("s2", 11);
    assert_eq!(scene.step(13), ["kill s1", "kill s2"]);
}

#[test]
fn a_post_start_hook_holds_back_later_containers_and_is_seen_as_creating() {
    let new = || {
        let mut scene = Scene::new(pod(
            "Always",
            json!({"containers": [
            {"name": "a", "image": "i", "lifecycle": {"postStart": {"sleep": {"seconds": 1}}}}, {"name": "b", "image": "i"}]}),
        ));
        assert_eq!(scene.step(0), ["start a 0"]);
        scene.started("a", 1);
        assert_eq!(scene.step(1), [""; 0]);
        assert_eq!(scene.waiting(0).as_deref(), Some("ContainerCreating"));
        assert_eq!(phase(&scene.pod, &scene.state), "Pending");
        assert_eq!(scene.condition("ContainersReady").0, "False");
        scene
    };
    let mut scene = new();
    let container = "a".to_owned();
    scene.observe(Observation::PostStarted { container }, 3);
    assert_eq!(scene.step(3), ["start b 0"]);
    assert_eq!(scene.waiting(0), None);
    scene.started("b", 4);
    assert_eq!(scene.condition("Ready"), ("True".to_owned(), None));
    // A hook that fails: the container is stopped, the others go on.
    let mut scene = new();
    scene.unhealthy("a", Unhealthy::PostStart, 3);
    assert_eq!(scene.step(3), ["stop a 30", "start b 0"]);
    scene.exited("a", 137, 5);
    assert_eq!(scene.step(5), ["start a 1"]);
    // The pod is deleted meanwhile.
    let mut scene = new();
    scene.delete(9);
    assert_eq!(scene.step(2), ["stop a 9"]);
}

#[test]
fn a_startup_probe_gates_readiness_and_what_comes_after_a_sidecar() {
    let mut scene = Scene::new(pod(
        "Always",
        json!({
        "initContainers": [{"name": "s", "image": "i", "restartPolicy": "Always", "startupProbe": {}}],
        "containers": [{"name": "c", "image": "i", "readinessProbe": {}}], "readinessGates": [{"conditionType": "example.com/gate"}]}),
    ));
    assert_eq!(scene.step(0), ["start s 0"]);
    scene.started("s", 0);
    assert_eq!(
        scene.step(1),
        [""; 0],
        "the startup probe has not succeeded"
    );
    assert_eq!(
        scene.condition("Initialized"),
        (
            "False".to_owned(),
            Some("ContainersNotInitialized".to_owned())
        )
    );
    let container = || "s".to_owned();
    scene.observe(
        Observation::StartupSucceeded {
            container: container(),
        },
        2,
    );
    assert_eq!(scene.step(2), ["start c 0"]);
    assert_eq!(scene.condition("Initialized").0, "True");
    scene.started("c", 3);
    assert_eq!(scene.condition("ContainersReady").0, "False");
    let container = "c".to_owned();
    scene.observe(
        Observation::Ready {
            container,
            ready: true,
        },
        4,
    );
    assert_eq!(scene.condition("ContainersReady").0, "True");
    assert_eq!(
        scene.condition("Ready"),
        (
            "False".to_owned(),
            Some("ReadinessGatesNotReady".to_owned())
        )
    );
    scene.pod.status = serde_json::from_value(
        json!({"conditions": [{"type": "example.com/gate", "status": "True"}]}),
    )
    .unwrap();
    assert_eq!(scene.condition("Ready"), ("True".to_owned(), None));
    // The sidecar's readiness counts.
    scene.exited("s", 1, 5);
    assert_eq!(scene.condition("Ready").0, "False");
    assert_eq!(
        scene.condition("Initialized").0,
        "True",
        "what was initialized stays so"
    );
}
