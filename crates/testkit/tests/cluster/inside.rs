//! What pods may do inside their VM, and what stays closed to them there.

use crate::{START, namespace, shell_pod};
use monopod_testkit::{Cluster, wait};
use serde_json::{Value, json};

/// Adds a container that runs a shell script.
fn beside(pod: &mut Value, name: &str, script: &str) {
    let container =
        json!({"name": name, "image": "monopod.local/busybox", "command": ["sh", "-c", script]});
    let containers = pod["spec"]["containers"].as_array_mut();
    containers.expect("containers").push(container);
}

/// What a script prints in a container, whatever comes of it.
fn print(cluster: &Cluster, pod: &str, script: &str) -> String {
    let arguments = [
        "exec", "-n", "inside", pod, "-c", "main", "--", "sh", "-c", script,
    ];
    let output = cluster.try_kubectl(&arguments);
    format!("{}{}", output.out, output.err)
}

/// All processes that a container sees.
const PROCESSES: &str = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done";

/// Containers of one PID namespace see and signal each other, and nothing else.
pub(crate) fn shared_processes(cluster: &Cluster) {
    namespace(cluster, "inside");
    let mut pod = shell_pod("inside", "shares", "sleep 54321 & wait");
    pod["spec"]["shareProcessNamespace"] = json!(true);
    pod["spec"]["restartPolicy"] = json!("Always");
    beside(&mut pod, "other", "sleep 65432 & wait");
    cluster.apply(&pod);
    cluster.wait_ready("inside", "shares", START);
    sees_its_pod_alone(cluster, "shares");
    // Signalled by its neighbour, a container starts again, by itself.
    let end = "for p in /proc/[0-9]*; do grep -q '6543[2]' $p/cmdline 2>/dev/null && kill -9 ${p#/proc/}; done; echo";
    print(cluster, "shares", end);
    wait("the other container is started again", START, || {
        let pod = cluster.get("inside", "pod", "shares").ok_or("no pod")?;
        let restarts = |name: &str| {
            let statuses = pod["status"]["containerStatuses"].as_array();
            let found = statuses.into_iter().flatten().find(|s| s["name"] == name);
            found.map(|status| (status["restartCount"].clone(), status["ready"].clone()))
        };
        let expected = |count: u32| Some((json!(count), json!(true)));
        if restarts("other") == expected(1) && restarts("main") == expected(0) {
            Ok(())
        } else {
            Err(pod["status"].to_string())
        }
    });
    sees_its_pod_alone(cluster, "shares");
    cluster.kubectl(&["delete", "pod", "-n", "inside", "shares", "--wait=false"]);
}

#[track_caller]
fn sees_its_pod_alone(cluster: &Cluster, pod: &str) {
    let seen = print(cluster, pod, PROCESSES);
    for own in ["sleep 54321", "sleep 65432", "pause-first"] {
        assert!(seen.contains(own), "{own}: {seen}");
    }
    for others in [" node", " platform", "/init", " container"] {
        assert!(!seen.contains(others), "{others}: {seen}");
    }
}

/// What a profile opens works, and the platform stays closed.
pub(crate) fn opened(cluster: &Cluster) {
    let mut pod = shell_pod("inside", "open", "sleep 54321 & wait");
    for field in ["hostNetwork", "hostPID", "hostIPC"] {
        pod["spec"][field] = json!(true);
    }
    let main = &mut pod["spec"]["containers"][0];
    main["securityContext"] = json!({"privileged": true});
    main["ports"] = json!([{"containerPort": 8080}]);
    beside(&mut pod, "other", "sleep 65432 & wait");
    cluster.apply(&pod);
    wait("it is refused in EKS's words", START, || {
        let pod = cluster.get("inside", "pod", "open").ok_or("no pod")?;
        let text = pod["status"]["conditions"].to_string();
        let said = ["HostNetwork, HostPID, HostIPC", "Privileged", "HostPort"];
        let all = said.iter().all(|word| text.contains(word));
        all.then_some(()).ok_or(text)
    });
    let allow =
        json!({"spec": {"allow": {"privileged": true, "hostNamespaces": true}}}).to_string();
    cluster.kubectl(&[
        "patch",
        "fargateprofile",
        "fp-inside",
        "--type=merge",
        "-p",
        &allow,
    ]);
    let pod = cluster.wait_ready("inside", "open", START);
    assert_eq!(pod["status"]["podIP"], pod["status"]["hostIP"]);
    assert_eq!(
        print(cluster, "open", "hostname").trim(),
        pod["spec"]["nodeName"]
    );
    sees_its_pod_alone(cluster, "open");
    let works = "mkdir /m && mount -t tmpfs none /m && echo 7 > /proc/sys/kernel/panic && mkdir /sys/fs/cgroup/own && echo works";
    assert_eq!(print(cluster, "open", works), "works\n");
    // The VM's disks and its ports to the host, by their numbers; devices work in this directory.
    for (kind, major) in [("b", 254), ("b", 253), ("c", 247), ("c", 1)] {
        let open = format!(
            "rm -f /dev/d; mknod /dev/d {kind} {major} 1 && head -c 1 /dev/d >/dev/null && echo opened"
        );
        let printed = print(cluster, "open", &open);
        assert!(
            printed.contains("Operation not permitted"),
            "{kind} {major}: {printed}"
        );
    }
    for platform in [
        "169.254.170.2 80",
        "169.254.169.254 80",
        "169.254.1.1 60250",
    ] {
        let ask = format!("timeout 4 nc {platform} </dev/null && echo reached || echo closed");
        let printed = print(cluster, "open", &ask);
        assert!(printed.contains("closed"), "{platform}: {printed}");
    }
    cluster.kubectl(&["delete", "namespace", "inside", "--wait=false"]);
    cluster.kubectl(&["delete", "fargateprofile", "fp-inside", "--wait=false"]);
}
