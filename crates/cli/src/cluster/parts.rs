//! The processes of an embedded cluster, as data: what is started, with which arguments, in which order.

use super::pki;
use crate::settings::{Layout, LocalPort, Settings};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Name of the host process, whose VMs outlive it.
pub const HOST: &str = "host";

/// A process of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its name, for logs and status.
    pub name: &'static str,
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// How it is known to be ready.
    pub ready: Ready,
    /// Seconds between SIGTERM and SIGKILL when it is stopped.
    pub grace_seconds: u64,
}

/// How a part is known to be ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ready {
    /// Its port on loopback accepts connections.
    Port(LocalPort),
    /// The API server answers `/readyz`.
    ApiServer,
    /// Its admin server answers `/readyz`.
    Admin(LocalPort),
}

/// Programs that parts are started from.
#[derive(Debug, Clone)]
pub struct Programs {
    /// The multi-call binary of the upstream control plane.
    pub kubernetes: PathBuf,
    /// This program.
    pub monopod: PathBuf,
    /// Kernel and initial file system of guests.
    pub guest: PathBuf,
}

/// The store and the API server, on which everything else waits.
pub fn api(layout: &Layout, settings: &Settings, programs: &Programs) -> Vec<Part> {
    vec![
        etcd(layout, settings, programs),
        apiserver(layout, settings, programs),
    ]
}

/// Everything that needs the API server and what is applied to it.
pub fn controllers(layout: &Layout, settings: &Settings, programs: &Programs) -> Vec<Part> {
    vec![
        // Before the controllers make pods: those of kube-system would be stored without its webhook.
        monopod("control", LocalPort::ControlAdmin, layout, programs),
        controller_manager(layout, settings, programs),
        scheduler(layout, settings, programs),
        host(layout, programs),
    ]
}

/// The one part of a machine that joined another's cluster, and the last of any other.
pub fn host(layout: &Layout, programs: &Programs) -> Part {
    let mut part = monopod(HOST, LocalPort::HostAdmin, layout, programs);
    part.arguments.insert(1, "run".to_owned());
    part.arguments.push(flag("guest", &programs.guest));
    part.arguments
        .push(flag("kubernetes", &programs.kubernetes));
    part
}

fn etcd(layout: &Layout, settings: &Settings, programs: &Programs) -> Part {
    let (certificate, key) = pki::files(&layout.pki(), "etcd");
    let ca = pki::files(&layout.pki(), "etcd-ca").0;
    let url = |port| format!("https://{}", settings.local(port));
    let (client, peer) = (url(LocalPort::Etcd), url(LocalPort::EtcdPeer));
    let arguments = [
        "etcd".to_owned(),
        "--name=default".to_owned(),
        flag("data-dir", &layout.data.join("etcd")),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=default={peer}"),
        flag("cert-file", &certificate),
        flag("key-file", &key),
        flag("trusted-ca-file", &ca),
        "--client-cert-auth".to_owned(),
        flag("peer-cert-file", &certificate),
        flag("peer-key-file", &key),
        flag("peer-trusted-ca-file", &ca),
        "--peer-client-cert-auth".to_owned(),
        "--log-level=warn".to_owned(),
        // One replica has nobody to elect against, and a busy small machine must not lose itself.
        "--heartbeat-interval=500".to_owned(),
        "--election-timeout=5000".to_owned(),
    ];
    upstream(
        "etcd",
        programs,
        arguments.into(),
        Ready::Port(LocalPort::Etcd),
    )
}

fn apiserver(layout: &Layout, settings: &Settings, programs: &Programs) -> Part {
    let dir = layout.pki();
    let pair = |name: &str| pki::files(&dir, name);
    let issuer = settings.issuer_url();
    let arguments = [
        "kube-apiserver".to_owned(),
        format!("--bind-address={}", settings.api_address()),
        format!("--advertise-address={}", settings.api_address()),
        format!("--secure-port={}", settings.api_port),
        format!("--etcd-servers=https://{}", settings.local(LocalPort::Etcd)),
        flag("etcd-cafile", &pair("etcd-ca").0),
        flag("etcd-certfile", &pair("apiserver-etcd").0),
        flag("etcd-keyfile", &pair("apiserver-etcd").1),
        flag("tls-cert-file", &pair("apiserver").0),
        flag("tls-private-key-file", &pair("apiserver").1),
        flag("client-ca-file", &pair("ca").0),
        format!("--service-account-jwks-uri={issuer}/openid/v1/jwks"),
        format!("--service-account-issuer={issuer}"),
        flag("service-account-key-file", &dir.join("service-account.pub")),
        flag(
            "service-account-signing-key-file",
            &dir.join("service-account.key"),
        ),
        format!("--service-cluster-ip-range={}", settings.service_cidr),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        flag(
            "admission-control-config-file",
            &layout.data.join("admission.json"),
        ),
        flag(
            "authentication-config",
            &layout.data.join("authentication.json"),
        ),
        "--enable-bootstrap-token-auth".to_owned(),
        flag("kubelet-certificate-authority", &pair("ca").0),
        flag("kubelet-client-certificate", &pair("apiserver-kubelet").0),
        flag("kubelet-client-key", &pair("apiserver-kubelet").1),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
        "--enable-aggregator-routing=true".to_owned(),
        flag("requestheader-client-ca-file", &pair("front-proxy-ca").0),
        "--requestheader-allowed-names=front-proxy-client".to_owned(),
        "--requestheader-username-headers=X-Remote-User".to_owned(),
        "--requestheader-group-headers=X-Remote-Group".to_owned(),
        "--requestheader-extra-headers-prefix=X-Remote-Extra-".to_owned(),
        flag("proxy-client-cert-file", &pair("front-proxy").0),
        flag("proxy-client-key-file", &pair("front-proxy").1),
        // The Fargate contract is the gate for privileged pods; the others are their owner's business.
        "--allow-privileged=true".to_owned(),
    ];
    let audit = settings.audit_policy.iter().flat_map(|policy| {
        [
            flag("audit-policy-file", policy),
            flag("audit-log-path", &layout.log("audit")),
            "--audit-log-maxsize=100".to_owned(),
            "--audit-log-maxbackup=3".to_owned(),
        ]
    });
    Part {
        // It waits for streams of VMs that are gone; all it knows is in etcd.
        grace_seconds: 5,
        ..upstream(
            "kube-apiserver",
            programs,
            arguments.into_iter().chain(audit).collect(),
            Ready::ApiServer,
        )
    }
}

