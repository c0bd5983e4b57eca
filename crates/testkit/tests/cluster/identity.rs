use crate::lifecycle::slow_pod;
use crate::{START, event_messages, namespace, shell_pod};
use k8s_openapi::ByteString;
use monopod_testkit::{Cluster, wait};
use serde_json::{Value, json};
use std::time::Duration;

pub(crate) fn binding(cluster: &Cluster) {
    let node = "fargate-ip-10-0-0-9.local-1.compute.internal";
    let mut named = shell_pod("default", "named", "true");
    named["spec"]["nodeName"] = json!(node);
    let output = cluster.try_apply(&named);
    assert!(
        !output.success
            && output
                .err
                .contains("a fargate- node runs only the pod it was made for"),
        "{}",
        output.err
    );
    let mut free = shell_pod("default", "free", "true");
    free["spec"]["schedulerName"] = json!("by-hand");
    cluster.apply(&free);
    let output = bind(cluster, "default", "free", node);
    assert!(
        output
            .err
            .contains("only the Fargate scheduler binds pods to fargate- nodes"),
        "{}",
        output.err
    );
    cluster.kubectl(&["delete", "pod", "free", "--now"]);
}

fn bind(cluster: &Cluster, namespace: &str, pod: &str, node: &str) -> monopod_testkit::Output {
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod, "namespace": namespace},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    });
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/binding");
    cluster.kubectl_as(
        "admin",
        &["create", "--raw", &path, "-f", "-"],
        &binding.to_string(),
    )
}

/// The policy is one wall; the node itself is another, which is seen once the first is taken away.
pub(crate) fn second_pod(cluster: &Cluster) {
    namespace(cluster, "second");
    // Of a size that no other check has, so that its VM boots.
    cluster.apply(&slow_pod("second", "first", "3700Mi"));
    // Bound by hand while the VM still starts, and once more when the pod runs.
    let node = wait("it has a node", Duration::from_secs(20), || {
        let pod = cluster.get("second", "pod", "first").unwrap_or_default();
        let nominated = pod["status"]["nominatedNodeName"].as_str();
        nominated
            .or_else(|| pod["spec"]["nodeName"].as_str())
            .map(str::to_owned)
            .ok_or_else(|| pod["status"].to_string())
    });
    cluster.kubectl(&[
        "delete",
        "validatingadmissionpolicybinding",
        "monopod-binding",
    ]);
    let intruder = |name: &str| {
        let mut pod = shell_pod("second", name, "sleep 1000");
        pod["metadata"]["annotations"] = json!({"eks.amazonaws.com/compute-type": "ec2"});
        pod["spec"]["schedulerName"] = json!("by-hand");
        cluster.apply(&pod);
        wait("it is bound by hand", Duration::from_secs(10), || {
            let output = bind(cluster, "second", name, &node);
            if output.success {
                Ok(())
            } else {
                Err(output.err)
            }
        });
    };
    intruder("early");
    cluster.wait_ready("second", "first", START);
    intruder("late");
    for name in ["early", "late"] {
        let pod = cluster.wait_phase("second", name, "Failed", START);
        assert_eq!(
            pod["status"]["reason"], "UnsupportedPodSpec",
            "{}",
            pod["status"]
        );
        assert!(!event_messages(cluster, "second", name, "UnsupportedPodSpec").is_empty());
        assert!(
            event_messages(cluster, "second", name, "Started").is_empty(),
            "it never ran"
        );
    }
    // `up` puts the policy back.
    let policies = include_str!("../../../../deploy/policies.yaml");
    let output = cluster.kubectl_as("admin", &["apply", "-f", "-"], policies);
    assert!(output.success, "{}", output.err);
    cluster.kubectl(&["delete", "namespace", "second", "--wait=false"]);
}

pub(crate) fn certificates(cluster: &Cluster) {
    let node = "fargate-ip-10-0-0-9.local-1.compute.internal";
    // The host asks for a node that no environment of its has.
    let host = request(cluster, "host", "stolen-by-host", node);
    assert!(host.success, "a host may ask: {}", host.err);
    cluster.wait_denied("stolen-by-host");
    // A workload's identity may not even ask.
    let token = cluster.kubectl(&["create", "token", "default", "-n", "default"]);
    let output = cluster.kubectl_as(
        "admin",
        &[
            "--token",
            token.trim(),
            "auth",
            "can-i",
            "create",
            "certificatesigningrequests",
            "--as",
            "system:serviceaccount:default:default",
        ],
        "",
    );
    assert!(output.out.starts_with("no"), "{}", output.out);
    // An administrator may ask, and is not given a node either.
    assert!(request(cluster, "admin", "stolen-by-admin", node).success);
    cluster.wait_denied("stolen-by-admin");
}

