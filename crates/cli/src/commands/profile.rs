//! `monopod profile`: which profile takes a pod, and why not the others.

use super::manifest::read_pod;
use super::status::Output;
use crate::cluster::client;
use crate::settings::Layout;
use clap::{Args, Subcommand};
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use monopod_api::profile::FargateProfile;
use monopod_core::admission::{Left, Profiles, Verdict, exempt, judge};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Profile {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Tell which profile takes a pod, and why not the others
    Match {
        /// A file with a pod, or with what makes pods; - is standard input
        #[arg(short, long)]
        file: PathBuf,
        /// The pod's namespace; default: the file's, or else `default`
        #[arg(short, long)]
        namespace: Option<String>,
        /// Output format
        #[arg(short, long, value_enum, default_value_t)]
        output: Output,
    },
}

impl Profile {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Command::Match {
            file,
            namespace,
            output,
        } = self.command;
        let pod = read_pod(&file)?;
        let namespace = namespace
            .or_else(|| pod.metadata.namespace.clone())
            .unwrap_or_else(|| "default".to_owned());
        let client = client::connect(&layout.kubeconfig("admin")).await?;
        let profiles: Profiles = Api::<FargateProfile>::all(client)
            .list(&ListParams::default())
            .await?
            .into_iter()
            .filter(|profile| profile.metadata.deletion_timestamp.is_none())
            .map(|profile| (profile.name_any(), profile.spec))
            .collect();
        let left = exempt(&pod);
        let judged = judge(&pod, &namespace, &profiles);
        let taken = judged
            .iter()
            .find(|(_, verdict)| left.is_none() && matches!(verdict, Verdict::Takes(_)))
            .map(|(name, _)| name.clone());
        match output {
            Output::Json => {
                let lines: serde_json::Map<_, _> = judged
                    .iter()
                    .map(|(name, verdict)| (name.clone(), json!(describe(verdict))))
                    .collect();
                let report =
                    json!({"profile": taken, "exempt": left.map(reason), "profiles": lines});
                println!("{}", serde_json::to_string_pretty(&report)?);
            }
            Output::Table => {
                let width = judged
                    .keys()
                    .map(String::len)
                    .max()
                    .unwrap_or(0)
                    .max("PROFILE".len());
                println!("{:<width$}   VERDICT", "PROFILE");
                for (name, verdict) in &judged {
                    println!("{name:<width$}   {}", describe(verdict));
                }
                match (&taken, left) {
                    (_, Some(left)) => println!("\nLeft to other schedulers: {}", reason(left)),
                    (Some(name), None) => println!("\nRuns on Monopod by the profile {name}"),
                    (None, None) => println!("\nLeft to other schedulers: no profile takes it"),
                }
            }
        }
        Ok(if taken.is_some() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

fn describe(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Takes(number) => format!("takes it, by selector {number}"),
        Verdict::After(first) => format!("would take it, but {first} comes first by name"),
        Verdict::NotNamed => "would take it, but the pod's label names another profile".to_owned(),
        Verdict::Misses(why) => why.join("; "),
    }
}

fn reason(left: Left) -> &'static str {
    match left {
        Left::NoProfileMatches | Left::NamedIsMissing | Left::NamedDoesNotMatch => {
            "no profile takes it"
        }
        Left::OptedOut => "its annotation eks.amazonaws.com/compute-type is ec2",
        Left::DaemonSet => "a DaemonSet owns it",
        Left::PlacedByHand => "it names its node or another scheduler itself",
    }
}
