use crate::{START, event_messages, namespace, shell_pod};
use monopod_testkit::{Cluster, wait};
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

const SHORT: Duration = Duration::from_mins(1);

fn status(cluster: &Cluster, pod: &str) -> Value {
    cluster.get("probes", "pod", pod).unwrap_or_default()["status"].clone()
}

fn condition(status: &Value, kind: &str) -> (String, String) {
    let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions
        .into_iter()
        .find(|c| c["type"] == kind)
        .unwrap_or_default();
    let text = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
    (text("status"), text("reason"))
}

fn wait_event(cluster: &Cluster, pod: &str, reason: &str, message: &str) {
    wait(&format!("{pod} has the event {reason}"), SHORT, || {
        let seen = event_messages(cluster, "probes", pod, reason);
        if seen.iter().any(|text| text.contains(message)) {
            Ok(())
        } else {
            Err(format!("{seen:?}"))
        }
    });
}

fn wait_restart(cluster: &Cluster, pod: &str) {
    wait(&format!("{pod} is restarted"), SHORT, || {
        let container = status(cluster, pod)["containerStatuses"][0].clone();
        if container["restartCount"].as_u64().unwrap_or(0) > 0 {
            Ok(())
        } else {
            Err(container.to_string())
        }
    });
}

fn agnhost(name: &str, container: &Value) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "probes"},
        "spec": {"terminationGracePeriodSeconds": 2, "containers": [{
            "name": "main", "image": "monopod.local/agnhost",
            // With the least CPU, an emulated agnhost may be longer in starting than its probes are patient.
            "resources": {"requests": {"cpu": "500m"}},
        }]},
    });
    for (key, value) in container.as_object().into_iter().flatten() {
        pod["spec"]["containers"][0][key] = value.clone();
    }
    pod
}