/// Asks for the client certificate of a node.
fn request(cluster: &Cluster, user: &str, name: &str, node: &str) -> monopod_testkit::Output {
    let subject = format!("system:node:{node}");
    let signer = "kubernetes.io/kube-apiserver-client-kubelet";
    cluster.request_certificate(user, name, signer, ("system:nodes", &subject))
}

pub(crate) fn hosts(cluster: &Cluster) {
    let other = json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "Host", "metadata": {"name": "host-2"},
        "spec": {"region": "r", "zone": "z", "memoryMib": 1, "cpuMillis": 1},
    });
    let output = cluster.kubectl_as("host", &["create", "-f", "-"], &other.to_string());
    assert!(
        output.err.contains("a host writes only its own Host"),
        "{}",
        output.err
    );
    let pods = cluster.kubectl_as("host", &["get", "pods", "-A"], "");
    assert!(pods.err.contains("forbidden"), "{}", pods.err);
    let secrets = cluster.kubectl_as("host", &["get", "secrets", "-A"], "");
    assert!(secrets.err.contains("forbidden"), "{}", secrets.err);
    let foreign = json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "Environment", "metadata": {"name": "env-foreign"},
        "spec": {
            "pod": {"namespace": "default", "name": "p", "uid": "foreign"}, "profile": "p", "podExecutionRole": "r",
            "size": {"cpuMillis": 250, "memoryMib": 512}, "scratchGib": 20, "host": "host-2", "node": "fargate-ip-10-9-9-9.r.compute.internal",
            "networkInterface": "eni-10-9-9-9", "address": "10.9.9.9", "images": [], "kubernetesVersion": "v1.37.2",
        },
    });
    cluster.apply(&foreign);
    // An apply is one request; a patch by kubectl reads first, which hosts have no right to.
    let failed = json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "Environment", "metadata": {"name": "env-foreign"},
        "status": {"phase": "Failed"},
    });
    let output = cluster.kubectl_as(
        "host",
        &[
            "apply",
            "--server-side",
            "--subresource=status",
            "--validate=false",
            "-f",
            "-",
        ],
        &failed.to_string(),
    );
    // Control may have released it already, since it has no pod; a host must not have written it in any case.
    assert!(
        output
            .err
            .contains("a host writes only environments that it runs")
            || output.err.contains("not found"),
        "{}",
        output.err
    );
}

