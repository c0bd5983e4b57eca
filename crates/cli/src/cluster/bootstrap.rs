//! What is applied to the API server of an embedded cluster: definitions, rights, policies, the
//! webhook, and the objects that a new cluster starts with.

use crate::settings::{AddOn, LocalPort, Settings};
use anyhow::Context;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::{DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt, discovery};
use monopod_api::labels::{WEBHOOK, WEBHOOK_OF_KUBE_SYSTEM};
use monopod_api::network::Subnet;
use monopod_api::{names, rights};
use serde_json::{Value, json};
use std::time::Duration;

const CRDS: &str = include_str!("../../../../deploy/crds.yaml");
const RBAC: &str = include_str!("../../../../deploy/rbac.yaml");
const POLICIES: &str = include_str!("../../../../deploy/policies.yaml");
const DEFAULTS: &str = include_str!("../../../../deploy/defaults.yaml");
const COREDNS: &str = include_str!("../../../../deploy/coredns.yaml");
const HOST: &str = include_str!("../../../../deploy/host.yaml");
/// Owner of the fields that are applied here.
const FIELD_MANAGER: &str = "monopod-up";
/// How long the API server may take to serve a new kind.
const ESTABLISH: Duration = Duration::from_secs(30);

/// Applies everything; what a user changed in the defaults stays.
pub async fn apply(client: &Client, settings: &Settings) -> anyhow::Result<()> {
    for text in [CRDS, RBAC] {
        apply_all(client, text).await?;
    }
    apply_all(client, POLICIES).await?;
    apply_host(client, &settings.host_name).await?;
    server_side_apply(client, &webhook(settings)?).await?;
    let subnets: Api<Subnet> = Api::all(client.clone());
    let has_subnets = !subnets.list(&ListParams::default()).await?.items.is_empty();
    for object in documents(DEFAULTS)? {
        let is_subnet = object.types.as_ref().is_some_and(|t| t.kind == "Subnet");
        // Whoever has others may have given them its addresses.
        if !(is_subnet && has_subnets) {
            create_if_missing(client, &with_settings(object, settings)?).await?;
        }
    }
    if !settings.disable.contains(&AddOn::Coredns) {
        for object in documents(&coredns(settings))? {
            create_if_missing(client, &object).await?;
        }
    }
    Ok(())
}

async fn apply_all(client: &Client, text: &str) -> anyhow::Result<()> {
    for object in documents(text)? {
        server_side_apply(client, &object).await?;
    }
    Ok(())
}

/// Applies what a host needs before it comes.
pub async fn apply_host(client: &Client, host: &str) -> anyhow::Result<()> {
    let text = HOST
        .replace(rights::HOST_NAMESPACE, &names::host_namespace(host))
        .replace(rights::HOST_NAME, host);
    apply_all(client, &text).await
}

/// Waits until pods can be created in the namespace `default`, which needs its service account.
pub async fn await_service_account(client: &Client, limit: Duration) -> anyhow::Result<()> {
    let accounts: Api<ServiceAccount> = Api::default_namespaced(client.clone());
    let deadline = tokio::time::Instant::now() + limit;
    while accounts.get_opt("default").await?.is_none() {
        let late = tokio::time::Instant::now() >= deadline;
        anyhow::ensure!(
            !late,
            "kube-controller-manager has not made the service account default; see its log"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// The objects of a file of YAML documents.
pub fn documents(text: &str) -> anyhow::Result<Vec<DynamicObject>> {
    text.split("\n---\n")
        .filter(|document| {
            document
                .lines()
                .any(|line| !line.trim_start().starts_with('#') && !line.trim().is_empty())
        })
        .map(|document| serde_saphyr::from_str(document).context("a built-in manifest is not YAML"))
        .collect()
}

fn coredns(settings: &Settings) -> String {
    COREDNS
        .replace("CLUSTER_DOMAIN", &settings.cluster_domain)
        .replace("CLUSTER_DNS", &settings.cluster_dns().to_string())
}

/// Fits the addresses and zone of the defaults to the cluster's settings.
fn with_settings(mut object: DynamicObject, settings: &Settings) -> anyhow::Result<DynamicObject> {
    let kind = object
        .types
        .as_ref()
        .map(|t| t.kind.clone())
        .unwrap_or_default();
    let spec = &mut object.data["spec"];
    match kind.as_str() {
        "Vpc" => spec["cidr"] = json!(settings.vpc_cidr.to_string()),
        "Subnet" => {
            // The first sixteenth of the VPC, or all of it if it is small.
            let prefix = settings
                .vpc_cidr
                .prefix_len()
                .saturating_add(4)
                .min(28)
                .max(settings.vpc_cidr.prefix_len());
            let first = ipnet::Ipv4Net::new(settings.vpc_cidr.network(), prefix)?;
            spec["cidr"] = json!(first.to_string());
            spec["zone"] = json!(settings.zone);
        }
        "SecurityGroup" => {
            spec["ingress"][1]["cidrs"] = json!([format!("{}/32", settings.api_address())]);
        }
        _other => {}
    }
    Ok(object)
}

/// Who may create pods while the webhook does not answer: only what the cluster itself is made of.
///
/// Control adds for which namespaces the API server asks, and whom it trusts there; until then it asks
/// about every pod, and trusts no answer.
fn webhook(settings: &Settings) -> anyhow::Result<DynamicObject> {
    let entry = |name: &str, operator: &str, policy: &str| {
        json!({
            "name": name,
            "clientConfig": {"url": format!("https://{}/mutate", settings.local(LocalPort::Webhook))},
            "failurePolicy": policy,
            "namespaceSelector": {"matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": operator, "values": ["kube-system"]},
            ]},
            "matchPolicy": "Equivalent", "reinvocationPolicy": "IfNeeded", "sideEffects": "None",
            "timeoutSeconds": 5, "admissionReviewVersions": ["v1"],
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"], "scope": "*"}],
        })
    };
    let object: Value = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": WEBHOOK},
        "webhooks": [
            // EKS has Ignore here, which lets a pod slip to a scheduler that has no node for it, for ever.
            entry(WEBHOOK, "NotIn", "Fail"),
            entry(WEBHOOK_OF_KUBE_SYSTEM, "In", "Ignore"),
        ],
    });
    Ok(serde_json::from_value(object)?)
}

