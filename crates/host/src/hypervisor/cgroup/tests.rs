//! With directories in place of version 2, and with the groups of this machine.

use super::*;

/// Version 2 as a tree of directories: what each group offers. One without a file for what is
/// enabled refuses, as the kernel does where there are processes.
fn unified(groups: &[(&str, &str, bool)]) -> tempfile::TempDir {
    let top = tempfile::tempdir().unwrap();
    for (group, offered, takes) in groups {
        let group = top.path().join(group);
        std::fs::create_dir_all(&group).unwrap();
        std::fs::write(group.join("cgroup.controllers"), offered).unwrap();
        if *takes {
            std::fs::write(group.join("cgroup.subtree_control"), "memory pids\n").unwrap();
            std::fs::write(group.join("cgroup.type"), "domain\n").unwrap();
        }
    }
    top
}

fn hierarchy(top: &Path, own: &str) -> Hierarchy {
    Hierarchy {
        unified: true,
        top: top.to_owned(),
        own: top.join(own),
    }
}

const ALL: &str = "cpuset cpu io memory pids\n";

#[test]
fn version_2_takes_groups_at_the_nearest_that_has_no_processes() {
    let top = unified(&[
        ("", ALL, true),
        ("user", ALL, true),
        // There already, with its files, as the kernel makes them with the group.
        ("user/monopod", ALL, true),
        ("user/session", ALL, false),
    ]);
    let parent = unified_parent(&hierarchy(top.path(), "user/session")).unwrap();
    assert_eq!(parent, top.path().join("user/monopod"));
    for group in ["user", "user/monopod"] {
        let told = std::fs::read_to_string(top.path().join(group).join("cgroup.subtree_control"));
        // The others were enabled.
        assert_eq!(told.unwrap(), "+cpu", "{group}");
    }
    assert!(!top.path().join("monopod").exists(), "nothing further up");
}

#[test]
fn version_2_takes_groups_where_most_can_be_limited() {
    let top = unified(&[
        ("", ALL, true),
        ("monopod", ALL, true),
        ("user", "memory pids\n", true),
        ("user/monopod", "memory pids\n", true),
        ("user/session", "", true),
    ]);
    let hierarchy = hierarchy(top.path(), "user/session");
    assert_eq!(
        unified_parent(&hierarchy).unwrap(),
        top.path().join("monopod")
    );
    std::fs::remove_file(top.path().join("cgroup.subtree_control")).unwrap();
    assert_eq!(
        unified_parent(&hierarchy).unwrap(),
        top.path().join("user/monopod")
    );
}

#[test]
fn why_nothing_is_limited_is_said() {
    let top = unified(&[("", ALL, false), ("own", "", false)]);
    let cgroups = Cgroups::within(vec![hierarchy(top.path(), "own")]);
    assert_eq!(cgroups.limits().set, [""; 0]);
    let reason = cgroups.limits().reason.clone().unwrap();
    assert!(
        reason.starts_with("VMs are not limited in cpu, memory, threads: "),
        "{reason}"
    );
    assert!(reason.contains("/own: No such file"), "{reason}");
    let reason = Cgroups::within(Vec::new()).limits().reason.clone().unwrap();
    assert!(
        reason.ends_with("no control group here limits them"),
        "{reason}"
    );
}

/// On the machine itself: tests need root, and control groups as a host needs them.
#[tokio::test]
async fn groups_are_made_joined_and_removed() {
    let cgroups = Cgroups::find();
    assert_eq!(
        cgroups.limits().set,
        ["cpu", "memory", "threads"],
        "{:?}",
        cgroups.limits()
    );
    assert_eq!(cgroups.limits().reason, None);
    let group = cgroups.group(&format!("test-groups-{}", std::process::id()));
    assert!(
        group
            .directories()
            .iter()
            .all(|directory| !directory.exists())
    );
    let bounds = Bounds {
        memory_bytes: 64 << 20,
        threads: 16,
    };
    // Twice: what a VM that was never started left is in nobody's way.
    drop(group.open(bounds).unwrap());
    let lists = group.open(bounds).unwrap();
    let mut child = std::process::Command::new("cat")
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    for mut list in lists {
        std::io::Write::write_all(&mut list, child.id().to_string().as_bytes()).unwrap();
    }
    group.limit_cpu(500).unwrap();
    for directory in group.directories() {
        let processes = std::fs::read_to_string(directory.join("cgroup.procs")).unwrap();
        assert_eq!(processes.trim(), child.id().to_string());
    }
    let busy = group.remove_now().unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::ResourceBusy);
    // It waits for the end.
    let (removed, ended) = tokio::join!(group.remove(), async {
        drop(child.stdin.take());
        tokio::task::spawn_blocking(move || child.wait()).await
    });
    removed.unwrap();
    assert!(ended.unwrap().unwrap().success());
    assert!(
        group
            .directories()
            .iter()
            .all(|directory| !directory.exists())
    );
    group.remove().await.unwrap();
}

/// The group that holds them goes with the last, and comes again with the next.
#[test]
fn groups_come_and_go_at_the_same_time() {
    let cgroups = Cgroups::find();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let cgroups = &cgroups;
            scope.spawn(move || {
                for _ in 0..50 {
                    let name = format!("test-many-{}-{thread}", std::process::id());
                    let group = cgroups.group(&name);
                    group.make().unwrap();
                    group.remove_now().unwrap();
                }
            });
        }
    });
}
