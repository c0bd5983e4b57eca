use crate::{START, event_messages, namespace, shell_pod};
use monopod_testkit::{Cluster, Registry, wait};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

fn archive(name: &str) -> PathBuf {
    let dist = std::env::var_os("MONOPOD_DIST").expect("set");
    Path::new(&dist).join(format!("images/{name}.tar"))
}

fn pod(namespace: &str, name: &str, image: &str, policy: &str) -> Value {
    let mut pod = shell_pod(namespace, name, "sleep 1000");
    pod["spec"]["containers"][0]["image"] = json!(image);
    pod["spec"]["containers"][0]["imagePullPolicy"] = json!(policy);
    pod
}

fn pull_secret(namespace: &str, name: &str, host: &str, password: &str) -> Value {
    let config = json!({"auths": {host: {"username": "right", "password": password}}}).to_string();
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace},
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": config},
    })
}

/// Waits until a pod's container waits for a reason, and gives the message.
fn wait_waiting(cluster: &Cluster, namespace: &str, name: &str, reason: &str) -> String {
    wait(&format!("{name} waits: {reason}"), START, || {
        let pod = cluster.get(namespace, "pod", name).unwrap_or_default();
        let waiting = pod["status"]["containerStatuses"][0]["state"]["waiting"].clone();
        if waiting["reason"] == reason {
            Ok(waiting["message"].as_str().unwrap_or_default().to_owned())
        } else {
            Err(pod["status"].to_string())
        }
    })
}

/// A public image: its events, its id, its state in the environment, and the second pod's use of it.
pub(crate) fn public(cluster: &Cluster) {
    namespace(cluster, "public");
    let registry = Registry::start(cluster.registry_ports()[0], false);
    let digest = registry.push(&archive("busybox"), "team/busybox", "1");
    let image = format!("{}/team/busybox:1", registry.host());
    cluster.apply(&pod("public", "first", &image, "IfNotPresent"));
    let first = cluster.wait_ready("public", "first", START);
    let id = &first["status"]["containerStatuses"][0]["imageID"];
    assert_eq!(*id, format!("{}/team/busybox@{digest}", registry.host()));
    let pulling = event_messages(cluster, "public", "first", "Pulling");
    assert_eq!(pulling[0], format!("Pulling image \"{image}\""));
    let pulled = event_messages(cluster, "public", "first", "Pulled").remove(0);
    assert!(
        pulled.starts_with(&format!("Successfully pulled image \"{image}\" in "))
            && pulled.contains(" including waiting). Image size: "),
        "{pulled}"
    );
    let environment = cluster.environment_of(&first).expect("an environment");
    assert_eq!(environment["status"]["images"][0]["state"], "Present");
    assert_eq!(
        environment["spec"]["images"][0]["pullPolicy"],
        "IfNotPresent"
    );
    let listed = cluster.monopod(&["image", "ls"]).out;
    assert!(
        listed
            .lines()
            .any(|line| line.contains(&image) && line.contains("pulled")),
        "{listed}"
    );
    // The registry is gone; what anybody may have is here.
    drop(registry);
    cluster.apply(&pod("public", "second", &image, "IfNotPresent"));
    cluster.wait_ready("public", "second", START);
    assert_eq!(
        event_messages(cluster, "public", "second", "Pulled"),
        [format!(
            "Container image \"{image}\" already present on machine"
        )]
    );
    // Whoever wants to know what the tag means now must wait for the registry.
    cluster.apply(&pod("public", "always", &image, "Always"));
    let message = wait_waiting(cluster, "public", "always", "ErrImagePull");
    assert!(message.contains("cannot be reached"), "{message}");
    cluster.apply(&pod("public", "never", &format!("{image}-none"), "Never"));
    let message = wait_waiting(cluster, "public", "never", "ErrImageNeverPull");
    assert_eq!(
        message,
        format!("Container image \"{image}-none\" is not present with pull policy of Never")
    );
    cluster.kubectl(&["delete", "namespace", "public", "--wait=false"]);
}

/// The pod's own secrets: missing, wrong, corrected; and that the store is no way around them.
pub(crate) fn private(cluster: &Cluster) {
    namespace(cluster, "private");
    let registry = Registry::start(cluster.registry_ports()[1], true);
    let host = registry.host();
    registry.push(&archive("busybox"), "busybox", "1");
    let image = format!("{host}/busybox:1");
    let mut with_secret = pod("private", "heals", &image, "IfNotPresent");
    with_secret["spec"]["imagePullSecrets"] = json!([{"name": "missing"}, {"name": "key"}]);
    cluster.apply(&pull_secret("private", "key", &host, "wrong"));
    cluster.apply(&with_secret);
    let message = wait_waiting(cluster, "private", "heals", "ErrImagePull");
    assert!(
        message.contains("401 Unauthorized: unauthorized: authentication required"),
        "{message}"
    );
    assert_eq!(
        event_messages(
            cluster,
            "private",
            "heals",
            "FailedToRetrieveImagePullSecret"
        ),
        [
            "Unable to retrieve some image pull secrets (missing); attempting to pull the image may not succeed."
        ]
    );
    wait_waiting(cluster, "private", "heals", "ImagePullBackOff");
    assert!(!event_messages(cluster, "private", "heals", "BackOff").is_empty());
    let status = cluster.monopod(&["status"]).out;
    assert!(status.contains("401 Unauthorized"), "{status}");
    cluster.apply(&pull_secret("private", "key", &host, "right"));
    cluster.wait_ready("private", "heals", START);
    // In the store now, and still not for everybody.
    cluster.apply(&pod("private", "without", &image, "IfNotPresent"));
    let message = wait_waiting(cluster, "private", "without", "ErrImagePull");
    assert!(message.contains("401 Unauthorized"), "{message}");
    cluster.apply(&pod("private", "never", &image, "Never"));
    let message = wait_waiting(cluster, "private", "never", "ErrImageNeverPull");
    assert!(
        message.contains("does not have the proper credentials"),
        "{message}"
    );
    // What the host was given goes with the pod.
    let given = || cluster.list("monopod-host-host-1", "secrets");
    assert!(!given().is_empty());
    cluster.kubectl(&["delete", "namespace", "private", "--wait=false"]);
    wait("the credentials are gone", Duration::from_mins(1), || {
        let given = given();
        if given.is_empty() {
            Ok(())
        } else {
            Err(format!("{} are left", given.len()))
        }
    });
}

