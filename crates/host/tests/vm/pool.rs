//! VMs that are ready before they are needed.

use crate::fixture::{self, Network, Vms, until};
use monopod_host::hypervisor::qemu::Qemu;
use monopod_host::hypervisor::{Hypervisor, Vm, VmEvent};
use monopod_wire::{GuestMessage, HostMessage};
use std::time::{Duration, Instant};

/// As long as a rehearsal may take, after the template was made.
const PATIENCE: Duration = Duration::from_mins(3);

async fn waiting(hypervisor: &Qemu, count: usize) {
    wait(|| hypervisor.waiting() == count).await;
}

async fn wait(reached: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_vm_that_rehearsed_is_as_good_as_new() {
    let network = Network::new(10).await;
    let vms = Vms::new(&network, &[]);
    let hypervisor = vms.with_pool(1).await;
    // Nobody asked for anything yet.
    assert_eq!(hypervisor.waiting(), 0);
    let (first, _events) = hypervisor.start(fixture::spec("env-first")).await.unwrap();
    waiting(&hypervisor, 1).await;
    let spare = vms.spare();
    let (second, mut events) = hypervisor.start(fixture::spec("env-second")).await.unwrap();
    assert_eq!(spare, [second.id()]);
    let address = network.address(23);
    network.plug(&second, address).await;
    let go = fixture::go("env-second", address);
    second.send(HostMessage::Go(Box::new(go))).unwrap();
    // The interface, the disk and everything else can be had once more.
    until(&mut events, |event| match event {
        VmEvent::Guest(GuestMessage::Ended(ended)) => panic!("the guest ended: {ended:?}"),
        VmEvent::Guest(GuestMessage::Phase(phase)) => (phase.name == "disk").then_some(()),
        _ => None,
    })
    .await;
    // And again; the next host process ends what waits.
    waiting(&hypervisor, 1).await;
    drop(hypervisor);
    let hypervisor = vms.hypervisor().await;
    assert_eq!(vms.spare(), Vec::<String>::new());
    for (vm, environment) in [(first, "env-first"), (second, "env-second")] {
        fixture::discard_one(&hypervisor, &vm, environment).await;
    }
    assert_eq!(network.devices(), ["api0", "lo"]);
}

#[tokio::test]
async fn a_vm_that_cannot_be_removed_goes_later() {
    let network = Network::new(16).await;
    let vms = Vms::new(&network, &[]);
    let hypervisor = vms.with_pool(1).await;
    let (first, _events) = hypervisor.start(fixture::spec("env-first")).await.unwrap();
    waiting(&hypervisor, 1).await;
    let [waits] = vms.spare().try_into().unwrap();
    vms.break_record(&waits);
    fixture::kill(&waits);
    // The pod gets another VM.
    let (second, _events) = hypervisor.start(fixture::spec("env-second")).await.unwrap();
    assert_ne!(second.id(), waits);
    waiting(&hypervisor, 1).await;
    assert!(vms.spare().contains(&waits));
    // Nor does one stay that cannot be had any more.
    let mut spare = vms.spare().into_iter();
    let next = spare.find(|vm| *vm != waits).unwrap();
    vms.remove_spare(&next);
    assert!(hypervisor.start(fixture::spec("env-third")).await.is_err());
    assert!(fixture::processes(&next).is_empty());
    vms.mend_record(&waits);
    wait(|| !vms.spare().contains(&waits)).await;
    drop(hypervisor);
    let hypervisor = vms.hypervisor().await;
    for (vm, environment) in [(first, "env-first"), (second, "env-second")] {
        fixture::discard_one(&hypervisor, &vm, environment).await;
    }
    assert_eq!(network.devices(), ["api0", "lo"]);
}
