//! Where a cluster keeps its data and which addresses it uses.

use crate::cluster::parts::HOST;
use crate::flags;
use anyhow::Context;
use clap::{Args, ValueEnum};
use ipnet::Ipv4Net;
use jiff::SignedDuration;
use monopod_core::image::endpoints::Registries;
use monopod_core::image::garbage::Limits;
use monopod_host::registry::{ConfigError, read_config};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Where the data of a cluster is unless a flag says otherwise.
pub const DEFAULT_DATA: &str = "/var/lib/monopod";

/// Addresses, ports and names of an embedded cluster.
#[derive(Args, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Settings {
    /// Name of the cluster; prefix of its network namespace and interfaces on this machine
    #[arg(long, default_value = "monopod", value_parser = flags::short_name)]
    pub name: String,
    /// Range of four addresses for the link between the API server (its first host) and the VPC
    #[arg(long, default_value = "100.64.0.0/30", value_parser = flags::link_range)]
    pub link: Ipv4Net,
    /// Addresses of pods; only of a new cluster
    #[arg(long, default_value = "10.0.0.0/16")]
    pub vpc_cidr: Ipv4Net,
    /// Addresses of services; only of a new cluster
    #[arg(long, default_value = "10.96.0.0/16")]
    pub service_cidr: Ipv4Net,
    /// Domain of the cluster's DNS
    #[arg(long, default_value = "cluster.local", value_parser = flags::name)]
    pub cluster_domain: String,
    /// Port of the API server, on the link's address
    #[arg(long, default_value_t = 6443, value_parser = flags::port())]
    pub api_port: u16,
    /// First of ten ports on 127.0.0.1 for etcd, the webhook and the parts' admin servers
    #[arg(long, default_value_t = 23440, value_parser = flags::base_port())]
    pub base_port: u16,
    /// Name of this machine as a Host; default: its host name
    #[arg(long, default_value_t = machine_name(), value_parser = flags::name)]
    pub host_name: String,
    /// Region of this machine
    #[arg(long, default_value = "local-1", value_parser = flags::label)]
    pub region: String,
    /// Availability zone of this machine
    #[arg(long, default_value = "local-1a", value_parser = flags::label)]
    pub zone: String,
    /// Thousandths of a CPU for VMs; default: eight times what the machine has, as idle pods share
    #[arg(long, value_parser = flags::cpu_millis())]
    pub vm_cpu_millis: Option<u32>,
    /// Memory for VMs in MiB; default: three quarters of the machine's
    #[arg(long, value_parser = flags::memory_mib())]
    pub vm_memory_mib: Option<u32>,
    /// URL that service account tokens name as their issuer, where you publish what the API server answers without
    /// credentials at /.well-known/openid-configuration and /openid/v1/jwks; default: a name inside the cluster
    #[arg(long, value_name = "URL", value_parser = flags::issuer)]
    #[serde(default)]
    pub issuer: Option<String>,
    /// Most Fargate profiles; EKS's quota, which is raised there on request. May be raised by another `up`
    #[arg(long, default_value_t = MAX_PROFILES)]
    #[serde(default = "max_profiles")]
    pub max_profiles: usize,
    /// Keep the API server's audit log, by this policy, in logs/audit.log
    #[arg(long, value_name = "FILE", value_parser = flags::existing_file)]
    #[serde(default)]
    pub audit_policy: Option<PathBuf>,
    /// Longest that a certificate lasts that the cluster signs: a host's, and a node's if it is less than an hour; also
    /// the authority of the webhook's. Each is renewed after two thirds. May be changed by another `up`
    #[arg(long, value_name = "DURATION", default_value = "8760h", value_parser = lifetime)]
    #[serde(default = "certificate_lifetime")]
    pub certificate_lifetime: SignedDuration,
    /// Leave out an add-on that a new cluster starts with
    #[arg(long, value_enum)]
    #[serde(default)]
    pub disable: Vec<AddOn>,
    /// What a host may be told anew.
    #[command(flatten)]
    #[serde(default)]
    pub host: HostSettings,
    /// Tells the VPC's packets from those of others on the same network between machines: 24 bits, at random.
    #[arg(skip = random_network())]
    #[serde(default)]
    pub network: u32,
    /// Whose cluster this machine is a host of; none if it is its own.
    #[arg(skip)]
    #[serde(default)]
    pub joined: Option<Joined>,
}

/// The cluster that a machine is a host of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Joined {
    /// Address of the machine with the API server.
    pub machine: Ipv4Addr,
}

fn random_network() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(0).to_le_bytes();
    u32::from_le_bytes([random[0], random[1], random[2], 0])
}

/// EKS's quota.
const MAX_PROFILES: usize = 10;

fn max_profiles() -> usize {
    MAX_PROFILES
}

/// Upstream's default for what the controller manager signs.
const fn certificate_lifetime() -> SignedDuration {
    SignedDuration::from_hours(365 * 24)
}