/// The role's credentials pull for pods that have none, and neither pod, node nor another host's
/// user can read them.
pub(crate) fn role(cluster: &Cluster) {
    let registry = Registry::start(cluster.registry_ports()[1], true);
    let host = registry.host();
    registry.push(&archive("busybox"), "roles/busybox", "1");
    for name in ["platform", "roles"] {
        cluster
            .apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}));
    }
    cluster.apply(&pull_secret("platform", "registry", &host, "right"));
    cluster.apply(&json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "PodExecutionRole", "metadata": {"name": "puller"},
        "spec": {"imagePullSecrets": [{"namespace": "platform", "name": "registry"}]},
    }));
    cluster.apply(&json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "FargateProfile", "metadata": {"name": "fp-roles"},
        "spec": {"podExecutionRole": "puller", "selectors": [{"namespace": "roles"}]},
    }));
    wait("the profile is ACTIVE", Duration::from_secs(10), || {
        let profile = cluster
            .get("", "fargateprofile", "fp-roles")
            .unwrap_or_default();
        if profile["status"]["status"] == "ACTIVE" {
            Ok(())
        } else {
            Err(profile.to_string())
        }
    });
    wait(
        "the service account is there",
        Duration::from_secs(10),
        || {
            cluster
                .get("roles", "serviceaccount", "default")
                .map(drop)
                .ok_or_else(String::new)
        },
    );
    let image = format!("{host}/roles/busybox:1");
    cluster.apply(&pod("roles", "plain", &image, "Always"));
    let plain = cluster.wait_ready("roles", "plain", START);
    assert!(event_messages(cluster, "roles", "plain", "Failed").is_empty());
    let environment = cluster.environment_of(&plain).expect("an environment");
    let name = environment["metadata"]["name"].as_str().expect("a name");
    let node = environment["spec"]["node"].as_str().expect("a node");
    out_of_reach(cluster, name, node);
    // Nobody else writes there, and nothing runs there that could mount it.
    let output = cluster.try_apply(&pull_secret(OWN, "smuggled", &host, "x"));
    assert!(
        output.err.contains("only Monopod's control writes secrets"),
        "{}",
        output.err
    );
    let output = cluster.try_apply(&pod(OWN, "smuggled", &image, "Always"));
    assert!(
        output.err.contains("pods do not run in a host's namespace"),
        "{}",
        output.err
    );
    cluster.kubectl(&["delete", "namespace", "roles", "platform", "--wait=false"]);
}

/// The namespace of what is addressed to the test cluster's host.
const OWN: &str = "monopod-host-host-1";

/// Who reads the role's secret, and what the host was given of it.
fn out_of_reach(cluster: &Cluster, environment: &str, node: &str) {
    let list = |user: &str, of: &[&str]| {
        cluster.kubectl_as(user, &[&["get", "secrets", "-o", "name"], of].concat(), "")
    };
    let own = list("host", &["-n", OWN]).out;
    assert!(
        own.contains(&format!("secret/{environment}\n")),
        "the host's own: {own}"
    );
    for (user, of) in [
        ("host", ["-n", "platform"].as_slice()),
        ("control", &["--all-namespaces"]),
    ] {
        let listed = list(user, of);
        assert!(
            listed.err.contains("forbidden"),
            "{user} {of:?}: {}",
            listed.out
        );
    }
    for (namespace, secret) in [("platform", "registry"), (OWN, environment)] {
        // The pod's own token, and its node's certificate.
        let account = "system:serviceaccount:roles:default";
        let output = cluster.try_kubectl(&[
            "auth", "can-i", "get", "secrets", "-n", namespace, "--as", account,
        ]);
        assert!(output.out.starts_with("no"), "{}", output.out);
        let user = format!("system:node:{node}");
        let output = cluster.try_kubectl(&[
            "get",
            "secret",
            "-n",
            namespace,
            secret,
            "--as",
            &user,
            "--as-group",
            "system:nodes",
            "--as-group",
            "system:authenticated",
        ]);
        assert!(
            !output.success && output.err.contains("forbidden"),
            "{}{}",
            output.out,
            output.err
        );
    }
}
