//! The OCI runtime configuration of a container.
//!
//! seccomp is not applied: libcontainer is built without libseccomp. `RuntimeDefault` and
//! `Unconfined` are the same here; what keeps a pod from its neighbours is its VM.

use monopod_core::pod::identity::Identity;
use monopod_core::pod::resources::Limits;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// What containerd grants unless a pod says otherwise.
const DEFAULT_CAPABILITIES: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// Every capability of Linux, for `ALL`.
const ALL_CAPABILITIES: [&str; 41] = [
    "AUDIT_CONTROL",
    "AUDIT_READ",
    "AUDIT_WRITE",
    "BLOCK_SUSPEND",
    "BPF",
    "CHECKPOINT_RESTORE",
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "IPC_LOCK",
    "IPC_OWNER",
    "KILL",
    "LEASE",
    "LINUX_IMMUTABLE",
    "MAC_ADMIN",
    "MAC_OVERRIDE",
    "MKNOD",
    "NET_ADMIN",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_RAW",
    "PERFMON",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYSLOG",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_CHROOT",
    "SYS_MODULE",
    "SYS_NICE",
    "SYS_PACCT",
    "SYS_PTRACE",
    "SYS_RAWIO",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "WAKE_ALARM",
];

const MASKED: [&str; 11] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];

/// A directory or file of the VM that the container sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    /// Path in the container.
    pub(crate) destination: PathBuf,
    /// Path in the VM.
    pub(crate) source: PathBuf,
    /// Whether the container cannot write to it.
    pub(crate) read_only: bool,
}

/// What a container's processes may become, and see of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Privileges {
    /// Set-user-id programs gain nothing.
    NoNew,
    /// What containers have.
    Usual,
    /// Nothing of the kernel is kept from it but devices.
    All,
}

/// Everything that a container is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Mounted root file system in the VM.
    pub(crate) root: PathBuf,
    /// Whether the container cannot write to its root.
    pub(crate) read_only_root: bool,
    /// Program and arguments.
    pub(crate) arguments: Vec<String>,
    /// Variables.
    pub(crate) variables: BTreeMap<String, String>,
    /// Working directory.
    pub(crate) directory: String,
    /// Whether it has a terminal.
    pub(crate) terminal: bool,
    /// User and groups.
    pub(crate) identity: Identity,
    /// Capabilities, without `CAP_`.
    pub(crate) capabilities: BTreeSet<String>,
    /// What its processes may become, and see of the kernel.
    pub(crate) privileges: Privileges,
    /// Host name.
    pub(crate) hostname: String,
    /// Path of the network namespace.
    pub(crate) network: PathBuf,
    /// Path of the pod's IPC namespace.
    pub(crate) ipc: PathBuf,
    /// Path of the pod's PID namespace; none if the container has one of its own.
    pub(crate) pids: Option<PathBuf>,
    /// Path of the cgroup below the hierarchy's root.
    pub(crate) cgroup: String,
    /// Limits.
    pub(crate) limits: Limits,
    /// Directory in the VM that is `/dev/shm` of all the pod's containers.
    pub(crate) shared_memory: PathBuf,
    /// Kernel parameters of the pod's namespaces.
    pub(crate) sysctls: BTreeMap<String, String>,
    /// Further mounts.
    pub(crate) mounts: Vec<Mount>,
}

/// The granted capabilities: containerd's, with what the pod adds and drops.
pub(crate) fn capabilities(add: &[String], drop: &[String]) -> BTreeSet<String> {
    let plain = |name: &String| {
        let name = name.to_ascii_uppercase();
        name.strip_prefix("CAP_").map(str::to_owned).unwrap_or(name)
    };
    let is_all = |list: &[String]| list.iter().any(|name| plain(name) == "ALL");
    let owned =
        |list: &[&str]| -> BTreeSet<String> { list.iter().map(|&n| n.to_owned()).collect() };
    let mut granted = if is_all(add) {
        owned(&ALL_CAPABILITIES)
    } else if is_all(drop) {
        BTreeSet::new()
    } else {
        owned(&DEFAULT_CAPABILITIES)
    };
    let known = |name: &String| ALL_CAPABILITIES.contains(&name.as_str());
    granted.extend(add.iter().map(plain).filter(known));
    for name in drop.iter().map(plain) {
        granted.remove(&name);
    }
    granted
}

