use super::*;
use crate::testing;
use serde_json::{Value, json};

fn set(pod: &Value) -> DaemonSet {
    serde_json::from_value(json!({
        "metadata": {"name": "agent", "namespace": "ops"},
        "spec": {"selector": {}, "template": {"spec": pod}},
    }))
    .expect("a DaemonSet")
}

fn machine_of(name: &str) -> Host {
    let spec = json!({"region": "r", "zone": "z", "memoryMib": 1024, "cpuMillis": 1000});
    Host::new(name, serde_json::from_value(spec).expect("a host"))
}

#[test]
fn daemon_sets_that_want_a_pod_on_each_node_are_found() {
    let everywhere = json!([{"operator": "Exists"}]);
    let ours = json!([{"key": COMPUTE_TYPE, "value": "fargate", "effect": "NoSchedule"}]);
    let affinity = |operator: &str, values: &[&str]| {
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": COMPUTE_TYPE, "operator": operator, "values": values}]},
        ]}}})
    };
    let wrong = [
        json!({"containers": [], "tolerations": everywhere}),
        json!({"containers": [], "tolerations": ours}),
        json!({"containers": [], "tolerations": [{"key": COMPUTE_TYPE, "operator": "Exists"}]}),
        json!({"containers": [], "tolerations": everywhere, "affinity": affinity("NotIn", &["ec2"])}),
        json!({"containers": [], "tolerations": everywhere, "affinity": affinity("In", &["fargate"])}),
        json!({"containers": [], "tolerations": everywhere, "nodeSelector": {"os": "linux"}}),
    ];
    for pod in wrong {
        let found = daemon_set(&set(&pod)).unwrap_or_else(|| panic!("{pod}"));
        assert_eq!(found.subject, "DaemonSet ops/agent");
        assert!(found.remedy.contains("NotIn"), "{found:?}");
    }
    let right = [
        json!({"containers": []}),
        json!({"containers": [], "tolerations": [{"operator": "Exists", "effect": "NoExecute"}]}),
        json!({"containers": [], "tolerations": [{"key": "other", "operator": "Exists"}]}),
        json!({"containers": [], "tolerations": everywhere, "affinity": affinity("NotIn", &["fargate"])}),
        json!({"containers": [], "tolerations": everywhere, "affinity": affinity("DoesNotExist", &[])}),
        json!({"containers": [], "tolerations": everywhere, "nodeSelector": {COMPUTE_TYPE: "ec2"}}),
    ];
    for pod in right {
        assert_eq!(daemon_set(&set(&pod)), None, "{pod}");
    }
}

#[test]
fn what_is_well_has_no_finding_and_what_lost_its_owner_has_one() {
    let environment = testing::environment("uid-1");
    let node = environment.spec.node.clone();
    let mut well = Cluster {
        environments: vec![environment],
        nodes: [node, "worker-1".to_owned()].into(),
        pods: ["uid-1".to_owned()].into(),
        ..Default::default()
    };
    assert_eq!(left_over(&well), []);
    well.pods.clear();
    well.nodes
        .insert(names::node(Ipv4Addr::new(10, 0, 9, 9), "r"));
    let subjects: Vec<String> = left_over(&well).into_iter().map(|f| f.subject).collect();
    assert_eq!(
        subjects,
        [
            "environment env-uid-1",
            "node fargate-ip-10-0-9-9.r.compute.internal"
        ]
    );
}

#[test]
fn what_the_cluster_does_not_know_of_this_machine_is_a_stray() {
    let environment = testing::environment("uid-1");
    let known = environment.metadata.name.clone().expect("a name");
    let mut cluster = Cluster {
        environments: vec![environment],
        hosts: ["host-1", "host-2"].map(machine_of).into(),
        ..Default::default()
    };
    let mut here = Machine {
        host: "host-1".to_owned(),
        vms: [known, "env-stray".to_owned()].into(),
        ..Default::default()
    };
    assert_eq!(strays(&here, &cluster).len(), 1);
    here.host = "host-2".to_owned();
    assert_eq!(
        strays(&here, &cluster).len(),
        2,
        "another host's environment"
    );
    cluster.hosts.clear();
    for (joined, remedy) in [(false, "--keep-pods"), (true, "a new token")] {
        here.joined = joined;
        let found = strays(&here, &cluster);
        assert_eq!(found.len(), 3);
        assert!(found[0].remedy.contains(remedy), "{found:?}");
    }
}

