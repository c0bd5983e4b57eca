//! `monopod host remove`: takes a machine without pods out of the cluster.

use super::{cordon, drain};
use crate::cluster::{client, invitation};
use crate::settings::Layout;
use anyhow::{Context, ensure};
use clap::Args;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::DeleteParams;
use kube::{Api, Client, Resource};
use monopod_api::host::Host;
use monopod_api::names;
use monopod_ops::answer::absent_is_fine;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::process::ExitCode;
use std::time::Duration;

/// How long kube-controller-manager may take to empty a namespace.
const GONE: Duration = Duration::from_mins(1);
/// Time between looks.
const PERIOD: Duration = Duration::from_millis(200);

#[derive(Args, Debug)]
#[command(
    after_help = "The machine gets no pods and comes back only after `monopod host token NAME`. Stop it there with `monopod down`."
)]
pub(crate) struct Remove {
    /// Name of the host
    host: String,
}

impl Remove {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self { host } = self;
        let own = layout.read_settings()?.host_name;
        ensure!(
            host != own,
            "host {host} is the cluster's own machine; `monopod down` ends both"
        );
        let admin = client::connect(&layout.kubeconfig("admin")).await?;
        // Before the look, so that nothing is placed after it.
        cordon::set(&admin, &host, true).await?;
        let left = drain::environments(&admin, &host).await?.len();
        ensure!(
            left == 0,
            "host {host} has {left} environments; drain it first with `monopod host drain {host}`, or if its machine is gone for good, `monopod host forget {host}`"
        );
        erase(&admin, &host).await?;
        println!("host {host} is removed");
        Ok(ExitCode::SUCCESS)
    }
}

/// Removes a host's object, its namespace, without which its process takes no part in the cluster, and the
/// tokens by which it could join again.
pub(super) async fn erase(admin: &Client, host: &str) -> anyhow::Result<()> {
    invitation::withdraw(admin, host).await?;
    // The right to register is gone first, or a host process would do so again.
    remove::<Namespace>(admin, &names::host_namespace(host)).await?;
    remove::<Host>(admin, host).await
}

/// Deletes an object, and waits until it is gone.
async fn remove<K>(admin: &Client, name: &str) -> anyhow::Result<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let api: Api<K> = Api::all(admin.clone());
    absent_is_fine(api.delete(name, &DeleteParams::default()).await)?;
    let gone = async {
        while api.get_opt(name).await?.is_some() {
            tokio::time::sleep(PERIOD).await;
        }
        Ok::<_, kube::Error>(())
    };
    let kind = K::kind(&());
    tokio::time::timeout(GONE, gone).await.with_context(|| {
        format!("the {kind} {name} is still there after {GONE:?}; see its finalizers and conditions (`monopod kubectl get {kind} {name} -o yaml`), and repeat this")
    })??;
    Ok(())
}
