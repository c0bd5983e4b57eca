use crate::lifecycle::{self, GONE, gone, kill_vm, leftovers};
use crate::{START, namespace, shell_pod};
use monopod_testkit::{Cluster, is_ready, wait};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// What `kubectl logs` prints, once it prints anything: between the guest's last answer and the
/// host's first there is a moment without any.
pub(crate) fn read(cluster: &Cluster, namespace: &str, arguments: &[&str]) -> String {
    let arguments = [&["logs", "-n", namespace], arguments].concat();
    wait("logs are answered", Duration::from_secs(15), || {
        let output = cluster.try_kubectl(&arguments);
        if output.success {
            Ok(output.out)
        } else {
            Err(output.err)
        }
    })
}

pub(crate) fn environment_in(cluster: &Cluster, pod: &Value, phase: &str) -> Value {
    wait(
        &format!("its environment is {phase}"),
        Duration::from_secs(30),
        || {
            let environment = cluster.environment_of(pod).ok_or("gone")?;
            if environment["status"]["phase"] == phase {
                Ok(environment)
            } else {
                Err(environment["status"].to_string())
            }
        },
    )
}

fn job(namespace: &str, name: &str, spec: &Value, script: &str) -> Value {
    let mut job = json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": namespace},
        "spec": {"template": {"spec": {
            "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 2,
            "containers": [{"name": "main", "image": "monopod.local/busybox", "command": ["sh", "-c", script],
                "volumeMounts": [{"name": "memory", "mountPath": "/memory"}]}],
            "volumes": [{"name": "memory", "emptyDir": {}}],
        }}},
    });
    for (key, value) in spec.as_object().into_iter().flatten() {
        job["spec"][key] = value.clone();
    }
    job
}

fn pod_of(cluster: &Cluster, namespace: &str, job: &str) -> Value {
    cluster
        .list(namespace, "pods")
        .into_iter()
        .find(|pod| pod["metadata"]["labels"]["batch.kubernetes.io/job-name"] == job)
        .expect("the job's pod")
}

/// Waits until a job's pod has succeeded and its VM is gone. Gives pod and environment.
fn completed(cluster: &Cluster, namespace: &str, job: &str) -> (Value, Value) {
    let job_name = format!("job/{job}");
    cluster.kubectl(&[
        "wait",
        "-n",
        namespace,
        "--for=condition=complete",
        &job_name,
        "--timeout=180s",
    ]);
    let pod = pod_of(cluster, namespace, job);
    let environment = environment_in(cluster, &pod, "Finished");
    (pod, environment)
}

fn node_is_ready(cluster: &Cluster, pod: &Value) -> bool {
    let node = cluster.get("", "node", pod["spec"]["nodeName"].as_str().expect("bound"));
    node.is_some_and(|node| is_ready(&node))
}

pub(crate) fn finished(cluster: &Cluster) {
    namespace(cluster, "kept");
    // Fails once, then writes many lines and ends without a newline.
    let script = "if [ ! -e /memory/seen ]; then touch /memory/seen; echo first run; exit 3; fi
        i=0; while [ $i -lt 2000 ]; do i=$((i+1)); echo line $i; done; echo to stderr >&2; printf 'no newline'";
    cluster.apply(&job("kept", "talker", &json!({}), script));
    cluster.kubectl(&[
        "wait",
        "-n",
        "kept",
        "--for=condition=complete",
        "job/talker",
        "--timeout=180s",
    ]);
    // At once, whoever answers.
    let expected: Vec<String> = (1..=2000).map(|n| format!("line {n}")).collect();
    let check = |when: &str| {
        let all = read(cluster, "kept", &["job/talker"]);
        // Two streams have no order between them.
        let lines: Vec<&str> = all.lines().filter(|l| l.starts_with("line")).collect();
        assert_eq!(lines, expected, "{when}");
        assert!(
            all.contains("to stderr") && all.contains("no newline"),
            "{when}: {}",
            &all[all.len() - 100..]
        );
        assert_eq!(
            read(cluster, "kept", &["job/talker", "--previous"]),
            "first run\n",
            "{when}"
        );
    };
    check("when it completed");
    let (pod, environment) = completed(cluster, "kept", "talker");
    let name = environment["metadata"]["name"]
        .as_str()
        .expect("a name")
        .to_owned();
    assert!(
        !cluster.data().join("host/vms").join(&name).exists(),
        "no VM"
    );
    check("without its VM");
    assert_eq!(
        read(cluster, "kept", &["job/talker", "--tail=3"])
            .lines()
            .count(),
        3
    );
    assert_eq!(
        read(cluster, "kept", &["job/talker", "--limit-bytes=7"]),
        "line 1\n"
    );
    assert_eq!(
        read(cluster, "kept", &["job/talker", "-f", "--tail=1"])
            .lines()
            .count(),
        1
    );
    assert_eq!(
        read(
            cluster,
            "kept",
            &["job/talker", "--since-time=2100-01-01T00:00:00Z"]
        ),
        ""
    );
    let stamped = read(
        cluster,
        "kept",
        &["job/talker", "--timestamps", "--since=1h"],
    );
    assert!(stamped.contains("Z line 2000\n"), "{stamped:.200}");
    let pod_name = pod["metadata"]["name"].as_str().expect("a name");
    let uri = format!("/api/v1/namespaces/kept/pods/{pod_name}/exec?command=true&stdout=true");
    let exec = cluster.try_kubectl(&["get", "--raw", &uri]);
    assert!(!exec.success, "nothing can be executed");

    let (pid, restarts) = lifecycle::part(cluster, "host");
    monopod_testkit::kill(pid);
    lifecycle::restarted(cluster, "host", restarts);
    check("after the host process was started again");
    // Longer than the lease's 40 seconds: only the host keeps the node alive.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(50) {
        assert!(node_is_ready(cluster, &pod), "the node stays Ready");
        let seen = cluster.get("kept", "pod", pod_name).expect("it stays");
        assert_eq!(seen["status"]["phase"], "Succeeded");
        assert_eq!(seen["metadata"]["deletionTimestamp"], Value::Null);
        std::thread::sleep(Duration::from_secs(2));
    }
    cluster.kubectl(&["delete", "job", "-n", "kept", "talker"]);
    gone(cluster, &environment, GONE);
    cluster.kubectl(&["delete", "namespace", "kept", "--wait=false"]);
}

