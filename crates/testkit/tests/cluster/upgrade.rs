//! Another release takes over the pods that run, and gives them back.

use crate::lifecycle::{GONE, gone, vm_process};
use crate::{START, namespace, shell_pod};
use monopod_testkit::{Cluster, Release, wait};
use serde_json::{Value, json};
use std::net::TcpListener;

/// A pod that runs, and whose VM nothing ends.
struct Steady {
    name: &'static str,
    pod: Value,
    environment: Value,
    vm: i32,
}

impl Steady {
    fn start(cluster: &Cluster, name: &'static str) -> Self {
        cluster.apply(&shell_pod("upgraded", name, "sleep 100000"));
        let pod = cluster.wait_ready("upgraded", name, START);
        let environment = cluster.environment_of(&pod).expect("an environment");
        Self {
            name,
            vm: vm_process(cluster, &environment),
            pod,
            environment,
        }
    }

    fn check(&self, cluster: &Cluster) {
        let answered =
            cluster.kubectl(&["exec", "-n", "upgraded", self.name, "--", "echo", "alive"]);
        assert_eq!(answered, "alive\n");
        let now = cluster.wait_ready("upgraded", self.name, START);
        assert_eq!(now["metadata"]["uid"], self.pod["metadata"]["uid"]);
        assert_eq!(now["status"]["containerStatuses"][0]["restartCount"], 0);
        assert_eq!(
            vm_process(cluster, &self.environment),
            self.vm,
            "the same VM"
        );
    }

    /// The build of its guest's kernel.
    fn kernel(&self, cluster: &Cluster) -> String {
        cluster.kubectl(&["exec", "-n", "upgraded", self.name, "--", "uname", "-v"])
    }
}

fn down(cluster: &Cluster) {
    let output = cluster.monopod(&["down", "--keep-pods"]);
    assert!(output.success, "{}{}", output.out, output.err);
}

pub(crate) fn handed_over(cluster: &Cluster) {
    namespace(cluster, "upgraded");
    let old = Steady::start(cluster, "old");
    // A subnet is for new pods; those that have an address keep it.
    rename_subnet(cluster, "private-a", "mine");
    down(cluster);
    let status = cluster.monopod(&["status"]).out;
    assert!(
        !status.contains("PART") && status.contains("VMs may go on"),
        "{status}"
    );
    // Control cannot start, and the VM goes on still.
    let busy = TcpListener::bind(("127.0.0.1", cluster.admin_ports()[0])).expect("a free port");
    let failed = cluster.monopod(&["up"]);
    assert!(!failed.success, "{}", failed.out);
    drop(busy);
    let release = Release::new(cluster);
    cluster.bring_up_by(&release.program());
    old.check(cluster);
    assert!(
        cluster.get("", "subnet", "private-a").is_none(),
        "where there are subnets, none is made"
    );
    let new = Steady::start(cluster, "new");
    for (pod, others) in [(&old, false), (&new, true)] {
        let kernel = pod.kernel(cluster);
        assert_eq!(
            Release::has_kernel(&kernel),
            others,
            "{}: {kernel}",
            pod.name
        );
    }

    // The older one again, with a guest of each.
    down(cluster);
    cluster.bring_up();
    old.check(cluster);
    new.check(cluster);
    cluster.kubectl(&["delete", "pod", "-n", "upgraded", "old", "new"]);
    gone(cluster, &old.environment, GONE);
    gone(cluster, &new.environment, GONE);
    rename_subnet(cluster, "mine", "private-a");
    cluster.kubectl(&["delete", "namespace", "upgraded", "--wait=false"]);
}

fn rename_subnet(cluster: &Cluster, from: &str, to: &str) {
    let old = cluster.get("", "subnet", from).expect("there");
    cluster.kubectl(&["delete", "subnet", from]);
    let new = json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "Subnet",
        "metadata": {"name": to}, "spec": old["spec"],
    });
    // The API server's policies may know the old one for a moment.
    wait("the addresses are free", GONE, || {
        let output = cluster.try_apply(&new);
        output.success.then_some(()).ok_or(output.err)
    });
}
