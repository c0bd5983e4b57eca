//! The `Node` object and its `Lease`.

use super::cluster::{Cluster, bounded};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams, PostParams};
use monopod_core::pod::node::{self, System};
use monopod_wire::Task;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Namespace of node leases.
const LEASES: &str = "kube-node-lease";
/// Between attempts while the API server does not take what we say.
const RETRY: Duration = Duration::from_millis(500);
/// The kubelet's longest pause between attempts to renew its lease.
const LONGEST_RETRY: Duration = Duration::from_secs(7);

/// Why the node cannot be registered. Everything else is tried again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegisterError {
    /// A node of this name belongs to another environment.
    #[error(
        "a node {name} exists and is not this one: its provider id is {provider_id:?}; delete it"
    )]
    Taken {
        /// The node's name.
        name: String,
        /// Its provider id.
        provider_id: String,
    },
}

/// Creates the node, Ready at once. Returns its uid.
pub(crate) async fn register(
    cluster: &Cluster,
    task: &Task,
    system: &System,
) -> Result<String, RegisterError> {
    loop {
        let nodes: Api<Node> = Api::all(cluster.client());
        let object = node::node(task, system, Timestamp::now());
        match bounded(nodes.create(&PostParams::default(), &object)).await {
            Ok(node) => return Ok(node.metadata.uid.unwrap_or_default()),
            Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => {
                match bounded(nodes.get(&task.node)).await {
                    Ok(found) => {
                        let provider_id = provider_id(&found);
                        if provider_id != task.provider_id {
                            return Err(RegisterError::Taken {
                                name: task.node.clone(),
                                provider_id: provider_id.to_owned(),
                            });
                        }
                        match patch_status(cluster, task, system, &found).await {
                            Ok(()) => return Ok(found.metadata.uid.unwrap_or_default()),
                            Err(error) => tracing::warn!(%error, "the node's status was not taken"),
                        }
                    }
                    Err(error) => tracing::warn!(%error, "the node that exists cannot be read"),
                }
            }
            Err(error) => tracing::warn!(%error, "the node was not taken"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn patch_status(
    cluster: &Cluster,
    task: &Task,
    system: &System,
    stored: &Node,
) -> kube::Result<()> {
    let nodes: Api<Node> = Api::all(cluster.client());
    let status = node::status(task, system, Some(stored), Timestamp::now());
    let patch = serde_json::json!({"status": status});
    bounded(nodes.patch_status(
        &task.node,
        &PatchParams::default(),
        &Patch::Strategic(patch),
    ))
    .await?;
    Ok(())
}

/// Keeps the node's lease, the node and its status, for ever.
pub(crate) async fn keep(cluster: Cluster, task: Arc<Task>, system: System, mut node_uid: String) {
    let node = &task.node;
    let mut exists = false;
    let mut retry = RETRY;
    let mut said = Timestamp::UNIX_EPOCH;
    loop {
        let begun = Instant::now();
        // A renewal counts only if it is later than the last one, which a clock that was set may not say.
        said = Timestamp::now().max(said + Duration::from_micros(1));
        let leases: Api<Lease> = Api::namespaced(cluster.client(), LEASES);
        let outcome = if exists {
            renew(&leases, node, said).await
        } else {
            create(&leases, &node::lease(node, &node_uid, said)).await
        };
        let gone = match outcome {
            Ok(()) if exists => !keep_status(&cluster, &task, &system).await,
            Ok(()) => {
                exists = true;
                false
            }
            Err(kube::Error::Api(status)) if exists && status.code == 404 => true,
            Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => {
                exists = true;
                continue;
            }
            Err(error) => {
                tracing::warn!(%error, "the lease was not renewed");
                tokio::time::sleep(retry).await;
                retry = (retry * 2).min(LONGEST_RETRY);
                continue;
            }
        };
        if gone {
            tracing::warn!("the node or its lease was deleted; made again");
            match register(&cluster, &task, &system).await {
                Ok(uid) => {
                    node_uid = uid;
                    exists = false;
                    continue;
                }
                Err(error) => tracing::error!(%error, "the node cannot be made again"),
            }
        }
        retry = RETRY;
        tokio::time::sleep_until(begun + node::RENEW).await;
    }
}

/// Reads the node, and tells its status if it must. False if the node is certainly not there: a pod
/// on no node is deleted within the minute.
async fn keep_status(cluster: &Cluster, task: &Task, system: &System) -> bool {
    let nodes: Api<Node> = Api::all(cluster.client());
    match bounded(nodes.get_opt(&task.node)).await {
        Ok(Some(node))
            if provider_id(&node) == task.provider_id
                && node::must_tell(&node, Timestamp::now()) =>
        {
            if let Err(error) = patch_status(cluster, task, system, &node).await {
                tracing::warn!(%error, "the node's status was not taken");
            }
            true
        }
        Ok(node) => node.is_some(),
        Err(error) => {
            tracing::warn!(%error, "the node cannot be read");
            true
        }
    }
}

fn provider_id(node: &Node) -> &str {
    let spec = node.spec.as_ref();
    let id = spec.and_then(|spec| spec.provider_id.as_deref());
    id.unwrap_or_default()
}

async fn create(leases: &Api<Lease>, lease: &Lease) -> kube::Result<()> {
    bounded(leases.create(&PostParams::default(), lease)).await?;
    Ok(())
}

async fn renew(leases: &Api<Lease>, node: &str, now: Timestamp) -> kube::Result<()> {
    let renewal = Patch::Merge(serde_json::json!({"spec": node::lease_spec(node, now)}));
    bounded(leases.patch(node, &PatchParams::default(), &renewal)).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::fake_api::{self, Answer};
    use serde_json::json;

    fn existing(provider_id: &str) -> Answer {
        Answer::ok(&json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n", "uid": "node-uid"}, "spec": {"providerID": provider_id},
        }))
    }

    #[tokio::test]
    async fn a_new_node_is_one_request() {
        let (cluster, requests) = fake_api::start(vec![existing("monopod:///z/env-1")]);
        let uid = register(&cluster, &fake_api::task(), &System::default())
            .await
            .unwrap();
        assert_eq!(uid, "node-uid");
        let requests = requests.lock().unwrap();
        assert_eq!(requests.len(), 1);
        assert_eq!(requests[0].0, "POST /api/v1/nodes");
        assert_eq!(requests[0].1["status"]["conditions"][3]["status"], "True");
    }

    #[tokio::test]
    async fn the_own_node_is_taken_up_again() {
        let answers = vec![
            Answer::exists(),
            existing("monopod:///z/env-1"),
            existing("monopod:///z/env-1"),
        ];
        let (cluster, requests) = fake_api::start(answers);
        register(&cluster, &fake_api::task(), &System::default())
            .await
            .unwrap();
        let requests = requests.lock().unwrap();
        assert_eq!(requests[2].0, "PATCH /api/v1/nodes/n/status");
    }

    /// Keeps the node until so many requests were made. The time is the test's own from now on.
    async fn keeps(cluster: Cluster, requests: &fake_api::Requests, count: usize) {
        let task = Arc::new(fake_api::task());
        let kept = keep(cluster, task, System::default(), "old-uid".to_owned());
        tokio::time::pause();
        let asked = async {
            while requests.lock().unwrap().len() < count {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        tokio::select! {
            () = kept => {}
            () = asked => {}
        }
    }

    #[tokio::test]
    async fn a_node_that_somebody_deleted_is_made_again() {
        let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "n"}});
        let answers = vec![
            Answer::ok(&lease),
            // The lease, and with it the node.
            Answer::missing(),
            existing("monopod:///z/env-1"),
            Answer::ok(&lease),
            // The node, whose lease is there still.
            Answer::ok(&lease),
            Answer::missing(),
            existing("monopod:///z/env-1"),
            Answer::exists(),
        ];
        let (cluster, requests) = fake_api::start(answers);
        keeps(cluster, &requests, 8).await;
        let requests = requests.lock().unwrap();
        assert_eq!(requests[2].0, "POST /api/v1/nodes");
        assert_eq!(requests[5].0, "GET /api/v1/nodes/n");
        assert_eq!(requests[6].0, "POST /api/v1/nodes");
        assert_eq!(
            requests[3].1["metadata"]["ownerReferences"][0]["uid"],
            "node-uid"
        );
    }

    /// The node controller says so of a node that it did not hear of, and never takes it back.
    #[tokio::test]
    async fn a_node_that_is_said_to_be_unknown_says_at_once_that_it_is_ready() {
        let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "n"}});
        let mut unknown = json!(node::node(
            &fake_api::task(),
            &System::default(),
            Timestamp::now()
        ));
        let known = unknown.clone();
        unknown["status"]["conditions"][3]["status"] = json!("Unknown");
        let answers = [
            &lease, &lease, &known, &lease, &unknown, &known, &lease, &known,
        ];
        let (cluster, requests) = fake_api::start(answers.map(Answer::ok).to_vec());
        let begun = Instant::now();
        keeps(cluster, &requests, 8).await;
        assert!(begun.elapsed() <= 3 * node::RENEW + Duration::from_secs(1));
        let requests = requests.lock().unwrap();
        assert_eq!(requests[2].0, "GET /api/v1/nodes/n");
        assert_eq!(requests[5].0, "PATCH /api/v1/nodes/n/status");
        assert_eq!(requests[5].1["status"]["conditions"][3]["status"], "True");
        let patches = requests
            .iter()
            .filter(|(line, _)| line.contains("/nodes/n/status"));
        assert_eq!(patches.count(), 1);
    }

    #[tokio::test]
    async fn the_node_of_another_environment_is_left_alone() {
        let (cluster, requests) =
            fake_api::start(vec![Answer::exists(), existing("monopod:///z/other")]);
        let error = register(&cluster, &fake_api::task(), &System::default())
            .await
            .unwrap_err();
        assert!(matches!(error, RegisterError::Taken { .. }), "{error}");
        assert_eq!(requests.lock().unwrap().len(), 2);
    }
}
