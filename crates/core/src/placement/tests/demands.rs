//! Hard constraints, against what the cluster would be with the pod in it.

use super::super::*;
use super::{HOST, HOSTNAME, Scene, ZONE, host, pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use proptest::prelude::*;
use serde_json::{Value, json};

fn hosts() -> impl Strategy<Value = Vec<Candidate>> {
    let sizes: Vec<Size> = Size::all().take(8).collect();
    let used = prop::collection::vec(prop::sample::select(sizes), 0..5);
    let mostly = || prop::bool::weighted(0.85);
    let one = (
        prop::sample::select(vec!["z1", "z2", "z3"]),
        (2000u32..20_000, 500u32..8_000, used),
        (mostly(), mostly(), mostly(), mostly(), any::<bool>()),
    );
    prop::collection::vec(one, 0..6).prop_map(|all| {
        let all = all.into_iter().enumerate();
        all.map(|(n, (zone, (memory_mib, cpu_millis, used), flags))| {
            let (ready, open, new, answers, cached) = flags;
            let mut one = host(&format!("h{n}"), zone);
            (one.spec.memory_mib, one.spec.cpu_millis) = (memory_mib, cpu_millis);
            one.spec.unschedulable = !open;
            one.status.ready = ready;
            one.status.runtime_version = Some(if new { "v1.37.0" } else { "v1.36.9" }.to_owned());
            one.status.images = cached.then(|| "i".to_owned()).into_iter().collect();
            (one.answers, one.used) = (answers, used);
            one
        })
        .collect()
    })
}

/// What a pod demands of others' places, each at most once.
fn demands() -> impl Strategy<Value = Value> {
    let key = || prop::sample::select(vec![ZONE, HOST, HOSTNAME, "rack"]);
    let app = || "[ab]".prop_map(|app| json!({"matchLabels": {"app": app}}));
    let term = || {
        (key(), app())
            .prop_map(|(key, selector)| json!({"topologyKey": key, "labelSelector": selector}))
    };
    let rule = (key(), app(), 1i32..3, prop::option::of(1i32..4), any::<bool>()).prop_map(
        |(key, selector, skew, domains, honours)| {
            json!({
                "maxSkew": skew, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": selector,
                "minDomains": domains, "nodeTaintsPolicy": if honours { "Honor" } else { "Ignore" },
            })
        },
    );
    let some = |term| prop::collection::vec(term, 0..2);
    let rules = prop::collection::vec(rule, 0..3);
    (rules, some(term().boxed()), some(term().boxed())).prop_map(|(rules, near, far)| {
        json!({
            "topologySpreadConstraints": rules,
            "affinity": {
                "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": near},
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": far},
            },
        })
    })
}

fn scenes() -> impl Strategy<Value = (Scene, Pod)> {
    let other = (
        "[ab]",
        demands(),
        any::<prop::sample::Index>(),
        any::<bool>(),
    );
    let others = prop::collection::vec(other, 0..6);
    let avoid = prop::option::of("h[0-2]");
    (hosts(), others, demands(), avoid, 0usize..8, any::<bool>()).prop_map(
        |(hosts, others, demands, avoid, size, has_address)| {
            let mut scene = Scene::new(hosts);
            for (n, (app, demands, at, deleted)) in others.into_iter().enumerate() {
                let mut other = pod(&format!("o{n}"), &json!({"app": app}), demands);
                other.metadata.deletion_timestamp =
                    serde_json::from_value(json!(deleted.then_some("2026-01-01T00:00:00Z")))
                        .expect("a time");
                if !scene.hosts.is_empty() {
                    let host = at.get(&scene.hosts).name.clone();
                    scene.placed.push((other, host));
                }
            }
            scene.zones = vec![("z1", true), ("z2", has_address)];
            scene.size = Size::all().nth(size).expect("there are more");
            scene.avoid = avoid;
            (scene, pod("new", &json!({"app": "a"}), demands))
        },
    )
}

/// Whether the pod may be on a host: by looking at what the cluster would be with it, not as `choose` does.
fn may_be(scene: &Scene, pod: &Pod, host: &Candidate) -> bool {
    let size = scene.size;
    let memory: u64 = host
        .used
        .iter()
        .chain([&size])
        .map(|s| u64::from(s.memory_mib) + 100)
        .sum();
    let cpu: u64 = host
        .used
        .iter()
        .chain([&size])
        .map(|s| u64::from(s.cpu_millis))
        .sum();
    let is_sound = |host: &Candidate| host.answers && host.status.ready && !host.spec.unschedulable;
    is_sound(host)
        && host.status.runtime_version.as_deref() == Some("v1.37.0")
        && scene.zones.contains(&(host.spec.zone.as_str(), true))
        && memory <= u64::from(host.spec.memory_mib)
        && cpu <= u64::from(host.spec.cpu_millis)
        && are_demands_met(scene, pod, host, &is_sound)
}

