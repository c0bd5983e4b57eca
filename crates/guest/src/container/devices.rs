//! Which devices containers may open: a filter on the cgroup that all of them are in.
//!
//! Containers hold `CAP_MKNOD`, as with containerd, so they can make a node for any device of the
//! VM: the scratch disk, the ports to the host. With cgroup v2 only a BPF program keeps them from
//! opening it. Making nodes stays allowed; opening is for the devices of every container alone.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// Character devices that containers may open: major and minor, or all minors.
const ALLOWED: [(i32, Option<i32>); 9] = [
    (1, Some(3)), // null
    (1, Some(5)), // zero
    (1, Some(7)), // full
    (1, Some(8)), // random
    (1, Some(9)), // urandom
    (5, Some(0)), // tty
    (5, Some(1)), // console
    (5, Some(2)), // ptmx
    (136, None),  // pts
];

// linux/bpf.h
const PROG_LOAD: libc::c_int = 5;
const PROG_ATTACH: libc::c_int = 8;
const PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const CGROUP_DEVICE: u32 = 6;
const ALLOW_MULTI: u32 = 2;
/// `BPF_DEVCG_ACC_MKNOD` and `BPF_DEVCG_DEV_CHAR`.
const MKNOD: i32 = 1;
const CHARACTER: i32 = 2;

// Instructions, as linux/bpf_common.h and linux/bpf.h compose them.
const LOAD_WORD: u8 = 0x61;
const MOVE: u8 = 0xbf;
const SET: u8 = 0xb7;
const AND: u8 = 0x57;
const SHIFT_RIGHT: u8 = 0x77;
const JUMP_UNLESS: u8 = 0x55;
const EXIT: u8 = 0x95;

/// Registers: result, context, kind of device, access, major, minor.
const RESULT: u8 = 0;
const CONTEXT: u8 = 1;
const KIND: u8 = 2;
const ACCESS: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;

/// One instruction.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction {
        code,
        registers: to | (from << 4),
        offset,
        immediate,
    }
}

/// The program: 1 to allow, 0 to deny.
fn program() -> Vec<Instruction> {
    let mut code = vec![
        // access << 16 | kind, major, minor
        instruction(LOAD_WORD, KIND, CONTEXT, 0, 0),
        instruction(MOVE, ACCESS, KIND, 0, 0),
        instruction(SHIFT_RIGHT, ACCESS, 0, 0, 16),
        instruction(AND, KIND, 0, 0, 0xffff),
        instruction(LOAD_WORD, MAJOR, CONTEXT, 4, 0),
        instruction(LOAD_WORD, MINOR, CONTEXT, 8, 0),
    ];
    let mut rule = |conditions: &[(u8, i32)]| {
        // Each condition that does not hold skips the rest of the rule.
        let mut skip = i16::try_from(conditions.len()).unwrap_or(i16::MAX) + 1;
        for &(register, value) in conditions {
            code.push(instruction(JUMP_UNLESS, register, 0, skip, value));
            skip -= 1;
        }
        code.push(instruction(SET, RESULT, 0, 0, 1));
        code.push(instruction(EXIT, 0, 0, 0, 0));
    };
    rule(&[(ACCESS, MKNOD)]);
    for (major, minor) in ALLOWED {
        match minor {
            Some(minor) => rule(&[(KIND, CHARACTER), (MAJOR, major), (MINOR, minor)]),
            None => rule(&[(KIND, CHARACTER), (MAJOR, major)]),
        }
    }
    code.push(instruction(SET, RESULT, 0, 0, 0));
    code.push(instruction(EXIT, 0, 0, 0, 0));
    code
}

/// Filters the devices of everything in a cgroup and below, from now on.
pub(crate) fn restrict(cgroup: &str) -> io::Result<()> {
    let directory = File::open(cgroup)?;
    let filter = load(&program())?;
    attach(&directory, &filter)
}

#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

#[repr(C)]
struct Attach {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

#[expect(unsafe_code, reason = "no crate in use wraps the system call bpf")]
fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    let license = c"Apache-2.0";
    let attributes = Load {
        kind: PROG_TYPE_CGROUP_DEVICE,
        count: u32::try_from(program.len()).map_err(io::Error::other)?,
        instructions: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
        ..Load::default()
    };
    // SAFETY: the attributes have the layout of `union bpf_attr` for this command up to the size
    // that is passed, and what they point to outlives the call.
    let descriptor = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            PROG_LOAD,
            &raw const attributes,
            size_of::<Load>(),
        )
    };
    let descriptor = i32::try_from(descriptor).map_err(io::Error::other)?;
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[expect(unsafe_code, reason = "no crate in use wraps the system call bpf")]
fn attach(cgroup: &File, program: &OwnedFd) -> io::Result<()> {
    let number = |descriptor: i32| u32::try_from(descriptor).map_err(io::Error::other);
    let attributes = Attach {
        target: number(cgroup.as_raw_fd())?,
        program: number(program.as_raw_fd())?,
        kind: CGROUP_DEVICE,
        flags: ALLOW_MULTI,
    };
    // SAFETY: the attributes have the layout of `union bpf_attr` for this command up to the size
    // that is passed; they hold no pointers.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            PROG_ATTACH,
            &raw const attributes,
            size_of::<Attach>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u32 = 1;
    const CHAR: u32 = 2;
    const READ: u32 = 2;
    const WRITE: u32 = 4;

    /// Interprets the program, with the kernel's meaning of the few instructions that it uses.
    fn is_allowed(access: u32, kind: u32, major: u32, minor: u32) -> bool {
        let context = [access << 16 | kind, major, minor];
        let program = program();
        let mut registers = [0i64; 6];
        let mut at = 0usize;
        loop {
            let i = program[at];
            let (to, from) = ((i.registers & 15) as usize, (i.registers >> 4) as usize);
            at += 1;
            match i.code {
                LOAD_WORD => {
                    registers[to] = i64::from(context[usize::try_from(i.offset).unwrap() / 4]);
                }
                MOVE => registers[to] = registers[from],
                SET => registers[to] = i64::from(i.immediate),
                AND => registers[to] &= i64::from(i.immediate),
                SHIFT_RIGHT => registers[to] >>= i.immediate,
                JUMP_UNLESS => {
                    if registers[to] != i64::from(i.immediate) {
                        at += usize::try_from(i.offset).unwrap();
                    }
                }
                EXIT => return registers[0] == 1,
                other => panic!("unknown instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn only_the_devices_of_every_container_are_opened() {
        for (major, minor) in [
            (1, 3),
            (1, 5),
            (1, 7),
            (1, 8),
            (1, 9),
            (5, 0),
            (5, 1),
            (5, 2),
            (136, 0),
            (136, 77),
        ] {
            for access in [READ, WRITE, READ | WRITE] {
                assert!(is_allowed(access, CHAR, major, minor), "{major}:{minor}");
                assert!(
                    !is_allowed(access, BLOCK, major, minor),
                    "block {major}:{minor}"
                );
            }
        }
        // mem, kmsg, a virtio port, fuse, and disks.
        for (kind, major, minor) in [
            (CHAR, 1, 1),
            (CHAR, 1, 11),
            (CHAR, 247, 1),
            (CHAR, 10, 229),
            (BLOCK, 254, 0),
            (BLOCK, 7, 0),
        ] {
            for access in [READ, WRITE, READ | WRITE, READ | 1] {
                assert!(
                    !is_allowed(access, kind, major, minor),
                    "{kind} {major}:{minor}"
                );
            }
            assert!(
                is_allowed(1, kind, major, minor),
                "making a node is harmless"
            );
        }
    }
}
