//! What the process of a real VM may do, and what it takes of the machine. That the jail holds
//! whatever is in it is shown beside it, in `hypervisor/jail/tests`.

use crate::fixture::{self, Network, Vms, is, until};
use monopod_host::hypervisor::{Hypervisor, HypervisorError, Vm, VmEvent};
use monopod_wire::{GuestMessage, HostMessage};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Uses all the CPU time that there is.
const BUSY: &str = "while :; do :; done & while :; do :; done";

#[tokio::test]
async fn a_vms_process_has_what_it_needs_and_takes_what_it_may() {
    let network = Network::new(11).await;
    let vms = Vms::with_node(&network, BUSY);
    let hypervisor = vms.hypervisor().await;
    let address = network.address(28);
    let (vm, mut events) = hypervisor.start(fixture::spec("env-jail")).await.unwrap();
    network.plug(&vm, address).await;
    let go = fixture::go("env-jail", address);
    vm.send(HostMessage::Go(Box::new(go))).unwrap();
    until(&mut events, |event| match event {
        VmEvent::Guest(GuestMessage::Phase(phase)) => (phase.name == "disk").then_some(()),
        _ => None,
    })
    .await;
    let [process] = fixture::processes(vm.id()).try_into().unwrap();
    rights(&process);
    root(&process);
    descriptors(&process);
    let groups = vms.groups("env-jail");
    assert!(!groups.is_empty(), "{:?}", hypervisor.limits());
    member(&process, &groups);

    // Unlimited for its start, then by whichever host process is there.
    let before = share(&vm, Duration::from_secs(2));
    assert!(before > 0.3, "{before}");
    drop((vm, events, hypervisor));
    let hypervisor = vms.hypervisor().await;
    let (vm, mut events) = hypervisor.adopt("env-jail").await.unwrap().unwrap();
    vm.limit_cpu(250).unwrap();
    let after = share(&vm, Duration::from_secs(10));
    assert!(after < 0.275, "{after}");

    fixture::kill(vm.id());
    until(&mut events, is(VmEvent::Exited)).await;
    fixture::discard(&hypervisor, &vm, "env-jail").await;
    assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
}

/// Every thread's, as each has its own.
fn rights(process: &Path) {
    for thread in std::fs::read_dir(process.join("task")).unwrap() {
        let status = std::fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        let field = |name: &str| {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        for ids in [field("Uid:"), field("Gid:")] {
            assert!(
                ids.split(' ')
                    .all(|id| id.parse::<u32>().unwrap() >= 1 << 30),
                "{ids}"
            );
        }
        assert_eq!(field("Groups:"), "");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(field(set), "0".repeat(16), "{set}");
        }
        assert_eq!(
            (field("NoNewPrivs:"), field("Seccomp:")),
            ("1".into(), "2".into())
        );
        // Two of ours, and QEMU's own.
        assert_eq!(field("Seccomp_filters:"), "3");
    }
    for namespace in ["mnt", "net", "ipc", "uts", "pid"] {
        let of = |process: &Path| std::fs::read_link(process.join("ns").join(namespace)).unwrap();
        assert_ne!(of(process), of(Path::new("/proc/self")), "{namespace}");
    }
    let status = std::fs::read_to_string(process.join("status")).unwrap();
    let numbers = status
        .lines()
        .find(|line| line.starts_with("NSpid:"))
        .unwrap();
    assert!(numbers.ends_with("\t1"), "{numbers}");
    let limits = std::fs::read_to_string(process.join("limits")).unwrap();
    for (limit, value) in [
        ("Max core file size", "0"),
        ("Max open files", "256"),
        ("Max locked memory", "0"),
        ("Max file size", "1073741824"),
    ] {
        let line = limits
            .lines()
            .find_map(|line| line.strip_prefix(limit))
            .unwrap();
        let values: Vec<_> = line.split_whitespace().take(2).collect();
        assert_eq!(values, [value, value], "{limit}");
    }
    let environment = std::fs::read_to_string(process.join("environ")).unwrap();
    let names = environment
        .split_terminator('\0')
        .map(|variable| variable.split_once('=').unwrap().0);
    let names: BTreeSet<_> = names.collect();
    assert_eq!(names, BTreeSet::from(["LD_LIBRARY_PATH", "LD_PRELOAD"]));
}

