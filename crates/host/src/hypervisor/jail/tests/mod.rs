//! A stand-in is run in QEMU's place, in the same jail, and tries to get out: each test has it try
//! one thing. It is this very executable, told by its arguments to be the stand-in.
//!
//! Needs root and control groups, as VMs do.

mod groups;
mod stand_in;

use super::*;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::mpsc;
use std::time::Duration;

/// A user like those of VMs.
const UID: u32 = (1 << 30) + 7;
/// Largest file that stand-ins may make.
const FILE_BYTES: u64 = 1 << 20;
/// Longest that a stand-in may take.
const PATIENCE: Duration = Duration::from_mins(1);

/// What is special about a stand-in's jail.
#[derive(Default)]
struct Special {
    inherited: Vec<OwnedFd>,
    groups: Vec<File>,
    kvm: bool,
}

/// A stand-in that runs.
struct Running {
    child: Child,
    output: mpsc::Receiver<String>,
    _root: tempfile::TempDir,
}

fn start_stand_in(attempt: &str, special: &Special) -> Running {
    let root = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    let program = Program::prepare(root.path(), &program, &[]).unwrap();
    let arguments = [
        concat!(module_path!(), "::the_stand_in")
            .split_once("::")
            .unwrap()
            .1,
        "--exact",
        "--nocapture",
        "--test-threads=1",
        &format!("attempt={attempt}"),
    ]
    .map(str::to_owned);
    let (mut reader, writer) = std::io::pipe().unwrap();
    let child = start(&Jail {
        program: &program,
        arguments: &arguments,
        uid: UID,
        inherited: &special.inherited,
        preload: None,
        groups: &special.groups,
        file_bytes: FILE_BYTES,
        kvm: special.kvm,
        output: writer.into(),
    })
    .unwrap();
    let (sender, output) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        // The test may have failed meanwhile.
        drop(sender.send(text));
    });
    Running {
        child,
        output,
        _root: root,
    }
}

impl Running {
    /// What the stand-in found, and how it ended.
    fn end(mut self) -> (Vec<String>, ExitStatus) {
        let text = self.output.recv_timeout(PATIENCE);
        if text.is_err() {
            self.child.kill().unwrap();
        }
        let status = self.child.wait().unwrap();
        let text = text.expect("the stand-in comes to an end");
        let found = text
            .lines()
            .filter_map(|line| line.strip_prefix(stand_in::FOUND));
        let found: Vec<String> = found.map(str::to_owned).collect();
        assert!(!found.is_empty(), "{status}: {text}");
        (found, status)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended, but where the test failed.
        drop(self.child.kill());
    }
}

/// Lets a stand-in try something, and gives what it found.
fn found(attempt: &str, special: &Special) -> Vec<String> {
    let (mut found, status) = start_stand_in(attempt, special).end();
    assert!(status.success(), "{status}: {found:?}");
    assert_eq!(found.pop().as_deref(), Some("end"), "{found:?}");
    found
}

/// Not a test by itself: what the others start.
#[test]
fn the_stand_in() {
    let attempt =
        std::env::args().find_map(|word| word.strip_prefix("attempt=").map(str::to_owned));
    if let Some(attempt) = attempt {
        stand_in::run(&attempt);
    }
}

#[test]
fn nothing_of_the_machine_is_in_its_root() {
    let program = std::env::current_exe().unwrap();
    let mut expected: Vec<String> = root::libraries(&program)
        .unwrap()
        .into_iter()
        .chain([program, "/dev/null".into()])
        .map(|path| path.display().to_string())
        .collect();
    expected.sort();
    assert_eq!(found("files", &Special::default()), expected);
    let with_kvm = Special {
        kvm: true,
        ..Special::default()
    };
    expected.push("/dev/kvm".to_owned());
    expected.sort();
    assert_eq!(found("files", &with_kvm), expected);
}

#[test]
fn nothing_can_be_written_or_made() {
    let mounts = ["/ ro", "/proc ro", "/dev ro", "/dev/null rw"];
    assert_eq!(found("write", &Special::default()), mounts);
}

/// The scratch disk is a descriptor; a disk that grows would fill the machine's.
#[test]
fn its_scratch_can_be_written_but_not_grow() {
    let scratch = tempfile::tempfile().unwrap();
    scratch.set_len(FILE_BYTES).unwrap();
    let special = Special {
        inherited: vec![scratch.try_clone().unwrap().into()],
        ..Special::default()
    };
    let number = special.inherited[0].as_raw_fd();
    let found = found(&format!("scratch:{number}"), &special);
    assert_eq!(
        found,
        [
            "within: 8",
            "punch: 0",
            "beyond: EFBIG",
            "truncate: EFBIG",
            "allocate: EPERM"
        ]
    );
    let is = scratch.metadata().unwrap();
    assert_eq!(is.len(), FILE_BYTES);
    assert!(std::os::unix::fs::MetadataExt::blocks(&is) * 512 <= FILE_BYTES);
}