/// With the credentials of a guest that was broken out of: it is its own node and nothing more.
pub(crate) fn guest(cluster: &Cluster) {
    namespace(cluster, "guest");
    cluster.apply(&shell_pod("guest", "own", "sleep 1000"));
    cluster.apply(&json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "other", "namespace": "guest"}, "stringData": {"a": "b"}}));
    let pod = cluster.wait_ready("guest", "own", START);
    let environment = cluster.environment_of(&pod).expect("an environment");
    let name = environment["metadata"]["name"].as_str().expect("a name");
    let node = environment["spec"]["node"].as_str().expect("a node");
    let stolen = std::fs::read(cluster.data().join("host/credentials").join(name))
        .expect("the host keeps them");
    let stolen: Value = serde_json::from_slice(&stolen).expect("JSON");
    let bytes = |key: &str| {
        let pem = stolen["credentials"][key].as_str().expect("PEM");
        ByteString(pem.as_bytes().to_vec())
    };
    let admin: Value = serde_json::from_str(&cluster.monopod(&["kubeconfig"]).out).expect("JSON");
    let kubeconfig = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c", "clusters": admin["clusters"],
        "users": [{"name": "u", "user": {
            "client-certificate-data": bytes("clientCertificate"), "client-key-data": bytes("key"),
        }}],
        "contexts": [{"name": "c", "context": {"cluster": "monopod", "user": "u"}}],
    });
    std::fs::write(
        cluster.data().join("kubeconfig/guest"),
        kubeconfig.to_string(),
    )
    .expect("written");
    let guest = |arguments: &[&str]| cluster.kubectl_as("guest", arguments, "");

    assert!(
        guest(&["get", "node", node]).success,
        "{}",
        guest(&["get", "node", node]).err
    );
    for (refused, arguments) in [
        ("cannot list", &["get", "nodes"][..]),
        ("forbidden", &["get", "secret", "-n", "guest", "other"]),
        ("forbidden", &["get", "environments"]),
        ("forbidden", &["get", "pods", "-A"]),
        (
            "metadata.labels: a fargate- node keeps",
            &[
                "label",
                "node",
                node,
                "eks.amazonaws.com/compute-type=ec2",
                "--overwrite",
            ],
        ),
        (
            "not allowed to modify taints",
            &["taint", "node", node, "eks.amazonaws.com/compute-type-"],
        ),
    ] {
        let output = guest(arguments);
        assert!(
            !output.success && output.err.contains(refused),
            "{arguments:?}: {}{}",
            output.out,
            output.err
        );
    }
    // The status it may write, but not room for more pods. (kubectl patch reads first, which it may not.)
    let mut own: Value =
        serde_json::from_str(&guest(&["get", "node", node, "-o", "json"]).out).expect("JSON");
    own["status"]["allocatable"]["pods"] = json!("9");
    own["status"]["capacity"]["pods"] = json!("9");
    let path = format!("/api/v1/nodes/{node}/status");
    let output = cluster.kubectl_as(
        "guest",
        &["replace", "--raw", &path, "-f", "-"],
        &own.to_string(),
    );
    assert!(
        !output.success && output.err.contains("room for exactly one pod"),
        "{}{}",
        output.out,
        output.err
    );
    let other = "fargate-ip-10-0-0-9.local-1.compute.internal";
    let asked = request(cluster, "guest", "stolen-by-guest", other);
    assert!(
        !asked.success && asked.err.contains("forbidden"),
        "{}",
        asked.err
    );
    // For its own name NodeRestriction lets it ask, and control does not give: the host makes its requests.
    assert!(request(cluster, "guest", "renewed-by-guest", node).success);
    cluster.wait_denied("renewed-by-guest");
    cluster.kubectl(&["delete", "namespace", "guest", "--wait=false"]);
}

/// A client that says who it is, or does not; prints what came of it. All control processes share the
/// port and have certificates of their own: it connects until it has seen as many, at most that often.
const ASK: &str = r#"
import http.client, os, ssl
context = ssl._create_unverified_context()
if "CERTIFICATE" in os.environ:
    context.load_cert_chain(os.environ["CERTIFICATE"], os.environ["KEY"])
asked = set()
for _ in range(100):
    if len(asked) == int(os.environ["PROCESSES"]):
        break
    try:
        client = http.client.HTTPSConnection("127.0.0.1", int(os.environ["PORT"]), timeout=10, context=context)
        client.connect()
        process = client.sock.getpeercert(binary_form=True)
        if process not in asked:
            client.request("POST", "/mutate", os.environ["REVIEW"], {"Content-Type": "application/json"})
            print("answered", client.getresponse().read().decode())
            asked.add(process)
        client.close()
    except ssl.SSLError as error:
        print("refused", error.reason)
        break
"#;

/// What each of so many control processes answers to a client that has a certificate, or none.
pub(crate) fn ask_webhook(
    cluster: &Cluster,
    processes: usize,
    client: Option<&str>,
    review: &Value,
) -> Vec<String> {
    let mut variables = vec![
        ("PORT", cluster.webhook_port().to_string()),
        ("PROCESSES", processes.to_string()),
        ("REVIEW", review.to_string()),
    ];
    if let Some(client) = client {
        let file = |end: &str| {
            cluster
                .data()
                .join(format!("pki/{client}.{end}"))
                .display()
                .to_string()
        };
        variables.extend([("CERTIFICATE", file("crt")), ("KEY", file("key"))]);
    }
    let variables: Vec<_> = variables
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    let told = cluster.python_with_sdk(ASK, &variables);
    told.lines().map(str::to_owned).collect()
}

/// Neither nobody nor another of the cluster is answered where the API server asks.
pub(crate) fn webhook(cluster: &Cluster) {
    let told = |client| ask_webhook(cluster, 1, client, &json!({}));
    let known = told(Some("apiserver-webhook"));
    assert!(
        known.len() == 1 && known[0].starts_with("answered"),
        "{known:?}"
    );
    for client in [None, Some("admin"), Some("host"), Some("apiserver-kubelet")] {
        let told = told(client);
        assert!(
            told.len() == 1 && told[0].starts_with("refused"),
            "{client:?}: {told:?}"
        );
    }
}
