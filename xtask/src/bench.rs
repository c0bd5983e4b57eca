//! `cargo xtask bench`: builds Monopod and the ordinary node that it is measured beside, then measures.

use crate::dist::{build, cache, cargo, root, step, unless_done, with_dist};
use crate::kernel::run;
use crate::{KUBERNETES_VERSION, go, images, packages};
use anyhow::{Context, Result};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The programs of the ordinary node beside the kubelet: module with version, package, cgo, tags.
const PROGRAMS: [(&str, &str, &str, &str); 4] = [
    (CONTAINERD, "/cmd/containerd", "0", "no_btrfs"),
    (CONTAINERD, "/cmd/containerd-shim-runc-v2", "0", "no_btrfs"),
    (CONTAINERD, "/cmd/ctr", "0", "no_btrfs"),
    (RUNC, "", "1", "seccomp"),
];
/// Debian's are too old for each other and for this Kubernetes.
const CONTAINERD: &str = "github.com/containerd/containerd/v2@v2.4.2";
const RUNC: &str = "github.com/opencontainers/runc@v1.5.3";

/// Gives the arguments to the program that measures, and becomes it.
pub(crate) fn measure(arguments: &[String]) -> Result<()> {
    let asks = |names: &[&str]| {
        arguments
            .iter()
            .any(|given| names.contains(&given.as_str()))
    };
    let mut command = cargo(&[
        "run",
        "--quiet",
        "--release",
        "--package",
        "monopod-bench",
        "--",
    ]);
    command.args(arguments);
    if !asks(&["-h", "--help", "help"]) {
        // Standard output is for what was measured alone.
        let stdout = rustix::io::dup(rustix::stdio::stdout())?;
        rustix::stdio::dup2_stdout(rustix::stdio::stderr())?;
        command.stdout(Stdio::from(stdout));
        let dist = build()?;
        if !asks(&["--no-peer"]) {
            let peer = dist.join("peer");
            step(
                "an ordinary node: kubelet, containerd, runc (Go, some minutes the first time)",
                || build_peer(&peer),
            )?;
            command.env("MONOPOD_PEER", peer);
        }
        with_dist(&mut command, &dist);
        println!("==> measuring");
    }
    Err(command.exec()).context("cargo does not start")
}

/// Makes the programs and images of the ordinary node, as far as they are not up to date.
fn build_peer(out: &Path) -> Result<()> {
    packages::ensure_for_peer()?;
    std::fs::create_dir_all(out)?;
    for (module, package, cgo, tags) in PROGRAMS {
        let (path, version) = module.split_once('@').context("a module has a version")?;
        let name = format!("{path}{package}");
        let name = name.rsplit('/').next().unwrap_or(&name);
        unless_done(&out.join(name), &[module.as_bytes()], || {
            println!("    {name} {version}");
            run(Command::new("go")
                .args(["install", "-trimpath", "-ldflags", "-s -w", "-tags", tags])
                .arg(format!("{path}{package}@{version}"))
                .env("CGO_ENABLED", cgo)
                .env("GOBIN", out)
                .current_dir(cache()))
        })?;
    }
    let module = root().join("kubernetes");
    let pinned = [
        std::fs::read(module.join("go.mod"))?,
        std::fs::read(module.join("go.sum"))?,
    ];
    unless_done(&out.join("kubelet"), &[&pinned[0], &pinned[1]], || {
        println!("    kubelet {KUBERNETES_VERSION}");
        let flags =
            format!("-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}");
        go::build(
            "kubernetes",
            &flags,
            &out.join("kubelet"),
            "k8s.io/kubernetes/cmd/kubelet",
        )
    })?;
    images::build_for_peer(out, &cache().join("downloads"))
}
