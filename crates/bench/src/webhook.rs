//! `bench webhook`: how long the webhook takes, called as the API server calls it, and what it adds
//! to the creation of a pod.

use crate::report::{Goal, Report, quantile};
use crate::site::Site;
use anyhow::{Context, Result, ensure};
use futures::future::join_all;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use monopod_api::profile::FargateProfile;
use monopod_cli::cluster::pki;
use monopod_cli::settings::Layout;
use serde_json::{Value, json};
use std::fs::read;
use std::time::Duration;
use tokio::time::Instant;

/// Calls each second, from the goal.
const RATE: u32 = 200;
/// Creations each second through the API server, which needs most of a core for them here.
const CREATIONS: u32 = 40;
/// Seconds of each measurement, after [`WARM`] that do not count.
const SECONDS: u32 = 15;
const WARM: u32 = 3;
/// Profiles of a large cluster; a small one has one.
const PROFILES: usize = 200;
/// What 99 of 100 calls should take at most.
const GOAL_MS: f64 = 5.0;

/// Calls the webhook with few and many profiles, then creates pods with and without it.
pub(crate) async fn measure() -> Result<Report> {
    let site = Site::up(None, &[]).await?;
    let mut report = Report::new("webhook", site.machine()?);
    let caller = Caller::new(&site).await?;
    eprintln!("calling the webhook {RATE} times a second");
    let few = at_rate(RATE, || caller.call()).await;
    let p99 = tell(&mut report, "webhook, 1 profile", few);
    report.ratio(
        &format!("p99 to {GOAL_MS} ms"),
        p99,
        Some(GOAL_MS),
        Some(Goal::AtMost(1.0)),
    );
    make_profiles(&site.client).await?;
    eprintln!("again with {PROFILES} profiles");
    let many = at_rate(RATE, || caller.call()).await;
    tell(&mut report, &format!("webhook, {PROFILES} profiles"), many);

    eprintln!("creating {CREATIONS} pods a second, without storing them");
    let pods: Api<Pod> = Api::namespaced(site.client.clone(), "default");
    let create = || create(&pods);
    let with = at_rate(CREATIONS, create).await;
    let with = tell(&mut report, "creation of a pod, with the webhook", with);
    remove_webhook(&site.client).await?;
    let without = at_rate(CREATIONS, create).await;
    let without = tell(&mut report, "creation of a pod, without it", without);
    report.ratio("p99 of a creation, with to without", with, without, None);
    report.machine.ended();
    Ok(report)
}

/// Adds the times, and their 50th and 99th of a hundred; gives the latter.
fn tell(report: &mut Report, what: &str, calls: Calls) -> Option<f64> {
    let Calls { times, failures } = calls;
    if let Some(first) = failures.first() {
        let failed = failures.len();
        report
            .notes
            .push(format!("{what}: {failed} calls failed; the first: {first}"));
    }
    let tails = [("p50", 0.5), ("p99", 0.99)].map(|(name, part)| (name, quantile(&times, part)));
    report.figure(what, "monopod", "ms", times);
    for (name, value) in tails {
        report.figure(
            &format!("{what}, {name}"),
            "monopod",
            "ms",
            value.into_iter().collect(),
        );
    }
    tails[1].1
}

/// Makes calls at their time, whether those before were answered or not, and gives the
/// milliseconds from that time to the answer. Those that fail are counted instead.
async fn at_rate<F>(rate: u32, call: impl Fn() -> F) -> Calls
where
    F: Future<Output = Result<()>>,
{
    let begin = Instant::now();
    let calls = (0..rate * (WARM + SECONDS)).map(|number| {
        let due = begin + Duration::from_secs(1) / rate * number;
        let call = &call;
        async move {
            tokio::time::sleep_until(due).await;
            let outcome = call().await;
            (
                number,
                outcome.map(|()| due.elapsed().as_secs_f64() * 1000.0),
            )
        }
    });
    let mut counted = Calls::default();
    for (number, outcome) in join_all(calls).await {
        match outcome {
            Ok(time) if number >= rate * WARM => counted.times.push(time),
            Ok(_warm) => {}
            Err(error) => counted.failures.push(format!("{error:#}")),
        }
    }
    counted
}

/// What became of many calls.
#[derive(Default)]
struct Calls {
    times: Vec<f64>,
    failures: Vec<String>,
}

/// Calls the webhook with the API server's certificate.
struct Caller {
    client: reqwest::Client,
    url: String,
    review: String,
}

