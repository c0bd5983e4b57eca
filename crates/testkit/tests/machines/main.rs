//! A cluster of two machines, one of which is a network namespace at a switch with this one.

mod certificates;
mod hosts;
mod placement;

use monopod_testkit::{
    Check, Cluster, Machine, Switch, kill, number, part, recorded, run, running, wait,
};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A VM's start on two busy cores under emulation, and the probe for KVM before the first.
const START: Duration = Duration::from_mins(2);
/// The host that joins.
const SECOND: &str = "host-2";
/// Among the numbers of this suite's clusters.
const OFFSET: u8 = 1;

const CHECKS: &[Check] = &[
    ("machines::a_machine_joins_once_with_its_token", joins),
    ("machines::pods_of_two_machines_are_in_one_vpc", one_vpc),
    (
        "machines::pods_are_placed_by_zone_and_by_what_others_allow",
        placement::spreads,
    ),
    (
        "machines::certificates_rotate_under_running_pods",
        certificates::rotate,
    ),
    ("machines::a_machine_that_restarts_keeps_its_pods", restarts),
    (
        "machines::a_machine_is_drained_removed_and_let_back_in",
        hosts::drained,
    ),
    (
        "machines::a_machine_that_is_gone_is_forgotten",
        hosts::forgotten,
    ),
];

/// The second machine, for all checks.
static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

fn main() -> ExitCode {
    let switch = Switch::new(number(OFFSET));
    let address = switch.address();
    let up = || {
        Cluster::up_with(
            number(OFFSET),
            &[
                "--underlay",
                &address,
                "--disable",
                "coredns",
                "--certificate-lifetime",
                &format!("{}s", certificates::LIFETIME.as_secs()),
            ],
        )
    };
    let last = (
        "machines::down_leaves_nothing_of_a_machine",
        down as fn(Cluster),
    );
    if run(up, CHECKS, last) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn second() -> MutexGuard<'static, Option<Machine>> {
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn joins(cluster: &Cluster) {
    let machine = Machine::new(number(OFFSET), 2, cluster.program());
    let token = cluster.token(SECOND);
    for wrong in ["", "abc", &token[..token.len() / 2]] {
        let output = machine.join(wrong);
        assert!(
            !output.success && output.err.contains("monopod host token NAME"),
            "{}",
            output.err
        );
    }
    // A zone of its own, where pods can be once it has a subnet.
    let output = machine.join_with(&token, &["--zone", "local-1b"]);
    assert!(output.success, "{}{}", output.out, output.err);
    let vpc = cluster.get("", "vpc", "default").expect("the VPC");
    let cidr = vpc["spec"]["cidr"].as_str().expect("its addresses");
    cluster.apply(&json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "Subnet", "metadata": {"name": "private-b"},
        "spec": {"cidr": cidr.replace(".0.0/16", ".16.0/20"), "zone": "local-1b"},
    }));
    let host = wait("the host takes VMs", START, || {
        let host = cluster.get("", "host", SECOND).ok_or("no Host")?;
        if host["status"]["ready"] == true {
            Ok(host)
        } else {
            Err(host["status"].to_string())
        }
    });
    assert_eq!(host["spec"]["address"], machine.address());

    // The token is worth one certificate, to whoever has it.
    let thief = Machine::new(number(OFFSET), 3, cluster.program());
    let output = thief.join(&token);
    assert!(
        !output.success && output.err.contains("the token was used"),
        "{}",
        output.err
    );
    drop(thief);
    // And to the one who has it, nothing but that.
    let kubeconfig = machine.data().join("kubeconfig/host");
    let flag = format!("--kubeconfig={}", kubeconfig.display());
    let server = format!("--server=https://{}:6443", address_of(cluster));
    for what in [["get", "pods", "-A"], ["get", "secrets", "-A"]] {
        let output = cluster.try_kubectl(&[&[flag.as_str(), &server], &what[..]].concat());
        assert!(
            !output.success && output.err.contains("Forbidden"),
            "{what:?}: {}",
            output.err
        );
    }
    *second() = Some(machine);
}

fn address_of(cluster: &Cluster) -> String {
    let host = cluster.get("", "host", "host-1").expect("the first host");
    host["spec"]["address"]
        .as_str()
        .expect("an address")
        .to_owned()
}