#[test]
fn it_sees_no_process_but_itself() {
    let mut other = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let found = found(&format!("processes:{}", other.id()), &Special::default());
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(found, ["pid: 1", "parent: 0", "listed: 1", "kill: ESRCH"]);
}

#[test]
fn it_has_no_network() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    let name = format!("monopod-jail-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _listener = UnixListener::bind_addr(&address).unwrap();
    let found = found(&format!("network:{name}"), &Special::default());
    assert_eq!(
        found,
        [
            "inet: EPERM",
            "inet6: EPERM",
            "netlink: EPERM",
            "packet: EPERM",
            "vsock: EPERM",
            "alg: EPERM",
            "unix: 0",
            "abstract: ECONNREFUSED",
            "devices: lo"
        ]
    );
}

#[test]
fn it_can_gain_no_rights() {
    let none = "0".repeat(16);
    assert_eq!(
        found("rights", &Special::default()),
        [
            format!("uid: {UID} {UID} {UID} {UID}"),
            format!("gid: {UID} {UID} {UID} {UID}"),
            "groups: ".to_owned(),
            format!("inheritable: {none}"),
            format!("permitted: {none}"),
            format!("effective: {none}"),
            format!("bounding: {none}"),
            format!("ambient: {none}"),
            "no new privileges: 1".to_owned(),
            "setuid: EPERM".to_owned(),
            "setgid: EPERM".to_owned(),
            "setgroups: EPERM".to_owned(),
        ]
    );
}

#[test]
fn limits_cannot_be_raised() {
    assert_eq!(
        found("limits", &Special::default()),
        [
            "core: 0",
            "open files: 256",
            "file size: 1048576",
            "raise: EPERM",
            "opened: EMFILE"
        ]
    );
}

/// In the first thread and in another one.
#[test]
fn system_calls_that_it_does_not_need_are_refused() {
    let found = found("calls", &Special::default());
    let (refused, other): (Vec<_>, Vec<_>) =
        found.iter().partition(|line| line.ends_with(": EPERM"));
    assert_eq!(
        other,
        [
            "clone3: ENOSYS",
            "io_uring: ENOSYS",
            "clone3: ENOSYS",
            "io_uring: ENOSYS"
        ]
    );
    assert_eq!(
        refused.len(),
        2 * (seccomp::REFUSED.len() + stand_in::ARGUMENTS.len()),
        "{refused:?}"
    );
}

#[test]
fn calls_by_other_numbers_end_it() {
    let (found, status) = start_stand_in("x32", &Special::default()).end();
    assert_eq!(
        (found, status.signal()),
        (vec!["begin".to_owned()], Some(libc::SIGSYS))
    );
}

#[test]
fn it_inherits_only_what_it_is_given() {
    let given = File::open("/proc/self/exe").unwrap();
    // As a careless parent of this process leaves them to it.
    let left = File::open("/proc/self/exe").unwrap();
    rustix::io::fcntl_setfd(&left, rustix::io::FdFlags::empty()).unwrap();
    let special = Special {
        inherited: vec![given.into()],
        ..Special::default()
    };
    let number = special.inherited[0].as_raw_fd().to_string();
    assert_eq!(found("descriptors", &special), ["0", "1", "2", &number]);
}

/// A root is made once, used again, and made anew when its program is another.
#[test]
fn a_root_is_made_for_a_program_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let copy = tempfile::tempdir().unwrap();
    let program = copy.path().join("program");
    std::fs::copy("/bin/sh", &program).unwrap();
    let roots = directory.path().join("roots");
    let prepare = || Program::prepare(&roots, &program, &["/nonexistent".into()]).unwrap();
    let first = prepare();
    let made = |program: &Program| program.root.metadata().unwrap().created().unwrap();
    let created = made(&first);
    let again = prepare();
    assert_eq!((&again.root, made(&again)), (&first.root, created));
    std::fs::remove_file(&program).unwrap();
    std::fs::copy("/bin/true", &program).unwrap();
    let other = prepare();
    assert_ne!(other.root, first.root);
    assert!(!first.root.exists());
    let inside = other.root.join(program.strip_prefix("/").unwrap());
    assert_eq!(
        std::fs::read(inside).unwrap(),
        std::fs::read("/bin/true").unwrap()
    );
    let missing = Program::prepare(&roots, Path::new("/nonexistent"), &[]);
    assert!(missing.unwrap_err().to_string().contains("/nonexistent"));
}
