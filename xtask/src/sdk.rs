//! An AWS SDK and a service that it can talk to, for the tests: boto3 and moto, from Python's registry.

use crate::dist::unless_done;
use crate::kernel::run;
use crate::packages;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::process::Command;

const PACKAGES: [&str; 2] = ["boto3==1.44.8", "moto[server]==5.2.5"];

/// Fills `out`, a directory for `PYTHONPATH`, unless it is there.
pub(crate) fn fetch(out: &Path) -> Result<()> {
    unless_done(out, &PACKAGES.map(str::as_bytes), || {
        packages::ensure_pip()?;
        if out.exists() {
            fs::remove_dir_all(out)?;
        }
        run(Command::new("pip")
            .args(["install", "--quiet", "--target"])
            .arg(out)
            .args(PACKAGES))
        .context("boto3 and moto cannot be fetched")
    })
}
