//! `monopod kubectl`: upstream kubectl of the cluster's version, with the administrator's kubeconfig.

use super::supervise::programs;
use crate::settings::Layout;
use clap::Args;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Kubectl {
    /// Arguments for kubectl
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

impl Kubectl {
    /// Becomes kubectl; returns only if that fails.
    pub(crate) fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let kubeconfig = layout.kubeconfig("admin");
        anyhow::ensure!(
            kubeconfig.exists(),
            "no cluster in {}: run `monopod up` first",
            layout.data.display()
        );
        let error = std::process::Command::new(programs()?.kubernetes)
            .arg("kubectl")
            .args(self.arguments)
            .env("KUBECONFIG", kubeconfig)
            .exec();
        Err(error.into())
    }
}
