//! Builds Go programs, and says how far it is.

use crate::dist::{replace_if_changed, root};
use crate::kernel::output;
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Where the output is a file, a line is written for each of so many parts of the whole.
const PARTS: usize = 10;

/// Builds a package of one of the Go modules. Go's own cache makes a second time short.
pub(crate) fn build(module: &str, linker_flags: &str, out: &Path, package: &str) -> Result<()> {
    let partial = out.with_extension("partial");
    let dependencies = output(go(module).args(["list", "-deps", package]))
        .context("Go 1.26 has to be there, and to reach its modules")?;
    let mut command = go(module);
    command
        .args(["build", "-v", "-trimpath", "-buildvcs=false"])
        .args(["-ldflags", linker_flags, "-o"])
        .arg(&partial)
        .arg(package);
    let mut child = command
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {command:?}"))?;
    let told = child.stderr.take().context("its output is piped")?;
    follow(BufReader::new(told), dependencies.lines().count())?;
    let status = child.wait()?;
    ensure!(status.success(), "{command:?} failed: {status}");
    replace_if_changed(&partial, out)
}

fn go(module: &str) -> Command {
    let mut command = Command::new("go");
    command
        .env("CGO_ENABLED", "0")
        .current_dir(root().join(module));
    command
}

/// Counts the packages that are compiled; what is cached is not named. Whatever else is said is shown.
fn follow(told: impl BufRead, packages: usize) -> Result<()> {
    let terminal = std::io::stdout().is_terminal();
    let every = (packages / PARTS).max(1);
    let mut compiled = 0;
    for line in told.split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        let is_package = !line.is_empty() && !line.contains([' ', '\t', '#', ':']);
        if !is_package {
            println!("    {line}");
            continue;
        }
        compiled += 1;
        if terminal {
            print!("\r    compiled {compiled} of {packages} packages");
            std::io::stdout().flush()?;
        } else if compiled % every == 0 {
            println!("    compiled {compiled} of {packages} packages");
        }
    }
    if terminal && compiled > 0 {
        println!();
    }
    Ok(())
}
