//! Properties under random histories.

use super::*;

#[derive(Clone, Debug)]
enum Happening {
    Started(usize),
    Exited(usize, i32),
    Cannot(usize),
    Unhealthy(usize),
    PostStarted(usize),
    Signalled(usize),
    Image(bool),
    Delete(i64),
    Later(i64),
}

fn happening() -> impl Strategy<Value = Happening> {
    let index = 0usize..4;
    prop_oneof![
        4 => index.clone().prop_map(Happening::Started),
        4 => (index.clone(), 0..2i32).prop_map(|(i, code)| Happening::Exited(i, code)),
        1 => index.clone().prop_map(Happening::Cannot),
        1 => index.clone().prop_map(Happening::Unhealthy),
        2 => index.clone().prop_map(Happening::PostStarted),
        2 => index.prop_map(Happening::Signalled),
        1 => any::<bool>().prop_map(Happening::Image),
        1 => (0..40i64).prop_map(Happening::Delete),
        4 => (0..700i64).prop_map(Happening::Later),
    ]
}

proptest! {
    /// Under any history: nothing runs twice, nothing starts after the end began, regular
    /// containers wait for init containers, and the end comes once, with nothing left running.
    #[test]
    fn any_history_keeps_the_invariants(
        policy in prop::sample::select(vec!["Always", "OnFailure", "Never"]),
        history in prop::collection::vec(happening(), 0..60),
    ) {
        let names = ["i1", "s", "c", "d"];
        let mut scene = Scene::new(pod(policy, json!({
            "initContainers": [{"name": "i1", "image": "i"}, {"name": "s", "image": "i", "restartPolicy": "Always"}],
            "containers": [{"name": "c", "image": "i", "lifecycle": {"postStart": {}}}, {"name": "d", "image": "i"}]})));
        let mut signals: BTreeMap<usize, i64> = BTreeMap::new();
        let mut alive = std::collections::BTreeSet::new();
        let mut init_done = false;
        let (mut now, mut finished, mut ending) = (0, false, false);
        for happening in history {
            match happening {
                Happening::Started(i) => scene.started(names[i], now),
                Happening::PostStarted(i) => {
                    scene.observe(Observation::PostStarted { container: names[i].to_owned() }, now);
                }
                Happening::Signalled(i) => {
                    let stopping = scene.state.container(names[i]).is_some_and(|c| matches!(c.state, State::Running { stopping: Some(_), .. }));
                    if stopping {
                        signals.entry(i).or_insert(now);
                    }
                    scene.signalled(names[i], now);
                }
                Happening::Exited(i, code) => {
                    if alive.remove(names[i]) {
                        signals.remove(&i);
                        init_done |= i == 0 && code == 0;
                        scene.exited(names[i], code, now);
                    }
                }
                Happening::Cannot(i) => {
                    if scene.state.container(names[i]).is_some_and(|c| c.state == State::Creating) {
                        alive.remove(names[i]);
                    }
                    let observation = Observation::CannotStart { container: names[i].to_owned(), reason: reason::CREATE_ERROR, message: "m".to_owned() };
                    observe(&mut scene.state, &scene.pod, observation, at(now));
                }
                Happening::Unhealthy(i) => {
                    scene.unhealthy(names[i], Unhealthy::PostStart, now);
                }
                Happening::Image(there) => {
                    let image = if there { images()["i"].clone() } else { Image::Pulling { done: 1, total: 2 } };
                    scene.images.insert("i".to_owned(), image);
                }
                Happening::Delete(grace) => {
                    ending = true;
                    scene.delete(grace);
                }
                Happening::Later(seconds) => now += seconds,
            }
            let desired = Desired { pod: &scene.pod, images: &scene.images, prepared: true };
            let decision = step(&mut scene.state, &desired, at(now));
            prop_assert!(decision.wake.is_none_or(|wake| wake > at(now)));
            let ending_now = scene.state.termination.is_some();
            for effect in decision.effects {
                match effect {
                    Effect::Start { container, .. } => {
                        prop_assert!(!ending && !finished);
                        prop_assert!(init_done || container == "i1");
                        prop_assert!(alive.insert(names.into_iter().find(|n| *n == container).unwrap()));
                    }
                    Effect::Kill { container } => {
                        prop_assert!(alive.contains(container.as_str()));
                        let i = names.iter().position(|n| *n == container).unwrap();
                        prop_assert!(signals.get(&i).is_none_or(|since| now >= since + 2), "two seconds at least");
                    }
                    Effect::Stop { container, held, .. } => {
                        prop_assert!(alive.contains(container.as_str()));
                        prop_assert!(!held || container == "s" && ending_now);
                    }
                    Effect::Release { container } => {
                        prop_assert!(container == "s" && alive.contains("s"));
                        let over = scene.state.termination.as_ref().is_some_and(|t| t.deadline <= at(now));
                        prop_assert!(over || !(alive.contains("c") || alive.contains("d")));
                    }
                    Effect::Finish { .. } => {
                        prop_assert!(!finished && alive.is_empty());
                        finished = true;
                    }
                    Effect::Event(_) => {}
                }
            }
            ending |= scene.state.termination.is_some();
            let phase = phase(&scene.pod, &scene.state);
            prop_assert_eq!(matches!(phase, "Succeeded" | "Failed"), finished);
        }
    }
}