/// Below a minute a third of it is no time for a renewal.
fn lifetime(text: &str) -> Result<SignedDuration, String> {
    let range = SignedDuration::from_mins(1)..=certificate_lifetime() * 10;
    text.parse()
        .ok()
        .filter(|lifetime| range.contains(lifetime))
        .ok_or_else(|| "a duration such as 720h or 90m, a minute to ten years".to_owned())
}

/// Enough for a pod after another; a burst empties any pool.
const POOL: usize = 4;

/// Images and the pool of this machine. Unlike all else these may be changed later, by another `up`.
#[derive(Args, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HostSettings {
    /// Most VMs kept ready for pods to come, of sizes that were asked for lately, some 110 MiB each; 0: none
    #[arg(long, value_name = "VMS", default_value_t = POOL)]
    pub pool: usize,
    /// IPv4 address of this machine at which the cluster's other machines reach it, in a network that nobody else is in; lets hosts join
    #[arg(long, value_name = "ADDRESS")]
    #[serde(default)]
    pub underlay: Option<Ipv4Addr>,
    /// YAML file of registries' mirrors, extra certificate authorities (`ca_file`) and http:// endpoints, in the form of k3s's registries.yaml
    #[arg(long, value_name = "FILE")]
    pub registries: Option<PathBuf>,
    /// Percent of the disk from which on unused images are removed
    #[arg(long, default_value_t = 85, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub image_gc_high: u8,
    /// Percent of the disk down to which unused images are removed
    #[arg(long, default_value_t = 80, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub image_gc_low: u8,
    /// Hours after which an image that no pod uses is removed whatever room there is; 0: never
    #[arg(long, default_value_t = 168, value_name = "HOURS")]
    pub image_max_age: u32,
}

impl Default for HostSettings {
    fn default() -> Self {
        Self {
            underlay: None,
            registries: None,
            pool: POOL,
            image_gc_high: 85,
            image_gc_low: 80,
            image_max_age: 168,
        }
    }
}

impl HostSettings {
    /// When images are removed.
    pub fn limits(&self) -> Limits {
        Limits {
            high: self.image_gc_high,
            low: self.image_gc_low,
            max_age: (self.image_max_age > 0)
                .then(|| SignedDuration::from_hours(i64::from(self.image_max_age))),
        }
    }

    /// Reads the file of registries; nothing is special if there is none.
    pub fn read_registries(&self) -> Result<Registries, ConfigError> {
        self.registries
            .as_deref()
            .map_or_else(|| Ok(Registries::default()), read_config)
    }

    /// The same, for a process with another working directory.
    pub fn with_absolute_paths(mut self) -> anyhow::Result<Self> {
        if let Some(file) = &mut self.registries {
            *file = file
                .canonicalize()
                .with_context(|| format!("--registries {}", file.display()))?;
        }
        Ok(self)
    }

    fn check(&self) -> anyhow::Result<()> {
        anyhow::ensure!(
            self.image_gc_low < self.image_gc_high,
            "--image-gc-low {} must be below --image-gc-high {}",
            self.image_gc_low,
            self.image_gc_high
        );
        self.read_registries().context("--registries")?;
        Ok(())
    }
}

/// What a new cluster starts with beside its control plane.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AddOn {
    /// The cluster's DNS: two pods, each in a VM.
    Coredns,
}

/// What listens on loopback; the number is the offset from the base port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalPort {
    /// etcd for clients.
    Etcd = 0,
    /// etcd for its peers, of which there are none.
    EtcdPeer = 1,
    /// kube-controller-manager's own server.
    ControllerManager = 2,
    /// kube-scheduler's own server.
    Scheduler = 3,
    /// Control's admin server.
    ControlAdmin = 4,
    /// The admission webhook; 23445 by default, as on EKS.
    Webhook = 5,
    /// The host's admin server.
    HostAdmin = 6,
}

impl Settings {
    /// Refuses ranges that share addresses, with the flags that name them.
    pub fn check(&self) -> anyhow::Result<()> {
        self.host.check()?;
        let ranges = [
            ("--link", self.link),
            ("--vpc-cidr", self.vpc_cidr),
            ("--service-cidr", self.service_cidr),
        ];
        for (at, (flag, range)) in ranges.iter().enumerate() {
            for (other_flag, other) in &ranges[at + 1..] {
                let apart = !range.contains(&other.network()) && !other.contains(&range.network());
                anyhow::ensure!(
                    apart,
                    "{flag} {range} and {other_flag} {other} overlap; choose other ranges"
                );
            }
        }
        if let Some(address) = self.host.underlay {
            let taken = ranges.iter().find(|(_, range)| range.contains(&address));
            anyhow::ensure!(
                taken.is_none(),
                "--underlay {address} is within {}; the machines' network must be apart from the VPC's",
                taken
                    .map(|(flag, range)| format!("{flag} {range}"))
                    .unwrap_or_default()
            );
        }
        Ok(())
    }

    /// Address of the API server: the host's end of the link.
    pub fn api_address(&self) -> Ipv4Addr {
        self.link.hosts().next().unwrap_or_else(|| self.link.addr())
    }

