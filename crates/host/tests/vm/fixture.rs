//! What each VM test needs, and its removal whatever happens.

use monopod_api::size::Size;
use monopod_host::hypervisor::qemu::{Qemu, QemuConfig};
use monopod_host::hypervisor::{Events, Hypervisor, Vm, VmEvent, VmSpec};
use monopod_host::network::{Api, Interface, Vpc};
use monopod_testkit::Room;
use monopod_wire::{Go, PodIdentity, Task};
use rand::RngCore;
use std::fs::Permissions;
use std::net::Ipv4Addr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest wait for any event. Booting takes 2 to 3 s on an idle machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// A directory of VMs that kills what is left in it.
pub(crate) struct Vms {
    /// Dropped before the directory that it is on.
    room: Option<Room>,
    directory: tempfile::TempDir,
    guest_image: tempfile::TempDir,
    network: Vpc,
}

impl Vms {
    /// VMs in which a shell script takes the node's place, once there is a task. It finds busybox at
    /// `/bin/busybox`, and can say something by [`POST`].
    pub(crate) fn with_node(network: &Network, script: &str) -> Self {
        let script = format!("{AWAIT_TASK}\n{POST}\n{script}");
        Self::new(network, &overlay("sbin/monopod-node", &script))
    }

    /// VMs that greet their host with these bytes, and say nothing more.
    pub(crate) fn that_greet(network: &Network, bytes: &[u8]) -> Self {
        let bytes: Vec<String> = bytes.iter().map(|byte| format!("\\0{byte:o}")).collect();
        let bytes = bytes.concat();
        let script = format!(
            r"
until port=$($B grep -lx {} /sys/class/virtio-ports/*/name); do $B usleep 10000; done
exec 3<>/dev/$($B basename ${{port%/name}})
$B printf %b '{bytes}' >&3
exec $B sleep 3600",
            monopod_wire::CONTROL_PORT
        );
        Self::new(network, &overlay("sbin/monopod-platform", &script))
    }

    /// VMs as they are.
    pub(crate) fn new(network: &Network, overlay: &[u8]) -> Self {
        let built = std::env::var_os("MONOPOD_GUEST_DIR")
            .map(PathBuf::from)
            .expect("MONOPOD_GUEST_DIR is not set: run these tests by `cargo xtask test`");
        let guest_image = tempfile::tempdir().unwrap();
        // The kernel unpacks archives one after another; later files replace earlier ones.
        let mut initramfs = std::fs::read(built.join("initramfs.cpio")).unwrap();
        initramfs.extend(overlay);
        std::fs::write(guest_image.path().join("initramfs.cpio"), initramfs).unwrap();
        for file in ["vmlinux", "preload.so"] {
            std::os::unix::fs::symlink(built.join(file), guest_image.path().join(file)).unwrap();
        }
        Self {
            room: None,
            directory: tempfile::tempdir().unwrap(),
            guest_image,
            network: network.vpc.clone(),
        }
    }

    /// Takes the process's number out of a VM's record.
    pub(crate) fn forget_process(&self, environment: &str) {
        let (path, mut record) = self.record(environment);
        assert!(record["process"].take().is_object());
        std::fs::write(path, record.to_string()).unwrap();
    }

    fn record(&self, environment: &str) -> (PathBuf, serde_json::Value) {
        let path = self.directory.path().join("vms").join(environment);
        let path = path.join("record.json");
        let record = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        (path, record)
    }

    /// The control groups of a VM, as its record has them.
    pub(crate) fn groups(&self, environment: &str) -> Vec<PathBuf> {
        let (_, record) = self.record(environment);
        let groups = record["groups"].as_array().unwrap().iter();
        groups.map(|group| group.as_str().unwrap().into()).collect()
    }

    /// Puts something else in the kernel's place.
    pub(crate) fn break_kernel(&self) {
        let kernel = self.guest_image.path().join("vmlinux");
        std::fs::remove_file(&kernel).unwrap();
        std::fs::write(kernel, "no kernel").unwrap();
    }

    /// As if the host process had ended just before it gave the VM to its environment.
    pub(crate) fn take_name_back(&self, environment: &str, vm: &str) {
        let at = |path: &str| self.directory.path().join(path);
        std::fs::rename(
            at(&format!("vms/{environment}")),
            at(&format!("spare/{vm}")),
        )
        .unwrap();
    }

    /// As if somebody had removed a VM's directory by hand.
    pub(crate) fn remove_directory(&self, environment: &str) {
        std::fs::remove_dir_all(self.directory.path().join("vms").join(environment)).unwrap();
    }

    /// As if the host were taken down.
    pub(crate) async fn down(&self) {
        let ended = monopod_host::end_vms(self.directory.path()).await;
        ended.unwrap();
    }

    /// The same of a VM without an environment.
    pub(crate) fn remove_spare(&self, vm: &str) {
        std::fs::remove_dir_all(self.directory.path().join("spare").join(vm)).unwrap();
    }

    /// Puts the directory on a file system of so many MiB.
    pub(crate) fn with_room(mut self, mib: u64) -> Self {
        self.room = Some(Room::new(self.directory.path(), mib));
        self
    }

    /// That file system.
    pub(crate) fn room(&self) -> &Room {
        self.room.as_ref().expect("it has one of its own")
    }

    /// Makes the record of a VM without an environment unreadable.
    pub(crate) fn break_record(&self, vm: &str) {
        let home = self.directory.path().join("spare").join(vm);
        std::fs::rename(home.join("record.json"), home.join("kept")).unwrap();
        std::fs::write(home.join("record.json"), "no record").unwrap();
    }

    /// Makes it readable again.
    pub(crate) fn mend_record(&self, vm: &str) {
        let home = self.directory.path().join("spare").join(vm);
        std::fs::rename(home.join("kept"), home.join("record.json")).unwrap();
    }

    /// VMs without an environment.
    pub(crate) fn spare(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.path().join("spare")).unwrap();
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
        entries.map(|entry| name(entry.unwrap())).collect()
    }

    /// Makes QEMU unable to use templates.
    pub(crate) fn break_templates(&self) {
        let library = self.guest_image.path().join("preload.so");
        std::fs::remove_file(&library).unwrap();
        std::fs::write(library, "no library").unwrap();
    }

    pub(crate) async fn hypervisor(&self) -> Qemu {
        self.with_pool(0).await
    }

    /// A hypervisor that keeps so many VMs ready.
    pub(crate) async fn with_pool(&self, pool: usize) -> Qemu {
        Qemu::new(QemuConfig {
            directory: self.directory.path().to_owned(),
            guest_image: self.guest_image.path().to_owned(),
            network: self.network.clone(),
            pool,
        })
        .await
        .unwrap()
    }
}

impl Drop for Vms {
    fn drop(&mut self) {
        let entries =
            ["vms", "spare"].map(|name| std::fs::read_dir(self.directory.path().join(name)));
        for entry in entries.into_iter().flatten().flatten().flatten() {
            let record = std::fs::read(entry.path().join("record.json")).unwrap_or_default();
            let record: serde_json::Value = serde_json::from_slice(&record).unwrap_or_default();
            let Some(pid) = record["process"]["pid"].as_u64() else {
                continue;
            };
            drop(Command::new("kill").args(["-9", &pid.to_string()]).status());
            let start = std::time::Instant::now();
            for group in record["groups"].as_array().into_iter().flatten() {
                let group = group.as_str().unwrap_or_default();
                // Its process takes a moment to end.
                while std::fs::remove_dir(group).is_err()
                    && Path::new(group).exists()
                    && start.elapsed() < Duration::from_secs(5)
                {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }
}

/// As the node does: it is started before the guest is told who it is.
const AWAIT_TASK: &str = r#"
until { /bin/busybox printf 'GET /v1/task HTTP/1.0\r\n\r\n'; /bin/busybox usleep 300000; } |
	/bin/busybox nc -w 30 169.254.170.2 80 2>/dev/null | /bin/busybox grep -q '"environment"'; do
	/bin/busybox usleep 100000
done"#;

/// How scripts say something, as a phase: `post NAME`.
const POST: &str = r#"
post() {
	body="{\"name\":\"$1\",\"timeNs\":0}"
	{ $B printf 'POST /v1/phase HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s' ${#body} "$body"; $B usleep 300000; } | $B nc -w 2 169.254.170.2 80
}"#;

/// Puts a script in the place of a program. `$B` is busybox there.
fn overlay(program: &str, script: &str) -> Vec<u8> {
    let root = tempfile::tempdir().unwrap();
    for directory in ["bin", "sbin"] {
        std::fs::create_dir(root.path().join(directory)).unwrap();
    }
    let busybox = Path::new("/bin/busybox");
    std::fs::copy(busybox, root.path().join("bin/busybox"))
        .expect("these tests need the Debian package busybox-static");
    let program = root.path().join(program);
    std::fs::write(
        &program,
        format!("#!/bin/busybox sh\nB=/bin/busybox\n{script}\n"),
    )
    .unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let output = Command::new("sh")
        .args(["-c", "find . | cpio --quiet -o -H newc"])
        .current_dir(root.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

/// A VPC of one test, on this machine, with interfaces and a firewall.
pub(crate) struct Network {
    vpc: Vpc,
}

impl Network {
    /// `number` tells the tests' networks apart.
    pub(crate) async fn new(number: u8) -> Self {
        let vpc = Vpc {
            name: format!("vt{number}"),
            api: Api::Link {
                address: Ipv4Addr::new(100, 65, number, 1),
                inner: Ipv4Addr::new(100, 65, number, 2),
            },
            underlay: None,
            api_port: 6443,
            cidr: format!("10.213.{number}.0/24").parse().unwrap(),
            services: "10.96.0.0/16".parse().unwrap(),
        };
        monopod_host::network::remove(&vpc).await.unwrap();
        monopod_host::network::ensure(&vpc).await.unwrap();
        Self { vpc }
    }

    pub(crate) fn address(&self, last: u8) -> Ipv4Addr {
        let [a, b, c, _] = self.vpc.cidr.addr().octets();
        Ipv4Addr::new(a, b, c, last)
    }

    /// Links in the VPC's namespace.
    pub(crate) fn devices(&self) -> Vec<String> {
        let arguments = ["-n", &self.vpc.namespace(), "-brief", "link"];
        let output = Command::new("ip").args(arguments).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let mut names: Vec<String> = text
            .lines()
            .filter_map(|line| Some(line.split([' ', '@']).next()?.to_owned()))
            .collect();
        names.sort();
        names
    }

    /// Gives a VM the interface of an address.
    pub(crate) async fn plug(&self, vm: &impl Vm, address: Ipv4Addr) {
        let interface = Interface {
            address,
            gateway: self.address(1),
        };
        monopod_host::network::plug(&self.vpc, &interface, vm.id())
            .await
            .unwrap();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for arguments in [
            ["link", "delete", &format!("{}-api", self.vpc.name)],
            ["netns", "delete", &self.vpc.namespace()],
        ] {
            // The test may have failed before it made them.
            drop(Command::new("ip").args(arguments).output());
        }
    }
}

pub(crate) fn spec(environment: &str) -> VmSpec {
    VmSpec {
        environment: environment.into(),
        size: Size {
            cpu_millis: 250,
            memory_mib: 512,
        },
        scratch_bytes: 1 << 30,
    }
}

pub(crate) fn go(environment: &str, address: Ipv4Addr) -> Go {
    let mut seed = [0; 32];
    rand::rng().fill_bytes(&mut seed);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    Go {
        seed: hex::encode(seed),
        time_ns: u64::try_from(now.as_nanos()).unwrap(),
        task: Task {
            environment: environment.into(),
            pod: PodIdentity::default(),
            node: monopod_api::names::node(address, "local-1"),
            hostname: monopod_api::names::hostname(address, "local-1"),
            region: "local-1".into(),
            zone: "local-1a".into(),
            host: "host-1".into(),
            provider_id: String::new(),
            api_server: "https://100.64.0.1:6443".into(),
            cluster_dns: Ipv4Addr::new(10, 100, 0, 10),
            cluster_domain: "cluster.local".into(),
            kubernetes_version: monopod_api::KUBERNETES_VERSION.into(),
            cpu_millis: 250,
            memory_mib: 512,
            scratch_bytes: 1 << 30,
            interface: Interface {
                address,
                gateway: {
                    let [a, b, c, _] = address.octets();
                    Ipv4Addr::new(a, b, c, 1)
                },
            }
            .as_told(),
        },
    }
}

/// Waits for an event, passing over others.
pub(crate) async fn until<T>(events: &mut Events, wanted: impl Fn(&VmEvent) -> Option<T>) -> T {
    let mut passed = Vec::new();
    let found = tokio::time::timeout(PATIENCE, async {
        loop {
            let event = events.recv().await?;
            if let Some(found) = wanted(&event) {
                return Some(found);
            }
            passed.push(event);
        }
    });
    match found.await.ok().flatten() {
        Some(found) => found,
        None => {
            panic!("no such event within {PATIENCE:?}, or none any more; passed over {passed:?}")
        }
    }
}

pub(crate) fn is(wanted: VmEvent) -> impl Fn(&VmEvent) -> Option<()> {
    move |event| (*event == wanted).then_some(())
}

/// The directories in `/proc` of a VM's processes.
pub(crate) fn processes(vm: &str) -> Vec<PathBuf> {
    let word = format!("guest={vm}");
    let is_ours = |process: &PathBuf| {
        let arguments = std::fs::read(process.join("cmdline")).unwrap_or_default();
        arguments
            .split(|&byte| byte == 0)
            .any(|argument| argument == word.as_bytes())
    };
    let entries = std::fs::read_dir("/proc").unwrap();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(is_ours)
        .collect()
}

/// Kills a VM's process.
pub(crate) fn kill(vm: &str) {
    let [process] = processes(vm).try_into().unwrap();
    let pid = process.file_name().unwrap();
    let killed = Command::new("kill").arg("-9").arg(pid).status().unwrap();
    assert!(killed.success());
}

/// What the file of this size that a VM has open takes on this machine.
pub(crate) fn disk_mib(vm: &str, bytes: u64) -> u64 {
    let [process] = processes(vm).try_into().unwrap();
    let open = std::fs::read_dir(process.join("fd")).unwrap();
    let files = open.filter_map(|entry| entry.unwrap().path().metadata().ok());
    let disk = files.filter(|meta| meta.is_file() && meta.len() == bytes);
    (disk.map(|meta| meta.blocks() * 512).next().unwrap()) >> 20
}

/// Discards the last VM.
pub(crate) async fn discard(hypervisor: &Qemu, vm: &impl Vm, environment: &str) {
    discard_one(hypervisor, vm, environment).await;
    assert_eq!(hypervisor.list().unwrap(), Vec::<String>::new());
}

pub(crate) async fn discard_one(hypervisor: &Qemu, vm: &impl Vm, environment: &str) {
    hypervisor.discard(environment).await.unwrap();
    assert_eq!(processes(vm.id()), Vec::<PathBuf>::new());
}
