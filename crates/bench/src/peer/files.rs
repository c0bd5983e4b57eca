//! The ordinary node's configuration, and its credentials in the cluster.

use super::{NODE, remains};
use anyhow::{Context, Result};
use monopod_cli::cluster::pki;
use monopod_cli::settings::Layout;
use rcgen::{CertificateParams, DistinguishedName, DnType, Issuer, KeyPair};
use serde_json::json;
use std::fs;
use std::path::Path;

/// Addresses of its pods, which nobody routes.
const PODS: &str = "10.244.9.0/24";
/// Not the kubelet's own 10250, at which another one may listen.
const PORT: u16 = 27_250;

/// Writes all files of the node into its directory.
pub(super) fn write(directory: &Path, programs: &Path, cluster: &Path, server: &str) -> Result<()> {
    let file = |name: &str, text: String| {
        let path = directory.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    fs::create_dir(directory.join("cni"))?;
    file("containerd.toml", containerd(directory, programs))?;
    file("cni/10-br.conflist", network(directory))?;
    file("kubelet.yaml", kubelet(directory))?;
    file("kubeconfig", kubeconfig(directory, cluster, server)?)
}

fn containerd(directory: &Path, programs: &Path) -> String {
    let (directory, programs) = (directory.display(), programs.display());
    format!(
        r#"version = 3
root = "{directory}/root"
state = "{directory}/state"
[grpc]
  address = "{directory}/containerd.sock"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "monopod.local/pause:latest"
[plugins."io.containerd.cri.v1.runtime"]
  # Root may lack CAP_SYS_RESOURCE, without which it cannot be lowered.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{directory}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "{programs}/runc"
      Root = "{directory}/runc"
      SystemdCgroup = false
"#
    )
}

fn network(directory: &Path) -> String {
    json!({
        "cniVersion": "1.0.0", "name": "br", "plugins": [{
            "type": "bridge", "bridge": remains::BRIDGE, "isGateway": true, "ipMasq": false,
            "ipam": {
                "type": "host-local", "subnet": PODS, "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": directory.join("addresses"),
            },
        }],
    })
    .to_string()
}

fn kubelet(directory: &Path) -> String {
    // JSON is YAML.
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "failCgroupV1": false, "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": format!("unix://{}/containerd.sock", directory.display()),
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false}, "x509": {"clientCAFile": ""}},
        "authorization": {"mode": "AlwaysAllow"},
        "address": "127.0.0.1", "port": PORT, "healthzPort": 0,
        "failSwapOn": false, "serializeImagePulls": false, "evictionHard": {},
        // The machine's own firewall is none of its business.
        "makeIPTablesUtilChains": false,
        "podLogsDir": directory.join("podlogs"),
        "volumePluginDir": directory.join("volume-plugins"),
    })
    .to_string()
}

/// The kubeconfig of a node, signed as the cluster would sign it.
fn kubeconfig(directory: &Path, cluster: &Path, server: &str) -> Result<String> {
    let (authority, authority_key) = pki::files(&Layout::new(cluster).pki(), "ca");
    let authority = fs::read_to_string(authority)?;
    let authority_key = KeyPair::from_pem(&fs::read_to_string(authority_key)?)?;
    let issuer = Issuer::new(pki::authority_parameters("ca"), authority_key);
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    parameters
        .distinguished_name
        .push(DnType::OrganizationName, "system:nodes");
    parameters
        .distinguished_name
        .push(DnType::CommonName, format!("system:node:{NODE}"));
    let key = KeyPair::generate()?;
    let certificate = parameters.signed_by(&key, &issuer)?;
    for (name, text) in [
        ("ca.crt", authority),
        ("node.crt", certificate.pem()),
        ("node.key", key.serialize_pem()),
    ] {
        fs::write(directory.join(name), text)?;
    }
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "peer",
        "clusters": [{"name": "peer", "cluster": {
            "server": server, "certificate-authority": directory.join("ca.crt"),
        }}],
        "users": [{"name": "peer", "user": {
            "client-certificate": directory.join("node.crt"), "client-key": directory.join("node.key"),
        }}],
        "contexts": [{"name": "peer", "context": {"cluster": "peer", "user": "peer"}}],
    });
    Ok(config.to_string())
}