    /// The VPC's end of the link.
    pub fn vpc_address(&self) -> Ipv4Addr {
        self.link.hosts().nth(1).unwrap_or_else(|| self.link.addr())
    }

    /// URL of the API server, as pods reach it.
    pub fn api_url(&self) -> String {
        format!("https://{}:{}", self.api_address(), self.api_port)
    }

    /// URL of the API server, as this machine's processes reach it.
    pub fn server(&self) -> String {
        match self.joined {
            Some(Joined { machine }) => format!("https://{machine}:{}", self.api_port),
            None => self.api_url(),
        }
    }

    /// Whom service account tokens name as their issuer.
    pub fn issuer_url(&self) -> String {
        self.issuer
            .clone()
            .unwrap_or_else(|| format!("https://kubernetes.default.svc.{}", self.cluster_domain))
    }

    /// The most powerful user whose kubeconfig this machine has: one that joined has no administrator's.
    pub fn user(&self) -> &'static str {
        match self.joined {
            Some(_) => HOST,
            None => "admin",
        }
    }

    /// A server's address on loopback.
    pub fn local(&self, port: LocalPort) -> SocketAddr {
        SocketAddr::new(
            IpAddr::V4(Ipv4Addr::LOCALHOST),
            self.base_port.saturating_add(port as u16),
        )
    }

    /// The address of the cluster's DNS service: the tenth of the services' range, by custom.
    pub fn cluster_dns(&self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.service_cidr.network()).saturating_add(10))
    }

    /// The address of the service `kubernetes`: the first of the services' range.
    pub fn kubernetes_service(&self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.service_cidr.network()).saturating_add(1))
    }
}

fn machine_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    flags::name(&name.trim().to_lowercase().replace('_', "-"))
        .unwrap_or_else(|_not_a_name| "host-1".to_owned())
}

/// Paths under a cluster's data directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// The data directory.
    pub data: PathBuf,
}

impl Layout {
    /// The layout of a data directory.
    pub fn new(data: &Path) -> Self {
        Self {
            data: data.to_owned(),
        }
    }

    /// Keys and certificates.
    pub fn pki(&self) -> PathBuf {
        self.data.join("pki")
    }

    /// A user's kubeconfig.
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.data.join("kubeconfig").join(user)
    }

    /// What a part prints.
    pub fn log(&self, part: &str) -> PathBuf {
        self.data.join("logs").join(format!("{part}.log"))
    }

    /// The host's images, VMs and records.
    pub fn host(&self) -> PathBuf {
        self.data.join("host")
    }

    /// Environments that have something left in the host's directory; none if there is none.
    pub fn environments(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.host().join("vms"));
        let names = entries.into_iter().flatten().flatten();
        names
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    }

    /// The supervisor's lock, which holds its process id.
    pub fn supervisor(&self) -> PathBuf {
        self.data.join("supervisor.pid")
    }

    /// What the supervisor has reached.
    pub fn progress(&self) -> PathBuf {
        self.data.join("progress.json")
    }

    /// The settings the cluster was brought up with.
    fn settings(&self) -> PathBuf {
        self.data.join("settings.json")
    }

    /// Reads the settings the cluster was brought up with.
    pub fn read_settings(&self) -> anyhow::Result<Settings> {
        let path = self.settings();
        let text = std::fs::read(&path).with_context(|| {
            format!(
                "no cluster in {}: run `monopod up` first, or name its --data directory",
                self.data.display()
            )
        })?;
        serde_json::from_slice(&text).with_context(|| {
            format!(
                "{} is not readable; `monopod up` writes it anew",
                path.display()
            )
        })
    }

    /// Keeps the settings for the other commands.
    pub fn write_settings(&self, settings: &Settings) -> anyhow::Result<()> {
        std::fs::create_dir_all(&self.data)
            .with_context(|| format!("cannot create {}", self.data.display()))?;
        // Images are as secret as their registries; keys have modes of their own.
        std::fs::set_permissions(&self.data, std::fs::Permissions::from_mode(0o700))?;
        std::fs::write(self.settings(), serde_json::to_vec_pretty(settings)?)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        settings: Settings,
    }

    fn settings(arguments: &[&str]) -> Settings {
        Flags::parse_from([&["monopod"], arguments].concat()).settings
    }

    #[test]
    fn ranges_that_overlap_are_refused_by_their_flags() {
        assert!(settings(&[]).check().is_ok());
        let error = settings(&["--link", "10.96.0.0/30"])
            .check()
            .expect_err("inside the services' range");
        assert!(
            error
                .to_string()
                .contains("--link 10.96.0.0/30 and --service-cidr 10.96.0.0/16 overlap"),
            "{error}"
        );
        let error = settings(&["--vpc-cidr", "10.0.0.0/8"])
            .check()
            .expect_err("holds the services' range");
        assert!(error.to_string().contains("--vpc-cidr"), "{error}");
    }
}
