//! `monopod supervise`: what `up` starts in the background.

use crate::cluster::parts::Programs;
use crate::cluster::supervisor;
use crate::settings::Layout;
use anyhow::Context;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;

pub(crate) async fn run(layout: &Layout) -> anyhow::Result<ExitCode> {
    monopod_ops::logs::init();
    let settings = layout.read_settings()?;
    let mut lock = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(layout.supervisor())?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)
        .context("another supervisor runs this cluster")?;
    let _name = claim_name(&settings.name, layout)?;
    lock.set_len(0)?;
    write!(lock, "{}", std::process::id())?;
    supervisor::run(layout.clone(), settings, programs()?).await?;
    drop(lock);
    Ok(ExitCode::SUCCESS)
}

/// Takes the name for as long as the file is open: devices and namespaces of a machine carry it.
pub(crate) fn claim_name(name: &str, layout: &Layout) -> anyhow::Result<File> {
    let directory = Path::new("/run/monopod");
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    let path = directory.join(format!("{name}.lock"));
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut owner = String::new();
        file.take(4096).read_to_string(&mut owner)?;
        anyhow::bail!(
            "a cluster named {name} runs on this machine with the data directory {}; choose another --name, --link, --vpc-cidr and --base-port",
            owner.trim()
        );
    }
    file.set_len(0)?;
    writeln!(file, "{}", layout.data.display())?;
    Ok(file)
}

/// Programs lie beside this one.
pub(crate) fn programs() -> anyhow::Result<Programs> {
    let monopod = std::env::current_exe()?.canonicalize()?;
    let beside = monopod
        .parent()
        .context("the program has no directory")?
        .to_owned();
    let programs = Programs {
        kubernetes: beside.join("kubernetes"),
        guest: beside.join("guest"),
        monopod,
    };
    for (path, what) in [
        (&programs.kubernetes, "the control plane"),
        (&programs.guest, "the guest image"),
    ] {
        if !path.exists() {
            anyhow::bail!(
                "{} is missing ({what}): build everything with `cargo xtask build`",
                path.display()
            );
        }
    }
    Ok(programs)
}