fn root(process: &Path) {
    let root = process.join("root");
    let mut programs = Vec::new();
    let mut directories = vec![root.clone()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let within = Path::new("/").join(path.strip_prefix(&root).unwrap());
            if path.is_dir() {
                if within != Path::new("/proc") {
                    directories.push(path);
                }
            } else {
                programs.push(within);
            }
        }
    }
    let is_ours = |path: &&PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        let library = name.contains(".so");
        let firmware =
            path.starts_with("/usr/share/qemu") || path.starts_with("/usr/share/seabios");
        let qemu = **path == Path::new("/usr/bin/qemu-system-x86_64");
        library || firmware || qemu || **path == Path::new("/dev/null")
    };
    let (ours, others): (Vec<_>, Vec<_>) = programs.iter().partition(is_ours);
    assert_eq!(others, Vec::<&PathBuf>::new());
    assert!(ours.len() > 3);
    let mounts = std::fs::read_to_string(process.join("mounts")).unwrap();
    let mounts: Vec<(&str, &str)> = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .map(|fields| (fields[1], &fields[3][..2]))
        .collect();
    assert_eq!(
        mounts,
        [
            ("/", "ro"),
            ("/proc", "ro"),
            ("/dev", "ro"),
            ("/dev/null", "rw")
        ]
    );
}

/// The template's memory, the scratch disk, the tap, sockets, the pipe for errors, the library, and
/// what QEMU makes itself.
fn descriptors(process: &Path) {
    let mut kinds = BTreeSet::new();
    for entry in std::fs::read_dir(process.join("fd")).unwrap() {
        let path = entry.unwrap().path();
        let (Ok(target), Ok(meta)) = (std::fs::read_link(&path), path.metadata()) else {
            continue;
        };
        let text = target.display().to_string();
        let kind = text
            .split_once(":[")
            .map_or(text.as_str(), |(kind, _)| kind);
        let name = target.file_name().unwrap().to_str().unwrap();
        kinds.insert(match kind {
            "socket" | "anon_inode" | "/dev/null" | "/dev/net/tun" => kind.to_owned(),
            kind if kind.starts_with("anon_inode:") => "anon_inode".to_owned(),
            // Files without a name are told apart by their sizes.
            kind if kind.ends_with("(deleted)") && meta.len() == 1 << 30 => "scratch".to_owned(),
            kind if kind.ends_with("(deleted)") && meta.len() == 512 << 20 => "memory".to_owned(),
            _file => name.to_owned(),
        });
    }
    let allowed = [
        "socket",
        "anon_inode",
        "/dev/null",
        "/dev/net/tun",
        "scratch",
        "memory",
        "errors",
        "preload.so",
    ];
    let unknown: Vec<_> = kinds
        .iter()
        .filter(|kind| !allowed.contains(&kind.as_str()))
        .collect();
    assert_eq!(unknown, Vec::<&String>::new());
    assert!(
        kinds.contains("scratch") && kinds.contains("/dev/net/tun"),
        "{kinds:?}"
    );
}

fn member(process: &Path, groups: &[PathBuf]) {
    let number = process.file_name().unwrap().to_str().unwrap();
    for group in groups {
        let members = std::fs::read_to_string(group.join("cgroup.procs")).unwrap();
        assert_eq!(members.trim(), number, "{}", group.display());
    }
}

/// CPU time that a VM takes in some time, in CPUs.
fn share(vm: &impl Vm, time: Duration) -> f64 {
    let used = || vm.usage().unwrap().cpu_time.as_secs_f64();
    let (start, before) = (Instant::now(), used());
    std::thread::sleep(time);
    (used() - before) / start.elapsed().as_secs_f64()
}

#[tokio::test]
async fn a_vm_that_does_not_start_says_why_and_leaves_nothing() {
    let network = Network::new(12).await;
    let vms = Vms::with_node(&network, "");
    vms.break_kernel();
    let hypervisor = vms.hypervisor().await;
    let spec = fixture::spec("env-broken");
    let failure = hypervisor.start(spec).await.unwrap_err();
    let HypervisorError::Program { message, .. } = &failure else {
        panic!("{failure:?}");
    };
    assert!(message.contains("kernel"), "{message}");
    assert_eq!(hypervisor.list().unwrap(), Vec::<String>::new());
    assert_eq!(vms.spare(), Vec::<String>::new());
}