pub(crate) fn last_output(cluster: &Cluster) {
    namespace(cluster, "ends");
    // Much output right before the end, more than a pipe holds.
    let much = "head -c 300000 /dev/zero | tr '\\0' x; echo; echo last words";
    // It has begun in time also on a busy machine, and writes as fast as it can when it is killed.
    let mut killed = shell_pod(
        "ends",
        "killed",
        "trap '' TERM; i=0; while true; do i=$((i+1)); echo $i; [ $((i % 10)) -ne 0 -o $i -gt 400 ] || sleep 0.1; done",
    );
    killed["spec"]["activeDeadlineSeconds"] = json!(30);
    cluster.apply(&killed);
    cluster.apply(&shell_pod("ends", "exits", &format!("{much}; exit 4")));
    // The shell would live on if only the process that eats were killed.
    let eating = format!("{much}; tail /dev/zero; echo survived");
    let mut eats = shell_pod("ends", "eats", &eating);
    eats["spec"]["containers"][0]["resources"] = json!({"limits": {"memory": "40Mi"}});
    cluster.apply(&eats);
    for (name, code, reason) in [
        ("exits", 4, "Error"),
        ("eats", 137, "OOMKilled"),
        ("killed", 137, "Error"),
    ] {
        let pod = cluster.wait_phase("ends", name, "Failed", START * 2);
        let end = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
        assert_eq!(
            (end["exitCode"].as_i64(), end["reason"].as_str()),
            (Some(code), Some(reason)),
            "{name}"
        );
        let at_once = read(cluster, "ends", &[name]);
        environment_in(cluster, &pod, "Finished");
        let archived = read(cluster, "ends", &[name]);
        assert!(
            at_once == archived,
            "{name}: {} bytes, then {}",
            at_once.len(),
            archived.len()
        );
        if name == "killed" {
            let numbers: Vec<u64> = archived
                .lines()
                .map(|line| line.parse().expect("a number"))
                .collect();
            assert!(numbers.len() > 100, "{}", numbers.len());
            assert!(
                numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]),
                "no line is missing"
            );
        } else {
            assert_eq!(archived.matches('x').count(), 300_000, "{name}");
            assert!(archived.ends_with("\nlast words\n"), "{name}");
        }
    }
    cluster.kubectl(&["delete", "namespace", "ends", "--wait=false"]);
}

