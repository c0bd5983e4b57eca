//! `monopod up`: starts the supervisor if it does not run, and waits until everything is ready.

use super::supervise::{claim_name, programs};
use crate::cluster::earlier::Parts;
use crate::cluster::parts::Programs;
use crate::cluster::supervisor::{Phase, Progress};
use crate::settings::{DEFAULT_DATA, HostSettings, Layout, Settings};
use anyhow::Context;
use clap::{Args, Parser};
use rustix::fs::{FlockOperation, flock};
use std::fs;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::{Child, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// How long everything together may take.
const LIMIT: Duration = Duration::from_mins(5);

#[derive(Args, Debug)]
pub(crate) struct Up {
    #[command(flatten)]
    settings: Settings,
    /// Stay in the foreground and log to the terminal, for service managers
    #[arg(long)]
    foreground: bool,
}

impl Up {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self {
            mut settings,
            foreground,
        } = self;
        settings.check()?;
        settings.host = settings.host.with_absolute_paths()?;
        let programs = programs()?;
        let settings = settle(layout, settings)?;
        start(layout, &settings, &programs, foreground).await
    }
}

/// Starts what the settings say, unless it runs already, and waits until it is ready.
pub(super) async fn start(
    layout: &Layout,
    settings: &Settings,
    programs: &Programs,
    foreground: bool,
) -> anyhow::Result<ExitCode> {
    // Before the cluster, whose first pods need one of them.
    super::image::load_built_in(layout, programs)?;
    if !running(layout)? {
        let earlier = Parts::of(layout);
        if !earlier.is_empty() {
            println!("Ending what runs of a supervisor that was killed.");
            earlier.end(layout).await?;
        }
    }
    if foreground {
        return super::supervise::run(layout).await;
    }
    let data = layout.data.display();
    let named = if layout.data == Path::new(DEFAULT_DATA) {
        String::new()
    } else {
        format!(" --data {data}")
    };
    let (what, hint) = match settings.joined {
        Some(_) => (
            "host",
            "Try on the cluster's machine: monopod kubectl get hosts".to_owned(),
        ),
        None => (
            "cluster",
            format!("Try: monopod{named} kubectl get nodes,pods -A"),
        ),
    };
    let started = if running(layout)? {
        println!("The {what} in {data} is running already.");
        None
    } else {
        println!("Starting the {what} in {data}.");
        clear(layout)?;
        drop(claim_name(&settings.name, layout)?);
        Some(start_supervisor(layout, &programs.monopod)?)
    };
    follow(layout, started).await?;
    println!("Ready. {hint}");
    Ok(ExitCode::SUCCESS)
}

#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    settings: Settings,
}

/// Writes the settings of a new cluster, or checks that they are those of an existing one, whose
/// own then hold.
fn settle(layout: &Layout, wanted: Settings) -> anyhow::Result<Settings> {
    let Ok(stored) = layout.read_settings() else {
        layout.write_settings(&wanted)?;
        return Ok(wanted);
    };
    let defaults = Defaults::parse_from(["monopod"]).settings;
    let host = if wanted.host == HostSettings::default() {
        stored.host.clone()
    } else {
        HostSettings {
            underlay: wanted.host.underlay.or(stored.host.underlay),
            ..wanted.host.clone()
        }
    };
    let max_profiles = if wanted.max_profiles == defaults.max_profiles {
        stored.max_profiles
    } else {
        wanted.max_profiles
    };
    let certificate_lifetime = if wanted.certificate_lifetime == defaults.certificate_lifetime {
        stored.certificate_lifetime
    } else {
        wanted.certificate_lifetime
    };
    // What no flag says is as it was.
    let settled = |settings: &Settings| Settings {
        host: host.clone(),
        max_profiles,
        certificate_lifetime,
        network: stored.network,
        joined: stored.joined,
        ..settings.clone()
    };
    let same = settled(&wanted) == settled(&stored);
    if !same && settled(&wanted) != settled(&defaults) {
        anyhow::bail!(
            "the cluster in {} was made with other settings; leave the flags out, choose another --data, or remove it with `monopod down --purge`",
            layout.data.display()
        );
    }
    let settled = settled(&stored);
    if settled != stored {
        layout.write_settings(&settled)?;
        if running(layout)? {
            println!("The new settings hold after `monopod down` and `monopod up`.");
        }
    }
    Ok(settled)
}

/// Whether a supervisor holds the lock.
pub(crate) fn running(layout: &Layout) -> anyhow::Result<bool> {
    let Ok(file) = fs::File::open(layout.supervisor()) else {
        return Ok(false);
    };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(error) => Err(error).context("cannot test the supervisor's lock"),
    }
}

fn clear(layout: &Layout) -> anyhow::Result<()> {
    match fs::remove_file(layout.progress()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn start_supervisor(layout: &Layout, monopod: &Path) -> anyhow::Result<Child> {
    let path = layout.log("supervisor");
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let log = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)?;
    // A session of its own, so that the terminal's signals do not reach it; done by `setsid(1)`,
    // which every Debian has, because only a new process may call it.
    std::process::Command::new("setsid")
        .arg(monopod)
        .arg("--data")
        .arg(&layout.data)
        .arg("supervise")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("cannot start the supervisor")
}

/// Shows the phases as they end, until all are done; of a supervisor that was `started` for it, or one that runs.
async fn follow(layout: &Layout, mut started: Option<Child>) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    let mut shown = 0;
    let terminal = std::io::stdout().is_terminal();
    loop {
        let progress = Progress::read(layout);
        for phase in progress.phases.iter().skip(shown) {
            let Some(seconds) = phase.seconds else { break };
            println!(
                "{}  {:<24} {seconds:6.1} s",
                if terminal { "\r✓" } else { "ok" },
                phase.name
            );
            shown += 1;
        }
        if let Some(error) = progress.error {
            // It stops what it started, and then another `up` may follow.
            while let Some(supervisor) = &mut started
                && supervisor.try_wait()?.is_none()
                && Instant::now() < deadline
            {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            anyhow::bail!("{error}");
        }
        if progress.ready {
            return Ok(());
        }
        // Not by its lock, which one that begins must find free.
        let ended = match &mut started {
            Some(supervisor) => supervisor.try_wait()?.is_some(),
            None => !running(layout)?,
        };
        if ended {
            // It may have said more before it ended.
            let Progress { ready, error, .. } = Progress::read(layout);
            anyhow::ensure!(
                ready,
                "the supervisor ended: {}; see {}",
                error.as_deref().unwrap_or("it was stopped meanwhile"),
                layout.log("supervisor").display()
            );
        }
        if Instant::now() >= deadline {
            let waiting = progress
                .phases
                .last()
                .map_or("the supervisor", |phase| &phase.name);
            anyhow::bail!(
                "not ready after {LIMIT:?}, waiting for {waiting}; see {}",
                layout.log("supervisor").display()
            );
        }
        if terminal
            && let Some(Phase {
                name,
                seconds: None,
                ..
            }) = progress.phases.last()
        {
            print!("\r…  {name:<24}");
            std::io::stdout().flush()?;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
