//! What starts and ends when, and what becomes of the pod.

use super::*;

#[test]
fn a_job_completes() {
    let mut scene = Scene::new(one("Never"));
    assert_eq!(phase(&scene.pod, &scene.state), "Pending");
    assert_eq!(scene.step(0), ["start c 0"]);
    scene.started("c", 1);
    assert_eq!(phase(&scene.pod, &scene.state), "Running");
    scene.exited("c", 0, 2);
    assert_eq!(scene.step(2), ["finish Completed"]);
    assert_eq!(phase(&scene.pod, &scene.state), "Succeeded");
    assert_eq!(scene.step(3), [""; 0]);
}

#[test]
fn a_crash_loop_backs_off() {
    let mut scene = Scene::new(one("Always"));
    scene.step(0);
    scene.started("c", 0);
    assert_eq!(scene.exited("c", 1, 1), []);
    assert_eq!(scene.step(1), ["start c 1"]);
    scene.started("c", 1);
    let events = scene.exited("c", 1, 2);
    assert_eq!(
        events[0].message,
        "Back-off restarting failed container c in pod p_ns(u)"
    );
    assert_eq!(scene.step(2), [""; 0]);
    assert_eq!(scene.waiting(0).as_deref(), Some("CrashLoopBackOff"));
    assert_eq!(phase(&scene.pod, &scene.state), "Running");
    assert_eq!(scene.step(11), [""; 0]);
    assert_eq!(scene.step(12), ["start c 2"]);
    let status = &scene.status().container_statuses.unwrap()[0];
    assert_eq!(status.restart_count, 2);
    assert_eq!(
        status
            .last_state
            .as_ref()
            .unwrap()
            .terminated
            .as_ref()
            .unwrap()
            .exit_code,
        1
    );
}

#[test]
fn init_containers_and_sidecars_come_first_and_sidecars_end_last() {
    let mut scene = Scene::new(pod(
        "Never",
        json!({
        "initContainers": [{"name": "i1", "image": "i"}, {"name": "s", "image": "i", "restartPolicy": "Always"}, {"name": "i2", "image": "i"}],
        "containers": [{"name": "c", "image": "i"}, {"name": "d", "image": "i"}]}),
    ));
    assert_eq!(scene.step(0), ["start i1 0"]);
    scene.started("i1", 0);
    assert_eq!(scene.waiting(0).as_deref(), Some("PodInitializing"));
    scene.exited("i1", 0, 1);
    assert_eq!(scene.step(1), ["start s 0"]);
    scene.started("s", 1);
    assert_eq!(scene.step(1), ["start i2 0"]);
    scene.started("i2", 1);
    scene.exited("s", 3, 2);
    assert_eq!(
        scene.step(2),
        ["start s 1"],
        "a sidecar is restarted although the policy is Never"
    );
    scene.started("s", 2);
    scene.exited("i2", 0, 3);
    assert_eq!(scene.step(3), ["start c 0", "start d 0"]);
    scene.started("c", 3);
    scene.started("d", 3);
    scene.exited("c", 0, 4);
    assert_eq!(scene.step(4), [""; 0]);
    scene.exited("d", 0, 5);
    assert_eq!(scene.step(5), ["stop s 30"]);
    assert_eq!(phase(&scene.pod, &scene.state), "Running");
    scene.exited("s", 143, 6);
    assert_eq!(scene.step(6), ["finish Completed"]);
    assert_eq!(phase(&scene.pod, &scene.state), "Succeeded");
}

#[test]
fn a_failed_init_container_fails_the_pod_if_it_is_never_restarted() {
    let spec = json!({"initContainers": [{"name": "i1", "image": "i"}], "containers": [{"name": "c", "image": "i"}]});
    let mut scene = Scene::new(pod("Never", spec.clone()));
    scene.step(0);
    scene.started("i1", 0);
    scene.exited("i1", 1, 1);
    assert_eq!(scene.step(1), ["finish Completed"]);
    assert_eq!(phase(&scene.pod, &scene.state), "Failed");

    let mut scene = Scene::new(pod("Always", spec));
    scene.step(0);
    scene.started("i1", 0);
    scene.exited("i1", 1, 1);
    assert_eq!(scene.step(1), ["start i1 1"]);
}

#[test]
fn deletion_stops_then_kills_then_finishes() {
    let mut scene = Scene::new(one("Always"));
    scene.step(0);
    scene.delete(5);
    assert_eq!(
        scene.step(1),
        [""; 0],
        "a container that is being created is stopped once it runs"
    );
    scene.started("c", 2);
    assert_eq!(scene.step(2), ["stop c 4"]);
    scene.signalled("c", 2);
    assert_eq!(scene.step(5), [""; 0]);
    assert_eq!(scene.step(6), ["kill c"]);
    scene.exited("c", 137, 7);
    assert_eq!(scene.step(7), ["finish Deleted"]);
    assert_eq!(phase(&scene.pod, &scene.state), "Failed");
}

#[test]
fn a_second_deletion_shortens_the_grace() {
    let mut scene = Scene::new(one("Always"));
    scene.step(0);
    scene.started("c", 0);
    scene.delete(30);
    assert_eq!(scene.step(1), ["stop c 30"]);
    scene.signalled("c", 1);
    scene.delete(1);
    scene.step(2);
    assert_eq!(scene.step(3), ["kill c"]);
}

#[test]
fn a_pod_deleted_before_it_started_finishes_at_once() {
    let mut scene = Scene::new(one("Always"));
    scene.delete(30);
    assert_eq!(scene.step(0), ["finish Deleted"]);
}

#[test]
fn a_missing_image_is_told_and_recovers() {
    let mut scene = Scene::new(one("Always"));
    scene.images.insert(
        "i".to_owned(),
        Image::Failed {
            reason: "ErrImagePull".to_owned(),
            message: "no such image".to_owned(),
        },
    );
    scene.step(0);
    assert_eq!(scene.waiting(0).as_deref(), Some("ErrImagePull"));
    scene.step(10);
    assert_eq!(scene.waiting(0).as_deref(), Some("ImagePullBackOff"));
    scene
        .images
        .insert("i".to_owned(), Image::Pulling { done: 0, total: 0 });
    scene.step(11);
    assert_eq!(scene.waiting(0).as_deref(), Some("ImagePullBackOff"));
    scene.images = images();
    assert_eq!(scene.step(12), ["start c 0"]);
}

#[test]
fn a_container_that_cannot_be_made_is_tried_again_without_a_restart() {
    let mut scene = Scene::new(one("Always"));
    scene.step(0);
    let observation = Observation::CannotStart {
        container: "c".to_owned(),
        reason: reason::CONFIG_ERROR,
        message: "secret \"s\" not found".to_owned(),
    };
    observe(&mut scene.state, &scene.pod, observation, at(0));
    assert_eq!(
        scene.waiting(0).as_deref(),
        Some("CreateContainerConfigError")
    );
    assert_eq!(scene.step(9), [""; 0]);
    assert_eq!(scene.step(10), ["start c 0"]);
}

#[test]
fn the_active_deadline_fails_the_pod() {
    let mut pod = one("Always");
    pod.spec.as_mut().unwrap().active_deadline_seconds = Some(60);
    let mut scene = Scene::new(pod);
    scene.step(0);
    scene.started("c", 0);
    assert_eq!(scene.step(60), ["stop c 30"]);
    scene.exited("c", 0, 61);
    assert_eq!(scene.step(61), ["finish DeadlineExceeded"]);
    assert_eq!(scene.status().phase.as_deref(), Some("Failed"));
    assert_eq!(scene.status().reason.as_deref(), Some("DeadlineExceeded"));
}
