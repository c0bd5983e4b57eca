use crate::{START, event_messages, namespace, shell_pod};
use monopod_testkit::{Cluster, is_ready, wait};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

fn http(address: &str) -> std::io::Result<String> {
    let socket: SocketAddr = format!("{address}:80").parse().expect("an address");
    let mut stream = TcpStream::connect_timeout(&socket, Duration::from_secs(3))?;
    stream.set_read_timeout(Some(Duration::from_secs(3)))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

pub(crate) fn deployment(cluster: &Cluster) {
    namespace(cluster, "three");
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "three"},
        "spec": {
            "replicas": 3, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "nginx", "image": "monopod.local/nginx"}]}},
        },
    }));
    cluster.rollout("three", "deployment/web", Duration::from_mins(3));
    let pods = cluster.list("three", "pods");
    assert_eq!(pods.len(), 3);
    let mut nodes: Vec<String> = Vec::new();
    for pod in &pods {
        let ip = pod["status"]["podIP"].as_str().expect("an address");
        // Running means that the process was started; it may not listen yet.
        wait("nginx answers", Duration::from_secs(15), || {
            let answer = http(ip).map_err(|error| error.to_string())?;
            if answer.starts_with("HTTP/1.1 200") {
                Ok(())
            } else {
                Err(answer)
            }
        });
        let name = pod["spec"]["nodeName"].as_str().expect("bound");
        let dashed = ip.replace('.', "-");
        assert_eq!(
            name,
            format!("fargate-ip-{dashed}.local-1.compute.internal")
        );
        node(&cluster.get("", "node", name).expect("a node"), ip);
        assert_eq!(pod["status"]["hostIP"], ip);
        assert_eq!(
            pod["metadata"]["annotations"]["CapacityProvisioned"],
            "0.25vCPU 0.5GB"
        );
        nodes.push(name.to_owned());
    }
    nodes.sort();
    nodes.dedup();
    assert_eq!(nodes.len(), 3, "a node of its own for each");
    let (one, other) = (&pods[0], &pods[1]);
    let ip = other["status"]["podIP"].as_str().expect("an address");
    let page = exec(
        cluster,
        "three",
        one,
        &["wget", "-qO-", &format!("http://{ip}/")],
    );
    assert!(
        page.contains("Welcome to nginx!"),
        "pods reach each other by IP: {page}"
    );
    cluster.kubectl(&["delete", "namespace", "three", "--wait=false"]);
}

fn exec(cluster: &Cluster, namespace: &str, pod: &Value, command: &[&str]) -> String {
    let name = pod["metadata"]["name"].as_str().expect("a name");
    cluster.kubectl(&[&["exec", "-n", namespace, name, "--"], command].concat())
}

/// The node of a pod, as in EKS Fargate, but with its true size.
fn node(node: &Value, ip: &str) {
    let hostname = format!("ip-{}.local-1.compute.internal", ip.replace('.', "-"));
    let labels = node["metadata"]["labels"].as_object().expect("labels");
    let expected = [
        ("beta.kubernetes.io/arch", "amd64"),
        ("beta.kubernetes.io/os", "linux"),
        ("eks.amazonaws.com/compute-type", "fargate"),
        ("failure-domain.beta.kubernetes.io/region", "local-1"),
        ("failure-domain.beta.kubernetes.io/zone", "local-1a"),
        ("kubernetes.io/arch", "amd64"),
        ("kubernetes.io/hostname", hostname.as_str()),
        ("kubernetes.io/os", "linux"),
        ("topology.kubernetes.io/region", "local-1"),
        ("topology.kubernetes.io/zone", "local-1a"),
        ("topology.monopod.dev/host", "host-1"),
    ];
    assert_eq!(labels.len(), expected.len(), "{labels:?}");
    for (key, value) in expected {
        assert_eq!(labels[key], value, "{key}");
    }
    let taints = node["spec"]["taints"].as_array().expect("taints");
    assert!(
        taints
            .iter()
            .any(|t| t["key"] == "eks.amazonaws.com/compute-type"
                && t["value"] == "fargate"
                && t["effect"] == "NoSchedule")
    );
    assert!(
        node["spec"]["providerID"]
            .as_str()
            .expect("set")
            .starts_with("monopod:///local-1a/env-")
    );
    let info = &node["status"]["nodeInfo"];
    assert_eq!(
        (info["osImage"].as_str(), info["kubeletVersion"].as_str()),
        (Some("Monopod"), Some("v1.37.2-monopod"))
    );
    assert_eq!(node["status"]["capacity"]["pods"], "1");
    assert_eq!(node["status"]["capacity"]["cpu"], "250m");
    let addresses = node["status"]["addresses"].as_array().expect("addresses");
    for (kind, value) in [
        ("InternalIP", ip),
        ("InternalDNS", &hostname),
        ("Hostname", &hostname),
    ] {
        assert!(
            addresses
                .iter()
                .any(|a| a["type"] == kind && a["address"] == value),
            "{kind} in {addresses:?}"
        );
    }
}

