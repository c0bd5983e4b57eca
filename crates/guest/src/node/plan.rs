//! From a container's spec to the plan that is run.

use super::images::Mounted;
use super::rootfs::Rootfs;
use super::subpath::Subpaths;
use super::volumes::Ready;
use crate::container::{CGROUP_PARENT, Mount, Plan, Privileges, SHARED_PIDS, capabilities};
use k8s_openapi::api::core::v1::{Container, Pod, VolumeMount};
use monopod_core::pod::environment::{self, EnvironmentError, Sources};
use monopod_core::pod::fields::Facts;
use monopod_core::pod::files::{self, Dns};
use monopod_core::pod::identity::{IdentityError, ImageUsers, identity};
use monopod_core::pod::resources::{self, Limits};
use monopod_core::pod::{command, shares_processes};
use monopod_core::quantity::InvalidQuantity;
use std::collections::BTreeMap;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// Shared by all of the pod's containers, like its IPC namespace.
pub(crate) const SHARED_MEMORY: &str = "/run/monopod/shm";
const NETWORK: &str = "/run/netns/workload";
const IPC: &str = "/run/ns/ipc";
/// Files that all of the pod's containers see.
const ETC: &str = "/run/scratch/etc";
/// The API's default for `terminationMessagePath`.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Why a container cannot be planned.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    /// Its variables.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// Its user.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Neither the image nor the spec says what to run.
    #[error("no command specified: neither the image nor the pod has one")]
    NoCommand,
    /// It mounts a volume that does not exist.
    #[error("volume {0} is not mounted")]
    NoVolume(String),
    /// A quantity that is none.
    #[error(transparent)]
    Quantity(#[from] InvalidQuantity),
    /// A part of a volume that is not there, or not inside it.
    #[error(
        "failed to prepare subPath for volumeMount \"{mount}\" of container \"{container}\": {source}"
    )]
    Subpath {
        /// Name of the volume.
        mount: String,
        /// Name of the container.
        container: String,
        /// Why.
        source: io::Error,
    },
    /// A part of a volume whose name has an unknown variable.
    #[error("missing value for a variable in subPathExpr {0:?}")]
    Expression(String),
    /// A file could not be written.
    #[error("cannot prepare the container")]
    Io(#[from] io::Error),
}

impl PlanError {
    /// The kubelet's word for it.
    pub(crate) fn reason(&self) -> &'static str {
        use monopod_core::pod::lifecycle::reason;
        match self {
            Self::Environment(_)
            | Self::Identity(_)
            | Self::Quantity(_)
            | Self::Subpath { .. }
            | Self::Expression(_) => reason::CONFIG_ERROR,
            Self::NoCommand | Self::NoVolume(_) | Self::Io(_) => reason::CREATE_ERROR,
        }
    }
}

/// What a plan is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<'a> {
    /// The pod.
    pub(crate) pod: &'a Pod,
    /// The container.
    pub(crate) container: &'a Container,
    /// The container's id.
    pub(crate) id: &'a str,
    /// Its image.
    pub(crate) image: &'a Mounted,
    /// Its root.
    pub(crate) rootfs: &'a Rootfs,
    /// Where parts of volumes are bound.
    pub(crate) subpaths: &'a Subpaths,
    /// The pod's volumes.
    pub(crate) volumes: &'a BTreeMap<String, Ready>,
    /// Objects that variables come from.
    pub(crate) sources: &'a Sources,
    /// What the pod can ask about itself.
    pub(crate) facts: &'a Facts,
    /// The cluster's domain.
    pub(crate) domain: &'a str,
}

