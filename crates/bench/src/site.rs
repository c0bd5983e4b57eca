//! The cluster of one run, and the nodes that are compared in it.

use crate::machine::Machine;
use crate::peer::Peer;
use crate::pods::Side;
use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use monopod_cli::cluster::client;
use monopod_cli::settings::Layout;
use monopod_testkit::Cluster;
use serde_json::Value;
use std::path::Path;

/// Tells this cluster from those of the tests.
const NUMBER: u8 = 102;
/// No profile selects it, so that its pods go to the ordinary node.
const PEERS: &str = "peers";
/// What the machine has would end a run of many pods that use little of it: room for 80 at a time.
const ROOM: [&str; 4] = ["--vm-memory-mib", "49152", "--vm-cpu-millis", "20000"];

/// A cluster with Monopod, and with an ordinary node beside it.
pub(crate) struct Site {
    pub(crate) monopod: Side,
    pub(crate) peer: Option<(Side, Peer)>,
    pub(crate) client: Client,
    // Dropped last: the node leaves before its cluster.
    pub(crate) cluster: Cluster,
}

impl Site {
    /// Brings up the cluster, and the ordinary node if its programs are given.
    pub(crate) async fn up(peer: Option<&Path>, flags: &[&str]) -> Result<Self> {
        eprintln!("bringing up a cluster");
        let flags = [&ROOM, &["--disable", "coredns"][..], flags].concat();
        let cluster = tokio::task::block_in_place(|| Cluster::up_with(NUMBER, &flags));
        let layout = Layout::new(cluster.data());
        let client = client::connect(&layout.kubeconfig("admin")).await?;
        let monopod = Side::new("monopod", "default", client.clone());
        let peer = match peer {
            Some(programs) => {
                eprintln!("bringing up an ordinary node beside it");
                make_namespace(&client).await?;
                let server = layout.read_settings()?.api_url();
                let peer = Peer::join(programs, &cluster, &server, &client).await?;
                Some((Side::new("peer", PEERS, client.clone()), peer))
            }
            None => None,
        };
        Ok(Self {
            monopod,
            peer,
            client,
            cluster,
        })
    }

    /// Monopod, and the ordinary node if there is one.
    pub(crate) fn sides(&self) -> Vec<&Side> {
        let peer = self.peer.iter().map(|(side, _)| side);
        std::iter::once(&self.monopod).chain(peer).collect()
    }

    /// This machine, with what runs its VMs.
    pub(crate) fn machine(&self) -> Result<Machine> {
        let status = self.status()?;
        let host = &status["hosts"][0];
        let text = |key: &str| host[key].as_str().unwrap_or_default();
        Ok(Machine::here(format!(
            "{} ({})",
            text("accelerator"),
            text("acceleratorReason")
        )))
    }

    /// The process of a part of the cluster.
    pub(crate) fn part(&self, name: &str) -> Result<i32> {
        let status = self.status()?;
        let parts = status["parts"].as_array();
        parts
            .and_then(|parts| parts.iter().find(|part| part["name"] == name))
            .and_then(|part| part["pid"].as_i64())
            .and_then(|pid| i32::try_from(pid).ok())
            .with_context(|| format!("{name} does not run"))
    }

    fn status(&self) -> Result<Value> {
        let output = self.cluster.monopod(&["status", "-o", "json"]);
        serde_json::from_str(&output.out)
            .with_context(|| format!("monopod status gave no JSON: {}", output.err))
    }
}

async fn make_namespace(client: &Client) -> Result<()> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let namespace = Namespace {
        metadata: ObjectMeta {
            name: Some(PEERS.to_owned()),
            ..ObjectMeta::default()
        },
        ..Namespace::default()
    };
    namespaces
        .create(&PostParams::default(), &namespace)
        .await?;
    Ok(())
}
