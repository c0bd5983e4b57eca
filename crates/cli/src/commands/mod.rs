//! The subcommands of `monopod`.

mod control;
mod doctor;
mod down;
mod explain;
mod host;
mod image;
mod kubectl;
mod manifest;
mod profile;
mod size;
mod status;
mod supervise;
mod trace;
mod up;

use crate::settings::{DEFAULT_DATA, Layout};
use anyhow::Context;
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Serverless Kubernetes on machines you own: each pod that a Fargate profile selects runs in a
/// microVM of its own.
#[derive(Parser, Debug)]
#[command(
    name = "monopod",
    version,
    about,
    after_help = "Begin with `monopod up`, then `monopod kubectl get nodes,pods -A`."
)]
struct Arguments {
    /// Directory with the cluster's data
    #[arg(long, global = true, env = "MONOPOD_DATA", default_value = DEFAULT_DATA)]
    data: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Bring up an embedded cluster on this machine, or find it running
    Up(Box<up::Up>),
    /// Stop the cluster and everything that it started
    Down(down::Down),
    /// Show the cluster's parts, hosts and environments
    Status(status::Status),
    /// Find what is wrong with this machine and its cluster, and say the remedy
    Doctor(doctor::Doctor),
    /// Tell where a pod is on its way, why, and what comes next
    Explain(explain::Explain),
    /// Show a pod's start, step by step
    Trace(trace::Trace),
    /// Run kubectl as the cluster's administrator
    #[command(disable_help_flag = true)]
    Kubectl(kubectl::Kubectl),
    /// Print the administrator's kubeconfig
    Kubeconfig,
    /// Load and list the images of this host
    Image(image::Image),
    /// Show the size that a pod gets, and the sum that leads to it
    Size(size::Size),
    /// Tell which profile takes a pod
    Profile(profile::Profile),
    /// Run the control process (the supervisor does)
    Control(control::Control),
    /// The cluster's machines
    Host(host::Host),
    /// Keep the parts running (`up` starts it)
    #[command(hide = true)]
    Supervise,
    /// Become a part that ends with its supervisor
    #[command(hide = true, disable_help_flag = true)]
    RunPart {
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

/// Runs the command that the arguments name.
pub fn main() -> ExitCode {
    let Arguments { data, command } = Arguments::parse();
    let server = match &command {
        Command::Control(_) | Command::Supervise => true,
        Command::Host(host) => host.is_server(),
        _command => false,
    };
    if !server {
        end_with_reader();
    }
    match run(&Layout::new(&data), command) {
        Ok(code) => code,
        Err(error) => {
            use std::io::Write;
            let text = format!("monopod: {error:#}\n");
            match std::io::stderr().write_all(text.as_bytes()) {
                Ok(()) | Err(_) => ExitCode::FAILURE,
            }
        }
    }
}

/// Lets `monopod … | head` end quietly, as other programs do. Servers must not end so.
#[expect(
    unsafe_code,
    reason = "the standard library ignores SIGPIPE and has no way to undo it"
)]
fn end_with_reader() {
    // SAFETY: the default action is always valid, and no other thread runs yet.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

fn run(layout: &Layout, command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::RunPart { program, arguments } => {
            Err(crate::cluster::supervisor::run_part(&program, &arguments))
        }
        Command::Kubectl(kubectl) => kubectl.run(layout),
        Command::Supervise => single(supervise::run(layout)),
        Command::Up(up) => single(up.run(layout)),
        Command::Down(down) => single(down.run(layout)),
        Command::Status(status) => single(status.run(layout)),
        Command::Doctor(doctor) => single(doctor.run(layout)),
        Command::Explain(explain) => single(explain.run(layout)),
        Command::Trace(trace) => single(trace.run(layout)),
        Command::Kubeconfig => {
            let path = layout.kubeconfig("admin");
            let text = std::fs::read_to_string(&path).with_context(|| {
                format!(
                    "cannot read {}: is the cluster up? (`monopod up`)",
                    path.display()
                )
            })?;
            println!("{text}");
            Ok(ExitCode::SUCCESS)
        }
        Command::Image(image) => image.run(layout),
        Command::Size(size) => size.run(),
        Command::Profile(profile) => single(profile.run(layout)),
        Command::Control(control) => several(control.run(layout)),
        Command::Host(host) => host.run(layout),
    }
}

/// Runs on this thread alone: a supervisor's children get a signal when the thread that started them ends.
fn single(work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(work)
}

fn several(work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(work)
}
