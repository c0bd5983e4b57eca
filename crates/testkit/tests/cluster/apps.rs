//! Applications as their owners run them: tiers wired by services and DNS, sets, timed jobs, helm.

use crate::namespace;
use monopod_testkit::{Cluster, wait};
use serde_json::{Value, json};
use std::time::Duration;

const NAMESPACE: &str = "shop";
/// With the least, an emulated Python is some twenty seconds in starting.
const CPU: &str = "500m";
const FRONT: &str = "daemon off; worker_processes 1; pid /tmp/nginx.pid; error_log /dev/stderr; events {}\n\
    http { access_log off; server { listen 80; location / { proxy_pass http://app:8000; proxy_connect_timeout 5s; } } }\n";

fn service(name: &str, port: u16, headless: bool) -> Value {
    let mut service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"selector": {"app": name}, "ports": [{"port": port}]},
    });
    if headless {
        service["spec"]["clusterIP"] = json!("None");
        // Members find each other before they are ready.
        service["spec"]["publishNotReadyAddresses"] = json!(true);
    }
    service
}

fn deployment(name: &str, replicas: u32, spec: &Value) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": {"app": name}},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": spec},
        },
    })
}

/// The middle tier in one version, which takes no request any more once its end is near.
fn app(version: &str, replicas: u32) -> Value {
    deployment(
        "app",
        replicas,
        &json!({
            "terminationGracePeriodSeconds": 20,
            "containers": [{
                "name": "app", "image": "monopod.local/python", "imagePullPolicy": "IfNotPresent",
                "resources": {"requests": {"cpu": CPU}}, "args": ["/code/app.py"], "env": [{"name": "VERSION", "value": version}],
                "ports": [{"name": "http", "containerPort": 8000}],
                "readinessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 5},
                "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
                "volumeMounts": [{"name": "code", "mountPath": "/code"}],
            }],
            "volumes": [{"name": "code", "configMap": {"name": "code"}}],
        }),
    )
}

fn rollout(cluster: &Cluster, object: &str) {
    cluster.rollout(NAMESPACE, object, Duration::from_mins(4));
}

/// What the load has counted: good answers, and the versions that gave them. Fails at a failed request.
#[track_caller]
fn load(cluster: &Cluster) -> (u64, String) {
    let log = cluster.kubectl(&["logs", "-n", NAMESPACE, "load"]);
    let failures: Vec<&str> = log.lines().filter(|l| l.starts_with("failed")).collect();
    assert!(failures.is_empty(), "requests failed: {failures:?}");
    let last = log.lines().last().unwrap_or_default();
    let mut words = last.split(' ');
    let good = words.nth(1).and_then(|count| count.parse().ok());
    (
        good.unwrap_or(0),
        words.nth(1).unwrap_or_default().to_owned(),
    )
}

/// Waits until the load made so many more requests.
fn go_on(cluster: &Cluster, requests: u64) -> String {
    let (before, _) = load(cluster);
    wait("the load goes on", Duration::from_mins(2), || {
        let (now, versions) = load(cluster);
        if now >= before + requests {
            Ok(versions)
        } else {
            Err(now.to_string())
        }
    })
}

/// Front, middle and store, and the service of each.
fn deploy(cluster: &Cluster) {
    for image in ["python", "redis"] {
        cluster.load_test_image(image);
    }
    namespace(cluster, NAMESPACE);
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code", "namespace": NAMESPACE},
        "data": {"app.py": include_str!("apps/app.py"), "load.py": include_str!("apps/load.py"), "nginx.conf": FRONT},
    }));
    for (name, port, headless) in [
        ("redis", 6379, true),
        ("app", 8000, false),
        ("front", 80, false),
    ] {
        cluster.apply(&service(name, port, headless));
    }
    // The first member is the primary; the others find it by its name.
    let redis = "case $HOSTNAME in redis-0) exec redis-server --protected-mode no --save '';; \
        *) exec redis-server --protected-mode no --save '' --replicaof redis-0.redis 6379;; esac";
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "redis", "namespace": NAMESPACE},
        "spec": {
            "serviceName": "redis", "replicas": 2, "selector": {"matchLabels": {"app": "redis"}},
            "template": {"metadata": {"labels": {"app": "redis"}}, "spec": {
                "terminationGracePeriodSeconds": 5,
                "containers": [{
                    "name": "redis", "image": "monopod.local/redis", "imagePullPolicy": "IfNotPresent",
                    "command": ["sh", "-c", redis], "ports": [{"containerPort": 6379}],
                    "readinessProbe": {"exec": {"command": ["redis-cli", "ping"]}, "periodSeconds": 2, "timeoutSeconds": 10},
                }],
            }},
        },
    }));
    cluster.apply(&app("v1", 1));
    cluster.apply(&deployment(
        "front",
        1,
        &json!({
            "containers": [{
                "name": "nginx", "image": "monopod.local/nginx", "imagePullPolicy": "IfNotPresent",
                "resources": {"requests": {"cpu": CPU}}, "command": ["nginx", "-c", "/code/nginx.conf"],
                "readinessProbe": {"httpGet": {"path": "/", "port": 80}, "periodSeconds": 1, "timeoutSeconds": 5},
                "volumeMounts": [{"name": "code", "mountPath": "/code"}],
            }],
            "volumes": [{"name": "code", "configMap": {"name": "code"}}],
        }),
    ));
    rollout(cluster, "statefulset/redis");
    rollout(cluster, "deployment/app");
    rollout(cluster, "deployment/front");
}

