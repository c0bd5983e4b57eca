use monopod_testkit::{Cluster, recorded, running};

/// With a pod still running, `down` leaves no process, network namespace, tap, mount or table.
pub(crate) fn down(cluster: Cluster) {
    let site = cluster.site();
    let vms = recorded(&site);
    assert!(!running().is_disjoint(&vms), "a pod runs until now");
    let output = cluster.monopod(&["down"]);
    assert!(output.success, "{}{}", output.out, output.err);
    let left = site.left_after_down(&vms);
    assert!(left.is_empty(), "{left:?}");
    assert!(!cluster.monopod(&["status"]).out.contains("PART"));
    drop(cluster);
}
