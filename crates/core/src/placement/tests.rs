mod demands;

use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

const VERSION: &str = "v1.37.2";

fn host(name: &str, zone: &str) -> Candidate {
    Candidate {
        name: name.to_owned(),
        spec: HostSpec {
            region: "r".to_owned(),
            zone: zone.to_owned(),
            address: None,
            memory_mib: 60_000,
            cpu_millis: 60_000,
            unschedulable: false,
        },
        status: HostStatus {
            ready: true,
            runtime_version: Some("v1.37.0".to_owned()),
            ..HostStatus::default()
        },
        answers: true,
        used: Vec::new(),
    }
}

fn pod(uid: &str, labels: &Value, spec: Value) -> Pod {
    let mut pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "n", "uid": uid, "labels": labels}, "spec": {"containers": []},
    }))
    .expect("a pod");
    let mut whole = json!({"containers": []});
    if let (Value::Object(whole), Value::Object(spec)) = (&mut whole, spec) {
        whole.extend(spec);
    }
    pod.spec = Some(serde_json::from_value(whole).expect("a spec"));
    pod
}

/// Everything that a choice is made from.
#[derive(Debug)]
struct Scene {
    hosts: Vec<Candidate>,
    /// Pods with the host that they are on.
    placed: Vec<(Pod, String)>,
    zones: Vec<(&'static str, bool)>,
    namespaces: BTreeMap<String, Labels>,
    size: Size,
    images: Vec<String>,
    avoid: Option<String>,
}

impl Scene {
    fn new(hosts: Vec<Candidate>) -> Self {
        Self {
            hosts,
            placed: Vec::new(),
            zones: vec![("z1", true), ("z2", true)],
            namespaces: BTreeMap::new(),
            size: Size::all().next().expect("there are some"),
            images: vec!["i".to_owned()],
            avoid: None,
        }
    }

    fn choose(&self, pod: &Pod) -> Result<String, NoHost> {
        let nodes: Vec<String> = (0..self.placed.len())
            .map(|n| format!("node-{n}"))
            .collect();
        let placed: Vec<Placed<'_>> = self
            .placed
            .iter()
            .zip(&nodes)
            .map(|((pod, host), node)| Placed { pod, host, node })
            .collect();
        let zones = self.zones.iter().copied().collect();
        let request = Request {
            pod,
            spec: pod.spec.as_ref().expect("a spec"),
            size: self.size,
            zones: &zones,
            holds: None,
            images: &self.images,
            avoid: self.avoid.as_deref(),
            kubernetes_version: VERSION,
            placed: &placed,
            namespaces: &self.namespaces,
        };
        choose(&self.hosts, &request).map(|chosen| chosen.name.clone())
    }

