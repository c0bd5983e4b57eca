//! IAM roles for service accounts: what a pod is given so that its AWS SDK assumes the role that its
//! service account names.
//!
//! The application's own identity, made by the API server for this pod. It has nothing to do with the
//! profile's pod execution role, which stays with the platform. Field by field what EKS's
//! `amazon-eks-pod-identity-webhook` does.

use k8s_openapi::api::core::v1::{Container, Pod, ServiceAccount};
use monopod_api::labels::{IAM_AUDIENCE, IAM_REGIONAL_STS, IAM_TOKEN_EXPIRATION};
use monopod_api::labels::{IAM_ROLE, IAM_SKIP_CONTAINERS, IAM_SKIP_POD};
use serde_json::{Value, json};

/// Name of the volume with the token.
const VOLUME: &str = "aws-iam-token";
/// Where the token's volume is mounted.
const DIRECTORY: &str = "/var/run/secrets/eks.amazonaws.com/serviceaccount";
/// The token in its volume.
const TOKEN: &str = "token";
/// Whom the token is for, unless the account says otherwise.
const AUDIENCE: &str = "sts.amazonaws.com";
/// Seconds that a token is good for, and the least that the API server makes.
const EXPIRATION: i64 = 86_400;
const MIN_EXPIRATION: i64 = 600;

/// What a service account says about its role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccountRole {
    /// The role's ARN.
    pub arn: String,
    /// Whom the token is for.
    pub audience: String,
    /// Seconds that the token is good for.
    pub expiration: i64,
    /// Whether the SDK asks the region's STS instead of the global one.
    pub regional_sts: bool,
}

/// The role of a service account, if it names one.
pub fn role(account: &ServiceAccount) -> Option<AccountRole> {
    let annotations = account.metadata.annotations.as_ref()?;
    let given = |key: &str| annotations.get(key).filter(|value| !value.is_empty());
    Some(AccountRole {
        arn: given(IAM_ROLE)?.clone(),
        audience: given(IAM_AUDIENCE).map_or_else(|| AUDIENCE.to_owned(), Clone::clone),
        expiration: given(IAM_TOKEN_EXPIRATION)
            .and_then(|text| text.parse().ok())
            .map_or(EXPIRATION, |seconds: i64| seconds.max(MIN_EXPIRATION)),
        regional_sts: given(IAM_REGIONAL_STS).is_some_and(|value| value == "true"),
    })
}

/// The JSON patch (RFC 6902) that gives a pod the role; empty if there is nothing to change.
pub fn patch(pod: &Pod, role: &AccountRole, region: &str) -> Vec<Value> {
    let is_skipped = pod
        .metadata
        .labels
        .as_ref()
        .is_some_and(|labels| labels.contains_key(IAM_SKIP_POD));
    let Some(spec) = pod.spec.as_ref().filter(|_| !is_skipped) else {
        return Vec::new();
    };
    let annotation = |key: &str| pod.metadata.annotations.as_ref()?.get(key);
    let skipped: Vec<&str> = annotation(IAM_SKIP_CONTAINERS)
        .map(|list| list.split(',').map(str::trim).collect())
        .unwrap_or_default();
    let mut operations = Vec::new();
    let lists = [
        ("initContainers", spec.init_containers.as_deref()),
        ("containers", Some(spec.containers.as_slice())),
    ];
    for (list, containers) in lists {
        for (index, container) in containers.unwrap_or_default().iter().enumerate() {
            if !skipped.contains(&container.name.as_str()) {
                let path = format!("/spec/{list}/{index}");
                operations.extend(of_container(container, &path, role, region));
            }
        }
    }
    let has_volume = spec.volumes.iter().flatten().any(|v| v.name == VOLUME);
    if operations.is_empty() || has_volume {
        return operations;
    }
    let expiration = annotation(IAM_TOKEN_EXPIRATION)
        .and_then(|text| text.parse().ok())
        .map_or(role.expiration, |seconds: i64| seconds.max(MIN_EXPIRATION));
    let volume = json!({"name": VOLUME, "projected": {"sources": [{"serviceAccountToken": {
        "audience": role.audience, "expirationSeconds": expiration, "path": TOKEN,
    }}]}});
    if spec.volumes.is_none() {
        operations.push(json!({"op": "add", "path": "/spec/volumes", "value": []}));
    }
    operations.push(json!({"op": "add", "path": "/spec/volumes/0", "value": volume}));
    operations
}