pub(crate) fn exec_and_logs(cluster: &Cluster) {
    namespace(cluster, "shell");
    let script = "i=0; while true; do i=$((i+1)); echo line $i; sleep 1; done";
    cluster.apply(&shell_pod("shell", "talker", script));
    let pod = cluster.wait_ready("shell", "talker", START);
    let release = exec(cluster, "shell", &pod, &["uname", "-r"]);
    let own = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("a kernel");
    assert!(
        release.contains("cloud-amd64") && release.trim() != own.trim(),
        "the guest's kernel: {release}"
    );
    let addresses = exec(
        cluster,
        "shell",
        &pod,
        &["ip", "-4", "addr", "show", "eth0"],
    );
    let ip = pod["status"]["podIP"].as_str().expect("an address");
    assert!(addresses.contains(&format!("{ip}/32")), "{addresses}");
    let links = exec(cluster, "shell", &pod, &["ls", "/sys/class/net"]);
    assert_eq!(links.split_whitespace().collect::<Vec<_>>(), ["eth0", "lo"]);

    let failed = cluster.try_kubectl(&[
        "exec",
        "-n",
        "shell",
        "talker",
        "--",
        "sh",
        "-c",
        "echo out; echo err >&2; exit 42",
    ]);
    assert_eq!((failed.code, failed.out.as_str()), (Some(42), "out\n"));
    assert!(failed.err.contains("err"), "{}", failed.err);
    let echoed = cluster.kubectl_as(
        "admin",
        &["exec", "-i", "-n", "shell", "talker", "--", "cat"],
        "through stdin",
    );
    assert_eq!(echoed.out, "through stdin");
    // With a terminal: kubectl insists on one of its own, which script(1) gives it.
    let kubectl = format!(
        "{} --data {} kubectl exec -it -n shell talker -- sh -c 'tty; exit 3'",
        std::path::Path::new(&std::env::var_os("MONOPOD_DIST").expect("set"))
            .join("monopod")
            .display(),
        cluster.data().display()
    );
    let terminal = std::process::Command::new("script")
        .args(["-qec", &kubectl, "/dev/null"])
        .output()
        .expect("script(1) runs");
    let said = String::from_utf8_lossy(&terminal.stdout);
    assert!(said.contains("/dev/pts/"), "{said}");
    assert_eq!(terminal.status.code(), Some(3), "{said}");

    wait("three lines are logged", Duration::from_secs(10), || {
        let log = cluster.kubectl(&["logs", "-n", "shell", "talker"]);
        if log.contains("line 3\n") {
            Ok(())
        } else {
            Err(log)
        }
    });
    assert_eq!(
        cluster
            .kubectl(&["logs", "-n", "shell", "talker", "--tail=1"])
            .lines()
            .count(),
        1
    );
    // Follows until the pod is deleted.
    let mut follow = std::process::Command::new(
        std::path::Path::new(&std::env::var_os("MONOPOD_DIST").expect("set")).join("monopod"),
    )
    .arg("--data")
    .arg(cluster.data())
    .args(["kubectl", "logs", "-f", "-n", "shell", "talker", "--tail=1"])
    .stdout(std::process::Stdio::piped())
    .spawn()
    .expect("kubectl starts");
    let mut followed = String::new();
    let mut out = follow.stdout.take().expect("piped");
    let mut chunk = [0; 256];
    while followed.lines().count() < 3 {
        let read = out.read(&mut chunk).expect("followed lines");
        assert!(read > 0, "the log ended: {followed}");
        followed.push_str(&String::from_utf8_lossy(&chunk[..read]));
    }
    cluster.kubectl(&["delete", "pod", "-n", "shell", "talker"]);
    assert!(follow.wait().expect("kubectl ends").success());
    cluster.kubectl(&["delete", "namespace", "shell", "--wait=false"]);
}

