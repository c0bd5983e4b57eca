//! What a stand-in tries, and how it says what it found: a line each, then `end`.

use super::seccomp;
use libc::c_long;
use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, Signal};
use std::fs::File;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

/// How a line begins; the test harness prints others.
pub(super) const FOUND: &str = "found: ";

fn say(what: &str) {
    println!("{FOUND}{what}");
}

fn result<T: ToString>(what: &str, result: Result<T, Errno>) {
    match result {
        Ok(value) => say(&format!("{what}: {}", value.to_string())),
        Err(error) => say(&format!("{what}: {}", name(error))),
    }
}

fn name(error: Errno) -> String {
    match error {
        Errno::PERM => "EPERM".into(),
        Errno::NOSYS => "ENOSYS".into(),
        Errno::FBIG => "EFBIG".into(),
        Errno::SRCH => "ESRCH".into(),
        Errno::MFILE => "EMFILE".into(),
        Errno::AGAIN => "EAGAIN".into(),
        Errno::CONNREFUSED => "ECONNREFUSED".into(),
        other => format!("{other:?}"),
    }
}

pub(super) fn run(attempt: &str) {
    // The harness has begun a line.
    println!();
    let (attempt, argument) = attempt.split_once(':').unwrap_or((attempt, ""));
    match attempt {
        "files" => files(),
        "write" => write(),
        "scratch" => scratch(argument.parse().unwrap()),
        "processes" => processes(argument.parse().unwrap()),
        "network" => network(argument),
        "rights" => rights(),
        "limits" => limits(),
        "calls" => {
            calls();
            std::thread::spawn(calls).join().unwrap();
        }
        "x32" => {
            say("begin");
            result("x32", call(X32 | libc::SYS_getpid, [0; 3]));
        }
        "descriptors" => descriptors(),
        "threads" => threads(),
        "memory" => memory(),
        "spin" => spin(),
        other => panic!("unknown attempt {other}"),
    }
    say("end");
}

/// Everything below a directory.
fn walk(directory: &Path, visit: &mut impl FnMut(PathBuf, &std::fs::Metadata)) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let is = path.symlink_metadata().unwrap();
        if is.is_dir() && path != Path::new("/proc") {
            walk(&path, visit);
        }
        visit(path, &is);
    }
}

fn files() {
    let mut found = Vec::new();
    walk(Path::new("/"), &mut |path, is| {
        let mode = std::os::unix::fs::MetadataExt::mode(is);
        assert_eq!(mode & 0o6000, 0, "{}", path.display());
        if !is.is_dir() {
            found.push(path.display().to_string());
        }
    });
    found.sort();
    for path in &found {
        say(path);
    }
    // What it is given it can use.
    File::options().write(true).open("/dev/null").unwrap();
    let kvm = found.iter().any(|path| path == "/dev/kvm");
    let opened = File::options().read(true).write(true).open("/dev/kvm");
    // The machine may have no KVM behind it.
    let refused = opened.is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied);
    assert!(!kvm || !refused);
}

/// Says which mounts there are, and what it could write: nothing is right.
fn write() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    for mount in mounts.lines() {
        let fields: Vec<&str> = mount.split(' ').collect();
        say(&format!("{} {}", fields[1], &fields[3][..2]));
    }
    let mut places = vec![
        PathBuf::from("/"),
        "/proc".into(),
        "/proc/self".into(),
        "/proc/self/task".into(),
    ];
    walk(Path::new("/"), &mut |path, _| places.push(path));
    for place in places {
        let written = if place.is_dir() {
            File::create(place.join("new")).is_ok()
                || std::fs::create_dir(place.join("new")).is_ok()
        } else {
            let device = place.starts_with("/dev");
            !device && File::options().append(true).open(&place).is_ok()
        };
        if written || std::fs::remove_file(&place).is_ok() {
            say(&place.display().to_string());
        }
    }
}

#[expect(
    unsafe_code,
    reason = "borrowing descriptors by number is marked unsafe"
)]
fn borrow<'a>(descriptor: RawFd) -> std::os::fd::BorrowedFd<'a> {
    // SAFETY: it was inherited and is never closed.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(descriptor) }
}

fn scratch(descriptor: RawFd) {
    let scratch = borrow(descriptor);
    let end = super::FILE_BYTES;
    result("within", rustix::io::pwrite(scratch, b"contents", end - 8));
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    result(
        "punch",
        rustix::fs::fallocate(scratch, punch, 0, end).map(|()| 0),
    );
    result("beyond", rustix::io::pwrite(scratch, b"contents", end));
    result(
        "truncate",
        rustix::fs::ftruncate(scratch, end + 1).map(|()| 0),
    );
    let keep = rustix::fs::FallocateFlags::KEEP_SIZE;
    result(
        "allocate",
        rustix::fs::fallocate(scratch, keep, end, 1 << 20).map(|()| 0),
    );
}

fn processes(other: i32) {
    say(&format!("pid: {}", std::process::id()));
    say(&format!(
        "parent: {}",
        rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get())
    ));
    for entry in std::fs::read_dir("/proc").unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.starts_with(|first: char| first.is_ascii_digit()) {
            say(&format!("listed: {name}"));
        }
    }
    let other = Pid::from_raw(other).unwrap();
    result(
        "kill",
        rustix::process::kill_process(other, Signal::KILL).map(|()| 0),
    );
}