/// A pod that is placed while only one host takes new ones.
fn pod_on(cluster: &Cluster, host: &str, name: &str) -> Value {
    for other in ["host-1", SECOND] {
        let cordoned = json!({"spec": {"unschedulable": other != host}}).to_string();
        cluster.kubectl(&["patch", "host", other, "--type=merge", "-p", &cordoned]);
    }
    let script = "mkdir /w && echo from $HOSTNAME > /w/index.html && exec httpd -f -p 8080 -h /w";
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "monopod.local/busybox", "command": ["sh", "-c", script]}],
        },
    }));
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]},
    }));
    let pod = cluster.wait_ready("default", name, START);
    let environment = cluster.environment_of(&pod).expect("its environment");
    assert_eq!(environment["spec"]["host"], host);
    pod
}

/// What a pod gets from an address.
fn fetch(cluster: &Cluster, from: &str, address: &str) -> Result<String, String> {
    // Debian's busybox ends badly with wget's own limit of time.
    let script = format!("printf 'GET /index.html HTTP/1.0\\r\\n\\r\\n' | timeout 5 nc {address}");
    let output = cluster.try_kubectl(&["exec", from, "--", "sh", "-c", &script]);
    if output.out.contains("from ") {
        Ok(output.out)
    } else {
        Err(format!("{}{}", output.out, output.err))
    }
}

fn one_vpc(cluster: &Cluster) {
    let pods = [("host-1", "one"), (SECOND, "two")].map(|(host, name)| {
        let pod = pod_on(cluster, host, name);
        (
            name,
            pod["status"]["podIP"]
                .as_str()
                .expect("an address")
                .to_owned(),
        )
    });
    for [(from, _), (to, address)] in [[&pods[0], &pods[1]], [&pods[1], &pods[0]]] {
        let answer =
            fetch(cluster, from, &format!("{address} 8080")).expect("reached by its address");
        assert!(answer.contains(&format!("from {to}")), "{answer}");
        let service = cluster.service_address("default", to);
        wait("reached by its service", Duration::from_mins(1), || {
            fetch(cluster, from, &format!("{service} 80"))
        });
    }
    // The API server's own address, from the machine that it is not on.
    let kubernetes = cluster.service_address("default", "kubernetes");
    let script = format!("timeout 5 nc {kubernetes} 443 </dev/null && echo reached");
    let output = cluster.try_kubectl(&["exec", "two", "--", "sh", "-c", &script]);
    assert!(
        output.out.contains("reached"),
        "{}{}",
        output.out,
        output.err
    );
    // A finished pod's logs are the host's to give.
    cluster.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ends", "namespace": "default"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "monopod.local/busybox", "command": ["echo", "last words"]}],
        },
    }));
    let pod = cluster.wait_phase("default", "ends", "Succeeded", START);
    let environment = cluster.environment_of(&pod).expect("its environment");
    assert_eq!(environment["spec"]["host"], SECOND);
    wait("its VM is gone", START, || {
        let environment = cluster.environment_of(&pod).ok_or("no environment")?;
        if environment["status"]["phase"] == "Finished" {
            Ok(())
        } else {
            Err(environment["status"].to_string())
        }
    });
    assert_eq!(cluster.kubectl(&["logs", "ends"]), "last words\n");
    cluster.kubectl(&["delete", "pod", "ends"]);
}

fn restarts(cluster: &Cluster) {
    let before = cluster.wait_ready("default", "two", START);
    let guard = second();
    let machine = guard.as_ref().expect("joined");
    let host = || part(&machine.monopod(&["status", "-o", "json"]), "host");
    let pid = host()["pid"].as_i64().and_then(|pid| pid.try_into().ok());
    let pid: i32 = pid.expect("it runs");
    kill(pid);
    wait("another process serves the host", START, || {
        let host = host();
        if host["pid"].as_i64() != Some(pid.into()) && host["ready"] == true {
            Ok(())
        } else {
            Err(host.to_string())
        }
    });
    assert_eq!(
        cluster.kubectl(&["exec", "two", "--", "echo", "alive"]),
        "alive\n"
    );
    let after = cluster.wait_ready("default", "two", START);
    assert_eq!(after["metadata"]["uid"], before["metadata"]["uid"]);
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
}

/// With a pod still running, `down` leaves no process, network namespace, link, mount or table.
fn down(cluster: Cluster) {
    cluster.kubectl(&["delete", "pod", "--all", "--timeout=60s"]);
    let machine = second().take().expect("joined");
    pod_on(&cluster, SECOND, "until-the-end");
    let site = machine.site();
    let vms = recorded(&site);
    assert!(!running().is_disjoint(&vms), "a VM runs until now");
    let output = machine.monopod(&["down"]);
    assert!(output.success, "{}{}", output.out, output.err);
    let left = site.left_after_down(&vms);
    assert!(left.is_empty(), "{left:?}");
    drop(machine);
    drop(cluster);
}