pub(crate) fn volumes(cluster: &Cluster) {
    namespace(cluster, "volumes");
    cluster.apply(&json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings", "namespace": "volumes"}, "data": {"colour": "blue"}}));
    cluster.apply(&json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "word", "namespace": "volumes"}, "stringData": {"password": "open"}}));
    let mounts = json!([
        {"name": "shared", "mountPath": "/shared"}, {"name": "settings", "mountPath": "/settings"}, {"name": "word", "mountPath": "/word"},
    ]);
    let environment = json!([
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "COLOUR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "colour"}}},
        {"name": "SENTENCE", "value": "$(POD) is $(COLOUR)"},
    ]);
    let container = |name: &str, script: &str| json!({"name": name, "image": "monopod.local/busybox", "command": ["sh", "-c", script], "volumeMounts": mounts, "env": environment});
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "several", "namespace": "volumes"},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "initContainers": [container("first", "echo from init > /shared/init")],
            "containers": [container("writer", "echo from writer > /shared/file; sleep 1000"), container("reader", "sleep 1000")],
            "volumes": [
                {"name": "shared", "emptyDir": {}}, {"name": "settings", "configMap": {"name": "settings"}},
                {"name": "word", "secret": {"secretName": "word", "defaultMode": 256}},
            ],
        },
    }));
    cluster.wait_ready("volumes", "several", START);
    let reader = |script: &str| {
        cluster.kubectl(&[
            "exec", "-n", "volumes", "several", "-c", "reader", "--", "sh", "-c", script,
        ])
    };
    assert_eq!(
        reader("cat /shared/init /shared/file /settings/colour; cat /word/password"),
        "from init\nfrom writer\nblueopen"
    );
    assert_eq!(reader("echo $SENTENCE"), "several is blue\n");
    assert_eq!(reader("stat -Lc %a /word/password").trim(), "400");
    let token = reader("cat /var/run/secrets/kubernetes.io/serviceaccount/token");
    assert_eq!(
        token.split('.').count(),
        3,
        "a service account token: {token}"
    );
    assert_eq!(
        reader("cat /var/run/secrets/kubernetes.io/serviceaccount/namespace"),
        "volumes"
    );
    cluster.kubectl(&["delete", "namespace", "volumes", "--wait=false"]);
}

pub(crate) fn security_groups(cluster: &Cluster) {
    namespace(cluster, "groups");
    cluster
        .apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "closed"}}));
    let link =
        cluster.get("", "securitygroup", "default").expect("there")["spec"]["ingress"][1]["cidrs"]
            [0]
        .clone();
    // The control plane reaches the kubelet's port; nobody else reaches anything but port 8080.
    cluster.apply(&json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "SecurityGroup", "metadata": {"name": "closed"},
        "spec": {"ingress": [
            {"protocol": "tcp", "fromPort": 60250, "toPort": 60250, "cidrs": [link]},
            {"protocol": "tcp", "fromPort": 8080, "toPort": 8080, "groups": ["default"]},
        ]},
    }));
    cluster.apply(&json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "FargateProfile", "metadata": {"name": "fp-closed"},
        "spec": {"podExecutionRole": "default", "securityGroups": ["closed"], "selectors": [{"namespace": "closed"}]},
    }));
    wait(
        "the closed namespace is ready",
        Duration::from_secs(10),
        || {
            cluster
                .get("closed", "serviceaccount", "default")
                .map(drop)
                .ok_or_else(String::new)?;
            let profile = cluster
                .get("", "fargateprofile", "fp-closed")
                .unwrap_or_default();
            if profile["status"]["status"] == "ACTIVE" {
                Ok(())
            } else {
                Err(profile.to_string())
            }
        },
    );
    cluster.apply(&shell_pod(
        "closed",
        "server",
        "httpd -p 8080 -h /etc; httpd -p 80 -h /etc; sleep 1000",
    ));
    cluster.apply(&shell_pod("groups", "client", "sleep 1000"));
    let server = cluster.wait_ready("closed", "server", START);
    cluster.wait_ready("groups", "client", START);
    let ip = server["status"]["podIP"]
        .as_str()
        .expect("an address")
        .to_owned();
    let get = |port: u16| {
        let url = format!("http://{ip}:{port}/passwd");
        // Not wget's own -T: Debian's busybox crashes on it, on any machine.
        let command = ["timeout", "3", "wget", "-qO-", &url];
        cluster.try_kubectl(&[&["exec", "-n", "groups", "client", "--"][..], &command[..]].concat())
    };
    assert!(get(8080).out.contains("root:"), "{}", get(8080).err);
    assert!(!get(80).success, "port 80 has no rule");
    assert!(
        http(&ip).is_err(),
        "the machine has no rule for port 80 either"
    );
    assert!(
        cluster
            .kubectl(&["exec", "-n", "closed", "server", "--", "true"])
            .is_empty()
    );
    for name in ["groups", "closed"] {
        cluster.kubectl(&["delete", "namespace", name, "--wait=false"]);
    }
}

