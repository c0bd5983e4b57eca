//! Starts and ends of pods, as a client sees them.

use crate::peer;
use anyhow::{Context, Result, ensure};
use futures::TryStreamExt;
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client, ResourceExt};
use monopod_api::environment::Environment;
use monopod_api::names;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What a single start or end may take before the run is given up.
const LIMIT: Duration = Duration::from_mins(5);

/// One of the two nodes that pods start on.
#[derive(Clone)]
pub(crate) struct Side {
    /// `monopod` or `peer`.
    pub(crate) name: &'static str,
    /// Pods of this namespace start on it.
    pub(crate) namespace: &'static str,
    client: Client,
}

/// When a pod's states were seen, in seconds since it was about to be created.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    pub(crate) uid: String,
    pub(crate) bound: f64,
    pub(crate) running: f64,
}

impl Side {
    pub(crate) fn new(name: &'static str, namespace: &'static str, client: Client) -> Self {
        Self {
            name,
            namespace,
            client,
        }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), self.namespace)
    }

    /// Creates one pod, and waits until it runs.
    pub(crate) async fn start(&self, name: &str) -> Result<Start> {
        let started = self.start_all(&[name.to_owned()]).await?;
        started
            .into_values()
            .next()
            .context("the one pod is missing among those that run")
    }

    /// Creates pods at once, and waits until each runs. The watch is opened before.
    pub(crate) async fn start_all(&self, names: &[String]) -> Result<BTreeMap<String, Start>> {
        let pods = self.pods();
        let selected = WatchParams::default();
        let selected = match names {
            [one] => selected.fields(&format!("metadata.name={one}")),
            _many => selected,
        };
        // From a version of before: an event can only come twice, never be missed.
        let version = pods
            .list(&ListParams::default().limit(1))
            .await?
            .metadata
            .resource_version
            .context("a list has a version")?;
        let mut events = Box::pin(pods.watch(&selected, &version).await?);
        let begin = Instant::now();
        let create = async {
            let parameters = PostParams::default();
            try_join_all(names.iter().map(|name| {
                let (pods, parameters, pod) = (&pods, &parameters, pod(name));
                async move {
                    pods.create(parameters, &pod?)
                        .await
                        .map_err(anyhow::Error::from)
                }
            }))
            .await
            .map(drop)
        };
        let follow = async {
            let mut bound = BTreeMap::new();
            let mut running = BTreeMap::new();
            while running.len() < names.len() {
                let event = events.try_next().await?.context("the watch ended")?;
                let (WatchEvent::Added(pod) | WatchEvent::Modified(pod)) = event else {
                    continue;
                };
                let (name, now) = (pod.name_any(), begin.elapsed().as_secs_f64());
                if !names.contains(&name) || running.contains_key(&name) {
                    continue;
                }
                ensure!(!has_failed(&pod), "pod {name} failed: {:?}", pod.status);
                if pod.spec.as_ref().is_some_and(|s| s.node_name.is_some()) {
                    bound.entry(name.clone()).or_insert(now);
                }
                if runs(&pod) {
                    let start = Start {
                        uid: pod.uid().unwrap_or_default(),
                        bound: bound.get(&name).copied().unwrap_or(now),
                        running: now,
                    };
                    running.insert(name, start);
                }
            }
            Ok(running)
        };
        let both = async { futures::try_join!(create, follow) };
        let ((), started) = tokio::time::timeout(LIMIT, both).await.with_context(|| {
            format!(
                "{} pods of {} do not run within {LIMIT:?}",
                names.len(),
                self.name
            )
        })??;
        Ok(started)
    }

    /// Deletes pods, and waits until nothing of them is left. Without a grace period the object
    /// goes at once, and all else after it.
    pub(crate) async fn end_all(&self, names: &[String]) -> Result<()> {
        let pods = self.pods();
        let listed = pods.list_metadata(&ListParams::default()).await?;
        let uids: Vec<String> = listed
            .into_iter()
            .filter(|pod| names.contains(&pod.name_any()))
            .filter_map(|pod| pod.uid())
            .collect();
        try_join_all(names.iter().map(|name| {
            let pods = &pods;
            async move { pods.delete(name, &DeleteParams::default()).await }
        }))
        .await?;
        let deadline = Instant::now() + LIMIT;
        for uid in uids {
            while !self.is_gone(&uid).await? {
                ensure!(
                    Instant::now() < deadline,
                    "pod {uid} of {} is not gone within {LIMIT:?}",
                    self.name
                );
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(())
    }

    /// Whether neither an environment nor a control group is left of a pod.
    async fn is_gone(&self, uid: &str) -> Result<bool> {
        let environments: Api<Environment> = Api::all(self.client.clone());
        let environment = environments
            .get_metadata_opt(&names::environment(uid))
            .await?;
        Ok(environment.is_none() && !peer::has_group(uid))
    }
}

fn pod(name: &str) -> Result<Pod> {
    Ok(serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [{
            "name": "main", "image": "monopod.local/busybox:latest", "imagePullPolicy": "Never",
            "command": ["sleep", "3600"],
        }]},
    }))?)
}

fn runs(pod: &Pod) -> bool {
    let Some(status) = &pod.status else {
        return false;
    };
    let containers = status.container_statuses.iter().flatten();
    status.phase.as_deref() == Some("Running")
        && containers
            .filter_map(|container| container.state.as_ref())
            .any(|state| state.running.is_some())
}

fn has_failed(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    phase == Some("Failed")
}
