//! QEMU's argument list, made without touching anything.
//!
//! Everything outside of the process reaches it as a descriptor (`jail.md`), so that it needs no
//! right to open a file but its own libraries.

use super::accelerator::Accelerator;
use super::{IMAGE_SLOTS, SCRATCH, Shape, slot_serial};
use serde_json::json;

/// Size that the guest believes an empty slot to have; images may be smaller.
pub(super) const SLOT_BYTES: u64 = 64 << 30;
/// Size that the guest believes the scratch disk to have until it is told; the largest is smaller.
pub(super) const SCRATCH_BYTES: u64 = 256 << 30;

/// MiB of translated code that an emulated VM keeps. QEMU's own choice is up to a gigabyte, which no
/// host has for each of its VMs; below 128 large programs are translated again and again.
pub(super) const CODE_MIB: u32 = 256;

/// System calls that QEMU takes from itself, beside those that it never had (`jail::seccomp`).
pub(super) const SANDBOX: &str =
    "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// Descriptors that the process inherits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptors {
    pub(super) tap: i32,
    pub(super) qmp: i32,
    pub(super) control: i32,
    pub(super) logs: i32,
    pub(super) console: i32,
}

/// Where a VM's first state comes from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Origin {
    /// A boot, with memory of its own or in a file that becomes a template's.
    Boot {
        kernel: i32,
        initramfs: i32,
        memory: Option<i32>,
    },
    /// A template's memory, of which only changed pages are the VM's own. The state follows by QMP.
    Clone { memory: i32 },
}

impl Origin {
    /// The file that the memory is in, if it is in one.
    pub(super) fn memory(self) -> Option<i32> {
        match self {
            Self::Boot { memory, .. } => memory,
            Self::Clone { memory } => Some(memory),
        }
    }
}

/// The arguments of a VM's process. The same devices in the same order for every origin: a state
/// fits only the machine that it was saved from.
pub(super) fn arguments(
    id: &str,
    shape: Shape,
    accelerator: Accelerator,
    origin: Origin,
    fds: Descriptors,
) -> Vec<String> {
    let mut list = machine(id, shape, accelerator);
    let mut add = |words: &[&str]| list.extend(words.iter().map(|&word| word.to_owned()));
    add(&["-object", &memory(shape, origin)]);
    match origin {
        Origin::Boot {
            kernel, initramfs, ..
        } => {
            add(&["-kernel", &format!("/proc/self/fd/{kernel}")]);
            add(&["-initrd", &format!("/proc/self/fd/{initramfs}")]);
            add(&["-append", &kernel_command_line(accelerator)]);
        }
        Origin::Clone { .. } => add(&["-incoming", "defer"]),
    }
    add(&["-netdev", &format!("tap,id=eni,fd={}", fds.tap)]);
    // The guest changes the address when it is told its own.
    add(&["-device", "virtio-net-device,netdev=eni"]);
    // The order of the disks is the guest's order; they are found by serial all the same.
    let scratch = json!({
        "driver": "null-co", "node-name": empty_node(SCRATCH), "size": SCRATCH_BYTES,
        "read-zeroes": true, "read-only": false, "discard": "unmap",
    });
    add(&["-blockdev", &scratch.to_string()]);
    add(&[
        "-device",
        &format!(
            "virtio-blk-device,drive={},id={SCRATCH},serial={SCRATCH},discard=on",
            empty_node(SCRATCH)
        ),
    ]);
    for slot in 0..IMAGE_SLOTS {
        let serial = slot_serial(slot);
        let empty = json!({
            "driver": "null-co", "node-name": empty_node(&serial), "size": SLOT_BYTES,
            "read-zeroes": true, "read-only": true,
        });
        add(&["-blockdev", &empty.to_string()]);
        add(&[
            "-device",
            &format!(
                "virtio-blk-device,drive={},id={serial},serial={serial}",
                empty_node(&serial)
            ),
        ]);
    }
    add(&["-device", "virtio-serial-device"]);
    for (id, fd, port) in [
        ("control", fds.control, monopod_wire::CONTROL_PORT),
        ("logs", fds.logs, monopod_wire::LOGS_PORT),
    ] {
        add(&[
            "-chardev",
            &format!("socket,id={id},fd={fd},server=on,wait=off"),
        ]);
        add(&[
            "-device",
            &format!("virtserialport,chardev={id},name={port}"),
        ]);
    }
    add(&[
        "-chardev",
        &format!("socket,id=console,fd={},server=on,wait=off", fds.console),
    ]);
    add(&["-serial", "chardev:console"]);
    add(&[
        "-chardev",
        &format!("socket,id=qmp,fd={},server=on,wait=off", fds.qmp),
    ]);
    add(&["-mon", "chardev=qmp,mode=control"]);
    list
}

/// Name of the node behind a disk to which nothing was attached.
pub(super) fn empty_node(disk: &str) -> String {
    format!("empty-{disk}")
}