pub(crate) fn job(cluster: &Cluster) {
    namespace(cluster, "jobs");
    cluster.apply(&json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "sum", "namespace": "jobs"},
        "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{
            "name": "main", "image": "monopod.local/busybox", "command": ["sh", "-c", "echo $((40 + 2))"]}]}}},
    }));
    cluster.kubectl(&[
        "wait",
        "-n",
        "jobs",
        "--for=condition=complete",
        "job/sum",
        "--timeout=120s",
    ]);
    let pod = cluster.list("jobs", "pods").remove(0);
    assert_eq!(pod["status"]["phase"], "Succeeded");
    assert_eq!(
        pod["status"]["containerStatuses"][0]["state"]["terminated"]["reason"],
        "Completed"
    );
    let environment = wait(
        "its environment is Finished",
        Duration::from_secs(20),
        || {
            let environment = cluster.environment_of(&pod).ok_or("gone")?;
            if environment["status"]["phase"] == "Finished" {
                Ok(environment)
            } else {
                Err(environment["status"].to_string())
            }
        },
    );
    let name = environment["metadata"]["name"].as_str().expect("a name");
    assert!(
        !cluster.data().join("host/vms").join(name).exists(),
        "its VM and disks are gone"
    );
    let node = cluster
        .get("", "node", pod["spec"]["nodeName"].as_str().expect("bound"))
        .expect("the node stays with the pod");
    assert!(is_ready(&node));
    cluster.kubectl(&["delete", "job", "-n", "jobs", "sum"]);
    wait("everything of it is gone", Duration::from_secs(15), || {
        if cluster.environment_of(&pod).is_none() {
            Ok(())
        } else {
            Err("its environment is there".to_owned())
        }
    });
    cluster.kubectl(&["delete", "namespace", "jobs", "--wait=false"]);
}

pub(crate) fn crash_loop(cluster: &Cluster) {
    namespace(cluster, "crash");
    let mut pod = shell_pod("crash", "loop", "echo attempt; exit 7");
    pod["spec"]["restartPolicy"] = json!("Always");
    cluster.apply(&pod);
    let status = wait(
        "it waits in CrashLoopBackOff after a restart",
        START,
        || {
            let pod = cluster.get("crash", "pod", "loop").unwrap_or_default();
            let status = pod["status"]["containerStatuses"][0].clone();
            let restarted = status["restartCount"].as_u64().unwrap_or(0) >= 1;
            if restarted && status["state"]["waiting"]["reason"] == "CrashLoopBackOff" {
                Ok(status)
            } else {
                Err(status.to_string())
            }
        },
    );
    assert_eq!(status["lastState"]["terminated"]["exitCode"], 7);
    assert_eq!(
        cluster.kubectl(&["logs", "-n", "crash", "loop", "--previous"]),
        "attempt\n"
    );
    assert!(!event_messages(cluster, "crash", "loop", "BackOff").is_empty());
    cluster.kubectl(&["delete", "namespace", "crash", "--wait=false"]);
}

pub(crate) fn missing_image(cluster: &Cluster) {
    namespace(cluster, "images");
    let mut pod = shell_pod("images", "later", "sleep 1000");
    pod["spec"]["containers"][0]["image"] = json!("monopod.local/later:v1");
    cluster.apply(&pod);
    wait("the missing image is named", START, || {
        let pod = cluster.get("images", "pod", "later").unwrap_or_default();
        let waiting = pod["status"]["containerStatuses"][0]["state"]["waiting"].clone();
        let known = waiting["reason"] == "ErrImagePull" || waiting["reason"] == "ImagePullBackOff";
        if known
            && waiting["message"]
                .as_str()
                .is_some_and(|m| m.contains("monopod.local/later:v1"))
        {
            Ok(())
        } else {
            Err(waiting.to_string())
        }
    });
    let archive = std::path::Path::new(&std::env::var_os("MONOPOD_DIST").expect("set"))
        .join("images/busybox.tar");
    let loaded = cluster.monopod(&[
        "image",
        "load",
        &archive.display().to_string(),
        "--name",
        "monopod.local/later:v1",
    ]);
    assert!(loaded.success, "{}", loaded.err);
    cluster.wait_ready("images", "later", START);
    assert!(
        cluster
            .monopod(&["image", "ls"])
            .out
            .contains("monopod.local/later:v1")
    );
    cluster.kubectl(&["delete", "namespace", "images", "--wait=false"]);
}
