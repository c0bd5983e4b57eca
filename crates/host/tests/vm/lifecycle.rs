//! READY, GO, the host's restart, Stop.

use crate::fixture::{self, Network, Vms, is, until};
use monopod_host::hypervisor::{Hypervisor, HypervisorError, Vm, VmEvent};
use monopod_wire::{Ended, GuestMessage, Hello, HostMessage, Stage, VERSION};

#[tokio::test]
async fn a_vm_goes_survives_its_host_and_stops() {
    let network = Network::new(1).await;
    let vms = Vms::with_node(&network, "exec /bin/busybox sleep 3600");
    let hypervisor = vms.hypervisor().await;
    let address = network.address(23);
    let (vm, mut events) = hypervisor
        .start(fixture::spec("env-lifecycle"))
        .await
        .unwrap();
    network.plug(&vm, address).await;
    assert!(matches!(
        hypervisor.start(fixture::spec("env-lifecycle")).await,
        Err(HypervisorError::Exists { .. })
    ));

    let go = HostMessage::Go(Box::new(fixture::go("env-lifecycle", address)));
    vm.send(go.clone()).unwrap();
    until(&mut events, phase("network")).await;
    let usage = vm.usage().unwrap();
    assert!(usage.unique_bytes > 10 << 20, "{usage:?}");

    // The host process ends and another one takes over.
    drop((vm, events, hypervisor));
    let hypervisor = vms.hypervisor().await;
    assert_eq!(hypervisor.list().unwrap(), ["env-lifecycle"]);
    let (vm, mut events) = hypervisor.adopt("env-lifecycle").await.unwrap().unwrap();
    until(&mut events, is(VmEvent::Connected(Stage::Going))).await;
    until(&mut events, phase("network")).await;
    vm.send(go).unwrap();
    vm.send(HostMessage::Stop).unwrap();
    until(
        &mut events,
        is(VmEvent::Guest(GuestMessage::Ended(Ended::Stopped))),
    )
    .await;
    until(&mut events, is(VmEvent::Exited)).await;
    assert!(hypervisor.adopt("env-lifecycle").await.unwrap().is_none());
    fixture::discard(&hypervisor, &vm, "env-lifecycle").await;
}

fn phase(name: &str) -> impl Fn(&VmEvent) -> Option<()> {
    move |event| match event {
        VmEvent::Guest(GuestMessage::Phase(phase)) if phase.name == name => Some(()),
        _ => None,
    }
}

#[tokio::test]
async fn a_host_may_restart_before_go_and_stop_the_vm() {
    let network = Network::new(5).await;
    let vms = Vms::with_node(&network, "exec /bin/busybox sleep 3600");
    let hypervisor = vms.hypervisor().await;
    drop(hypervisor.start(fixture::spec("env-early")).await.unwrap());
    let hypervisor = vms.hypervisor().await;
    let (vm, mut events) = hypervisor.adopt("env-early").await.unwrap().unwrap();
    until(&mut events, is(VmEvent::Connected(Stage::Ready))).await;
    vm.send(HostMessage::Stop).unwrap();
    until(
        &mut events,
        is(VmEvent::Guest(GuestMessage::Ended(Ended::Stopped))),
    )
    .await;
    until(&mut events, is(VmEvent::Exited)).await;
    fixture::discard(&hypervisor, &vm, "env-early").await;
}

#[tokio::test]
async fn a_killed_vm_leaves_nothing() {
    let network = Network::new(2).await;
    let vms = Vms::with_node(&network, "exec /bin/busybox sleep 3600");
    let hypervisor = vms.hypervisor().await;
    let start = || hypervisor.start(fixture::spec("env-killed"));
    let (vm, mut events) = start().await.unwrap();
    fixture::kill(vm.id());
    until(&mut events, is(VmEvent::Exited)).await;
    fixture::discard(&hypervisor, &vm, "env-killed").await;
    // Discarding also ends a VM that runs, even if the host process ended before it wrote which
    // process that is.
    let (vm, mut events) = start().await.unwrap();
    vms.forget_process("env-killed");
    fixture::discard(&hypervisor, &vm, "env-killed").await;
    until(&mut events, is(VmEvent::Exited)).await;
    assert_eq!(network.devices(), ["api0", "lo"]);
}