/// Plans a container. Writes nothing but its working directory and its termination log.
pub(crate) fn plan(parts: &Parts<'_>) -> Result<Plan, PlanError> {
    let Parts {
        pod,
        container,
        id,
        image,
        rootfs,
        subpaths: _,
        volumes: _,
        sources,
        facts,
        domain,
    } = *parts;
    let config = &image.config;
    let (hostname, _) = files::hostname(pod, domain);
    let variables = environment::variables(pod, container, &config.env, &hostname, sources, facts)?;
    let arguments = command::arguments(
        container.command.as_deref().unwrap_or_default(),
        container.args.as_deref().unwrap_or_default(),
        &config.entrypoint,
        &config.cmd,
        &variables,
    );
    if arguments.is_empty() {
        return Err(PlanError::NoCommand);
    }
    let users = (rootfs.text("/etc/passwd"), rootfs.text("/etc/group"));
    let identity = identity(
        pod,
        container,
        &ImageUsers {
            user: &config.user,
            passwd: &users.0,
            group: &users.1,
        },
    )?;
    let directory = container
        .working_dir
        .clone()
        .filter(|path| !path.is_empty())
        .or_else(|| Some(config.working_dir.clone()).filter(|path| !path.is_empty()))
        .unwrap_or_else(|| "/".to_owned());
    rootfs.make_directory(Path::new(&directory))?;

    let mounts = mounts(parts, &variables)?;
    let context = container.security_context.as_ref();
    let privileged = context.and_then(|c| c.privileged) == Some(true);
    let changes = context.and_then(|c| c.capabilities.as_ref());
    let list = |names: Option<&Vec<String>>| names.cloned().unwrap_or_default();
    Ok(Plan {
        root: rootfs.root(),
        read_only_root: context.and_then(|c| c.read_only_root_filesystem) == Some(true),
        arguments,
        variables,
        directory,
        terminal: container.tty == Some(true),
        identity,
        capabilities: if privileged {
            capabilities(&["ALL".to_owned()], &[])
        } else {
            capabilities(
                &list(changes.and_then(|c| c.add.as_ref())),
                &list(changes.and_then(|c| c.drop.as_ref())),
            )
        },
        privileges: if privileged {
            Privileges::All
        } else if context.and_then(|c| c.allow_privilege_escalation) == Some(false) {
            Privileges::NoNew
        } else {
            Privileges::Usual
        },
        hostname,
        network: NETWORK.into(),
        ipc: IPC.into(),
        pids: shares_processes(pod).then(|| SHARED_PIDS.into()),
        cgroup: format!("{CGROUP_PARENT}/{id}"),
        limits: match &pod.spec {
            Some(spec) => resources::of_container(spec, container, facts.cpu_millis)?,
            None => Limits::default(),
        },
        shared_memory: SHARED_MEMORY.into(),
        sysctls: pod
            .spec
            .iter()
            .flat_map(|spec| &spec.security_context)
            .flat_map(|context| context.sysctls.iter().flatten())
            .map(|sysctl| (sysctl.name.clone(), sysctl.value.clone()))
            .collect(),
        mounts,
    })
}

fn mounts(
    parts: &Parts<'_>,
    variables: &BTreeMap<String, String>,
) -> Result<Vec<Mount>, PlanError> {
    let Parts {
        container, rootfs, ..
    } = *parts;
    let mut mounts = Vec::new();
    for (index, wanted) in container.volume_mounts.iter().flatten().enumerate() {
        let volume = parts
            .volumes
            .get(&wanted.name)
            .ok_or_else(|| PlanError::NoVolume(wanted.name.clone()))?;
        let source = match part(wanted, variables)? {
            None => volume.path.clone(),
            Some(part) => parts
                .subpaths
                .bind(index, &volume.path, &part, !volume.read_only)
                .map_err(|source| PlanError::Subpath {
                    mount: wanted.name.clone(),
                    container: container.name.clone(),
                    source,
                })?,
        };
        mounts.push(Mount {
            destination: Path::new("/").join(&wanted.mount_path),
            source,
            read_only: volume.read_only || wanted.read_only == Some(true),
        });
    }
    for name in ["hosts", "hostname", "resolv.conf"] {
        let destination = Path::new("/etc").join(name);
        // A pod that mounts one of these itself knows better.
        if mounts.iter().all(|mount| mount.destination != destination) {
            mounts.push(Mount {
                destination,
                source: Path::new(ETC).join(name),
                read_only: false,
            });
        }
    }
    let log = termination_log(rootfs);
    std::fs::write(&log, "")?;
    std::fs::set_permissions(&log, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
    mounts.push(Mount {
        destination: container
            .termination_message_path
            .as_deref()
            .filter(|path| !path.is_empty())
            .unwrap_or(TERMINATION_LOG)
            .into(),
        source: log,
        read_only: false,
    });
    Ok(mounts)
}

/// The part of the volume that is mounted, if it is not the whole.
fn part(
    mount: &VolumeMount,
    variables: &BTreeMap<String, String>,
) -> Result<Option<String>, PlanError> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    if let Some(expression) = given(&mount.sub_path_expr) {
        let expanded = command::expand(&expression, variables);
        if expanded.contains("$(") {
            return Err(PlanError::Expression(expression));
        }
        return Ok(Some(expanded));
    }
    Ok(given(&mount.sub_path))
}

/// The file into which a container writes its last words.
pub(crate) fn termination_log(rootfs: &Rootfs) -> PathBuf {
    rootfs.beside("termination-log")
}

/// Names of the config maps and secrets that one container's variables come from.
pub(crate) fn references(
    container: &Container,
) -> (
    std::collections::BTreeSet<String>,
    std::collections::BTreeSet<String>,
) {
    let mut pod = Pod::default();
    pod.spec.get_or_insert_default().containers = vec![container.clone()];
    environment::references(&pod)
}

/// Writes the files that all of the pod's containers see.
pub(crate) fn write_etc(pod: &Pod, address: Ipv4Addr, dns: &Dns) -> io::Result<()> {
    std::fs::create_dir_all(ETC)?;
    let write = |name: &str, text: String| std::fs::write(Path::new(ETC).join(name), text);
    let (hostname, _) = files::hostname(pod, &dns.domain);
    write("hostname", format!("{hostname}\n"))?;
    write("hosts", files::hosts(pod, address, &dns.domain))?;
    write("resolv.conf", files::resolv_conf(pod, dns))
}