/// The machine's memory. A clone's is private: what it writes is its own.
fn memory(shape: Shape, origin: Origin) -> String {
    let size = format!("id=memory,size={}M", shape.memory_mib);
    let Some(memory) = origin.memory() else {
        return format!("memory-backend-ram,{size}");
    };
    let sharing = match origin {
        Origin::Boot { .. } => "on",
        Origin::Clone { .. } => "off",
    };
    format!("memory-backend-file,{size},mem-path=/proc/self/fd/{memory},share={sharing}")
}

/// The machine without its disks, network and sockets.
fn machine(id: &str, shape: Shape, accelerator: Accelerator) -> Vec<String> {
    let emulation = format!("tcg,thread=multi,tb-size={CODE_MIB}");
    let (accel, cpu) = match accelerator {
        Accelerator::Kvm => ("kvm", "host"),
        // Without these features page faults are twice as fast under emulation (`microvm.md`).
        Accelerator::Tcg { .. } => (emulation.as_str(), "max,-la57,-erms,-fsrm"),
    };
    [
        "-name",
        &process_name(id),
        "-M",
        "microvm,memory-backend=memory",
        "-accel",
        accel,
        "-cpu",
        cpu,
        "-smp",
        &shape.vcpus.to_string(),
        "-m",
        &shape.memory_mib.to_string(),
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-sandbox",
        SANDBOX,
        "-device",
        "virtio-rng-device",
    ]
    .map(str::to_owned)
    .into()
}

/// The value of `-name`, by which a process is found whose number was not recorded.
pub(super) fn process_name(id: &str) -> String {
    format!("guest={id}")
}

/// The VM that an argument names, if it is a [`process_name`].
pub(super) fn named_by(argument: &str) -> Option<&str> {
    argument.strip_prefix("guest=")
}

pub(super) fn kernel_command_line(accelerator: Accelerator) -> String {
    let common = "console=ttyS0 quiet rdinit=/init reboot=t panic=-1 cryptomgr.notests \
                  rcupdate.rcu_expedited=1 audit=0 random.trust_cpu=on \
                  initcall_blacklist=init_kprobe_trace,load_system_certificate_list";
    match accelerator {
        Accelerator::Kvm => common.into(),
        Accelerator::Tcg { tsc_khz } => {
            // Patching the lock prefixes away takes 0.2 s of a start and gains nothing here.
            format!(
                "{common} tsc_early_khz={tsc_khz} tsc=reliable no_timer_check mitigations=off \
                 noreplace-smp"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(accelerator: Accelerator, origin: Origin) -> Vec<String> {
        let fds = Descriptors {
            tap: 13,
            qmp: 14,
            control: 15,
            logs: 16,
            console: 17,
        };
        let shape = Shape {
            vcpus: 2,
            memory_mib: 4096,
        };
        arguments("vm-1", shape, accelerator, origin, fds)
    }

    const BOOT: Origin = Origin::Boot {
        kernel: 10,
        initramfs: 11,
        memory: None,
    };
    const TEMPLATE: Origin = Origin::Boot {
        kernel: 10,
        initramfs: 11,
        memory: Some(12),
    };
    const CLONE: Origin = Origin::Clone { memory: 12 };

    /// What the isolation of the process rests on.
    #[test]
    fn nothing_is_opened_by_name() {
        for origin in [BOOT, TEMPLATE, CLONE] {
            let list = list(Accelerator::Tcg { tsc_khz: 1 }, origin);
            let kernel_command_line = list.iter().position(|word| word == "-append");
            for (at, word) in list.iter().enumerate() {
                if at > 0 && Some(at - 1) == kernel_command_line {
                    continue;
                }
                assert!(
                    !word.contains('/') || word.contains("/proc/self/fd/"),
                    "{word}"
                );
            }
            assert!(list.contains(&"guest=vm-1".to_owned()));
            assert_eq!(
                list.iter()
                    .filter(|word| word.contains("serial=image-"))
                    .count(),
                usize::from(IMAGE_SLOTS)
            );
        }
    }

    #[test]
    fn only_a_template_writes_to_its_file() {
        let text = |origin| list(Accelerator::Kvm, origin).join(" ");
        assert!(text(TEMPLATE).contains("/proc/self/fd/12,share=on"));
        assert!(text(CLONE).contains("/proc/self/fd/12,share=off"));
        assert!(!text(BOOT).contains("share"));
        assert!(!text(CLONE).contains("-kernel"));
    }

    #[test]
    fn emulation_is_told_the_counter() {
        let tcg = list(Accelerator::Tcg { tsc_khz: 2_445_426 }, BOOT).join(" ");
        assert!(tcg.contains("tsc_early_khz=2445426"), "{tcg}");
        let kvm = list(Accelerator::Kvm, BOOT).join(" ");
        assert!(
            kvm.contains("-accel kvm") && !kvm.contains("tsc_early_khz"),
            "{kvm}"
        );
    }
}