/// Appends the variables and the mount that a container lacks.
fn of_container(container: &Container, path: &str, role: &AccountRole, region: &str) -> Vec<Value> {
    let has = |name: &str| container.env.iter().flatten().any(|v| v.name == name);
    let any = |names: [&str; 2]| names.into_iter().any(has);
    let mut added = Vec::new();
    let mut add = |name: &str, value: &str| added.push(json!({"name": name, "value": value}));
    if role.regional_sts && !has("AWS_STS_REGIONAL_ENDPOINTS") {
        add("AWS_STS_REGIONAL_ENDPOINTS", "regional");
    }
    // Who sets one of a pair knows better about both.
    if !any(["AWS_DEFAULT_REGION", "AWS_REGION"]) {
        add("AWS_DEFAULT_REGION", region);
        add("AWS_REGION", region);
    }
    if !any(["AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"]) {
        add("AWS_ROLE_ARN", &role.arn);
        add(
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            &format!("{DIRECTORY}/{TOKEN}"),
        );
    }
    let mut operations = Vec::new();
    let mut append = |field: &str, is_missing: bool, value: Value| {
        if is_missing {
            operations.push(json!({"op": "add", "path": format!("{path}/{field}"), "value": []}));
        }
        operations.push(json!({"op": "add", "path": format!("{path}/{field}/-"), "value": value}));
    };
    for (number, variable) in added.into_iter().enumerate() {
        append("env", number == 0 && container.env.is_none(), variable);
    }
    let mounts = container.volume_mounts.as_ref();
    if !mounts.into_iter().flatten().any(|m| m.name == VOLUME) {
        let mount = json!({"name": VOLUME, "mountPath": DIRECTORY, "readOnly": true});
        append("volumeMounts", mounts.is_none(), mount);
    }
    operations
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn account(annotations: &Value) -> ServiceAccount {
        serde_json::from_value(json!({"metadata": {"name": "a", "annotations": annotations}}))
            .expect("an account")
    }

    fn plain() -> AccountRole {
        role(&account(
            &json!({IAM_ROLE: "arn:aws:iam::111122223333:role/app"}),
        ))
        .expect("a role")
    }

    fn patched(before: &Value, role: &AccountRole) -> Value {
        let pod: Pod = serde_json::from_value(before.clone()).expect("a pod");
        let operations = Value::Array(patch(&pod, role, "local-1"));
        let operations: json_patch::Patch = serde_json::from_value(operations).expect("a patch");
        let mut after = serde_json::to_value(&pod).expect("serialises");
        json_patch::patch(&mut after, &operations).expect("applies");
        after
    }

    #[test]
    fn accounts_are_read_as_on_eks() {
        assert_eq!(role(&account(&json!({}))), None);
        assert_eq!(role(&account(&json!({IAM_ROLE: ""}))), None);
        let role = plain();
        assert_eq!(
            (role.audience.as_str(), role.expiration, role.regional_sts),
            ("sts.amazonaws.com", 86_400, false)
        );
        let all = super::role(&account(&json!({IAM_ROLE: "r", IAM_AUDIENCE: "me", IAM_TOKEN_EXPIRATION: "60", IAM_REGIONAL_STS: "true"})))
            .expect("a role");
        assert_eq!(
            (all.audience.as_str(), all.expiration, all.regional_sts),
            ("me", 600, true)
        );
    }

    #[test]
    fn the_whole_pod_is_as_on_eks() {
        let pod = json!({
            "metadata": {"name": "p", "annotations": {IAM_SKIP_CONTAINERS: "proxy, other", IAM_TOKEN_EXPIRATION: "7200"}},
            "spec": {
                "initContainers": [{"name": "init"}],
                "containers": [
                    {"name": "app", "env": [{"name": "A", "value": "b"}, {"name": "AWS_REGION", "value": "eu-west-1"}],
                        "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
                    {"name": "proxy"},
                ],
                "volumes": [{"name": "data", "emptyDir": {}}],
            },
        });
        let role = AccountRole {
            regional_sts: true,
            ..plain()
        };
        let token = json!({"name": "AWS_WEB_IDENTITY_TOKEN_FILE", "value": "/var/run/secrets/eks.amazonaws.com/serviceaccount/token"});
        let arn = json!({"name": "AWS_ROLE_ARN", "value": "arn:aws:iam::111122223333:role/app"});
        let regional = json!({"name": "AWS_STS_REGIONAL_ENDPOINTS", "value": "regional"});
        let mount = json!({"name": "aws-iam-token", "mountPath": "/var/run/secrets/eks.amazonaws.com/serviceaccount", "readOnly": true});
        assert_eq!(
            patched(&pod, &role)["spec"],
            json!({
                "initContainers": [{"name": "init", "volumeMounts": [mount], "env": [
                    regional, {"name": "AWS_DEFAULT_REGION", "value": "local-1"}, {"name": "AWS_REGION", "value": "local-1"}, arn, token]}],
                "containers": [
                    {"name": "app", "volumeMounts": [{"name": "data", "mountPath": "/data"}, mount],
                        "env": [{"name": "A", "value": "b"}, {"name": "AWS_REGION", "value": "eu-west-1"}, regional, arn, token]},
                    {"name": "proxy"},
                ],
                "volumes": [
                    {"name": "aws-iam-token", "projected": {"sources": [{"serviceAccountToken":
                        {"audience": "sts.amazonaws.com", "expirationSeconds": 7200, "path": "token"}}]}},
                    {"name": "data", "emptyDir": {}},
                ],
            })
        );
        let mut skipped = pod;
        skipped["metadata"]["labels"] = json!({IAM_SKIP_POD: ""});
        assert_eq!(patched(&skipped, &role)["spec"], skipped["spec"]);
    }

    proptest! {
        /// Once more changes nothing, and what the pod had stays.
        #[test]
        fn the_patch_is_idempotent_and_only_adds(
            env in prop::option::of(prop::collection::vec(prop::sample::select(vec!["A", "AWS_REGION", "AWS_ROLE_ARN", "AWS_STS_REGIONAL_ENDPOINTS"]), 0..3)),
            has_volume: bool, has_mount: bool, regional_sts: bool,
        ) {
            let mut container = json!({"name": "c"});
            if let Some(names) = &env {
                container["env"] = names.iter().map(|name| json!({"name": name, "value": "own"})).collect();
            }
            if has_mount {
                container["volumeMounts"] = json!([{"name": VOLUME, "mountPath": "/own"}]);
            }
            // A mount without its volume is no valid pod.
            let has_volume = has_volume || has_mount;
            let mut pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [container]}});
            if has_volume {
                pod["spec"]["volumes"] = json!([{"name": VOLUME, "emptyDir": {}}]);
            }
            let role = AccountRole { regional_sts, ..plain() };
            let once = patched(&pod, &role);
            prop_assert_eq!(patched(&once, &role), once.clone());
            let own: Vec<_> = once["spec"]["containers"][0]["env"].as_array().into_iter().flatten().filter(|v| v["value"] == "own").collect();
            prop_assert_eq!(own.len(), env.map_or(0, |names| names.len()));
            let volumes = once["spec"]["volumes"].as_array().expect("a list");
            prop_assert_eq!(volumes.iter().filter(|v| v["name"] == VOLUME).count(), 1);
        }
    }
}
