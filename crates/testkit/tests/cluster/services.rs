//! Services, as upstream kube-proxy makes them in the VPC's namespace.

use crate::{START, namespace, python, python_pod};
use monopod_testkit::{Cluster, wait};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

const NAMESPACE: &str = "services";

/// Asks a URL some times and prints each answer, or the error's class.
fn ask(url: &str, times: u32) -> String {
    format!(
        "import urllib.request as u\nfor i in range({times}):\n  try: print(u.urlopen('{url}', timeout=5).read().decode().strip())\n  except OSError as e: print('!', getattr(e, 'reason', e))\n"
    )
}

/// What connecting to an address says in the client's pod, and the seconds until then.
fn refusal(cluster: &Cluster, address: &str) -> (String, f64) {
    let program = format!(
        "import socket, time\nstarted = time.monotonic()\ntry: socket.create_connection(('{address}', 80), 30)\nexcept OSError as e: print(e)\nprint(time.monotonic() - started)"
    );
    let printed = python(cluster, NAMESPACE, "client", &program);
    let (answer, took) = printed.trim().rsplit_once('\n').unwrap_or_default();
    (answer.to_owned(), took.parse().unwrap_or(f64::INFINITY))
}

fn service(name: &str, spec: &Value) -> Value {
    let mut object = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": "web"}]},
    });
    for (key, value) in spec.as_object().into_iter().flatten() {
        object["spec"][key] = value.clone();
    }
    object
}

pub(crate) fn cluster_ip(cluster: &Cluster) {
    cluster.load_test_image("python");
    namespace(cluster, NAMESPACE);
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "server", "namespace": NAMESPACE},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "server"}}, "template": {
            "metadata": {"labels": {"app": "server"}},
            "spec": {"terminationGracePeriodSeconds": 1, "containers": [{
                "name": "main", "image": "monopod.local/agnhost", "imagePullPolicy": "IfNotPresent",
                "args": ["netexec", "--http-port=8080"], "ports": [{"name": "web", "containerPort": 8080}],
                "readinessProbe": {"httpGet": {"path": "/hostname", "port": "web"}, "periodSeconds": 1},
            }]},
        }},
    }));
    cluster.apply(&service("plain", &json!({})));
    cluster.apply(&service("sticky", &json!({"sessionAffinity": "ClientIP"})));
    cluster.apply(&service("nobody", &json!({"selector": {"app": "none"}})));
    cluster.apply(&python_pod(NAMESPACE, "client"));
    cluster.wait_ready(NAMESPACE, "client", START);
    cluster.rollout(NAMESPACE, "deployment/server", Duration::from_mins(2));
    let servers: BTreeSet<String> = cluster
        .list(NAMESPACE, "pods")
        .iter()
        .filter(|pod| pod["metadata"]["labels"]["app"] == "server")
        .filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(servers.len(), 2);
    let ask_service = |pod: &str, name: &str, times| -> Vec<String> {
        let url = format!(
            "http://{}/hostname",
            cluster.service_address(NAMESPACE, name)
        );
        let printed = python(cluster, NAMESPACE, pod, &ask(&url, times));
        printed.lines().map(str::to_owned).collect()
    };
    wait("the service answers", Duration::from_mins(1), || {
        let answers = ask_service("client", "plain", 1);
        if servers.contains(&answers[0]) {
            Ok(())
        } else {
            Err(answers[0].clone())
        }
    });
    let answers: BTreeSet<String> = ask_service("client", "plain", 30).into_iter().collect();
    assert_eq!(
        answers, servers,
        "both pods answer behind one address, across VMs"
    );
    let answers: BTreeSet<String> = ask_service("client", "sticky", 20).into_iter().collect();
    assert_eq!(answers.len(), 1, "one client stays with one pod");
    assert!(answers.is_subset(&servers), "{answers:?}");

    // Refused at once, by the client's own clock: an emulated Python takes seconds to start.
    let (answer, took) = refusal(cluster, &cluster.service_address(NAMESPACE, "nobody"));
    assert!(
        answer.contains("refused"),
        "a service without pods refuses: {answer}"
    );
    assert!(took < 5.0, "after {took} s");

    // A pod reaches itself by its own service: no answer may be lost, whoever gives it.
    let url = format!("{}:80", cluster.service_address(NAMESPACE, "plain"));
    for server in &servers {
        let path = format!(
            "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do timeout 5 wget -qO- http://{url}/hostname || echo lost; echo; done"
        );
        let answers = cluster.kubectl(&["exec", "-n", NAMESPACE, server, "--", "sh", "-c", &path]);
        let answers: BTreeSet<&str> = answers.lines().filter(|line| !line.is_empty()).collect();
        assert!(answers.contains(server.as_str()), "itself: {answers:?}");
        assert!(!answers.contains("lost"), "{answers:?}");
    }
}

pub(crate) fn api_server(cluster: &Cluster) {
    let program = "import ssl, urllib.request as u, os\n\
        d = '/var/run/secrets/kubernetes.io/serviceaccount/'\n\
        c = ssl.create_default_context(cafile=d + 'ca.crt')\n\
        for host in (os.environ['KUBERNETES_SERVICE_HOST'], 'kubernetes.default.svc'):\n\
        \x20 r = u.Request('https://' + host + '/version', headers={'Authorization': 'Bearer ' + open(d + 'token').read()})\n\
        \x20 print(u.urlopen(r, context=c, timeout=10).read().decode())\n";
    // By address and by name; the certificate must be good for both.
    let answer = python(cluster, NAMESPACE, "client", program);
    assert_eq!(answer.matches("v1.37.2").count(), 2, "{answer}");
}
