//! The pod's volumes: made before its first container starts, kept up to date while it runs.
//!
//! Volumes that show API objects are read-only for containers, so that only we write to them.

mod atomic;
mod payload;
mod token;

use super::cluster::{Cluster, bounded};
use atomic::Payload;
use k8s_openapi::api::core::v1::{
    ConfigMap, EmptyDirVolumeSource, Pod, ProjectedVolumeSource, Secret, Volume,
};
use kube::api::Api;
use monopod_core::pod::fields::Facts;
use monopod_core::quantity;
use payload::{DEFAULT_MODE, PayloadError};
use rustix::mount::{MountFlags, mount};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use token::Tokens;

/// Where volumes are.
const ROOT: &str = "/run/scratch/volumes";

/// Why a volume cannot be made (yet). It is tried again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeError {
    /// The object that it shows does not exist.
    #[error("{kind} \"{name}\" not found")]
    NotFound {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// The API server refused, which it also does for a moment after the pod was bound.
    #[error("the API server refused")]
    Api(#[from] Box<kube::Error>),
    /// The object does not have what the volume shows.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// Writing failed.
    #[error("the volume cannot be written")]
    Io(#[from] io::Error),
    /// A kind of volume that admission should have refused.
    #[error("the type of the volume is not supported")]
    Unsupported,
}

impl VolumeError {
    /// Whether this is what happens for a moment after the pod was bound.
    pub(crate) fn is_forbidden(&self) -> bool {
        match self {
            Self::Api(error) => matches!(&**error, kube::Error::Api(status) if status.code == 403),
            Self::NotFound { .. } | Self::Payload(_) | Self::Io(_) | Self::Unsupported => false,
        }
    }
}

/// A volume that containers can mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ready {
    /// Its directory.
    pub(crate) path: PathBuf,
    /// Whether containers cannot write to it.
    pub(crate) read_only: bool,
}

/// The pod's volumes.
#[derive(Debug)]
pub(crate) struct Volumes {
    cluster: Cluster,
    facts: Facts,
    tokens: Tokens,
    written: BTreeMap<String, Payload>,
    generation: u64,
}

impl Volumes {
    /// Of a pod that has none yet.
    pub(crate) fn new(cluster: Cluster, facts: Facts) -> Self {
        Self {
            tokens: Tokens::new(cluster.clone()),
            cluster,
            facts,
            written: BTreeMap::new(),
            generation: 0,
        }
    }

    /// Makes a volume, or brings it up to date.
    pub(crate) async fn make(&mut self, pod: &Pod, volume: &Volume) -> Result<Ready, VolumeError> {
        let path = Path::new(ROOT).join(&volume.name);
        let group = fs_group(pod);
        if let Some(source) = &volume.empty_dir {
            if !self.written.contains_key(&volume.name) {
                make_empty(&path, source, group)?;
                self.written.insert(volume.name.clone(), Payload::new());
            }
            return Ok(Ready {
                path,
                read_only: false,
            });
        }
        let payload = self.payload(pod, volume).await?;
        if self.written.get(&volume.name) != Some(&payload) {
            self.generation += 1;
            atomic::write(&path, &payload, self.generation, group)?;
            self.written.insert(volume.name.clone(), payload);
        }
        Ok(Ready {
            path,
            read_only: true,
        })
    }

    /// Brings all volumes that show API objects up to date.
    pub(crate) async fn refresh(&mut self, pod: &Pod) {
        for volume in pod
            .spec
            .iter()
            .flat_map(|spec| spec.volumes.iter().flatten())
        {
            if let Err(error) = self.make(pod, volume).await {
                tracing::warn!(%error, volume = volume.name, "a volume was not brought up to date");
            }
        }
    }

    async fn payload(&mut self, pod: &Pod, volume: &Volume) -> Result<Payload, VolumeError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        if let Some(source) = &volume.config_map {
            let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
            let optional = source.optional == Some(true);
            return self
                .config_map(
                    namespace,
                    &source.name,
                    source.items.as_deref(),
                    mode,
                    optional,
                )
                .await;
        }
        if let Some(source) = &volume.secret {
            let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
            let optional = source.optional == Some(true);
            let name = source.secret_name.as_deref().unwrap_or_default();
            return self
                .secret(namespace, name, source.items.as_deref(), mode, optional)
                .await;
        }
        if let Some(source) = &volume.downward_api {
            let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
            let items = source.items.as_deref().unwrap_or_default();
            return Ok(payload::of_downward_api(pod, &self.facts, items, mode)?);
        }
        match &volume.projected {
            Some(source) => self.projected(pod, namespace, source).await,
            None => Err(VolumeError::Unsupported),
        }
    }

    async fn projected(
        &mut self,
        pod: &Pod,
        namespace: &str,
        source: &ProjectedVolumeSource,
    ) -> Result<Payload, VolumeError> {
        let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
        let mut all = Payload::new();
        for part in source.sources.iter().flatten() {
            if let Some(token) = &part.service_account_token {
                let text = self.tokens.get(pod, token).await?;
                // Upstream: readable by its owner alone if someone can own it.
                let owner = common_user(pod);
                let is_private = owner.is_some() || fs_group(pod).is_some();
                let mode = if is_private { 0o600 } else { mode };
                payload::insert(&mut all, &token.path, text.into_bytes(), mode)?;
                if fs_group(pod).is_none()
                    && let Some(file) = all.get_mut(Path::new(&token.path))
                {
                    file.uid = owner;
                }
            } else if let Some(map) = &part.config_map {
                let optional = map.optional == Some(true);
                let files = self
                    .config_map(namespace, &map.name, map.items.as_deref(), mode, optional)
                    .await?;
                all.extend(files);
            } else if let Some(secret) = &part.secret {
                let optional = secret.optional == Some(true);
                let files = self
                    .secret(
                        namespace,
                        &secret.name,
                        secret.items.as_deref(),
                        mode,
                        optional,
                    )
                    .await?;
                all.extend(files);
            } else if let Some(own) = &part.downward_api {
                let items = own.items.as_deref().unwrap_or_default();
                all.extend(payload::of_downward_api(pod, &self.facts, items, mode)?);
            } else {
                return Err(VolumeError::Unsupported);
            }
        }
        Ok(all)
    }

    async fn config_map(
        &self,
        namespace: &str,
        name: &str,
        items: Option<&[k8s_openapi::api::core::v1::KeyToPath]>,
        mode: i32,
        optional: bool,
    ) -> Result<Payload, VolumeError> {
        let api: Api<ConfigMap> = Api::namespaced(self.cluster.client(), namespace);
        match bounded(api.get_opt(name)).await.map_err(Box::new)? {
            Some(map) => Ok(payload::of_config_map(&map, items, mode, optional)?),
            None if optional => Ok(Payload::new()),
            None => Err(VolumeError::NotFound {
                kind: "configmap",
                name: name.to_owned(),
            }),
        }
    }

    async fn secret(
        &self,
        namespace: &str,
        name: &str,
        items: Option<&[k8s_openapi::api::core::v1::KeyToPath]>,
        mode: i32,
        optional: bool,
    ) -> Result<Payload, VolumeError> {
        let api: Api<Secret> = Api::namespaced(self.cluster.client(), namespace);
        match bounded(api.get_opt(name)).await.map_err(Box::new)? {
            Some(secret) => Ok(payload::of_secret(&secret, items, mode, optional)?),
            None if optional => Ok(Payload::new()),
            None => Err(VolumeError::NotFound {
                kind: "secret",
                name: name.to_owned(),
            }),
        }
    }
}

fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref()?.security_context.as_ref()?;
    u32::try_from(context.fs_group?).ok()
}

/// The user that all containers run as, if the spec says one and the same for all.
fn common_user(pod: &Pod) -> Option<u32> {
    let spec = pod.spec.as_ref()?;
    let of_pod = spec.security_context.as_ref().and_then(|c| c.run_as_user);
    let mut users = spec
        .init_containers
        .iter()
        .flatten()
        .chain(&spec.containers)
        .map(|container| {
            container
                .security_context
                .as_ref()
                .and_then(|c| c.run_as_user)
                .or(of_pod)
        });
    let first = users.next()??;
    users
        .all(|user| user == Some(first))
        .then(|| u32::try_from(first).ok())?
}

fn make_empty(path: &Path, source: &EmptyDirVolumeSource, group: Option<u32>) -> io::Result<()> {
    fs::create_dir_all(path)?;
    if source.medium.as_deref() == Some("Memory") {
        let size = source
            .size_limit
            .as_ref()
            .and_then(|limit| quantity::units(limit).ok());
        let options = size.map_or_else(
            || "mode=0777".to_owned(),
            |size| format!("mode=0777,size={size}"),
        );
        let options = std::ffi::CString::new(options).map_err(io::Error::other)?;
        mount(
            "tmpfs",
            path,
            "tmpfs",
            MountFlags::NODEV | MountFlags::NOSUID,
            Some(options.as_c_str()),
        )?;
    }
    let mode = if group.is_some() { 0o2777 } else { 0o777 };
    if let Some(group) = group {
        rustix::fs::chown(path, None, Some(rustix::fs::Gid::from_raw(group)))?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}