pub(crate) fn flood(cluster: &Cluster) {
    namespace(cluster, "flood");
    cluster.apply(&shell_pod(
        "flood",
        "loud",
        "while true; do yes a flood of words; done",
    ));
    cluster.apply(&shell_pod(
        "flood",
        "quiet",
        "while true; do echo quiet; sleep 1; done",
    ));
    let loud = cluster.wait_ready("flood", "loud", START);
    let quiet = cluster.wait_ready("flood", "quiet", START);
    let environment = cluster.environment_of(&loud).expect("an environment");
    let archive = cluster
        .data()
        .join("host/logs")
        .join(environment["metadata"]["name"].as_str().expect("a name"));
    let archived = || -> u64 {
        std::fs::read_dir(&archive)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.metadata().ok())
            .map(|metadata| metadata.len())
            .sum()
    };
    let (host, _) = lifecycle::part(cluster, "host");
    let resident = || -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{host}/status")).expect("it runs");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .expect("a figure");
        line.trim()
            .trim_end_matches(" kB")
            .parse()
            .expect("a number")
    };
    wait("the flood is archived", Duration::from_mins(1), || {
        let bytes = archived();
        if bytes > 256 << 10 {
            Ok(())
        } else {
            Err(format!("{bytes} bytes"))
        }
    });
    let before = resident();
    let start = Instant::now();
    let mut slowest = Duration::ZERO;
    while start.elapsed() < Duration::from_secs(20) {
        let asked = Instant::now();
        assert_eq!(
            cluster.kubectl(&["exec", "-n", "flood", "quiet", "--", "echo", "prompt"]),
            "prompt\n"
        );
        slowest = slowest.max(asked.elapsed());
        let last = read(cluster, "flood", &["quiet", "--tail=1", "--since=10s"]);
        assert_eq!(last, "quiet\n", "the quiet one writes on");
    }
    assert!(slowest < Duration::from_secs(15), "{slowest:?}");
    assert!(
        resident() < before + (64 << 10),
        "the host process grows: {before} kB, then {} kB",
        resident()
    );
    assert!(archived() <= 40 << 20, "{} bytes", archived());
    // The loud one itself still answers, and is Ready.
    assert_eq!(
        read(cluster, "flood", &["loud", "--tail=2"]),
        "a flood of words\na flood of words\n"
    );
    assert!(node_is_ready(cluster, &loud) && node_is_ready(cluster, &quiet));
    kill_vm(cluster, &environment);
    cluster.wait_phase("flood", "loud", "Failed", Duration::from_secs(30));
    let text = read(cluster, "flood", &["loud", "--tail=1000"]);
    assert!(
        text.lines()
            .filter(|line| *line == "a flood of words")
            .count()
            > 900
    );
    cluster.kubectl(&["delete", "pod", "-n", "flood", "loud"]);
    gone(cluster, &environment, GONE);
    cluster.kubectl(&["delete", "namespace", "flood", "--wait=false"]);
}

pub(crate) fn leaves_nothing(cluster: &Cluster) {
    for name in ["ttl", "byhand"] {
        namespace(cluster, name);
    }
    let words = "echo some words";
    // Time enough to see it finished before it goes.
    cluster.apply(&job(
        "ttl",
        "brief",
        &json!({"ttlSecondsAfterFinished": 60}),
        words,
    ));
    cluster.apply(&job("byhand", "brief", &json!({}), words));
    cluster.apply(&job("byhand", "other", &json!({}), words));
    let (_, by_time) = completed(cluster, "ttl", "brief");
    let (pod, by_node) = completed(cluster, "byhand", "brief");
    let (_, by_namespace) = completed(cluster, "byhand", "other");
    assert!(
        !leftovers(cluster, &by_namespace).is_empty(),
        "what stays is seen"
    );
    // The garbage collector of pods waits 40 seconds and comes by every 20.
    cluster.kubectl(&[
        "delete",
        "node",
        pod["spec"]["nodeName"].as_str().expect("bound"),
    ]);
    gone(cluster, &by_node, Duration::from_mins(2));
    gone(cluster, &by_time, Duration::from_mins(2));
    assert_eq!(read(cluster, "byhand", &["job/other"]), "some words\n");
    cluster.kubectl(&["delete", "namespace", "byhand", "--timeout=60s"]);
    gone(cluster, &by_namespace, GONE);
    cluster.kubectl(&["delete", "namespace", "ttl", "--wait=false"]);
}

pub(crate) fn down_and_up(cluster: &Cluster) {
    namespace(cluster, "lost");
    cluster.apply(&shell_pod(
        "lost",
        "running",
        "echo before the end; sleep 1000",
    ));
    cluster.apply(&shell_pod("lost", "done", "echo done"));
    let running = cluster.wait_ready("lost", "running", START);
    let done = cluster.wait_phase("lost", "done", "Succeeded", START);
    let finished = environment_in(cluster, &done, "Finished");
    let lost = cluster.environment_of(&running).expect("an environment");
    let archive = cluster
        .data()
        .join("host/logs")
        .join(lost["metadata"]["name"].as_str().expect("a name"))
        .join("0.0.0");
    wait("its log is archived", Duration::from_secs(20), || {
        let text = std::fs::read_to_string(&archive).map_err(|error| error.to_string())?;
        text.contains("before the end").then_some(()).ok_or(text)
    });
    let down = cluster.monopod(&["down"]);
    assert!(down.success, "{}{}", down.out, down.err);
    cluster.bring_up();
    let failed = cluster.wait_phase("lost", "running", "Failed", Duration::from_mins(1));
    let container = &failed["status"]["containerStatuses"][0];
    assert_eq!(
        (&container["ready"], &container["started"]),
        (&json!(false), &json!(false))
    );
    let end = &container["state"]["terminated"];
    assert_eq!(
        (end["exitCode"].as_i64(), end["reason"].as_str()),
        (Some(137), Some("EnvironmentLost"))
    );
    assert_eq!(read(cluster, "lost", &["running"]), "before the end\n");
    let again = cluster.get("lost", "pod", "done").expect("still there");
    assert_eq!(again["status"]["phase"], "Succeeded");
    assert_eq!(read(cluster, "lost", &["done"]), "done\n");
    cluster.kubectl(&["delete", "pod", "-n", "lost", "running", "done"]);
    gone(cluster, &lost, GONE);
    gone(cluster, &finished, GONE);
    cluster.kubectl(&["delete", "namespace", "lost", "--wait=false"]);
}
