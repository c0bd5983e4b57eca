use monopod_testkit::{Cluster, recorded, running};

/// With pods still running, `down` leaves no process, control group, network namespace, tap, mount or table. Not even of
/// a VM whose directory somebody removed.
pub(crate) fn down(cluster: Cluster) {
    let site = cluster.site();
    let vms = recorded(&site);
    assert!(!running().is_disjoint(&vms), "a pod runs until now");
    let directories = cluster.data().join("host/vms");
    let mut directories = std::fs::read_dir(directories).expect("VMs");
    let one = directories.next().expect("a VM").expect("a directory");
    std::fs::remove_dir_all(one.path()).expect("removed");
    let output = cluster.monopod(&["down"]);
    assert!(output.success, "{}{}", output.out, output.err);
    let left = site.left_after_down(&vms);
    assert!(left.is_empty(), "{left:?}");
    assert!(!cluster.monopod(&["status"]).out.contains("PART"));
    drop(cluster);
}
