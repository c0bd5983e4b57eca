//! What Monopod's own processes may ask of the API server, and why: `deploy/rbac.yaml` and `deploy/host.yaml`
//! are made from this.
//!
//! Nodes get their rights from the Node authorizer alone. What RBAC cannot say is in `deploy/policies.yaml`.
//! A cluster's tests end with the question which right nobody used.

use crate::environment::Environment;
use crate::host::Host;
use crate::labels;
use crate::network::{NetworkInterface, SecurityGroup, Subnet, Vpc};
use crate::profile::{FargateProfile, PodExecutionRole};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{
    Event, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, Secret, Service,
    ServiceAccount,
};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::api::rbac::v1::{
    ClusterRole, ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject,
};
use kube::Resource;
use kube::core::ObjectMeta;
use serde_json::{Result, Value, to_value};

/// The role of what control may do; roles with rights in one namespace have its name, too.
pub const CONTROL: &str = labels::CONTROL_USER;
/// The same of hosts.
pub const HOST: &str = "monopod:host";
/// Stands for a host's name in [`of_a_host`].
pub const HOST_NAME: &str = "HOST";
/// Stands for a host's namespace there.
pub const HOST_NAMESPACE: &str = "NAMESPACE";

const RBAC_GROUP: &str = "rbac.authorization.k8s.io";
const SYSTEM: &str = "kube-system";

/// Rights that hold in the whole cluster, and in `kube-system`.
pub fn of_the_cluster() -> Result<Vec<Value>> {
    let control = || user(labels::CONTROL_USER);
    let hosts = group(labels::HOSTS_GROUP);
    let objects = [
        everywhere(CONTROL, control(), control_everywhere())?,
        within(SYSTEM, CONTROL, control(), control_in_kube_system())?,
        // Every host has the same; admission policies narrow its writes to objects that name it.
        everywhere(HOST, hosts, host_everywhere())?,
        vec![
            // Control fills it with the authorities of the webhook. It may not create secrets there, tokens among them.
            to_value(Secret {
                metadata: named(labels::WEBHOOK_AUTHORITY, Some(SYSTEM)),
                ..Secret::default()
            })?,
            // Who has a token of `monopod host token` may ask for a certificate; control decides (core::certificates).
            upstream(
                "monopod:invited",
                "system:node-bootstrapper",
                group(labels::INVITED_GROUP),
            )?,
            // With this right, and no other of the kubelet API, the API server serves logs, exec and attach.
            upstream(
                "monopod:kubelet-client",
                "system:kubelet-api-admin",
                user(labels::KUBELET_CLIENT_USER),
            )?,
            // Identity providers verify service account tokens: the issuer's keys are public, by anonymous requests.
            upstream(
                "monopod:issuer-discovery",
                "system:service-account-issuer-discovery",
                group("system:unauthenticated"),
            )?,
        ],
    ];
    Ok(objects.concat())
}

/// For each host: the namespace of what is addressed to it alone, and of its lease, and the rights there.
pub fn of_a_host() -> Result<Vec<Value>> {
    let namespace = to_value(Namespace {
        metadata: named(HOST_NAMESPACE, None),
        ..Namespace::default()
    })?;
    // Control writes the registry credentials of one environment; the host reads them.
    let control = vec![to::<Secret>("create patch delete")];
    let host = vec![to::<Secret>("list watch"), to::<Lease>("create patch")];
    let itself = user(&format!("{}{HOST_NAME}", labels::HOST_USER_PREFIX));
    let objects = [
        vec![namespace],
        within(HOST_NAMESPACE, CONTROL, user(labels::CONTROL_USER), control)?,
        within(HOST_NAMESPACE, HOST, itself, host)?,
    ];
    Ok(objects.concat())
}

fn control_everywhere() -> Vec<PolicyRule> {
    vec![
        to::<Pod>("get list watch patch delete"),
        to_part::<Pod>("status", "patch"),
        to_part::<Pod>("binding", "create"),
        to_part::<Pod>("eviction", "create"),
        // By name alone, as profiles' roles and pods name them: registry credentials. It cannot list them.
        to::<Secret>("get"),
        to::<Node>("get list watch delete"),
        // Which IAM role a pod's service account names.
        to::<ServiceAccount>("list watch"),
        // Which namespaces a pod's affinity selects.
        to::<Namespace>("list watch"),
        // What a pod's claims stand for.
        to::<PersistentVolumeClaim>("list watch"),
        to::<PersistentVolume>("list watch"),
        to::<Event>("create patch"),
        // Nodes' leases are deleted with them; hosts' are watched.
        to::<Lease>("list watch delete"),
        to::<Environment>("get list watch create patch delete"),
        to::<NetworkInterface>("get list watch create patch delete"),
        to_part::<NetworkInterface>("status", "patch"),
        // Its finalizer drains a profile's pods before the profile is gone.
        to::<FargateProfile>("list watch patch"),
        to_part::<FargateProfile>("status", "patch"),
        to::<PodExecutionRole>("list watch"),
        to::<Host>("list watch"),
        to::<Vpc>("get list watch"),
        to_part::<Vpc>("status", "patch"),
        to::<Subnet>("get list watch"),
        to_part::<Subnet>("status", "patch"),
        to::<SecurityGroup>("get list watch"),
        to_part::<SecurityGroup>("status", "patch"),
        // For which namespaces the API server asks the webhook, and which authorities it trusts there.
        only(
            &[labels::WEBHOOK],
            to::<MutatingWebhookConfiguration>("get patch"),
        ),
        to::<CertificateSigningRequest>("list watch deletecollection"),
        to_part::<CertificateSigningRequest>("approval", "patch"),
        // Nodes' two certificates, and hosts'.
        only(
            &[
                "kubernetes.io/kube-apiserver-client-kubelet",
                "kubernetes.io/kubelet-serving",
                "kubernetes.io/kube-apiserver-client",
            ],
            rule("certificates.k8s.io", "signers".to_owned(), "approve"),
        ),
    ]
}

