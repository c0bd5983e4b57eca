//! VMs that are clones of one template: what differs between them, and what none of them can change.

use crate::fixture::{self, Network, Vms, until};
use monopod_host::hypervisor::{Events, Hypervisor, Vm, VmEvent};
use monopod_wire::{GuestMessage, HostMessage};
use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Posts what must differ between any two guests.
const SCRIPT: &str = r#"
random() { $B head -c 32 /dev/$1 | $B sha256sum | $B cut -c 1-32; }
post "random=$(random random)"
post "urandom=$(random urandom)"
post "boot-id=$($B cat /proc/sys/kernel/random/boot_id)"
post "uuid=$($B cat /proc/sys/kernel/random/uuid)"
post "hostname=$($B hostname)"
post "mac=$($B cat /sys/class/net/eni0/address 2>/dev/null || $B ip link show eni0 | $B sed -n 's/.*ether \([0-9a-f:]*\).*/\1/p')"
post done=
exec $B sleep 3600
"#;

struct Clone {
    vm: monopod_host::hypervisor::qemu::QemuVm,
    events: Events,
    environment: String,
}

async fn start(
    hypervisor: &impl Hypervisor<Vm = monopod_host::hypervisor::qemu::QemuVm>,
    network: &Network,
    number: u8,
) -> Clone {
    let environment = format!("env-clone-{number}");
    let (vm, events) = hypervisor.start(fixture::spec(&environment)).await.unwrap();
    network.plug(&vm, network.address(20 + number)).await;
    Clone {
        vm,
        events,
        environment,
    }
}

/// What the script posted, and the error of the guest's clock.
async fn go(clone: &mut Clone, network: &Network, number: u8) -> BTreeMap<String, String> {
    let go = fixture::go(&clone.environment, network.address(20 + number));
    let before = now();
    clone.vm.send(HostMessage::Go(Box::new(go))).unwrap();
    let guest = until(&mut clone.events, |event| match event {
        VmEvent::Guest(GuestMessage::Phase(phase)) if phase.name == "go" => Some(phase.time_ns),
        _ => None,
    })
    .await;
    let guest = Duration::from_nanos(guest);
    let tolerance = Duration::from_millis(100);
    assert!(
        before < guest + tolerance && guest < now() + tolerance,
        "the guest's clock is wrong: {before:?} {guest:?}"
    );
    let mut posted = BTreeMap::new();
    loop {
        let (name, value) = until(&mut clone.events, |event| match event {
            VmEvent::Guest(GuestMessage::Phase(phase)) => {
                let (name, value) = phase.name.split_once('=')?;
                Some((name.to_owned(), value.to_owned()))
            }
            _ => None,
        })
        .await;
        if name == "done" {
            return posted;
        }
        posted.insert(name, value);
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}

fn arguments(vm: &str) -> String {
    let [process] = fixture::processes(vm).try_into().unwrap();
    String::from_utf8_lossy(&std::fs::read(process.join("cmdline")).unwrap()).replace('\0', " ")
}

#[tokio::test]
async fn clones_differ_in_everything_that_must_differ() {
    let network = Network::new(8).await;
    let vms = Vms::with_node(&network, SCRIPT);
    let hypervisor = vms.hypervisor().await;
    // At once: one template serves both.
    let (mut first, mut second) = tokio::join!(
        start(&hypervisor, &network, 1),
        start(&hypervisor, &network, 2)
    );
    for clone in [&first, &second] {
        assert!(arguments(clone.vm.id()).contains("-incoming defer"));
    }
    let (one, other) = tokio::join!(go(&mut first, &network, 1), go(&mut second, &network, 2));
    let names = ["boot-id", "hostname", "mac", "random", "urandom", "uuid"];
    for name in names {
        assert!(!one[name].is_empty(), "{name} is empty");
        assert_ne!(one[name], other[name], "{name} is the same");
    }
    assert_eq!(one["mac"], monopod_api::names::mac(network.address(21)));
    assert_eq!(other["mac"], monopod_api::names::mac(network.address(22)));

    nobody_writes_to_the_template(first.vm.id());
    for clone in [first, second] {
        fixture::discard_one(&hypervisor, &clone.vm, &clone.environment).await;
    }
    assert_eq!(hypervisor.list().unwrap(), Vec::<String>::new());
}

/// With the rights of the VM's process, and with the descriptor that it holds.
fn nobody_writes_to_the_template(vm: &str) {
    let [process] = fixture::processes(vm).try_into().unwrap();
    let memory = memory(&process);
    for (number, flags) in &memory {
        assert_eq!(flags & 0o3, 0, "descriptor {number} can be written to");
    }
    let number = memory.first().unwrap().0.clone();
    let path = process.join("fd").join(number);
    let meta = path.metadata().unwrap();
    assert_eq!((meta.uid(), meta.permissions().mode() & 0o777), (0, 0o600));

    let status = std::fs::read_to_string(process.join("status")).unwrap();
    let uid = status
        .lines()
        .find_map(|line| line.strip_prefix("Uid:\t"))
        .and_then(|ids| ids.split('\t').next())
        .unwrap();
    let attempt = |script: &str| {
        Command::new("setpriv")
            .args(["--reuid", uid, "--regid", uid, "--clear-groups"])
            .args(["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"])
            .args(["sh", "-c", script])
            .stdin(std::fs::File::open(&path).unwrap())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap()
            .success()
    };
    assert!(attempt("head -c 4096 > /dev/null"), "it can be read");
    for script in [
        "exec 3<> /proc/self/fd/0",
        "exec 3> /proc/self/fd/0",
        "exec 3>> /proc/self/fd/0",
        "echo x >&0",
        "truncate -s 0 /proc/self/fd/0",
        "fallocate --punch-hole --offset 0 --length 4096 /proc/self/fd/0",
        "chmod 666 /proc/self/fd/0",
    ] {
        assert!(!attempt(script), "{script} works");
    }
}

/// Descriptors of the guest's memory with the flags that they were opened with.
fn memory(process: &Path) -> Vec<(String, u32)> {
    let size = 512 << 20;
    let open = std::fs::read_dir(process.join("fd")).unwrap();
    let found: Vec<(String, u32)> = open
        .map(|entry| entry.unwrap().path())
        .filter(|path: &PathBuf| {
            path.metadata()
                .is_ok_and(|m| m.is_file() && m.len() == size)
        })
        .map(|path| {
            let number = path.file_name().unwrap().to_str().unwrap().to_owned();
            let info = std::fs::read_to_string(process.join("fdinfo").join(&number)).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
            let flags = u32::from_str_radix(flags.unwrap().trim(), 8).unwrap();
            (number, flags)
        })
        .collect();
    assert!(!found.is_empty(), "the guest's memory is no file");
    found
}

#[tokio::test]
async fn without_a_template_a_vm_is_booted() {
    let network = Network::new(9).await;
    let vms = Vms::with_node(&network, SCRIPT);
    let hypervisor = vms.hypervisor().await;
    vms.break_templates();
    let mut clone = start(&hypervisor, &network, 1).await;
    assert!(arguments(clone.vm.id()).contains("-kernel"));
    go(&mut clone, &network, 1).await;
    fixture::discard(&hypervisor, &clone.vm, &clone.environment).await;
}
