//! Monopod's Kubernetes objects, and every name that users or other components see.
//!
//! Only data: no client and no runtime. What a name or a message must be comes from
//! AWS EKS Fargate where it has one (`eks.amazonaws.com/…`), else from Monopod.

#![expect(
    unreachable_pub,
    reason = "the KubeSchema derive repeats each type in a private module"
)]

pub mod environment;
pub mod host;
pub mod labels;
pub mod messages;
pub mod names;
pub mod network;
pub mod profile;
pub mod rights;
pub mod size;
pub mod timeline;

/// The API group of Monopod's own objects.
pub const GROUP: &str = "monopod.dev";

/// The Kubernetes version that this release of Monopod is built for.
pub const KUBERNETES_VERSION: &str = include_str!("../../../kubernetes/VERSION");

/// All custom resource definitions, in the order in which they are best applied.
pub fn custom_resource_definitions()
-> Vec<k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition>
{
    use kube::CustomResourceExt;
    vec![
        profile::PodExecutionRole::crd(),
        profile::FargateProfile::crd(),
        network::Vpc::crd(),
        network::Subnet::crd(),
        network::SecurityGroup::crd(),
        network::NetworkInterface::crd(),
        host::Host::crd(),
        environment::Environment::crd(),
    ]
}