fn get(address: &str, port: u16, path: &str) -> std::io::Result<String> {
    let socket: SocketAddr = format!("{address}:{port}").parse().expect("an address");
    let mut stream = TcpStream::connect_timeout(&socket, Duration::from_secs(3))?;
    stream.set_read_timeout(Some(Duration::from_secs(3)))?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// By gRPC and HTTP, as a container's own programs answer.
pub(crate) fn probes(cluster: &Cluster) {
    namespace(cluster, "probes");
    let grpc = json!({"grpc": {"port": 5000}, "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 2});
    cluster.apply(&agnhost(
        "grpc",
        &json!({"args": ["grpc-health-checking"], "livenessProbe": grpc, "readinessProbe": grpc,
            "startupProbe": {"grpc": {"port": 5000}, "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 60}}),
    ));
    cluster.apply(&agnhost(
        "web",
        &json!({"args": ["netexec", "--http-port=8080"], "ports": [{"name": "web", "containerPort": 8080}],
            "livenessProbe": {"httpGet": {"path": "/healthz", "port": "web"}, "initialDelaySeconds": 10, "timeoutSeconds": 5},
            "readinessProbe": {"httpGet": {"path": "/redirect?location=http://example.com/", "port": "web"}, "periodSeconds": 1, "timeoutSeconds": 5}}),
    ));
    let mut late = shell_pod("probes", "late", "sleep 1000");
    late["spec"]["restartPolicy"] = json!("Always");
    late["spec"]["containers"][0]["startupProbe"] = json!({"tcpSocket": {"port": 81}, "periodSeconds": 1, "failureThreshold": 2, "terminationGracePeriodSeconds": 1});
    cluster.apply(&late);
    let mut hooked = shell_pod("probes", "hooked", "sleep 1000");
    hooked["spec"]["restartPolicy"] = json!("Always");
    hooked["spec"]["containers"][0]["lifecycle"] =
        json!({"postStart": {"exec": {"command": ["sh", "-c", "echo secret; exit 1"]}}});
    cluster.apply(&hooked);

    let ready = cluster.wait_ready("probes", "grpc", START);
    assert_eq!(ready["status"]["containerStatuses"][0]["started"], true);
    let address = ready["status"]["podIP"].as_str().expect("an address");
    let answer = get(address, 8080, "/make-not-serving").expect("it answers");
    assert!(answer.contains("200"), "{answer}");
    wait_event(
        cluster,
        "grpc",
        "Unhealthy",
        "service unhealthy (responded with \"NOT_SERVING\")",
    );
    wait_event(
        cluster,
        "grpc",
        "Killing",
        "Container main failed liveness probe, will be restarted",
    );
    wait_restart(cluster, "grpc");
    cluster.wait_ready("probes", "grpc", START);

    cluster.wait_ready("probes", "web", START);
    wait_event(
        cluster,
        "web",
        "ProbeWarning",
        "Readiness probe warning: Probe terminated redirects",
    );
    assert_eq!(
        status(cluster, "web")["containerStatuses"][0]["restartCount"],
        0
    );

    wait_event(
        cluster,
        "late",
        "Unhealthy",
        "Startup probe failed: dial tcp",
    );
    wait_event(
        cluster,
        "late",
        "Killing",
        "Container main failed startup probe, will be restarted",
    );
    wait_restart(cluster, "late");
    assert_eq!(condition(&status(cluster, "late"), "Ready").0, "False");

    wait_event(
        cluster,
        "hooked",
        "FailedPostStartHook",
        "PostStartHook failed",
    );
    wait_event(cluster, "hooked", "Killing", "FailedPostStartHook");
    wait_restart(cluster, "hooked");
    for event in event_messages(cluster, "probes", "hooked", "FailedPostStartHook") {
        assert!(
            !event.contains("secret"),
            "what a hook says is not told: {event}"
        );
    }
    cluster.kubectl(&[
        "delete",
        "pod",
        "-n",
        "probes",
        "grpc",
        "web",
        "late",
        "hooked",
        "--wait=false",
    ]);
    gates(cluster);
    cluster.kubectl(&["delete", "namespace", "probes", "--wait=false"]);
}

/// What comes first, what waits for it, and the order at the end.
fn gates(cluster: &Cluster) {
    let container = |name: &str, script: &str| {
        json!({
            "name": name, "image": "monopod.local/busybox", "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "m", "mountPath": "/m"}],
        })
    };
    let mut side = container(
        "side",
        "trap 'test -e /m/main-ended && echo after main; test -e /m/hook && echo hook ran; exit 0' TERM; sleep 3; echo up; touch /m/up; while true; do sleep 0.2; done",
    );
    side["restartPolicy"] = json!("Always");
    side["startupProbe"] = json!({"exec": {"command": ["test", "-e", "/m/up"]}, "periodSeconds": 1, "failureThreshold": 30, "timeoutSeconds": 5});
    side["lifecycle"] = json!({"preStop": {"exec": {"command": ["touch", "/m/hook"]}}});
    let mut first = container("first", "sleep 1000");
    first["lifecycle"] =
        json!({"postStart": {"exec": {"command": ["sh", "-c", "sleep 3; touch /m/posted"]}}});
    let mut second = container(
        "second",
        "trap 'sleep 1; touch /m/main-ended; exit 0' TERM; test -e /m/posted && echo in time; while true; do sleep 0.2; done",
    );
    second["readinessProbe"] = json!({"exec": {"command": ["test", "-e", "/m/ready"]}, "periodSeconds": 1, "timeoutSeconds": 5});
    second["resources"] = json!({"requests": {"cpu": "50m"}});
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gated", "namespace": "probes"},
        "spec": {
            "terminationGracePeriodSeconds": 20, "readinessGates": [{"conditionType": "example.com/gate"}],
            "initContainers": [side, container("after", "test -e /m/up")], "containers": [first, second],
            "volumes": [{"name": "m", "emptyDir": {}}],
        },
    }));
    let seen = wait("its containers run", START, || {
        let seen = status(cluster, "gated");
        let running = seen["containerStatuses"][1]["state"]["running"].is_object();
        if running {
            Ok(seen)
        } else {
            Err(seen.to_string())
        }
    });
    assert_eq!(condition(&seen, "Initialized").0, "True");
    assert_eq!(condition(&seen, "PodReadyToStartContainers").0, "True");
    assert_eq!(
        condition(&seen, "ContainersReady"),
        ("False".to_owned(), "ContainersNotReady".to_owned())
    );
    assert_eq!(
        seen["initContainerStatuses"][1]["restartCount"], 0,
        "the sidecar had started before"
    );
    assert_eq!(
        seen["containerStatuses"][1]["allocatedResources"]["cpu"],
        "50m"
    );
    // The container runs a moment before it says anything.
    wait("the hook came before", SHORT, || {
        let said = crate::logs::read(cluster, "probes", &["gated", "-c", "second"]);
        assert!(["", "in time\n"].contains(&said.as_str()), "{said}");
        if said.is_empty() { Err(said) } else { Ok(()) }
    });
    cluster.kubectl(&[
        "exec", "-n", "probes", "gated", "-c", "second", "--", "touch", "/m/ready",
    ]);
    wait("only the gate is missing", SHORT, || {
        let seen = status(cluster, "gated");
        let ready = condition(&seen, "Ready");
        if condition(&seen, "ContainersReady").0 == "True" && ready.1 == "ReadinessGatesNotReady" {
            Ok(())
        } else {
            Err(seen["conditions"].to_string())
        }
    });
    let patch = r#"{"status":{"conditions":[{"type":"example.com/gate","status":"True"}]}}"#;
    cluster.kubectl(&[
        "patch",
        "pod",
        "-n",
        "probes",
        "gated",
        "--subresource=status",
        "-p",
        patch,
    ]);
    cluster.wait_ready("probes", "gated", SHORT);
    last_words(cluster);
}

/// Deletes the pod and reads what its sidecar says at the end.
fn last_words(cluster: &Cluster) {
    // Its last words come only over a connection that is open when it ends.
    let mut follow = Command::new(
        std::path::Path::new(&std::env::var_os("MONOPOD_DIST").expect("set")).join("monopod"),
    )
    .arg("--data")
    .arg(cluster.data())
    .args([
        "kubectl", "logs", "-f", "-n", "probes", "gated", "-c", "side",
    ])
    .stdout(Stdio::piped())
    .spawn()
    .expect("kubectl starts");
    let mut out = follow.stdout.take().expect("piped");
    let mut first = [0; 3];
    out.read_exact(&mut first).expect("what it said before");
    cluster.kubectl(&["delete", "pod", "-n", "probes", "gated"]);
    let mut last = String::new();
    out.read_to_string(&mut last).expect("text");
    assert!(follow.wait().expect("kubectl ends").success());
    assert_eq!(
        last, "after main\nhook ran\n",
        "the sidecar ended last, and its hook ran"
    );
}