impl Plan {
    /// The `config.json` of the container's bundle.
    pub(crate) fn config(&self) -> Value {
        let pids = match &self.pids {
            Some(path) => json!({"type": "pid", "path": path}),
            None => json!({"type": "pid"}),
        };
        let unless_privileged = |paths: &'static [&'static str]| {
            if self.privileges == Privileges::All {
                &[][..]
            } else {
                paths
            }
        };
        json!({
            "ociVersion": "1.2.0",
            "process": self.process(),
            "root": {"path": self.root, "readonly": self.read_only_root},
            "hostname": self.hostname,
            "mounts": self.mount_list(),
            "linux": {
                "cgroupsPath": self.cgroup,
                "namespaces": [
                    pids,
                    {"type": "mount"},
                    {"type": "uts"},
                    {"type": "cgroup"},
                    {"type": "ipc", "path": self.ipc},
                    {"type": "network", "path": self.network},
                ],
                "resources": self.resources(),
                "sysctl": self.sysctls,
                "maskedPaths": unless_privileged(&MASKED),
                "readonlyPaths": unless_privileged(&READ_ONLY),
            },
        })
    }

    /// The container's process, and the model for commands executed in it.
    pub(crate) fn process(&self) -> Value {
        let granted: Vec<String> = self
            .capabilities
            .iter()
            .map(|name| format!("CAP_{name}"))
            .collect();
        let variables: Vec<String> = self
            .variables
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        // What EKS Fargate's containers have.
        let limit = |kind: &str| json!({"type": kind, "soft": 1024, "hard": 65535});
        let mut process = json!({
            "terminal": self.terminal,
            "user": {
                "uid": self.identity.uid,
                "gid": self.identity.gid,
                "additionalGids": self.identity.groups,
            },
            "args": self.arguments,
            "env": variables,
            "cwd": self.directory,
            "capabilities": {"bounding": granted, "effective": granted, "permitted": granted},
            "rlimits": [limit("RLIMIT_NOFILE"), limit("RLIMIT_NPROC")],
        });
        if self.privileges == Privileges::NoNew {
            process["noNewPrivileges"] = json!(true);
        }
        process
    }

    fn mount_list(&self) -> Vec<Value> {
        let access = match self.privileges {
            Privileges::All => "rw",
            Privileges::NoNew | Privileges::Usual => "ro",
        };
        let mount = |destination: &str, kind: &str, source: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": source, "options": options});
        let mut list = vec![
            mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount(
                "/dev",
                "tmpfs",
                "tmpfs",
                &["nosuid", "strictatime", "mode=755", "size=65536k"],
            ),
            mount(
                "/dev/pts",
                "devpts",
                "devpts",
                &[
                    "nosuid",
                    "noexec",
                    "newinstance",
                    "ptmxmode=0666",
                    "mode=0620",
                    "gid=5",
                ],
            ),
            mount(
                "/dev/mqueue",
                "mqueue",
                "mqueue",
                &["nosuid", "noexec", "nodev"],
            ),
            mount(
                "/sys",
                "sysfs",
                "sysfs",
                &["nosuid", "noexec", "nodev", access],
            ),
            mount(
                "/sys/fs/cgroup",
                "cgroup",
                "cgroup",
                &["nosuid", "noexec", "nodev", "relatime", access],
            ),
            json!({
                "destination": "/dev/shm", "type": "bind", "source": self.shared_memory,
                "options": ["rbind", "rw"],
            }),
        ];
        let mut own: Vec<_> = self.mounts.iter().collect();
        // A mount below another one must come after it.
        own.sort_by_key(|mount| mount.destination.components().count());
        list.extend(own.into_iter().map(|mount| {
            let access = if mount.read_only { "ro" } else { "rw" };
            json!({
                "destination": mount.destination, "type": "bind", "source": mount.source,
                "options": ["rbind", "rprivate", access],
            })
        }));
        list
    }

    fn resources(&self) -> Value {
        // Memory that runs out ends the whole container, as under a kubelet, never half of it.
        let mut resources = json!({"unified": {"memory.oom.group": "1"}});
        let mut cpu = json!({});
        if let Some(quota) = self.limits.quota() {
            cpu["quota"] = json!(quota);
            cpu["period"] = json!(Limits::period());
        }
        if let Some(shares) = self.limits.shares() {
            cpu["shares"] = json!(shares);
        }
        if cpu != json!({}) {
            resources["cpu"] = cpu;
        }
        if let Some(bytes) = self.limits.memory_bytes {
            resources["memory"] = json!({"limit": i64::try_from(bytes).unwrap_or(i64::MAX)});
        }
        resources
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan {
            root: "/run/scratch/c/c-0/root".into(),
            read_only_root: true,
            arguments: vec!["/bin/sh".to_owned()],
            variables: BTreeMap::from([("A".to_owned(), "1".to_owned())]),
            directory: "/".to_owned(),
            terminal: false,
            identity: Identity {
                uid: 101,
                gid: 102,
                groups: vec![102, 200],
            },
            capabilities: capabilities(&[], &["all".to_owned()]),
            privileges: Privileges::NoNew,
            hostname: "p".to_owned(),
            network: "/run/netns/workload".into(),
            ipc: "/run/ns/ipc".into(),
            pids: None,
            cgroup: "/pod/c-0".to_owned(),
            limits: Limits {
                cpu_millis: Some(250),
                cpu_share_millis: Some(100),
                memory_bytes: Some(64 << 20),
            },
            shared_memory: "/run/monopod/shm".into(),
            sysctls: BTreeMap::new(),
            mounts: vec![
                Mount {
                    destination: "/data/deep".into(),
                    source: "/v/b".into(),
                    read_only: false,
                },
                Mount {
                    destination: "/data".into(),
                    source: "/v/a".into(),
                    read_only: true,
                },
            ],
        }
    }

    #[test]
    fn libcontainer_reads_what_was_meant() {
        let spec: oci_spec::runtime::Spec = serde_json::from_value(plan().config()).unwrap();
        let process = spec.process().as_ref().unwrap();
        assert_eq!(process.user().uid(), 101);
        assert_eq!(
            process.user().additional_gids().as_deref(),
            Some(&[102, 200][..])
        );
        assert_eq!(process.no_new_privileges(), Some(true));
        let capabilities = process.capabilities().as_ref().unwrap();
        assert!(capabilities.effective().as_ref().unwrap().is_empty());
        assert_eq!(
            capabilities
                .inheritable()
                .as_ref()
                .map(std::collections::HashSet::len),
            None
        );
        assert_eq!(
            capabilities
                .ambient()
                .as_ref()
                .map(std::collections::HashSet::len),
            None
        );
        let linux = spec.linux().as_ref().unwrap();
        let resources = linux.resources().as_ref().unwrap();
        assert_eq!(resources.cpu().as_ref().unwrap().quota(), Some(25_000));
        assert_eq!(resources.memory().as_ref().unwrap().limit(), Some(64 << 20));
        let destinations: Vec<_> = spec
            .mounts()
            .as_ref()
            .unwrap()
            .iter()
            .map(|mount| mount.destination().display().to_string())
            .collect();
        assert!(destinations.ends_with(&["/data".to_owned(), "/data/deep".to_owned()]));
    }

    #[test]
    fn a_privileged_container_sees_the_kernel_and_a_sharing_one_its_pods_processes() {
        let text = |plan: Plan| plan.config()["linux"].to_string();
        let plain = text(plan());
        assert!(plain.contains("/proc/kcore") && plain.contains(r#"{"type":"pid"}"#));
        let privileged = Plan {
            privileges: Privileges::All,
            pids: Some("/run/ns/pid".into()),
            ..plan()
        };
        let sys = privileged.config()["mounts"][4].clone();
        assert_eq!(
            (&sys["destination"], &sys["options"][3]),
            (&json!("/sys"), &json!("rw"))
        );
        let linux = text(privileged);
        assert!(
            !linux.contains("/proc/") && linux.contains("/run/ns/pid"),
            "{linux}"
        );
    }

    #[test]
    fn capabilities_add_and_drop() {
        let list = |names: &[&str]| names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>();
        assert_eq!(capabilities(&[], &[]).len(), 14);
        let got = capabilities(&list(&["cap_net_admin"]), &list(&["ALL"]));
        assert_eq!(got, BTreeSet::from(["NET_ADMIN".to_owned()]));
        assert!(!capabilities(&[], &list(&["CAP_MKNOD"])).contains("MKNOD"));
        assert_eq!(capabilities(&list(&["ALL"]), &list(&["KILL"])).len(), 40);
        assert!(!capabilities(&list(&["NONSENSE"]), &[]).contains("NONSENSE"));
    }
}
