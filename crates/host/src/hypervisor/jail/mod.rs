//! Starts a program with as little as it needs: an own user id, no capabilities, namespaces of its
//! own, a root with nothing but the program in it, control groups, limits, a filter of system
//! calls, and only the descriptors that it is given.
//!
//! Everything here is private to the process and goes with it. What fails on purpose: `jail.md`.

mod root;
mod seccomp;
#[cfg(test)]
mod tests;

pub(super) use root::Program;

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, Gid, Uid, UnshareFlags};
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Result;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// What to start.
#[derive(Debug)]
pub(super) struct Jail<'a> {
    /// The program, in its root.
    pub(super) program: &'a Program,
    /// Its arguments.
    pub(super) arguments: &'a [String],
    /// User and group id, which must own nothing on this machine.
    pub(super) uid: u32,
    /// Descriptors to inherit; their numbers stay the same.
    pub(super) inherited: &'a [OwnedFd],
    /// A library among them that the program is to load first.
    pub(super) preload: Option<RawFd>,
    /// Lists of processes of the control groups that it joins before it is anything else.
    pub(super) groups: &'a [File],
    /// Largest size that it can give to a file.
    pub(super) file_bytes: u64,
    /// Whether it is given `/dev/kvm`.
    pub(super) kvm: bool,
    /// Where its output and error messages go.
    pub(super) output: OwnedFd,
}

/// Starts the process. It lives on when this one ends.
pub(super) fn start(jail: &Jail<'_>) -> Result<Child> {
    let command = command(jail)?;
    // The first process of a PID namespace is the first child of a thread that asked for one. Such
    // a thread can have no other children in its own namespace, hence one that ends then.
    std::thread::scope(|scope| {
        let born = scope.spawn(|| -> Result<Child> {
            let mut command = command;
            unshare(UnshareFlags::NEWPID)?;
            command.spawn()
        });
        let panicked = |_panic| Err(std::io::Error::other("the thread that starts VMs panicked"));
        born.join().unwrap_or_else(panicked)
    })
}

#[expect(
    unsafe_code,
    reason = "the kernel's settings of the child must be made between fork and exec"
)]
fn command(jail: &Jail<'_>) -> Result<Command> {
    let mut command = Command::new(&jail.program.path);
    command
        .args(jail.arguments)
        .env_clear()
        .env("LD_LIBRARY_PATH", &jail.program.library_path)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(jail.output.try_clone()?)
        .stderr(jail.output.try_clone()?);
    if let Some(library) = jail.preload {
        command.env("LD_PRELOAD", format!("/proc/self/fd/{library}"));
    }
    let inherited: Vec<RawFd> = jail.inherited.iter().map(AsRawFd::as_raw_fd).collect();
    let groups: Vec<RawFd> = jail.groups.iter().map(AsRawFd::as_raw_fd).collect();
    let root = CString::new(jail.program.root.as_os_str().as_bytes())?;
    let filters = jail.program.filters.clone();
    let (uid, file_bytes, kvm) = (jail.uid, jail.file_bytes, jail.kvm.then_some(jail.uid));
    // SAFETY: the closure only makes system calls; it allocates nothing and takes no lock. The
    // descriptors stay open in the parent until after the fork.
    unsafe {
        command.pre_exec(move || {
            join(&groups)?;
            close_others()?;
            inherit(&inherited)?;
            rustix::process::setsid()?;
            let namespaces = UnshareFlags::NEWNS
                .union(UnshareFlags::NEWNET)
                .union(UnshareFlags::NEWIPC)
                .union(UnshareFlags::NEWUTS);
            unshare(namespaces)?;
            change_root(&root, kvm)?;
            limit(file_bytes)?;
            drop_rights(uid)?;
            filters.install()
        });
    }
    Ok(command)
}

#[expect(unsafe_code, reason = "unshare is marked unsafe")]
fn unshare(namespaces: UnshareFlags) -> Result<()> {
    // SAFETY: the danger is in FILES, which is not among what is asked for here.
    Ok(unsafe { rustix::thread::unshare_unsafe(namespaces) }?)
}

#[expect(
    unsafe_code,
    reason = "borrowing descriptors by number is marked unsafe"
)]
fn borrow<'a>(descriptor: RawFd) -> BorrowedFd<'a> {
    // SAFETY: open, as it was at the fork.
    unsafe { BorrowedFd::borrow_raw(descriptor) }
}

/// Joins control groups: "0" is whoever writes it.
fn join(groups: &[RawFd]) -> Result<()> {
    for &group in groups {
        rustix::io::write(borrow(group), b"0")?;
    }
    Ok(())
}