fn redis_cli(cluster: &Cluster, member: &str, words: &[&str]) -> String {
    let command = ["exec", "-n", NAMESPACE, member, "--", "redis-cli"];
    cluster.kubectl(&[&command[..], words].concat())
}

/// A pod that asks all the while.
fn start_load(cluster: &Cluster) {
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "load", "namespace": NAMESPACE},
        "spec": {
            "terminationGracePeriodSeconds": 1, "restartPolicy": "Never",
            "containers": [{
                "name": "load", "image": "monopod.local/python", "imagePullPolicy": "IfNotPresent",
                "resources": {"requests": {"cpu": CPU}}, "args": ["/code/load.py"],
                "volumeMounts": [{"name": "code", "mountPath": "/code"}],
            }],
            "volumes": [{"name": "code", "configMap": {"name": "code"}}],
        },
    }));
    cluster.wait_ready(NAMESPACE, "load", crate::START);
}

pub(crate) fn two_tiers(cluster: &Cluster) {
    deploy(cluster);
    let replicas = wait("the replica is connected", Duration::from_mins(1), || {
        let info = redis_cli(cluster, "redis-1", &["info", "replication"]);
        if info.contains("master_link_status:up") {
            Ok(info)
        } else {
            Err(info)
        }
    });
    assert!(replicas.contains("role:slave"), "{replicas}");

    start_load(cluster);
    assert_eq!(go_on(cluster, 20), "v1");
    for replicas in ["5", "2"] {
        cluster.kubectl(&[
            "scale",
            "-n",
            NAMESPACE,
            "deployment/app",
            "--replicas",
            replicas,
        ]);
        rollout(cluster, "deployment/app");
        go_on(cluster, 20);
    }
    wait("two pods are left", Duration::from_mins(1), || {
        let pods = cluster.kubectl(&[
            "get", "pods", "-n", NAMESPACE, "-l", "app=app", "-o", "name",
        ]);
        if pods.lines().count() == 2 {
            Ok(())
        } else {
            Err(pods)
        }
    });
    cluster.apply(&app("v2", 2));
    rollout(cluster, "deployment/app");
    assert_eq!(go_on(cluster, 30), "v1,v2", "both answered, none failed");
    let (good, _) = load(cluster);
    let visits: u64 = redis_cli(cluster, "redis-1", &["get", "visits"])
        .trim()
        .parse()
        .expect("a number on the replica");
    assert!(visits >= good, "{visits} visits for {good} answers");
    cluster.kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"]);
}

pub(crate) fn cron_job(cluster: &Cluster) {
    namespace(cluster, "timed");
    cluster.apply(&json!({
        "apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "tick", "namespace": "timed"},
        "spec": {"schedule": "* * * * *", "jobTemplate": {"spec": {"template": {"spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "monopod.local/busybox", "command": ["echo", "tick"]}],
        }}}}},
    }));
    wait("a job of it succeeded", Duration::from_mins(2), || {
        let jobs = cluster.list("timed", "jobs");
        if jobs.iter().any(|job| job["status"]["succeeded"] == 1) {
            Ok(())
        } else {
            Err(format!("{jobs:?}"))
        }
    });
    cluster.kubectl(&["delete", "namespace", "timed", "--wait=false"]);
}

pub(crate) fn helm(cluster: &Cluster) {
    namespace(cluster, "charts");
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/chart");
    // A pod that ended is an endpoint for a moment longer, here as on any node.
    let shows = |page: &str| {
        let ask = ["exec", "-n", "charts", "deployment/site", "--"];
        let command = ["timeout", "5", "wget", "-qO-", "http://site/"];
        wait(
            &format!("the page is {page}"),
            Duration::from_secs(30),
            || {
                let answer = cluster.try_kubectl(&[&ask[..], &command].concat());
                if answer.out.contains(page) {
                    Ok(())
                } else {
                    Err(format!("{}{}", answer.out, answer.err))
                }
            },
        );
    };
    let helm = |arguments: &[&str]| {
        let patience = ["-n", "charts", "--timeout", "3m"];
        cluster.helm(&[arguments, &patience].concat())
    };
    helm(&["install", "site", chart, "--wait"]);
    shows("first");
    helm(&["upgrade", "site", chart, "--set", "page=second", "--wait"]);
    shows("second");
    let tested = helm(&["test", "site"]);
    assert!(tested.contains("Succeeded"), "{tested}");
    helm(&["rollback", "site", "1", "--wait"]);
    shows("first");
    helm(&["uninstall", "site", "--wait"]);
    wait("its pods are gone", Duration::from_mins(1), || {
        let pods = cluster.kubectl(&[
            "get", "pods", "-n", "charts", "-l", "app=site", "-o", "name",
        ]);
        if pods.is_empty() { Ok(()) } else { Err(pods) }
    });
    cluster.kubectl(&["delete", "namespace", "charts", "--wait=false"]);
}
