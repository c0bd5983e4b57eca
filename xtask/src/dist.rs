//! Builds everything that a machine needs into one directory, and links `bin/monopod`.
//!
//! Caches lie outside the checkout, so that a fresh clone is built fast:
//! `$MONOPOD_CACHE`, else `$XDG_CACHE_HOME/monopod`, else `~/.cache/monopod`.
//!
//! ```text
//! dist/monopod  dist/kubernetes  dist/guest/{vmlinux,initramfs.cpio,preload.so,release.json}  dist/images/*.tar
//! target/       cargo's           downloads/  Debian packages
//! ```

use crate::kernel::run;
use crate::{KUBERNETES_VERSION, go, guest_image, helm, images, packages, sdk};
use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The checkout.
pub(crate) fn root() -> PathBuf {
    // Where this program was built from; its parent is the workspace.
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(Path::to_owned)
        .unwrap_or_default()
}

/// Where everything that is built or downloaded is kept.
pub(crate) fn cache() -> PathBuf {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    variable("MONOPOD_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|base| base.join("monopod")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/monopod")))
        .unwrap_or_else(|| PathBuf::from("/var/cache/monopod"))
}

/// Cargo's target directory for everything but this program itself.
pub(crate) fn target_directory() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| cache().join("target"), |given| root().join(given))
}

/// The directory with the results.
pub(crate) fn directory() -> PathBuf {
    cache().join("dist")
}

/// A command of cargo's, in the checkout, with the shared target directory.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO"));
    command
        .args(arguments)
        .current_dir(root())
        .env("CARGO_TARGET_DIR", target_directory());
    // What cargo told this program of itself. Crates that watch it (ring does) would be built anew,
    // with all that need them, each time after a cargo that a shell started.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Programs that need what was built find it by these variables.
pub(crate) fn with_dist<'a>(command: &'a mut Command, dist: &Path) -> &'a mut Command {
    command
        .env("MONOPOD_DIST", dist)
        .env("MONOPOD_GUEST_DIR", dist.join("guest"))
}

/// Builds everything; what is up to date costs little.
pub(crate) fn build() -> Result<PathBuf> {
    let uid = Command::new("id").arg("-u").output()?.stdout;
    ensure!(
        uid == b"0\n",
        "Monopod needs root, for VMs, taps and network namespaces: run this as root"
    );
    let dist = directory();
    for part in ["guest", "images"] {
        std::fs::create_dir_all(dist.join(part))?;
    }
    step("Debian packages", packages::ensure)?;
    step(
        "upstream control plane (Go, about ten minutes the first time)",
        || kubernetes(&dist),
    )?;
    step("monopod (Rust, some minutes the first time)", || {
        monopod(&dist)
    })?;
    step("guest image (Rust and Debian's kernel)", || {
        guest_image::build(&dist.join("guest"), &cache().join("downloads"))
    })?;
    step("sample images", || {
        images::build(&dist.join("images"), &cache().join("downloads"))
    })?;
    link(&dist)?;
    Ok(dist)
}

/// Makes what only the tests use, beside the rest.
pub(crate) fn build_for_tests(dist: &Path) -> Result<()> {
    let out = dist.join("tests");
    step("images and tools of the tests", || {
        images::build_for_tests(&out, &cache().join("downloads"))?;
        sdk::fetch(&out.join("sdk"))?;
        helm::fetch(&out.join("helm"))
    })
}

/// Does something, and says what and how long it took.
pub(crate) fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("==> {name}");
    let start = Instant::now();
    let result = work().with_context(|| format!("{name} failed"))?;
    println!("    done in {:.1} s", start.elapsed().as_secs_f64());
    Ok(result)
}

/// Makes a file unless it was made from the same inputs before, which a stamp beside it tells.
pub(crate) fn unless_done(
    out: &Path,
    inputs: &[&[u8]],
    work: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let stamp = out.with_extension("stamp");
    let mut hash = Sha256::new();
    for input in inputs {
        hash.update(input.len().to_le_bytes());
        hash.update(input);
    }
    let wanted = hex::encode(hash.finalize());
    if out.exists() && std::fs::read_to_string(&stamp).is_ok_and(|done| done == wanted) {
        return Ok(());
    }
    work()?;
    Ok(std::fs::write(stamp, wanted)?)
}

fn kubernetes(dist: &Path) -> Result<()> {
    let module = root().join("kubernetes");
    let read =
        |name: &str| std::fs::read(module.join(name)).with_context(|| format!("kubernetes/{name}"));
    let inputs = [
        read("main.go")?,
        read("node.go")?,
        read("go.mod")?,
        read("go.sum")?,
        read("VERSION")?,
    ];
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    // Linking takes ten seconds even when nothing changed.
    unless_done(&dist.join("kubernetes"), &inputs, || {
        let flags =
            format!("-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}");
        go::build("kubernetes", &flags, &dist.join("kubernetes"), ".")
    })
}

fn monopod(dist: &Path) -> Result<()> {
    run(&mut cargo(&[
        "build",
        "--release",
        "--package",
        "monopod-cli",
    ]))?;
    let partial = dist.join("monopod.partial");
    std::fs::copy(target_directory().join("release/monopod"), &partial)?;
    replace_if_changed(&partial, &dist.join("monopod"))
}

/// A program that runs cannot be written to, but its name can be given to another file.
pub(crate) fn replace_if_changed(partial: &Path, out: &Path) -> Result<()> {
    std::fs::rename(partial, out).with_context(|| format!("cannot write {}", out.display()))
}

fn link(dist: &Path) -> Result<()> {
    let bin = root().join("bin");
    std::fs::create_dir_all(&bin)?;
    let link = bin.join("monopod");
    if std::fs::read_link(&link).is_ok_and(|target| target == dist.join("monopod")) {
        return Ok(());
    }
    match std::fs::remove_file(&link) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        Ok(()) | Err(_) => {}
    }
    std::os::unix::fs::symlink(dist.join("monopod"), &link).context("cannot link bin/monopod")
}