/// Closes at exec what this process has open, even what was left open to it by its own parent.
#[expect(unsafe_code, reason = "closing descriptors by number is marked unsafe")]
fn close_others() -> Result<()> {
    let flags = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
    // SAFETY: nothing is closed before exec, after which nobody is left who could use it.
    match unsafe { libc::close_range(3, libc::c_uint::MAX, flags) } {
        0 => Ok(()),
        _failed => Err(std::io::Error::last_os_error()),
    }
}

fn inherit(descriptors: &[RawFd]) -> Result<()> {
    for &descriptor in descriptors {
        rustix::io::fcntl_setfd(borrow(descriptor), rustix::io::FdFlags::empty())?;
    }
    Ok(())
}

const SAFE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);
/// Major and minor number of `/dev/kvm` (`Documentation/admin-guide/devices.txt`).
const KVM: (u32, u32) = (10, 232);

/// Leaves the machine's files for the program's root with the process's own part of `/proc` and
/// `/dev/null`, and KVM for the user that may have it. All of it is read-only.
fn change_root(root: &CStr, kvm: Option<u32>) -> Result<()> {
    use rustix::fs::{CWD, FileType, Mode, OFlags};
    use rustix::mount;
    let recursively = MountPropagationFlags::PRIVATE.union(MountPropagationFlags::REC);
    mount::mount_change(c"/", recursively)?;
    mount::mount_bind(root, root)?;
    rustix::process::chdir(root)?;
    // Descriptors are opened anew by /proc/self/fd.
    let proc_flags = SAFE.union(MountFlags::NOEXEC).union(MountFlags::RDONLY);
    let proc_options = c"subset=pid,hidepid=invisible";
    mount::mount(c"proc", c"proc", c"proc", proc_flags, Some(proc_options))?;
    let dev_flags = MountFlags::NOSUID.union(MountFlags::NOEXEC);
    mount::mount(
        c"dev",
        c"dev",
        c"tmpfs",
        dev_flags,
        Some(c"size=4k,mode=755"),
    )?;
    // Without it QEMU's file locks are silently off.
    let flags = OFlags::CREATE.union(OFlags::WRONLY).union(OFlags::CLOEXEC);
    let mode = Mode::from_raw_mode(0o666);
    drop(rustix::fs::openat(CWD, c"dev/null", flags, mode)?);
    mount::mount_bind(c"/dev/null", c"dev/null")?;
    if let Some(uid) = kvm {
        // A node of its own: who may open the machine's is the machine's business.
        let device = rustix::fs::makedev(KVM.0, KVM.1);
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(CWD, c"dev/kvm", FileType::CharacterDevice, mode, device)?;
        rustix::fs::chownat(
            CWD,
            c"dev/kvm",
            Some(Uid::from_raw(uid)),
            None,
            rustix::fs::AtFlags::empty(),
        )?;
    }
    read_only(c"dev", dev_flags)?;
    read_only(c".", SAFE)?;
    // The old root comes to lie on top of the new one, and is taken away.
    rustix::process::pivot_root(c".", c".")?;
    mount::unmount(c".", UnmountFlags::DETACH)?;
    rustix::process::chdir(c"/")?;
    Ok(())
}

fn read_only(target: &CStr, flags: MountFlags) -> Result<()> {
    let flags = flags.union(MountFlags::BIND).union(MountFlags::RDONLY);
    Ok(rustix::mount::mount_remount(target, flags, c"")?)
}

/// Descriptors that a VM's process may have open: twice what all slots in use take.
const DESCRIPTORS: u64 = 256;

/// Sets limits that cannot be raised again.
fn limit(file_bytes: u64) -> Result<()> {
    for (resource, value) in [
        // A dump holds the pod's memory.
        (Resource::Core, 0),
        (Resource::Nofile, DESCRIPTORS),
        (Resource::Memlock, 0),
        (Resource::Msgqueue, 0),
        // The scratch disk is one file, and stays as large as it was made.
        (Resource::Fsize, file_bytes),
    ] {
        let limit = Rlimit {
            current: Some(value),
            maximum: Some(value),
        };
        rustix::process::setrlimit(resource, limit)?;
    }
    Ok(())
}

/// Leaves user id 0 and all capabilities, for good.
fn drop_rights(uid: u32) -> Result<()> {
    for bit in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // The kernel knows no more.
            Err(rustix::io::Errno::INVAL) => break,
            Err(error) => return Err(error.into()),
        }
    }
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    rustix::thread::set_thread_res_uid(user, user, user)?;
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none)?;
    rustix::thread::set_no_new_privs(true)?;
    Ok(())
}
