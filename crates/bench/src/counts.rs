//! What could leak: counted before and after many pods came and went.

use crate::process::{all, descriptors, unique_mib};
use crate::site::Site;
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod, Secret};
use kube::api::ListParams;
use kube::core::metadata::PartialObjectMeta;
use kube::{Api, Resource};
use monopod_api::environment::Environment;
use monopod_api::network::NetworkInterface;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs::{read_dir, read_to_string};
use std::path::Path;
use std::process::Command;

/// How many there are of each thing.
pub(crate) type Counts = BTreeMap<&'static str, f64>;

/// What may differ without being a leak: allocators keep some memory.
pub(crate) const MEMORY: [&str; 2] = ["host memory, MiB", "control memory, MiB"];

/// Counts everything on this machine and in the API server that belongs to the cluster.
pub(crate) async fn take(site: &Site) -> Result<Counts> {
    let data = site.cluster.data();
    let (host, control) = (site.part("host")?, site.part("control")?);
    let named = data.display().to_string();
    let namespace = format!("{}-vpc", site.cluster.name());
    let inside = |arguments: &[&str]| lines_inside(&namespace, arguments);
    let processes = all()?;
    let mounts = read_to_string("/proc/self/mountinfo")?;
    let groups = control_groups(Path::new("/sys/fs/cgroup"));
    #[expect(clippy::cast_precision_loss, reason = "counts of a small cluster")]
    let count = |number: usize| number as f64;
    Ok(BTreeMap::from([
        (MEMORY[0], unique_mib(host)?),
        (MEMORY[1], unique_mib(control)?),
        ("host descriptors", count(descriptors(host)?)),
        ("control descriptors", count(descriptors(control)?)),
        (
            "processes",
            count(
                processes
                    .iter()
                    .filter(|p| p.command.contains(&named))
                    .count(),
            ),
        ),
        ("files of the host", count(files(&data.join("host"))?)),
        (
            "mounts",
            count(mounts.lines().filter(|line| line.contains(&named)).count()),
        ),
        ("control groups", count(groups)),
        ("network devices", count(inside(&["ip", "-brief", "link"])?)),
        ("routes", count(inside(&["ip", "route"])?)),
        (
            "nftables lines",
            count(inside(&["nft", "list", "ruleset"])?),
        ),
        ("pods", objects::<Pod>(site).await?),
        ("environments", objects::<Environment>(site).await?),
        (
            "network interfaces",
            objects::<NetworkInterface>(site).await?,
        ),
        ("nodes", objects::<Node>(site).await?),
        ("leases", objects::<Lease>(site).await?),
        ("secrets", objects::<Secret>(site).await?),
        (
            "certificate requests",
            objects::<CertificateSigningRequest>(site).await?,
        ),
    ]))
}

async fn objects<K>(site: &Site) -> Result<f64>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    PartialObjectMeta<K>: DeserializeOwned,
{
    let api: Api<K> = Api::all(site.client.clone());
    let list = api.list_metadata(&ListParams::default()).await?;
    #[expect(clippy::cast_precision_loss, reason = "counts of a small cluster")]
    Ok(list.items.len() as f64)
}

/// Lines that a command prints in the cluster's network namespace.
fn lines_inside(namespace: &str, arguments: &[&str]) -> Result<usize> {
    let output = Command::new("nsenter")
        .arg(format!("--net=/run/netns/{namespace}"))
        .args(arguments)
        .output()
        .context("nsenter does not start")?;
    ensure!(
        output.status.success(),
        "{arguments:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(output.stdout.split(|byte| *byte == b'\n').count())
}

fn files(directory: &Path) -> Result<usize> {
    let mut count = 0;
    for entry in read_dir(directory)? {
        let entry = entry?;
        count += 1;
        if entry.file_type()?.is_dir() {
            count += files(&entry.path())?;
        }
    }
    Ok(count)
}

/// Groups in one that is Monopod's; those of other clusters of this machine are among them.
fn control_groups(directory: &Path) -> usize {
    let entries = read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| usize::from(directory.ends_with("monopod")) + control_groups(&entry.path()))
        .sum()
}