fn controller_manager(layout: &Layout, settings: &Settings, programs: &Programs) -> Part {
    let dir = layout.pki();
    let ca = pki::files(&dir, "ca");
    let port = settings.local(LocalPort::ControllerManager);
    let arguments = [
        "kube-controller-manager".to_owned(),
        format!("--bind-address={}", port.ip()),
        format!("--secure-port={}", port.port()),
        flag("kubeconfig", &layout.kubeconfig("controller-manager")),
        flag(
            "authentication-kubeconfig",
            &layout.kubeconfig("controller-manager"),
        ),
        flag(
            "authorization-kubeconfig",
            &layout.kubeconfig("controller-manager"),
        ),
        flag(
            "service-account-private-key-file",
            &dir.join("service-account.key"),
        ),
        flag("root-ca-file", &ca.0),
        flag("cluster-signing-cert-file", &ca.0),
        flag("cluster-signing-key-file", &ca.1),
        format!(
            "--cluster-signing-duration={}s",
            settings.certificate_lifetime.as_secs()
        ),
        format!("--service-cluster-ip-range={}", settings.service_cidr),
        // It would approve node certificates for whoever has an administrator's rights; control approves
        // them for the environment's host alone.
        "--controllers=*,token-cleaner-controller,-certificatesigningrequest-approving-controller"
            .to_owned(),
        "--use-service-account-credentials".to_owned(),
        "--leader-elect=false".to_owned(),
    ];
    upstream(
        "kube-controller-manager",
        programs,
        arguments.into(),
        Ready::Port(LocalPort::ControllerManager),
    )
}

fn scheduler(layout: &Layout, settings: &Settings, programs: &Programs) -> Part {
    let port = settings.local(LocalPort::Scheduler);
    let arguments = [
        "kube-scheduler".to_owned(),
        format!("--bind-address={}", port.ip()),
        format!("--secure-port={}", port.port()),
        flag("kubeconfig", &layout.kubeconfig("scheduler")),
        flag("authentication-kubeconfig", &layout.kubeconfig("scheduler")),
        flag("authorization-kubeconfig", &layout.kubeconfig("scheduler")),
        "--leader-elect=false".to_owned(),
    ];
    upstream(
        "kube-scheduler",
        programs,
        arguments.into(),
        Ready::Port(LocalPort::Scheduler),
    )
}

/// One of Monopod's own processes, which reads everything else from the settings.
fn monopod(name: &'static str, admin: LocalPort, layout: &Layout, programs: &Programs) -> Part {
    Part {
        name,
        program: programs.monopod.clone(),
        arguments: vec![name.to_owned(), flag("data", &layout.data)],
        ready: Ready::Admin(admin),
        grace_seconds: 30,
    }
}

fn upstream(name: &'static str, programs: &Programs, arguments: Vec<String>, ready: Ready) -> Part {
    Part {
        name,
        program: programs.kubernetes.clone(),
        arguments,
        ready,
        grace_seconds: 10,
    }
}

fn flag(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}

/// Who need not show credentials: whoever verifies service account tokens, and asks for their keys.
pub fn authentication_configuration() -> Value {
    json!({
        "apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthenticationConfiguration",
        "anonymous": {"enabled": true, "conditions": [
            {"path": "/.well-known/openid-configuration"}, {"path": "/openid/v1/jwks"},
        ]},
    })
}

/// With what certificate the API server calls the webhook.
pub fn admission_configuration(layout: &Layout) -> Value {
    json!({
        "apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration",
        "plugins": [{"name": "MutatingAdmissionWebhook", "configuration": {
            "apiVersion": "apiserver.config.k8s.io/v1", "kind": "WebhookAdmissionConfiguration",
            "kubeConfigFile": layout.kubeconfig("apiserver-webhook"),
        }}],
    })
}

/// The kubeconfig in which the API server finds that certificate, by the webhook's address.
pub fn webhook_kubeconfig(layout: &Layout, settings: &Settings) -> Value {
    let (certificate, key) = pki::files(&layout.pki(), "apiserver-webhook");
    json!({
        "apiVersion": "v1", "kind": "Config",
        "users": [{"name": settings.local(LocalPort::Webhook).to_string(), "user": {
            "client-certificate": certificate, "client-key": key,
        }}],
    })
}
