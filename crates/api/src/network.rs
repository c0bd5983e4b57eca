//! The cluster's network: the VPC, its subnets, security groups and interfaces, with EC2's meaning.

use crate::environment::EnvironmentReference;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The private network of the cluster. There is one, named `default`.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monopod.dev",
    version = "v1alpha1",
    derive = "PartialEq",
    kind = "Vpc",
    plural = "vpcs",
    status = "NetworkStatus",
    printcolumn(name = "CIDR", type_ = "string", json_path = ".spec.cidr"),
    printcolumn(name = "ID", type_ = "string", json_path = ".status.id"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = kube::core::Rule::new("self.metadata.name == 'default'")
        .message("metadata.name: a cluster has one VPC, named default")
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = kube::core::Rule::new("self == oldSelf").message("spec: a VPC cannot be changed"))]
pub struct VpcSpec {
    /// Addresses of all subnets, for instance `10.0.0.0/16`.
    #[x_kube(validation = kube::core::Rule::new("isCIDR(self) && cidr(self).ip().family() == 4")
        .message("cidr: an IPv4 range such as 10.0.0.0/16"))]
    #[schemars(length(max = 18))]
    pub cidr: String,
}

/// A part of the VPC's addresses in one zone.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monopod.dev",
    version = "v1alpha1",
    derive = "PartialEq",
    kind = "Subnet",
    plural = "subnets",
    status = "NetworkStatus",
    printcolumn(name = "CIDR", type_ = "string", json_path = ".spec.cidr"),
    printcolumn(name = "Zone", type_ = "string", json_path = ".spec.zone"),
    printcolumn(name = "ID", type_ = "string", json_path = ".status.id"),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = kube::core::Rule::new("self == oldSelf").message("spec: a subnet cannot be changed"))]
pub struct SubnetSpec {
    /// Addresses of the subnet, for instance `10.0.1.0/24`: a part of the VPC's that no other subnet has. The
    /// first four and the last stay unused.
    #[x_kube(validation = kube::core::Rule::new("isCIDR(self) && cidr(self).ip().family() == 4 && cidr(self).prefixLength() <= 28")
        .message("cidr: an IPv4 range of at least 16 addresses, such as 10.0.1.0/24"))]
    #[schemars(length(max = 18))]
    pub cidr: String,
    /// Availability zone; only hosts of this zone serve the subnet.
    #[schemars(length(min = 1, max = 63))]
    pub zone: String,
}

/// What may reach the interfaces that carry the group, and what they may reach. Stateful.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monopod.dev",
    version = "v1alpha1",
    derive = "PartialEq",
    kind = "SecurityGroup",
    plural = "securitygroups",
    shortname = "sg",
    status = "NetworkStatus",
    printcolumn(name = "ID", type_ = "string", json_path = ".status.id"),
    printcolumn(
        name = "Description",
        type_ = "string",
        json_path = ".spec.description"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecurityGroupSpec {
    /// Says what the group is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// What may come in. Nothing else may.
    #[serde(default)]
    #[schemars(length(max = 60))]
    pub ingress: Vec<SecurityGroupRule>,
    /// What may go out. Nothing else may. If the field is absent, everything may, as in a new EC2 group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 60))]
    pub egress: Option<Vec<SecurityGroupRule>>,
}

/// One permission: a protocol, its ports, and the peers it holds for.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    validation = kube::core::Rule::new("has(self.fromPort) == has(self.toPort)")
        .message("fromPort and toPort: give both or neither"),
    validation = kube::core::Rule::new("!has(self.fromPort) || !has(self.toPort) || self.fromPort <= self.toPort")
        .message("fromPort: must not be above toPort"),
    validation = kube::core::Rule::new("!has(self.fromPort) || self.protocol in ['tcp', 'udp']")
        .message("fromPort: ports exist only with the protocols tcp and udp"),
    validation = kube::core::Rule::new("size(self.cidrs) + size(self.groups) > 0")
        .message("cidrs or groups: name at least one peer; 0.0.0.0/0 is everyone")
)]
pub struct SecurityGroupRule {
    /// `tcp`, `udp`, `icmp`, or `-1` for all protocols.
    pub protocol: Protocol,
    /// First port; absent with `toPort`: all ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 65535))]
    pub from_port: Option<u16>,
    /// Last port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 65535))]
    pub to_port: Option<u16>,
    /// IPv4 ranges of peers.
    #[serde(default)]
    #[schemars(length(max = 60), inner(length(max = 18)))]
    #[x_kube(validation = kube::core::Rule::new("self.all(c, isCIDR(c) && cidr(c).ip().family() == 4)")
        .message("cidrs: IPv4 ranges such as 10.0.0.0/16"))]
    pub cidrs: Vec<String>,
    /// Names or ids of security groups whose members are peers.
    #[serde(default)]
    #[schemars(length(max = 16), inner(length(max = 63)))]
    pub groups: Vec<String>,
}

/// Protocol of a security group's rule.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP, all types.
    Icmp,
    /// All protocols; EC2 writes `-1`.
    #[default]
    #[serde(rename = "-1")]
    All,
}

/// A pod's network interface. Its name follows from its address.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "monopod.dev",
    version = "v1alpha1",
    derive = "PartialEq",
    kind = "NetworkInterface",
    plural = "networkinterfaces",
    shortname = "eni",
    status = "NetworkInterfaceStatus",
    printcolumn(name = "IP", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "Subnet", type_ = "string", json_path = ".spec.subnet"),
    printcolumn(name = "Groups", type_ = "string", json_path = ".spec.securityGroups"),
    printcolumn(name = "Host", type_ = "string", json_path = ".spec.host"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Environment",
        type_ = "string",
        json_path = ".spec.environment.name",
        priority = 1
    ),
    printcolumn(name = "MAC", type_ = "string", json_path = ".spec.mac", priority = 1),
    printcolumn(name = "ID", type_ = "string", json_path = ".status.id", priority = 1),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = kube::core::Rule::new("self.address == oldSelf.address && self.environment == oldSelf.environment && self.host == oldSelf.host && self.mac == oldSelf.mac && self.subnet == oldSelf.subnet")
    .message("spec: only the security groups of an interface can be changed"))]
pub struct NetworkInterfaceSpec {
    /// The private IPv4 address.
    #[schemars(length(max = 15))]
    pub address: String,
    /// The hardware address.
    #[schemars(length(max = 17))]
    pub mac: String,
    /// Name of the subnet.
    #[schemars(length(max = 253))]
    pub subnet: String,
    /// Names of the security groups.
    #[schemars(length(max = 5))]
    pub security_groups: Vec<String>,
    /// The environment it belongs to.
    pub environment: EnvironmentReference,
    /// Name of the host that carries it.
    #[schemars(length(max = 253))]
    pub host: String,
}

/// State of an interface.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkInterfaceStatus {
    /// Whether the interface is in use, or its address is only kept from being used again at once.
    #[serde(default)]
    pub phase: InterfacePhase,
    /// EC2-style id, derived from the object's uid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Until when the address is not used again (RFC 3339); only in the phase `Cooling`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cooling_until: Option<k8s_openapi::apimachinery::pkg::apis::meta::v1::Time>,
}

/// Phases of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum InterfacePhase {
    /// Belongs to a live environment.
    #[default]
    InUse,
    /// Released a short time ago; the address is not yet given again.
    Cooling,
}

/// Status shared by the network's objects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkStatus {
    /// EC2-style id, derived from the object's uid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}