async fn api_of(client: &Client, object: &DynamicObject) -> anyhow::Result<Api<DynamicObject>> {
    let types = object
        .types
        .as_ref()
        .context("a built-in manifest has no kind")?;
    let gvk = GroupVersionKind::try_from(types)?;
    let deadline = tokio::time::Instant::now() + ESTABLISH;
    loop {
        match discovery::pinned_kind(client, &gvk).await {
            Ok((resource, capabilities)) => {
                return Ok(match (capabilities.scope, object.namespace()) {
                    (discovery::Scope::Namespaced, Some(namespace)) => {
                        Api::namespaced_with(client.clone(), &namespace, &resource)
                    }
                    (discovery::Scope::Namespaced, None) => {
                        Api::default_namespaced_with(client.clone(), &resource)
                    }
                    (discovery::Scope::Cluster, _) => Api::all_with(client.clone(), &resource),
                });
            }
            Err(error) if tokio::time::Instant::now() >= deadline => {
                return Err(error)
                    .with_context(|| format!("the API server does not serve {}", types.kind));
            }
            Err(_not_yet) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn server_side_apply(client: &Client, object: &DynamicObject) -> anyhow::Result<()> {
    let api = api_of(client, object).await?;
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    retry_briefly(|| async {
        api.patch(&object.name_any(), &parameters, &Patch::Apply(object))
            .await
    })
    .await
    .with_context(|| format!("cannot apply {}", describe(object)))
}

async fn create_if_missing(client: &Client, object: &DynamicObject) -> anyhow::Result<()> {
    let api = api_of(client, object).await?;
    if api.get_opt(&object.name_any()).await?.is_some() {
        return Ok(());
    }
    let parameters = PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..Default::default()
    };
    retry_briefly(|| async { api.create(&parameters, object).await })
        .await
        .with_context(|| format!("cannot create {}", describe(object)))
}

/// A kind that was defined a moment ago may be listed before it is served.
async fn retry_briefly<T, F>(mut request: impl FnMut() -> F) -> Result<(), kube::Error>
where
    F: Future<Output = Result<T, kube::Error>>,
{
    let deadline = tokio::time::Instant::now() + ESTABLISH;
    loop {
        match request().await {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(status))
                if [404, 429, 500, 503].contains(&status.code)
                    && tokio::time::Instant::now() < deadline =>
            {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => return Err(error),
        }
    }
}

fn describe(object: &DynamicObject) -> String {
    let kind = object
        .types
        .as_ref()
        .map(|t| t.kind.clone())
        .unwrap_or_default();
    format!("{kind} {}", object.name_any())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The second of two objects of one name would undo the first.
    #[test]
    fn no_built_in_object_is_there_twice() {
        let mut seen = BTreeSet::new();
        for text in [CRDS, RBAC, POLICIES, DEFAULTS, COREDNS, HOST] {
            for object in documents(text).unwrap() {
                let name = (object.namespace(), describe(&object));
                assert!(seen.insert(name.clone()), "{name:?}");
            }
        }
        assert!(seen.len() > 30, "{}", seen.len());
    }
}
