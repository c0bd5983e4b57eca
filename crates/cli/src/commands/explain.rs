//! `monopod explain`: where a pod is on its way, in plain words.

use super::status::Output;
use crate::cluster::client;
use crate::settings::Layout;
use anyhow::Context;
use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use monopod_api::environment::Environment;
use monopod_api::names;
use monopod_core::explain::explain;
use serde_json::json;
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Explain {
    /// The pod's name
    pod: String,
    /// The pod's namespace
    #[arg(short, long, default_value = "default")]
    namespace: String,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Explain {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self {
            pod: name,
            namespace,
            output,
        } = self;
        let client = client::connect(&layout.kubeconfig("admin")).await?;
        let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
        let pod = pods
            .get_opt(&name)
            .await?
            .with_context(|| format!("there is no pod {namespace}/{name}; `-n` names another namespace, `monopod kubectl get pods -A` lists all pods"))?;
        let uid = pod.uid().unwrap_or_default();
        let of_it = ListParams::default().fields(&format!("involvedObject.uid={uid}"));
        let events: Api<Event> = Api::namespaced(client.clone(), &namespace);
        let events = events.list(&of_it).await?.items;
        let environments: Api<Environment> = Api::all(client.clone());
        let environment = environments.get_opt(&names::environment(&uid)).await?;
        let nodes: Api<Node> = Api::all(client);
        let node = match pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
            Some(bound_to) => nodes.get_opt(bound_to).await?,
            None => None,
        };
        let now = Timestamp::now();
        let told = explain(&pod, environment.as_ref(), node.as_ref(), &events, now);
        match output {
            Output::Json => println!("{:#}", json!(told)),
            Output::Table => {
                println!("{}", shown(&told.state));
                for cause in &told.because {
                    println!("  {}", shown(cause));
                }
                println!("{}", shown(&told.next));
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Text that may be a guest's, for a terminal.
fn shown(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(plain).collect()
}
