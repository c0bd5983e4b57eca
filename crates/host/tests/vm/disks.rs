//! Disks: images that are attached before and after GO, and the scratch disk.

use crate::fixture::{self, Network, Vms, is, until};
use monopod_host::hypervisor::{Hypervisor, HypervisorError, IMAGE_SLOTS, Vm, VmEvent};
use monopod_wire::{GuestMessage, HostMessage, HostTime};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Posts what `/name` in each image says, and the scratch disk's size in MiB.
const SCRIPT: &str = r#"
disk() { for d in /sys/block/vd*; do [ "$($B cat $d/serial)" = $1 ] && echo /dev/${d##*/}; done; }
image() {
	$B mkdir -p /tmp/$1
	# The last slot is empty until the host hears of the first.
	until $B mount -t squashfs -o ro $(disk $1) /tmp/$1 2>/dev/null; do $B blockdev --flushbufs $(disk $1); $B usleep 100000; done
	post "$1=$($B cat /tmp/$1/name)"
}
image image-0
image image-7
post "writable=$($B touch /tmp/image-0/x 2>/dev/null && echo yes || echo no)"
$B dd if=/dev/zero of=/run/scratch/x bs=1M count=100 2>/dev/null && $B sync && $B rm /run/scratch/x && $B sync
post "scratch=$($B df -m /run/scratch | $B tail -n 1 | $B tr -s ' ' | $B cut -d ' ' -f 2)"
exec $B sleep 3600
"#;

fn image(directory: &Path, name: &str) -> PathBuf {
    let content = directory.join(name);
    std::fs::create_dir(&content).unwrap();
    std::fs::write(content.join("name"), name).unwrap();
    let file = directory.join(format!("{name}.squashfs"));
    let output = Command::new("mksquashfs")
        .arg(&content)
        .arg(&file)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    file
}

#[tokio::test]
async fn images_appear_in_slots_at_any_time() {
    let network = Network::new(4).await;
    let vms = Vms::with_node(&network, SCRIPT);
    let hypervisor = vms.hypervisor().await;
    let address = network.address(23);
    let images = tempfile::tempdir().unwrap();
    let (first, last) = (image(images.path(), "first"), image(images.path(), "last"));
    let (mut vm, mut events) = hypervisor.start(fixture::spec("env-disks")).await.unwrap();
    network.plug(&vm, address).await;
    assert_eq!(vm.attach(0, &first).await.unwrap(), "image-0");
    assert_eq!(vm.attach(0, &first).await.unwrap(), "image-0");
    for (slot, other) in [(0, &last), (IMAGE_SLOTS, &last)] {
        let refused = vm.attach(slot, other).await;
        assert!(
            matches!(refused, Err(HypervisorError::Slot { .. })),
            "{refused:?}"
        );
    }
    vm.send(HostMessage::Go(Box::new(fixture::go("env-disks", address))))
        .unwrap();
    until(&mut events, posted("image-0=first")).await;

    // By the next host process.
    drop((vm, events));
    let (mut vm, mut events) = hypervisor.adopt("env-disks").await.unwrap().unwrap();
    assert_eq!(vm.attached(), [(0, first)]);
    assert_eq!(vm.attach(7, &last).await.unwrap(), "image-7");
    until(&mut events, posted("image-7=last")).await;
    until(&mut events, posted("writable=no")).await;
    // 1 GiB less what ext4 keeps for itself.
    until(&mut events, |event| {
        size(event).filter(|mib| (900..1024).contains(mib))
    })
    .await;
    assert!(
        fixture::disk_mib(vm.id(), 1 << 30) < 100,
        "deleted files were not given back"
    );
    fixture::kill(vm.id());
    until(&mut events, is(VmEvent::Exited)).await;
    fixture::discard(&hypervisor, &vm, "env-disks").await;
}

/// Writes more than there is room for. Says what time it is, asks the host, and says it again.
const FILL: &str = r#"
$B dd if=/dev/zero of=/run/scratch/x bs=1M count=100 conv=fsync 2>/dev/null
post "written=$?"
post "clock=$($B date +%s)"
{ $B printf 'POST /v1/report HTTP/1.0\r\nContent-Length: 13\r\n\r\n{"values":{}}'; $B usleep 300000; } | $B nc -w 2 169.254.170.2 80
while $B usleep 500000; do post "clock=$($B date +%s)"; done
"#;

/// A machine without room halts a VM that writes, and breaks nothing in it. Its clock stood still.
#[tokio::test]
async fn a_vm_whose_disk_has_no_room_waits_and_goes_on() {
    let network = Network::new(14).await;
    let vms = Vms::with_node(&network, FILL).with_room(1024);
    let hypervisor = vms.hypervisor().await;
    let address = network.address(23);
    let (mut vm, mut events) = hypervisor.start(fixture::spec("env-full")).await.unwrap();
    network.plug(&vm, address).await;
    assert!(!vm.unhalt().await.unwrap(), "it runs");
    vms.room().leave(30 << 20);
    vm.send(HostMessage::Go(Box::new(fixture::go("env-full", address))))
        .unwrap();
    for _twice in 0..2 {
        let halted = async {
            while !vm.unhalt().await.unwrap() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let halted = tokio::time::timeout(Duration::from_secs(90), halted);
        halted.await.expect("it is halted");
    }
    // A clock that is this much behind is one that a user would see.
    tokio::time::sleep(Duration::from_secs(5)).await;
    vms.room().free();
    // Blocks of a removed file are free once the journal is written: it may be halted once more.
    let goes_on = async {
        loop {
            vm.unhalt().await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        () = until(&mut events, posted("written=0")) => {}
        () = goes_on => {}
    }
    let wrong = Duration::from_secs(3);
    let behind = until(&mut events, clock_behind).await;
    assert!(behind >= wrong, "it was not halted: {behind:?}");
    let number = until(&mut events, report).await;
    let time_ns = fixture::go("env-full", address).time_ns;
    let answer = HostTime { time_ns, number };
    vm.send(HostMessage::Time(answer)).unwrap();
    let right = |behind: &Duration| *behind < wrong;
    until(&mut events, |event| clock_behind(event).filter(right)).await;
    fixture::discard(&hypervisor, &vm, "env-full").await;
}

fn posted(name: &str) -> impl Fn(&VmEvent) -> Option<()> {
    move |event| match event {
        VmEvent::Guest(GuestMessage::Phase(phase)) if phase.name == name => Some(()),
        _ => None,
    }
}

/// How far the clock is behind that a script said.
fn clock_behind(event: &VmEvent) -> Option<Duration> {
    match event {
        VmEvent::Guest(GuestMessage::Phase(phase)) => {
            let said = Duration::from_secs(phase.name.strip_prefix("clock=")?.parse().ok()?);
            let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
            Some(now.saturating_sub(said))
        }
        _ => None,
    }
}

/// The number of a report.
fn report(event: &VmEvent) -> Option<u64> {
    match event {
        VmEvent::Guest(GuestMessage::Report(report)) => Some(report.number),
        _ => None,
    }
}

fn size(event: &VmEvent) -> Option<u64> {
    match event {
        VmEvent::Guest(GuestMessage::Phase(phase)) => {
            phase.name.strip_prefix("scratch=")?.parse().ok()
        }
        _ => None,
    }
}
