use crate::lifecycle::vms;
use monopod_testkit::{Cluster, is_vm, process, processes_with};
use std::process::Command;

/// With a pod still running, `down` leaves no process, network namespace, tap, mount or table.
pub(crate) fn down(cluster: Cluster) {
    let (data, name) = (cluster.data().to_owned(), cluster.name().to_owned());
    let processes: Vec<i32> = vms(&cluster).iter().filter_map(process).collect();
    assert!(!processes.is_empty(), "a pod runs until now");
    let output = cluster.monopod(&["down"]);
    assert!(output.success, "{}{}", output.out, output.err);
    assert_eq!(processes_with(&data.display().to_string()), 0, "processes");
    for process in processes {
        assert!(!is_vm(process), "VM process {process}");
    }
    let namespaces = output_of("ip", &["netns", "list"]);
    assert!(!namespaces.contains(&name), "{namespaces}");
    let links = output_of("ip", &["-brief", "link"]);
    assert!(!links.contains(&name), "{links}");
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    assert!(!mounts.contains(&data.display().to_string()), "{mounts}");
    let tables = output_of("nft", &["list", "tables"]);
    assert!(!tables.contains(&name), "{tables}");
    assert!(!cluster.monopod(&["status"]).out.contains("PART"));
    drop(cluster);
}

fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .expect("runs");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
