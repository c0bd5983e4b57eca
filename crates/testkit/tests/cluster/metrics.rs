//! What the processes export, and that the alert rules and the documentation are about that.

use crate::lifecycle::slow_pod;
use crate::{START, event_messages, namespace, shell_pod};
use monopod_testkit::{Cluster, figure, kill, process, records_in, wait};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

const ALERTS: &str = include_str!("../../../../deploy/alerts.yaml");
const DOCUMENTED: &str = include_str!("../../../../docs/metrics.md");

/// What control and host export now.
fn scrape(cluster: &Cluster) -> String {
    let ports = cluster.admin_ports();
    ports
        .map(|port| monopod_testkit::scrape(port).expect("it answers"))
        .concat()
}

/// The value of a series.
fn value(cluster: &Cluster, series: &str) -> Option<f64> {
    figure(&scrape(cluster), series)
}

/// Names of metrics in a text.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c == '_' || c.is_ascii_alphanumeric()));
    words
        .filter(|word| word.starts_with("monopod_"))
        .map(str::to_owned)
        .collect()
}

pub(crate) fn exported(cluster: &Cluster) {
    namespace(cluster, "figures");
    cluster.apply(&shell_pod("figures", "runs", "sleep 100000"));
    cluster.wait_phase("figures", "runs", "Running", START);

    let rules: Value = serde_saphyr::from_str(ALERTS).expect("YAML");
    let rules = rules["groups"][0]["rules"].as_array().expect("rules");
    let text = scrape(cluster);
    for rule in rules {
        let alert = &rule["alert"];
        let wanted = names(rule["expr"].as_str().expect("an expression"));
        assert!(!wanted.is_empty(), "{alert} is about nothing");
        for name in wanted {
            let found = text.lines().any(|line| line.starts_with(&name));
            assert!(found, "{alert}: {name} is not exported");
        }
        for part in ["summary", "description", "runbook"] {
            let said = rule["annotations"][part].as_str().unwrap_or_default();
            assert!(!said.is_empty(), "{alert} has no {part}");
        }
    }
    // Each series' family is documented, and what is documented is exported.
    let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let families = families.map(|line| match line.split_once(' ') {
        Some((name, "counter")) => format!("{name}_total"),
        Some((name, _)) => name.to_owned(),
        None => line.to_owned(),
    });
    assert_eq!(families.collect::<BTreeSet<_>>(), names(DOCUMENTED));
}

pub(crate) fn counted(cluster: &Cluster) {
    namespace(cluster, "counted");
    let running =
        |cluster: &Cluster| value(cluster, "monopod_control_environments{phase=\"Running\"}");
    assert!(running(cluster) >= Some(0.0));
    assert_eq!(value(cluster, "monopod_control_leader"), Some(1.0));
    assert_eq!(
        value(cluster, "monopod_control_hosts{state=\"ready\"}"),
        Some(1.0)
    );
    let refusals = "monopod_control_placement_refusals_total{reason=\"affinity\"}";
    let before = value(cluster, refusals).expect("each reason has its zero");
    let mut lonely = shell_pod("counted", "lonely", "true");
    lonely["spec"]["affinity"] = json!({"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": {"matchLabels": {"app": "friend"}}},
    ]}});
    cluster.apply(&lonely);
    let limit = Duration::from_secs(10);
    wait("the refusal is counted, and the pod waits", limit, || {
        let (now, waiting) = (
            value(cluster, refusals),
            value(cluster, "monopod_control_waiting_pods"),
        );
        if now > Some(before) && waiting >= Some(1.0) {
            Ok(())
        } else {
            Err(format!("{now:?} after {before}, {waiting:?} wait"))
        }
    });
    // It starts by itself once it is not alone.
    let mut friend = shell_pod("counted", "friend", "sleep 100000");
    friend["metadata"]["labels"] = json!({"app": "friend"});
    cluster.apply(&friend);
    cluster.wait_phase("counted", "lonely", "Succeeded", 2 * START);
    let free = value(
        cluster,
        "monopod_control_subnet_free_addresses{subnet=\"private-a\"}",
    );
    assert!(free > Some(0.0), "{free:?}");
    let pulls = "monopod_host_image_pulls_total{outcome=\"resolve\"}";
    let before = value(cluster, pulls).expect("each outcome has its zero");
    let mut pod = shell_pod("counted", "imageless", "true");
    // Nothing listens there.
    pod["spec"]["containers"][0]["image"] = json!("127.0.0.1:1/none");
    cluster.apply(&pod);
    wait("the failed pull is counted", START, || {
        let now = value(cluster, pulls);
        (now > Some(before))
            .then_some(())
            .ok_or_else(|| format!("{now:?} after {before}"))
    });
    let died = value(cluster, "monopod_host_vm_failures_total{category=\"died\"}");
    assert!(died.is_some(), "each category has its zero");
    cluster.kubectl(&["delete", "namespace", "counted", "--wait=false"]);
}

/// A start whose VM dies is counted by its cause, and so is the next, which succeeds.
pub(crate) fn retried(cluster: &Cluster) {
    namespace(cluster, "retried");
    let series = [
        "monopod_control_provisioning_failures_total{category=\"vm_ended\"}",
        "monopod_control_provisioning_retries_total",
    ];
    let counts = || series.map(|series| value(cluster, series).expect("each has its zero"));
    let before = counts();
    let site = cluster.site();
    let owned = || -> Vec<i32> {
        records_in(&site, "vms")
            .iter()
            .filter_map(process)
            .collect()
    };
    let known = owned();
    cluster.apply(&slow_pod("retried", "again", "5700Mi"));
    let vm = wait("it has a VM", START, || {
        let new = owned().into_iter().find(|vm| !known.contains(vm));
        new.ok_or_else(|| "none".to_owned())
    });
    kill(vm);
    cluster.wait_ready("retried", "again", 2 * START);
    let now = counts();
    let is_counted = now.iter().zip(before).all(|(now, before)| *now > before);
    assert!(is_counted, "{now:?} after {before:?}");
    let told = event_messages(cluster, "retried", "again", "FailedScheduling");
    assert!(!told.is_empty(), "the pod's events say that a start failed");
    cluster.kubectl(&["delete", "namespace", "retried", "--wait=false"]);
}