fn control_in_kube_system() -> Vec<PolicyRule> {
    vec![
        // The lease by which one of several control processes acts.
        to::<Lease>("create"),
        only(&[labels::CONTROL_LEASE], to::<Lease>("get update")),
        // Tokens of `monopod host token`: marked as used, for good, before a certificate is approved.
        // The webhook's authorities.
        to::<Secret>("patch"),
    ]
}

fn host_everywhere() -> Vec<PolicyRule> {
    vec![
        to::<Host>("list watch create patch"),
        to_part::<Host>("status", "patch"),
        to::<NetworkInterface>("list watch"),
        to::<SecurityGroup>("list watch"),
        to::<Subnet>("list watch"),
        to::<Environment>("get list watch patch"),
        to_part::<Environment>("status", "patch"),
        to::<CertificateSigningRequest>("create list watch"),
        // kube-proxy on each machine runs as its host.
        to::<Service>("list watch"),
        to::<EndpointSlice>("list watch"),
        to::<ServiceCIDR>("list watch"),
    ]
}

fn to<K: Resource<DynamicType = ()>>(verbs: &str) -> PolicyRule {
    rule(&K::group(&()), K::plural(&()).into_owned(), verbs)
}

fn to_part<K: Resource<DynamicType = ()>>(part: &str, verbs: &str) -> PolicyRule {
    rule(&K::group(&()), format!("{}/{part}", K::plural(&())), verbs)
}

fn rule(group: &str, resource: String, verbs: &str) -> PolicyRule {
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(vec![resource]),
        verbs: verbs.split(' ').map(str::to_owned).collect(),
        ..PolicyRule::default()
    }
}

/// The same, of objects with these names alone.
fn only(names: &[&str], rule: PolicyRule) -> PolicyRule {
    PolicyRule {
        resource_names: Some(names.iter().map(|name| (*name).to_owned()).collect()),
        ..rule
    }
}

/// A role for the whole cluster, and who has it.
fn everywhere(name: &str, subject: Subject, rules: Vec<PolicyRule>) -> Result<Vec<Value>> {
    let role = ClusterRole {
        metadata: named(name, None),
        rules: Some(rules),
        ..ClusterRole::default()
    };
    Ok(vec![to_value(role)?, upstream(name, name, subject)?])
}

/// Who has a role of the cluster that there is.
fn upstream(name: &str, role: &str, subject: Subject) -> Result<Value> {
    to_value(ClusterRoleBinding {
        metadata: named(name, None),
        role_ref: reference("ClusterRole", role),
        subjects: Some(vec![subject]),
    })
}

/// A role in one namespace, and who has it.
fn within(
    namespace: &str,
    name: &str,
    subject: Subject,
    rules: Vec<PolicyRule>,
) -> Result<Vec<Value>> {
    let metadata = named(name, Some(namespace));
    let role = Role {
        metadata: metadata.clone(),
        rules: Some(rules),
    };
    let binding = RoleBinding {
        metadata,
        role_ref: reference("Role", name),
        subjects: Some(vec![subject]),
    };
    Ok(vec![to_value(role)?, to_value(binding)?])
}

fn named(name: &str, namespace: Option<&str>) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        namespace: namespace.map(str::to_owned),
        ..ObjectMeta::default()
    }
}

fn reference(kind: &str, name: &str) -> RoleRef {
    RoleRef {
        api_group: Some(RBAC_GROUP.to_owned()),
        kind: kind.to_owned(),
        name: name.to_owned(),
    }
}

fn user(name: &str) -> Subject {
    subject("User", name)
}

fn group(name: &str) -> Subject {
    subject("Group", name)
}

fn subject(kind: &str, name: &str) -> Subject {
    Subject {
        api_group: Some(RBAC_GROUP.to_owned()),
        kind: kind.to_owned(),
        name: name.to_owned(),
        namespace: None,
    }
}