#[test]
fn a_missing_definition_is_not_taken_for_missing_objects() {
    let here = Machine {
        vms: ["env-1".to_owned()].into(),
        ..Default::default()
    };
    let none = Cluster {
        undefined: ["hosts.monopod.dev".to_owned()].into(),
        profiles: Some(Vec::new()),
        ..Default::default()
    };
    let found = cluster(&none, Timestamp::UNIX_EPOCH);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].subject, "definition hosts.monopod.dev");
    assert_eq!(strays(&here, &none), []);
}

#[test]
fn a_machine_is_told_what_it_lacks() {
    let gib = 1 << 30;
    let well = Machine {
        disk: Some((20 * gib, 100 * gib)),
        ..Default::default()
    };
    assert_eq!(machine(&well), []);
    let poor = Machine {
        missing_programs: vec![("nft", "nftables")],
        missing_features: vec![("tap devices", "CONFIG_TUN")],
        disk: Some((9 * gib, 100 * gib)),
        ..Default::default()
    };
    let remedies: Vec<String> = machine(&poor).into_iter().map(|f| f.remedy).collect();
    assert!(remedies[0].contains("nftables") && remedies[1].contains("CONFIG_TUN"));
    assert_eq!(remedies.len(), 3);
}

#[test]
fn a_host_that_does_not_renew_its_lease_is_found() {
    let now: Timestamp = "2026-01-01T00:10:00Z".parse().expect("a time");
    let lease = |namespace: &str, name: &str, renewed: &str| -> Lease {
        serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": name}, "spec": {"renewTime": renewed}}))
            .expect("a lease")
    };
    let cluster = |renewed: &str| Cluster {
        hosts: ["host-1", "host-2"].map(machine_of).into(),
        leases: vec![
            lease(
                "monopod-host-host-1",
                "host-1",
                "2026-01-01T00:09:50.000000Z",
            ),
            lease("monopod-host-host-2", "host-2", renewed),
            // Others' leases say nothing of a host.
            lease("kube-node-lease", "host-1", "2026-01-01T00:00:00.000000Z"),
            lease(
                "monopod-host-host-1",
                "other",
                "2026-01-01T00:00:00.000000Z",
            ),
        ],
        ..Default::default()
    };
    let heard = |cluster: &Cluster| -> Vec<Finding> {
        super::cluster(cluster, now)
            .into_iter()
            .filter(|finding| finding.problem.contains("heard of"))
            .collect()
    };
    assert_eq!(heard(&cluster("2026-01-01T00:09:21.000000Z")), []);
    let found = heard(&cluster("2026-01-01T00:09:20.000000Z"));
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].subject, "host host-2");
    assert!(
        found[0].problem.contains("2026-01-01T00:09:20Z"),
        "{found:?}"
    );
    assert!(found[0].remedy.contains("host forget host-2"), "{found:?}");
}

#[test]
fn a_subnet_that_runs_out_of_addresses_is_found() {
    // Of 16 addresses 11 are for pods; fewer than a tenth is less than two.
    let subnet: Subnet = serde_json::from_value(
        json!({"metadata": {"name": "small"}, "spec": {"cidr": "10.0.1.0/28", "zone": "z"}}),
    )
    .expect("a subnet");
    let found = |taken: u8| {
        let addresses = (0..taken).map(|n| Ipv4Addr::new(10, 0, 1, 4 + n));
        // Another subnet's are not its own.
        let others = (0..9).map(|n| Ipv4Addr::new(10, 0, 2, 4 + n));
        let interfaces = addresses.chain(others).map(|address| {
            let spec = json!({"address": address, "mac": "", "subnet": "small", "securityGroups": [], "host": "host-1", "environment": {"name": "env-uid-1"}});
            NetworkInterface::new("eni", serde_json::from_value(spec).expect("an interface"))
        });
        let cluster = Cluster {
            interfaces: interfaces.collect(),
            subnets: vec![subnet.clone()],
            ..Default::default()
        };
        addresses_of(&cluster)
    };
    assert_eq!(found(9), [""; 0]);
    assert_eq!(found(10), ["1 of its 11 addresses are free"]);
    assert_eq!(found(11), ["0 of its 11 addresses are free"]);
}

fn addresses_of(cluster: &Cluster) -> Vec<String> {
    super::cluster(cluster, Timestamp::UNIX_EPOCH)
        .into_iter()
        .filter(|finding| finding.subject == "subnet small")
        .map(|finding| finding.problem)
        .collect()
}