impl Caller {
    async fn new(site: &Site) -> Result<Self> {
        let pki = Layout::new(site.cluster.data()).pki();
        let (certificate, key) = pki::files(&pki, "apiserver-webhook");
        let identity = [read(certificate)?, read(key)?].concat();
        let webhooks: Api<MutatingWebhookConfiguration> = Api::all(site.client.clone());
        let webhook = webhooks
            .list(&ListParams::default())
            .await?
            .into_iter()
            .flat_map(|configuration| configuration.webhooks.unwrap_or_default())
            .next();
        let asked = webhook.context("the cluster has no webhook")?.client_config;
        let url = asked.url.context("the webhook has no URL")?;
        let authority = asked
            .ca_bundle
            .context("the webhook has no authority yet")?;
        let authorities = reqwest::Certificate::from_pem_bundle(&authority.0)?;
        // The whole process may use one; that another was chosen before is as good.
        let _chosen = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder()
            .tls_certs_only(authorities)
            .identity(reqwest::Identity::from_pem(&identity)?)
            .build()?;
        let review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "0d6d7c5e-3a52-4a39-8d0b-6c8d1f0e7a11",
                "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
                "requestResource": {"group": "", "version": "v1", "resource": "pods"},
                "namespace": "default", "operation": "CREATE", "dryRun": false,
                "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"},
                "object": pod(), "oldObject": null, "options": {"apiVersion": "meta.k8s.io/v1", "kind": "CreateOptions"},
            },
        })
        .to_string();
        Ok(Self {
            client,
            url,
            review,
        })
    }

    async fn call(&self) -> Result<()> {
        let request = self.client.post(&self.url).body(self.review.clone());
        let answer = request
            .header("content-type", "application/json")
            .send()
            .await?
            .error_for_status()?;
        let answer: Value = serde_json::from_slice(&answer.bytes().await?)?;
        ensure!(
            answer["response"]["allowed"] == true && !answer["response"]["patch"].is_null(),
            "the webhook did not select the pod: {answer}"
        );
        Ok(())
    }
}

async fn create(pods: &Api<Pod>) -> Result<()> {
    let parameters = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    pods.create(&parameters, &serde_json::from_value(pod())?)
        .await?;
    Ok(())
}

/// Profiles that select other namespaces, by labels too.
async fn make_profiles(client: &Client) -> Result<()> {
    let profiles: Api<FargateProfile> = Api::all(client.clone());
    for number in 1..PROFILES {
        let profile = serde_json::from_value(json!({
            "apiVersion": "monopod.dev/v1alpha1", "kind": "FargateProfile",
            // Before the one that selects the pods: all are looked at.
            "metadata": {"name": format!("a-team-{number}")},
            "spec": {"podExecutionRole": "default", "selectors": [
                {"namespace": format!("team-{number}-*"), "labels": {"tier": "front*", "stage": "prod"}},
                {"namespace": "shared", "labels": {"team": format!("team-{number}")}},
            ]},
        }))?;
        profiles.create(&PostParams::default(), &profile).await?;
    }
    Ok(())
}

/// It is this run's own cluster.
async fn remove_webhook(client: &Client) -> Result<()> {
    let webhooks: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    for webhook in webhooks.list(&ListParams::default()).await? {
        webhooks
            .delete(&webhook.name_any(), &DeleteParams::default())
            .await?;
    }
    Ok(())
}

/// A pod as a Deployment of a web application makes it.
fn pod() -> Value {
    let variables: Vec<Value> = (0..20)
        .map(|n| json!({"name": format!("SETTING_{n}"), "value": format!("a value of usual length {n}")}))
        .collect();
    let container = |name: &str, port: u16| {
        json!({
            "name": name, "image": format!("registry.example/team/{name}:1.2.3"), "env": variables,
            "ports": [{"name": name, "containerPort": port}],
            "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "256Mi"}},
            "volumeMounts": [{"name": "config", "mountPath": "/etc/app"}, {"name": "scratch", "mountPath": "/tmp"}],
            "securityContext": {"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}},
        })
    };
    let serving = |name: &str, port: u16| {
        let probe = |path: &str| json!({"httpGet": {"path": path, "port": port}, "periodSeconds": 10, "timeoutSeconds": 2});
        let mut container = container(name, port);
        container["livenessProbe"] = probe("/live");
        container["readinessProbe"] = probe("/ready");
        container
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "generateName": "web-7c5ddbdf54-",
            "labels": {"app": "web", "pod-template-hash": "7c5ddbdf54", "tier": "front", "version": "1.2.3"},
            "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": "8080", "checksum/config": "9f86d081884c7d659a2feaa0c55ad015"},
        },
        "spec": {
            "initContainers": [container("migrate", 8080)],
            "containers": [serving("web", 8080), serving("proxy", 9090)],
            "volumes": [
                {"name": "config", "configMap": {"name": "web", "optional": true}},
                {"name": "scratch", "emptyDir": {"sizeLimit": "64Mi"}},
            ],
            "securityContext": {"runAsNonRoot": true, "runAsUser": 10001, "fsGroup": 10001},
            "terminationGracePeriodSeconds": 30,
        },
    })
}
