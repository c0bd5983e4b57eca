//! `monopod trace`: what is kept of a pod's start, and what is said when nothing is.

use crate::{START, namespace, shell_pod};
use monopod_testkit::{Cluster, Output, wait};
use serde_json::{Value, json};
use std::time::Duration;

fn trace(cluster: &Cluster, pod: &str, format: &str) -> Output {
    cluster.monopod(&["trace", pod, "-n", "traced", "-o", format])
}

pub(crate) fn start(cluster: &Cluster) {
    namespace(cluster, "traced");
    cluster.apply(&shell_pod("traced", "seen", "sleep 100000"));
    cluster.wait_phase("traced", "seen", "Running", START);
    let complete = "the timeline is complete";
    let traced: Value = wait(complete, Duration::from_secs(10), || {
        let output = trace(cluster, "seen", "json");
        let traced: Value = serde_json::from_str(&output.out).map_err(|_not_json| output.err)?;
        let steps = traced["steps"].as_array().cloned().unwrap_or_default();
        if steps.iter().any(|step| step["step"] == "running") {
            Ok(traced)
        } else {
            Err(traced.to_string())
        }
    });
    let steps = traced["steps"].as_array().expect("steps").clone();
    let begin = |name: &str| {
        let step = steps.iter().find(|step| step["step"] == name);
        let start = step.and_then(|step| step["startMs"].as_f64());
        start.ok_or_else(|| format!("no step {name}: {traced}"))
    };
    // As they need each other: of what overlaps nothing is said.
    for chain in [
        &["request", "vm", "tap", "go", "network"][..],
        &["network", "disk", "credentials", "registered"],
        &["registered", "pod-admitted", "container-started", "running"],
        &["request", "image"],
        &["request", "certificates"],
    ] {
        for pair in chain.windows(2) {
            let [earlier, later] = [pair[0], pair[1]].map(|name| begin(name).expect("the step"));
            assert!(earlier <= later, "{pair:?}: {traced}");
        }
    }
    let total = traced["totalMs"].as_f64().expect("a number");
    let last = steps.iter().map(|step| {
        step["startMs"].as_f64().unwrap_or_default()
            + step["durationMs"].as_f64().unwrap_or_default()
    });
    assert!(total > 0.0 && (last.fold(0.0, f64::max) - total).abs() < 1.0);
    let table = trace(cluster, "seen", "table").out;
    assert!(
        table.contains("pod-admitted") && table.contains('█'),
        "{table}"
    );
}

pub(crate) fn nothing(cluster: &Cluster) {
    namespace(cluster, "traceless");
    let say = |pod: &str| {
        let output = cluster.monopod(&["trace", pod, "-n", "traceless"]);
        assert!(!output.success, "{}", output.out);
        output.err
    };
    let missing = say("missing");
    assert!(
        missing.contains("there is no pod traceless/missing")
            && missing.contains("monopod kubectl get pods -n traceless"),
        "{missing}"
    );
    let mut gated = shell_pod("traceless", "gated", "true");
    gated["spec"]["schedulingGates"] = json!([{"name": "example.com/wait"}]);
    cluster.apply(&gated);
    let gated = say("gated");
    assert!(
        gated.contains("has no environment yet") && gated.contains("describe pod"),
        "{gated}"
    );
    let mut other = shell_pod("traceless", "other", "true");
    other["spec"]["schedulerName"] = json!("somebody-elses");
    cluster.apply(&other);
    let other = say("other");
    assert!(
        other.contains("was never Monopod's") && other.contains("monopod profile match"),
        "{other}"
    );
}