/// Name of the node, or the host's part of the label's value.
fn value(scene: &Scene, key: &str, node: &str, host: &str) -> Option<String> {
    let host = scene.hosts.iter().find(|one| one.name == host)?;
    match key {
        ZONE => Some(host.spec.zone.clone()),
        HOST => Some(host.name.clone()),
        HOSTNAME => Some(node.to_owned()),
        _rack => None,
    }
}

fn is_app(selector: Option<&LabelSelector>, pod: &Pod) -> bool {
    let wanted = selector.and_then(|s| s.match_labels.as_ref()?.get("app"));
    wanted.is_some() && wanted == pod.metadata.labels.as_ref().and_then(|l| l.get("app"))
}

fn are_demands_met(
    scene: &Scene,
    new: &Pod,
    host: &Candidate,
    is_sound: &dyn Fn(&Candidate) -> bool,
) -> bool {
    let nodes: Vec<(String, &Pod, &str)> = scene
        .placed
        .iter()
        .enumerate()
        .map(|(n, (pod, host))| (format!("node-{n}"), pod, host.as_str()))
        .collect();
    let here = |key: &str| value(scene, key, "new", &host.name);
    let terms = |pod: &Pod, far: bool| {
        let affinity = pod.spec.clone().and_then(|s| s.affinity).expect("some");
        let near = affinity
            .pod_affinity
            .and_then(|a| a.required_during_scheduling_ignored_during_execution);
        let anti = affinity
            .pod_anti_affinity
            .and_then(|a| a.required_during_scheduling_ignored_during_execution);
        if far {
            anti.expect("some")
        } else {
            near.expect("some")
        }
    };
    let is_beside = |key: &str, node: &str, on: &str| {
        here(key).is_some() && here(key) == value(scene, key, node, on)
    };
    let apart = nodes.iter().all(|(node, other, on)| {
        let hits = |owner, target| {
            terms(owner, true).iter().any(|term| {
                is_app(term.label_selector.as_ref(), target)
                    && is_beside(&term.topology_key, node, on)
            })
        };
        !hits(new, other) && !hits(other, new)
    });
    let wanted = terms(new, false);
    let all_wanted = |pod: &Pod| {
        wanted
            .iter()
            .all(|term| is_app(term.label_selector.as_ref(), pod))
    };
    let together = wanted.iter().all(|term| {
        let key = &term.topology_key;
        let mut friends = nodes
            .iter()
            .filter(|(_, other, _)| all_wanted(other))
            .peekable();
        let alone = friends.peek().is_none() && all_wanted(new);
        here(key).is_some() && (alone || friends.any(|(node, _, on)| is_beside(key, node, on)))
    });
    let rules = new
        .spec
        .clone()
        .and_then(|s| s.topology_spread_constraints)
        .expect("some");
    apart
        && together
        && rules.iter().all(|rule| {
            let key = &rule.topology_key;
            let counts = |on: &str| {
                scene.hosts.iter().any(|host| {
                    host.name == on
                        && host.spec.zone != "z3"
                        && (is_sound(host) || rule.node_taints_policy.as_deref() != Some("Honor"))
                })
            };
            let mut domains: Vec<String> = scene
                .hosts
                .iter()
                .filter(|h| counts(&h.name))
                .filter_map(|h| value(scene, key, "new", &h.name))
                .collect();
            let pods: Vec<String> = nodes
                .iter()
                .filter(|(_, pod, on)| {
                    counts(on)
                        && pod.metadata.deletion_timestamp.is_none()
                        && is_app(rule.label_selector.as_ref(), pod)
                })
                .filter_map(|(node, _, on)| value(scene, key, node, on))
                .collect();
            domains.extend(pods.iter().cloned());
            domains.sort();
            domains.dedup();
            let number = |domain: &String| pods.iter().filter(|one| *one == domain).count();
            let few =
                domains.len() < usize::try_from(rule.min_domains.unwrap_or(1)).expect("small");
            let fewest = if few {
                0
            } else {
                domains.iter().map(number).min().unwrap_or(0)
            };
            let itself = usize::from(is_app(rule.label_selector.as_ref(), new));
            here(key).is_some_and(|here| {
                number(&here) + itself <= fewest + usize::try_from(rule.max_skew).expect("small")
            })
        })
}

proptest! {
    /// A chosen host can take the VM without being overcommitted and breaks no constraint; a refusal is true of all.
    #[test]
    fn a_choice_fits_and_a_refusal_is_true((scene, pod) in scenes()) {
        let fits = |host: &Candidate| may_be(&scene, &pod, host);
        match scene.choose(&pod) {
            Ok(name) => {
                let chosen = scene.hosts.iter().find(|host| host.name == name).expect("one of them");
                prop_assert!(fits(chosen));
                let failed = |host: &Candidate| scene.avoid.as_ref() == Some(&host.name);
                prop_assert!(!failed(chosen) || scene.hosts.iter().all(|host| !fits(host) || failed(host)));
            }
            Err(no) => {
                prop_assert!(!scene.hosts.iter().any(fits), "{no}");
                prop_assert_eq!(no.reasons.values().sum::<usize>(), scene.hosts.len());
            }
        }
    }
}
