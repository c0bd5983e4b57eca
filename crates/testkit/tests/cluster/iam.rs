//! The two identities around a pod: its application's IAM role, and the platform's execution role.

use crate::{START, namespace, shell_pod};
use monopod_testkit::{Cluster, wait};
use serde_json::json;
use std::time::Duration;

const ROLE: &str = "arn:aws:iam::111122223333:role/app";

pub(crate) fn role(cluster: &Cluster) {
    namespace(cluster, "iam");
    cluster.apply(&json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "app", "namespace": "iam",
        "annotations": {"eks.amazonaws.com/role-arn": ROLE, "eks.amazonaws.com/token-expiration": "3600",
            "eks.amazonaws.com/sts-regional-endpoints": "true"}}}));
    let mut pod = shell_pod("iam", "app", "sleep 1000");
    pod["spec"]["serviceAccountName"] = json!("app");
    cluster.apply(&pod);
    let other = shell_pod("iam", "other", "sleep 1000");
    cluster.apply(&other);
    cluster.wait_ready("iam", "app", START);
    cluster.wait_ready("iam", "other", START);
    let run = |pod: &str, script: &str| {
        cluster.kubectl(&["exec", "-n", "iam", pod, "--", "sh", "-c", script])
    };
    let variables = run("app", "env | grep ^AWS_ | sort");
    let file = "/var/run/secrets/eks.amazonaws.com/serviceaccount/token";
    assert_eq!(
        variables,
        format!(
            "AWS_DEFAULT_REGION=local-1\nAWS_REGION=local-1\nAWS_ROLE_ARN={ROLE}\nAWS_STS_REGIONAL_ENDPOINTS=regional\nAWS_WEB_IDENTITY_TOKEN_FILE={file}\n"
        )
    );
    assert_eq!(run("other", "env | grep ^AWS_ || true"), "");

    // The SDK assumes the role with what the pod has.
    let token = cluster.data().join("web-identity-token");
    std::fs::write(&token, run("app", &format!("cat {file}"))).expect("the token is kept");
    let mut given: Vec<(String, String)> = variables
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    given.push((
        "AWS_WEB_IDENTITY_TOKEN_FILE".to_owned(),
        token.display().to_string(),
    ));
    let said = cluster.python_with_sdk(include_str!("iam.py"), &given);
    let token = "sts.amazonaws.com system:serviceaccount:iam:app 3600";
    assert_eq!(said.lines().next(), Some(token));
    let assumed = said.lines().last().unwrap_or_default();
    assert!(
        assumed.starts_with("arn:aws:sts::111122223333:assumed-role/app/"),
        "{said}"
    );

    // Neither can be had from the other's place: the platform cannot make the application's tokens, nor
    // read its account, and from the pod the platform's credentials are out of reach.
    for user in ["host", "control"] {
        let output = cluster.kubectl_as(user, &["create", "token", "app", "-n", "iam"], "");
        assert!(
            !output.success && output.err.contains("forbidden"),
            "{user}: {}",
            output.err
        );
    }
    let reached = run(
        "app",
        "for url in http://169.254.170.2/ http://169.254.170.2/credentials http://169.254.169.254/; do wget -q -T 2 -O - $url && echo reached; done; true",
    );
    assert_eq!(reached, "");
    cluster.kubectl(&["delete", "namespace", "iam", "--wait=false"]);
    wait("its pods are gone", Duration::from_mins(1), || {
        let pods = cluster.list("iam", "pods");
        pods.is_empty()
            .then_some(())
            .ok_or_else(|| format!("{} pods", pods.len()))
    });
}