/// What a host process had started when it was killed is ended by the next.
#[tokio::test]
async fn a_vm_without_an_environment_does_not_outlive_its_host() {
    let network = Network::new(6).await;
    let vms = Vms::with_node(&network, "exec /bin/busybox sleep 3600");
    let hypervisor = vms.hypervisor().await;
    let (vm, mut events) = hypervisor.start(fixture::spec("env-left")).await.unwrap();
    vms.take_name_back("env-left", vm.id());
    vms.hypervisor().await;
    until(&mut events, is(VmEvent::Exited)).await;
    fixture::discard(&hypervisor, &vm, "env-left").await;
    assert_eq!(network.devices(), ["api0", "lo"]);
}

/// A directory that somebody removed hides a VM from no later host process.
#[tokio::test]
async fn a_vm_without_a_directory_is_ended_by_the_next_host() {
    let network = Network::new(13).await;
    let vms = Vms::with_node(&network, "exec /bin/busybox sleep 3600");
    let hypervisor = vms.hypervisor().await;
    let (kept, kept_events) = hypervisor.start(fixture::spec("env-kept")).await.unwrap();
    let (_hidden, mut events) = hypervisor.start(fixture::spec("env-hidden")).await.unwrap();
    let groups = vms.groups("env-hidden");
    vms.remove_directory("env-hidden");
    drop((kept, kept_events, hypervisor));
    let hypervisor = vms.hypervisor().await;
    until(&mut events, is(VmEvent::Exited)).await;
    assert!(hypervisor.adopt("env-hidden").await.unwrap().is_none());
    let (kept, _events) = hypervisor.adopt("env-kept").await.unwrap().unwrap();
    for group in groups {
        assert!(!group.exists(), "{}", group.display());
    }
    fixture::discard(&hypervisor, &kept, "env-kept").await;
    assert_eq!(network.devices(), ["api0", "lo"]);
}

/// By its host, and by who takes the host down.
#[tokio::test]
async fn a_vm_ends_whole_whose_directory_was_removed() {
    let network = Network::new(17).await;
    let vms = Vms::with_node(&network, "exec /bin/busybox sleep 3600");
    let hypervisor = vms.hypervisor().await;
    let (vm, mut events) = hypervisor.start(fixture::spec("env-bare")).await.unwrap();
    let groups = vms.groups("env-bare");
    vms.remove_directory("env-bare");
    vm.end().await.unwrap();
    until(&mut events, is(VmEvent::Exited)).await;
    fixture::discard(&hypervisor, &vm, "env-bare").await;
    let (vm, _events) = hypervisor.start(fixture::spec("env-next")).await.unwrap();
    let groups = [groups, vms.groups("env-next")].concat();
    vms.remove_directory("env-next");
    drop(hypervisor);
    vms.down().await;
    assert!(fixture::processes(vm.id()).is_empty());
    for group in groups {
        assert!(!group.exists(), "{}", group.display());
    }
    assert_eq!(network.devices(), ["api0", "lo"]);
}

#[tokio::test]
async fn names_that_are_no_file_names_are_refused() {
    let network = Network::new(7).await;
    let vms = Vms::with_node(&network, "exec /bin/busybox sleep 3600");
    let hypervisor = vms.hypervisor().await;
    for name in ["", "..", "a/b", "A", &"a".repeat(64)] {
        assert!(matches!(
            hypervisor.adopt(name).await,
            Err(HypervisorError::Name { .. })
        ));
    }
}

/// Such a guest may understand Go, or something else by it.
#[tokio::test]
async fn a_guest_of_another_version_is_refused() {
    let network = Network::new(15).await;
    let other = VERSION + 1;
    let hello = Hello {
        version: other,
        epoch: 1,
        stage: Stage::Ready,
    };
    let hello = monopod_wire::encode(&GuestMessage::Hello(hello)).unwrap();
    let vms = Vms::that_greet(&network, &hello);
    let hypervisor = vms.hypervisor().await;
    let refused = hypervisor.start(fixture::spec("env-other")).await;
    assert!(
        matches!(refused, Err(HypervisorError::Incompatible { version }) if version == other),
        "{:?}",
        refused.err()
    );
    assert_eq!(hypervisor.list().unwrap(), Vec::<String>::new());
    assert_eq!(vms.spare(), Vec::<String>::new());
}
