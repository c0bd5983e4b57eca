//! The guest image: kernel, initramfs, the library that QEMU needs for them, and a note of what they are.
//!
//! The initramfs is a plain cpio archive: under emulation unpacking a compressed one takes longer
//! than reading a larger one. Every input is named in `release.json`; the files are only replaced
//! when an input changed.

use crate::kernel::{self, output, run};
use crate::ruleset;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// What a guest image is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Release {
    /// The Kubernetes version that the node runtime is built for.
    kubernetes_version: String,
    /// `uname -r` of the kernel.
    kernel: String,
    /// The kernel's package.
    kernel_build: String,
    /// The source's revision.
    revision: String,
    /// SHA-256 of the archive.
    initramfs: String,
    /// SHA-256 of the library.
    preload: String,
}

/// Builds `vmlinux`, `initramfs.cpio`, `preload.so` and `release.json` into `out`; downloads are kept in `cache`.
pub(crate) fn build(out: &Path, cache: &Path) -> Result<()> {
    let kernel = kernel::fetch(cache)?;
    let binary = build_binary()?;
    let archive = archive(&kernel, &binary)?;
    let preload = std::fs::read(build_preload()?)?;
    let release = Release {
        kubernetes_version: crate::KUBERNETES_VERSION.into(),
        kernel: kernel.release.clone(),
        kernel_build: kernel.build.clone(),
        revision: output(Command::new("git").args(["describe", "--always", "--dirty"]))
            .map_or_else(|_| "unknown".into(), |text| text.trim().into()),
        initramfs: hex::encode(Sha256::digest(&archive)),
        preload: hex::encode(Sha256::digest(&preload)),
    };
    std::fs::create_dir_all(out)?;
    let note = out.join("release.json");
    let before: Option<Release> = std::fs::read(&note)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok());
    if before.as_ref() != Some(&release) {
        // A VM that starts meanwhile reads either the old files or the new.
        replace(&out.join("vmlinux"), &std::fs::read(&kernel.vmlinux)?)?;
        replace(&out.join("initramfs.cpio"), &archive)?;
        replace(&out.join("preload.so"), &preload)?;
        replace(&note, &serde_json::to_vec_pretty(&release)?)?;
    }
    Ok(())
}

fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(path.parent().context("file at the root")?)?;
    std::io::Write::write_all(&mut file, bytes)?;
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    file.as_file().set_permissions(permissions)?;
    file.persist(path)?;
    Ok(())
}

/// The static binary. Its own target directory keeps its flags from rebuilding everything else.
fn build_binary() -> Result<PathBuf> {
    let target = crate::dist::target_directory().join("guest");
    let build = ["build", "--package", "monopod-guest", "--profile", "guest"];
    run(crate::dist::cargo(&build)
        .args(["--target", TARGET, "--target-dir"])
        .arg(&target)
        // At one address in every process: what one has run need not be translated for another.
        .env(
            "RUSTFLAGS",
            "-C target-feature=+crt-static -C relocation-model=static",
        ))?;
    Ok(target.join(TARGET).join("guest/monopod-guest"))
}

/// The library that is loaded into QEMU.
fn build_preload() -> Result<PathBuf> {
    let build = [
        "build",
        "--package",
        "monopod-preload",
        "--profile",
        "guest",
    ];
    run(&mut crate::dist::cargo(&build))?;
    Ok(crate::dist::target_directory().join("guest/libmonopod_preload.so"))
}

fn archive(kernel: &kernel::Kernel, binary: &Path) -> Result<Vec<u8>> {
    let mut archive = Cpio::default();
    for directory in [
        "bin",
        "dev",
        "etc",
        "lib",
        "lib/modules",
        "proc",
        "root",
        "run",
        "sbin",
        "sys",
        "tmp",
        "usr",
    ] {
        archive.directory(directory);
    }
    archive.file("init", 0o755, &std::fs::read(binary)?);
    for part in ["platform", "node", "stand-in"] {
        archive.link(&format!("sbin/monopod-{part}"), "/init");
    }
    let mut order = String::new();
    for path in &kernel.modules {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .context("module without a name")?;
        archive.file(&format!("lib/modules/{name}"), 0o644, &std::fs::read(path)?);
        order.push_str(name);
        order.push('\n');
    }
    archive.file("lib/modules/order", 0o644, order.as_bytes());
    let ruleset = ruleset::compile(include_str!("../../crates/guest/src/pid1/node.nft"))?;
    archive.file("lib/node.ruleset", 0o644, &ruleset);
    Ok(archive.finish())
}

/// A cpio archive in the format `newc`, which the kernel unpacks (Documentation/driver-api/early-userspace/buffer-format.rst).
#[derive(Default)]
struct Cpio {
    bytes: Vec<u8>,
    inodes: u32,
}

impl Cpio {
    fn directory(&mut self, name: &str) {
        self.entry(name, 0o040_755, &[]);
    }

    fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, 0o100_000 | mode, content);
    }

    fn link(&mut self, name: &str, target: &str) {
        self.entry(name, 0o120_777, target.as_bytes());
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.inodes += 1;
        let size = u32::try_from(content.len()).expect("the guest's files are small");
        let name_size = u32::try_from(name.len() + 1).expect("names are short");
        // ino, mode, uid, gid, nlink, mtime, filesize, device and rdevice, namesize, check
        let fields = [
            self.inodes,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            0,
            0,
            name_size,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::Stdio;

    #[test]
    fn cpio_reads_what_we_write() {
        let mut archive = Cpio::default();
        archive.directory("a");
        archive.file("a/b", 0o755, b"odd length!");
        archive.link("a/c", "b");
        let bytes = archive.finish();
        let mut child = Command::new("cpio")
            .args(["--list", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "a\na/b\na/c\n");
    }
}
