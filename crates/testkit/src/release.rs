//! Another release than the one that was built.

use crate::cluster::Cluster;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

/// How the built release's guests name their kernel's build.
const BUILT: &[u8] = b"PREEMPT_DYNAMIC Debian";
/// How the guests of the other one do: of the same length, since the kernel's file is changed in place.
const OTHER: &[u8; BUILT.len()] = b"PREEMPT_DYNAMIC others";

/// The programs of the built release in another place, and guests with a kernel that calls itself another build.
#[derive(Debug)]
pub struct Release {
    directory: tempfile::TempDir,
}

impl Release {
    /// Makes one of what a cluster runs.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(cluster: &Cluster) -> Self {
        let built = cluster
            .program()
            .parent()
            .expect("programs are in a directory");
        let directory = tempfile::Builder::new()
            .prefix("monopod-test-")
            .tempdir()
            .expect("a temporary directory");
        let made = Self { directory };
        let from = |name: &str| built.join(name);
        let to = |name: &str| made.directory.path().join(name);
        // It finds the others beside itself.
        std::fs::copy(from("monopod"), to("monopod")).expect("a copy");
        std::fs::create_dir(to("guest")).expect("a directory");
        for name in [
            "kubernetes",
            "images",
            "guest/initramfs.cpio",
            "guest/preload.so",
            "guest/release.json",
        ] {
            symlink(from(name), to(name)).expect("a link");
        }
        let mut kernel = std::fs::read(from("guest/vmlinux")).expect("the built guest image");
        let found: Vec<usize> = kernel
            .windows(BUILT.len())
            .enumerate()
            .filter_map(|(at, bytes)| (bytes == BUILT).then_some(at))
            .collect();
        assert!(
            !found.is_empty(),
            "the kernel does not say how it was built"
        );
        for at in found {
            kernel[at..at + BUILT.len()].copy_from_slice(OTHER);
        }
        std::fs::write(to("guest/vmlinux"), kernel).expect("the other guest image");
        made
    }

    /// Its `monopod`.
    pub fn program(&self) -> PathBuf {
        self.directory.path().join("monopod")
    }

    /// Whether a kernel's build, as `uname -v` prints it, is of such guests.
    pub fn has_kernel(build: &str) -> bool {
        build
            .as_bytes()
            .windows(OTHER.len())
            .any(|part| part == OTHER)
    }
}
