//! System calls that a VM's process is refused, beside those that QEMU's own filter takes away.
//!
//! QEMU's filter begins only once QEMU has parsed its arguments, leaves `ptrace` and `io_uring`
//! open and ends a single thread, which may leave the rest running (`jail.md`, section 1.3). This
//! one is there before its first instruction, holds for every thread, and answers with an error:
//! a library that only asks whether a call exists must not end a VM.

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter, sock_filter,
};
use std::collections::BTreeMap;
use std::io::{Error, Result};

/// Calls that a VM's process never needs, whatever their arguments.
pub(super) const REFUSED: [c_long; 63] = [
    // Other processes, and new ones.
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    // Namespaces, roots and mounts.
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_acct,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    // Parts of the kernel with a long history of holes.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_vmsplice,
    libc::SYS_modify_ldt,
    libc::SYS_lookup_dcookie,
    libc::SYS_uselib,
    libc::SYS_personality,
    // The machine itself.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_syslog,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_vhangup,
    libc::SYS__sysctl,
];

/// Calls that must seem not to exist, so that libraries take the older way: `pthread_create` goes on
/// with `clone`, whose flags a filter can read.
const ABSENT: [c_long; 4] = [
    libc::SYS_clone3,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
];

const NAMESPACES: [libc::c_int; 8] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    // CLONE_NEWTIME, which the libc crate lacks.
    0x80,
];

/// What could be done to the machine's end of the tap: keep it or give it away, cut it, change its
/// address (`linux/if_tun.h`, `linux/sockios.h`).
const TAP: [u64; 8] = [
    0x4004_54cb, // TUNSETPERSIST
    0x4004_54cc, // TUNSETOWNER
    0x4004_54cd, // TUNSETLINK
    0x4004_54ce, // TUNSETGROUP
    0x4004_54c9, // TUNSETDEBUG
    0x4004_54e2, // TUNSETCARRIER
    0x8924,      // SIOCSIFHWADDR
    0x5412,      // TIOCSTI
];

/// Modes of `fallocate` that stay within a file's size, or are held to it by the kernel's limit.
const ALLOCATE: [libc::c_int; 3] = [
    0,
    libc::FALLOC_FL_ZERO_RANGE,
    libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
];

/// The filters, ready to be installed.
#[derive(Clone, Debug)]
pub(super) struct Filters {
    programs: [BpfProgram; 2],
}

impl Filters {
    pub(super) fn compile() -> Result<Self> {
        let refused = compile(refused()?, libc::EPERM)?;
        let absent = ABSENT.into_iter().map(|call| (call, Vec::new())).collect();
        Ok(Self {
            programs: [refused, compile(absent, libc::ENOSYS)?],
        })
    }

    /// Holds for this thread and all that it becomes and begets. Allocates nothing.
    pub(super) fn install(&self) -> Result<()> {
        for program in &self.programs {
            apply_filter(program).map_err(|error| match error {
                seccompiler::Error::Prctl(error) | seccompiler::Error::Seccomp(error) => error,
                _other => std::io::ErrorKind::InvalidInput.into(),
            })?;
        }
        Ok(())
    }
}

fn refused() -> Result<BTreeMap<c_long, Vec<SeccompRule>>> {
    let mut rules: BTreeMap<c_long, Vec<SeccompRule>> =
        REFUSED.into_iter().map(|call| (call, Vec::new())).collect();
    // A thread is all that may be begun, in the namespaces that there are.
    let mut clone = vec![rule([masked(0, libc::CLONE_THREAD, 0)])?];
    for flag in NAMESPACES {
        clone.push(rule([masked(0, flag, flag)])?);
    }
    rules.insert(libc::SYS_clone, clone);
    let unix = value(0, SeccompCmpOp::Ne, number(libc::AF_UNIX));
    rules.insert(libc::SYS_socket, vec![rule([unix])?]);
    let tap = TAP.map(|request| rule([value(1, SeccompCmpOp::Eq, request)]));
    rules.insert(libc::SYS_ioctl, tap.into_iter().collect::<Result<_>>()?);
    let others = ALLOCATE.map(|mode| value(1, SeccompCmpOp::Ne, number(mode)));
    rules.insert(libc::SYS_fallocate, vec![rule(others)?]);
    Ok(rules)
}

type Condition = std::result::Result<SeccompCondition, seccompiler::BackendError>;

fn value(argument: u8, operator: SeccompCmpOp, value: u64) -> Condition {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
}

fn masked(argument: u8, mask: libc::c_int, wanted: libc::c_int) -> Condition {
    let operator = SeccompCmpOp::MaskedEq(number(mask));
    value(argument, operator, number(wanted))
}

/// All conditions at once.
fn rule(conditions: impl IntoIterator<Item = Condition>) -> Result<SeccompRule> {
    let conditions: std::result::Result<_, _> = conditions.into_iter().collect();
    SeccompRule::new(conditions.map_err(Error::other)?).map_err(Error::other)
}

/// Flags and modes as the filter compares them: 32 bits without a sign.
fn number(value: libc::c_int) -> u64 {
    u64::from(value.cast_unsigned())
}

fn compile(rules: BTreeMap<c_long, Vec<SeccompRule>>, errno: libc::c_int) -> Result<BpfProgram> {
    let answer = SeccompAction::Errno(errno.cast_unsigned());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, answer, TargetArch::x86_64)
        .map_err(Error::other)?;
    let compiled: BpfProgram = filter.try_into().map_err(Error::other)?;
    // The x32 calls are the same ones by other numbers.
    let mut program = vec![
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, X32),
        instruction(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            libc::SECCOMP_RET_KILL_PROCESS,
        ),
    ];
    program.extend(compiled);
    Ok(program)
}

/// The lowest number of an x32 call; the filter for this architecture does not look at it.
const X32: u32 = 0x4000_0000;

fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    // All codes are below 256.
    let code = u16::try_from(code).unwrap_or(u16::MAX);
    sock_filter { code, jt, jf, k }
}