    fn place(&mut self, pod: Pod) -> String {
        let name = self.choose(&pod).expect("there is room");
        let mut hosts = self.hosts.iter_mut();
        let host = hosts.find(|host| host.name == name).expect("chosen");
        host.used.push(self.size);
        self.placed.push((pod, name.clone()));
        name
    }
}

#[test]
fn versions_are_compared_by_major_and_minor() {
    assert!(same_minor("v1.37.2", "v1.37.0"));
    assert!(same_minor("v1.37.2", "v1.37.2-monopod"));
    assert!(!same_minor("v1.37.2", "v1.36.2"));
    assert!(!same_minor("", ""));
}

fn spread(key: &str, more: &Value) -> Value {
    let mut one = json!({"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "a"}}});
    if let (Value::Object(one), Value::Object(more)) = (&mut one, more) {
        one.extend(more.clone());
    }
    json!({"topologySpreadConstraints": [one]})
}

fn near(side: &str, key: &str, more: &Value) -> Value {
    let mut term = json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": "a"}}});
    if let (Value::Object(term), Value::Object(more)) = (&mut term, more) {
        term.extend(more.clone());
    }
    json!({"affinity": {side: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}})
}

const ZONE: &str = "topology.kubernetes.io/zone";
const HOST: &str = "topology.monopod.dev/host";
const HOSTNAME: &str = "kubernetes.io/hostname";

/// A pod's spec, what is different in the scene, and the host or the reason.
type Case = (Value, fn(&mut Scene), Result<&'static str, &'static str>);

/// Two hosts in z1, one in z2; a pod `a` on h1 and one on h2, both in z1. Where another `a` goes, or why nowhere.
#[test]
fn constraints_are_judged_as_upstream_would() {
    let anti = "podAntiAffinity";
    let spread_refused = "node(s) didn't match pod topology spread constraints";
    let full_z2 = |scene: &mut Scene| scene.hosts[2].spec.cpu_millis = 0;
    let nothing = |_: &mut Scene| {};
    let cases: [Case; 17] = [
        (spread(ZONE, &json!({})), nothing, Ok("h3")),
        (spread(ZONE, &json!({})), full_z2, Err(spread_refused)),
        (spread(ZONE, &json!({"maxSkew": 3})), full_z2, Ok("h1")),
        // A cordoned host is a tainted node: its zone counts unless taints are honoured.
        (
            spread(ZONE, &json!({"nodeTaintsPolicy": "Honor"})),
            |scene| scene.hosts[2].spec.unschedulable = true,
            Ok("h1"),
        ),
        (
            spread(ZONE, &json!({})),
            |scene| scene.hosts[2].spec.unschedulable = true,
            Err(spread_refused),
        ),
        // A zone without a subnet can have no node.
        (
            spread(ZONE, &json!({})),
            |scene| scene.zones = vec![("z1", true)],
            Ok("h1"),
        ),
        (
            spread(ZONE, &json!({"minDomains": 3, "maxSkew": 2})),
            full_z2,
            Err(spread_refused),
        ),
        (spread(HOSTNAME, &json!({})), full_z2, Ok("h1")),
        (spread(HOST, &json!({})), nothing, Ok("h3")),
        (
            spread("rack", &json!({})),
            nothing,
            Err("3 node(s) didn't match pod topology spread constraints (missing required label)"),
        ),
        (
            spread(ZONE, &json!({"matchLabelKeys": ["revision"]})),
            full_z2,
            Ok("h1"),
        ),
        (near("podAffinity", ZONE, &json!({})), nothing, Ok("h1")),
        (
            near("podAffinity", HOSTNAME, &json!({})),
            nothing,
            Err("3 node(s) didn't match pod affinity rules"),
        ),
        (near(anti, ZONE, &json!({})), nothing, Ok("h3")),
        (
            near(anti, ZONE, &json!({})),
            full_z2,
            Err("1 not enough cpu, 2 node(s) didn't match pod anti-affinity rules"),
        ),
        (near(anti, HOSTNAME, &json!({})), full_z2, Ok("h1")),
        (
            near(
                anti,
                ZONE,
                &json!({"namespaceSelector": {"matchLabels": {"team": "m"}}}),
            ),
            |scene| {
                scene.hosts[2].spec.cpu_millis = 0;
                let team = [("team".to_owned(), "m".to_owned())].into();
                scene.namespaces.insert("m".to_owned(), team);
            },
            Ok("h1"),
        ),
    ];
    for (spec, change, expected) in cases {
        let mut scene = Scene::new(vec![host("h1", "z1"), host("h2", "z1"), host("h3", "z2")]);
        for name in ["h1", "h2"] {
            let other = pod(name, &json!({"app": "a", "revision": "1"}), json!({}));
            scene.placed.push((other, name.to_owned()));
        }
        change(&mut scene);
        let new = pod("new", &json!({"app": "a", "revision": "2"}), spec.clone());
        match (scene.choose(&new), expected) {
            (Ok(chosen), Ok(expected)) => assert_eq!(chosen, expected, "{spec}"),
            (Err(no), Err(expected)) => {
                assert!(no.to_string().contains(expected), "{spec}: {no}");
            }
            (chosen, expected) => panic!("{spec}: {chosen:?} instead of {expected:?}"),
        }
    }
}

#[test]
fn the_first_of_a_group_may_be_anywhere_and_others_keep_strangers_away() {
    let mut scene = Scene::new(vec![host("h1", "z1"), host("h2", "z2")]);
    let together = near("podAffinity", ZONE, &json!({}));
    let of = |uid: &str, app: &str, spec: &Value| pod(uid, &json!({"app": app}), spec.clone());
    let lonely = scene.choose(&of("lonely", "b", &together));
    let lonely = lonely.expect_err("there is no a").to_string();
    assert_eq!(
        lonely,
        "0/2 hosts are available: 2 node(s) didn't match pod affinity rules"
    );
    let first = scene.place(of("first", "a", &together));
    assert_eq!(scene.place(of("second", "a", &together)), first);
    for uid in ["one", "two"] {
        let alone = near(
            "podAntiAffinity",
            ZONE,
            &json!({"labelSelector": {"matchLabels": {"app": "c"}}}),
        );
        scene.place(of(uid, "c", &alone));
    }
    let third = scene.choose(&of("third", "c", &json!({})));
    assert_eq!(
        third.expect_err("kept away").to_string(),
        "0/2 hosts are available: 2 node(s) didn't satisfy existing pods anti-affinity rules"
    );
}

#[test]
fn preferences_come_before_even_numbers_and_these_before_images() {
    let prefer = |value: &str| {
        json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "preference": {"matchExpressions": [{"key": ZONE, "operator": "In", "values": [value]}]}},
        ]}}})
    };
    let away = json!({"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "podAffinityTerm": {"topologyKey": ZONE, "labelSelector": {"matchLabels": {"app": "b"}}}},
    ]}}});
    let wish = spread(ZONE, &json!({"whenUnsatisfiable": "ScheduleAnyway"}));
    let app = json!({"app": "a"});
    for (spec, expected) in [
        (json!({}), "h2"),
        (prefer("z1"), "h1"),
        (away, "h1"),
        (wish, "h2"),
    ] {
        let mut scene = Scene::new(vec![host("h1", "z1"), host("h2", "z2")]);
        scene.hosts[0].status.images = scene.images.clone();
        scene.placed = vec![
            (pod("1", &app, json!({})), "h1".to_owned()),
            (pod("2", &json!({"app": "b"}), json!({})), "h2".to_owned()),
        ];
        let chosen = scene.choose(&pod("new", &app, spec.clone()));
        assert_eq!(chosen.expect("there is room"), expected, "{spec}");
    }
    let mut scene = Scene::new(vec![host("h1", "z1"), host("h2", "z2")]);
    scene.hosts[1].status.images = scene.images.clone();
    scene.hosts[1].used = vec![scene.size; 3];
    assert_eq!(scene.place(pod("new", &app, json!({}))), "h2");
}

