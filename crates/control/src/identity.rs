//! Gives network objects their EC2-style ids.

use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource, ResourceExt};
use monopod_api::names;
use monopod_api::network::{NetworkInterface, SecurityGroup, Subnet, Vpc};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::fmt::Debug;

/// The id of an object; empty until it is stored.
pub(crate) fn id<K: Resource>(prefix: &str, object: &K) -> String {
    object
        .meta()
        .uid
        .as_deref()
        .map(|uid| names::ec2_id(prefix, uid))
        .unwrap_or_default()
}

/// An object that lacks its id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Unmarked {
    Vpc(String),
    Subnet(String),
    Group(String),
    Interface(String),
}

/// Writes the status of an object that lacks it.
pub(crate) async fn mark(client: &Client, unmarked: &Unmarked) -> Result<(), kube::Error> {
    match unmarked {
        Unmarked::Vpc(name) => patch::<Vpc>(client, name, "vpc").await,
        Unmarked::Subnet(name) => patch::<Subnet>(client, name, "subnet").await,
        Unmarked::Group(name) => patch::<SecurityGroup>(client, name, "sg").await,
        Unmarked::Interface(name) => patch::<NetworkInterface>(client, name, "eni").await,
    }
}

async fn patch<K>(client: &Client, name: &str, prefix: &str) -> Result<(), kube::Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let api: Api<K> = Api::all(client.clone());
    let Some(object) = api.get_opt(name).await? else {
        return Ok(());
    };
    let patch = json!({"metadata": {"uid": object.uid()}, "status": {"id": id(prefix, &object)}});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .map(|_| ())
}