fn network(abstract_name: &str) {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
    for (name, family) in [
        ("inet", AddressFamily::INET),
        ("inet6", AddressFamily::INET6),
        ("netlink", AddressFamily::NETLINK),
        ("packet", AddressFamily::PACKET),
        ("vsock", AddressFamily::VSOCK),
        ("alg", AddressFamily::from_raw(38)),
        ("unix", AddressFamily::UNIX),
    ] {
        result(name, socket(family, SocketType::STREAM, None).map(|_| 0));
    }
    let unix = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let address = SocketAddrUnix::new_abstract_name(abstract_name.as_bytes()).unwrap();
    result("abstract", connect(&unix, &address).map(|()| 0));
    let devices = std::fs::read_to_string("/proc/self/net/dev").unwrap();
    for device in devices
        .lines()
        .skip(2)
        .filter_map(|line| line.split_once(':'))
    {
        say(&format!("devices: {}", device.0.trim()));
    }
}

fn rights() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    for (name, field) in [
        ("uid", "Uid:"),
        ("gid", "Gid:"),
        ("groups", "Groups:"),
        ("inheritable", "CapInh:"),
        ("permitted", "CapPrm:"),
        ("effective", "CapEff:"),
        ("bounding", "CapBnd:"),
        ("ambient", "CapAmb:"),
        ("no new privileges", "NoNewPrivs:"),
    ] {
        let value = status
            .lines()
            .find_map(|line| line.strip_prefix(field))
            .unwrap();
        let value: Vec<_> = value.split_whitespace().collect();
        say(&format!("{name}: {}", value.join(" ")));
    }
    let root = rustix::thread::Uid::ROOT;
    let group = rustix::thread::Gid::ROOT;
    result("setuid", rustix::thread::set_thread_uid(root).map(|()| 0));
    result("setgid", rustix::thread::set_thread_gid(group).map(|()| 0));
    result(
        "setgroups",
        rustix::thread::set_thread_groups(&[group]).map(|()| 0),
    );
}

fn limits() {
    for (name, resource) in [
        ("core", Resource::Core),
        ("open files", Resource::Nofile),
        ("file size", Resource::Fsize),
    ] {
        let limit = rustix::process::getrlimit(resource);
        assert_eq!(limit.current, limit.maximum);
        say(&format!("{name}: {}", limit.maximum.unwrap()));
    }
    let more = Rlimit {
        current: Some(1024),
        maximum: Some(1024),
    };
    result(
        "raise",
        rustix::process::setrlimit(Resource::Nofile, more).map(|()| 0),
    );
    let mut open = Vec::new();
    let full = loop {
        match rustix::io::dup(std::io::stdin()) {
            Ok(descriptor) => open.push(descriptor),
            Err(error) => break error,
        }
    };
    drop(open);
    result::<i32>("opened", Err(full));
}

const X32: c_long = 0x4000_0000;

/// Calls that are refused for their arguments.
pub(super) const ARGUMENTS: [(&str, c_long, [u64; 3]); 6] = [
    ("a process", libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0]),
    (
        "a user namespace",
        libc::SYS_clone,
        [(libc::CLONE_NEWUSER | libc::CLONE_THREAD) as u64, 0, 0],
    ),
    ("tap: persist", libc::SYS_ioctl, [0, 0x4004_54cb, 0]),
    ("tap: address", libc::SYS_ioctl, [0, 0x8924, 0]),
    (
        "collapse",
        libc::SYS_fallocate,
        [0, libc::FALLOC_FL_COLLAPSE_RANGE as u64, 0],
    ),
    (
        "inet",
        libc::SYS_socket,
        [libc::AF_INET as u64, libc::SOCK_STREAM as u64, 0],
    ),
];

fn calls() {
    for number in seccomp::REFUSED {
        result(&number.to_string(), call(number, [0; 3]));
    }
    for (name, number, arguments) in ARGUMENTS {
        result(name, call(number, arguments));
    }
    result("clone3", call(libc::SYS_clone3, [0; 3]));
    result("io_uring", call(libc::SYS_io_uring_setup, [0; 3]));
}

#[expect(unsafe_code, reason = "calls are made by number")]
fn call(number: c_long, arguments: [u64; 3]) -> Result<c_long, Errno> {
    let [a, b, c] = arguments;
    // SAFETY: refused before anything is done; otherwise the test has failed, and this process,
    // which exists for nothing else, may go wrong.
    match unsafe { libc::syscall(number, a, b, c, 0, 0, 0) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap()),
        value => Ok(value),
    }
}

fn descriptors() {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    // The listing itself took one.
    for path in paths.into_iter().filter(|path| path.is_symlink()) {
        say(path.file_name().unwrap().to_str().unwrap());
    }
}

/// As many as can be begun.
fn threads() {
    let error = loop {
        match std::thread::Builder::new()
            .stack_size(64 << 10)
            .spawn(std::thread::park)
        {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
    say(&format!("threads: {threads}"));
    result::<i32>("another", Err(Errno::from_io_error(&error).unwrap()));
}

/// Touches 256 MiB, piece by piece.
fn memory() {
    let mut pieces = Vec::new();
    for piece in 1..=256u32 {
        pieces.push(std::hint::black_box(vec![1u8; 1 << 20]));
        say(&format!("MiB: {piece}"));
    }
    assert_eq!(pieces.len(), 256);
}

/// Uses all the CPU time it can get, until it is killed.
fn spin() {
    say("begin");
    let work = || loop {
        std::hint::black_box(std::array::from_fn::<u64, 64, _>(|at| at as u64));
    };
    let threads: [std::thread::JoinHandle<()>; 2] =
        std::array::from_fn(|_| std::thread::spawn(work));
    for thread in threads {
        thread.join().unwrap();
    }
}