proptest! {
    /// Without constraints replicas are even over zones, and in each zone over hosts, whoever else is there.
    #[test]
    fn replicas_are_even(zones in prop::collection::vec(0usize..3, 1..6), count in 0usize..20, others in prop::collection::vec(0usize..6, 0..6), images in prop::collection::vec(any::<bool>(), 6)) {
        let mut scene = Scene::new(Vec::new());
        scene.zones = vec![("z0", true), ("z1", true), ("z2", true)];
        for (n, zone) in zones.iter().enumerate() {
            let mut one = host(&format!("h{n}"), &format!("z{zone}"));
            one.status.images = images[n].then(|| "i".to_owned()).into_iter().collect();
            scene.hosts.push(one);
        }
        for (n, at) in others.iter().enumerate() {
            let host = scene.hosts[at % zones.len()].name.clone();
            scene.placed.push((pod(&format!("o{n}"), &json!({"app": "b"}), json!({})), host));
        }
        let mut hosts: BTreeMap<String, usize> = scene.hosts.iter().map(|host| (host.name.clone(), 0)).collect();
        for n in 0..count {
            let mut replica = pod(&format!("p{n}"), &json!({"revision": n.to_string()}), json!({}));
            let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "u", "controller": true}]);
            replica.metadata.owner_references = serde_json::from_value(owner).expect("an owner");
            *hosts.get_mut(&scene.place(replica)).expect("one of them") += 1;
        }
        let is_even = |counts: Vec<usize>| counts.iter().max().unwrap_or(&0) - counts.iter().min().unwrap_or(&0) <= 1;
        let mut in_zones: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for host in &scene.hosts {
            in_zones.entry(&host.spec.zone).or_default().push(hosts[&host.name]);
        }
        prop_assert!(is_even(in_zones.values().map(|hosts| hosts.iter().sum()).collect()), "{hosts:?}");
        for counts in in_zones.into_values() {
            prop_assert!(is_even(counts), "{hosts:?}");
        }
    }
}
