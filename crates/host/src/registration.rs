//! The Host object of this machine, and the lease by which others know that it is there.

use crate::hypervisor::Hypervisor;
use crate::{Context, files, machine, network};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use monopod_api::host::{Host, HostSpec};
use monopod_api::{labels, names};
use monopod_core::placement::LEASE;
use monopod_ops::admin::Readiness;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

const FIELD_MANAGER: &str = "monopod-host";
/// Time between heartbeats; also how soon a newly loaded image is known to the scheduler.
const PERIOD: Duration = Duration::from_secs(10);
/// Free disk in bytes without which no VM is placed here: a VM whose disk cannot grow is halted.
const LEAST_DISK: u64 = 1 << 30;
/// Images that are named in the status; they only guide the choice of a host.
const IMAGES: usize = 256;
/// Share of the machine's memory that VMs may have: the rest is the control plane's and the page cache's.
const MEMORY_SHARE: (u32, u32) = (3, 4);
/// How many times its CPUs a host offers: most pods are idle most of the time.
const CPU_OVERCOMMIT: u32 = 8;

/// Creates the object and renews its status until the token is cancelled.
pub(crate) async fn keep<H: Hypervisor>(
    context: Arc<Context<H>>,
    readiness: Readiness,
    shutdown: CancellationToken,
) {
    readiness.expect("registration");
    let decided = context.hypervisor.decided();
    tokio::pin!(decided);
    let mut deciding = true;
    loop {
        let delay = match beat(&context).await {
            Ok(ready) => {
                if ready {
                    readiness.done("registration");
                }
                PERIOD
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 403 | 404) => {
                let remedy = match context.options.network.api {
                    network::Api::Link { .. } => {
                        "`monopod down --keep-pods` and `monopod up` let it back in".to_owned()
                    }
                    network::Api::Through { .. } => format!(
                        "`monopod host token {}` on the cluster's machine lets it back in",
                        context.options.name
                    ),
                };
                tracing::error!(
                    answer = status.message,
                    "this host is not one of the cluster any more: it was removed or forgotten; {remedy}"
                );
                PERIOD
            }
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "heartbeat failed; tried again"
                );
                Duration::from_secs(1)
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(delay) => {}
            () = &mut decided, if deciding => deciding = false,
        }
    }
}

/// Writes what there is of this host, and says whether it takes VMs.
async fn beat<H: Hypervisor>(context: &Context<H>) -> Result<bool, kube::Error> {
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    // First: a host that was removed may not write it, and must not make its object again.
    renew(context, &parameters).await?;
    let (options, api) = (&context.options, Api::<Host>::all(context.client.clone()));
    let memory = machine::memory_mib().unwrap_or(0);
    let underlay = options.network.underlay.as_ref();
    let spec = HostSpec {
        address: underlay.map(|underlay| underlay.address.to_string()),
        region: options.region.clone(),
        zone: options.zone.clone(),
        memory_mib: options
            .vm_memory_mib
            .unwrap_or(memory / MEMORY_SHARE.1 * MEMORY_SHARE.0),
        cpu_millis: options
            .vm_cpu_millis
            .unwrap_or_else(|| machine::cpu_millis().saturating_mul(CPU_OVERCOMMIT)),
        unschedulable: false,
    };
    // An operator may cordon the host: that field is not ours once the object exists.
    let mut fields = json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "Host",
        "metadata": {"name": options.name, "annotations": {labels::HOST_NAMESPACE: names::host_namespace(&options.name)}},
        "spec": {"region": spec.region, "zone": spec.zone, "address": spec.address, "memoryMib": spec.memory_mib, "cpuMillis": spec.cpu_millis},
    });
    api.patch(&options.name, &parameters, &Patch::Apply(&fields))
        .await?;
    let images: Vec<String> = match context.images.list() {
        Ok(images) => images
            .into_iter()
            .map(|image| image.reference)
            .take(IMAGES)
            .collect(),
        Err(error) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the image store cannot be listed"
            );
            Vec::new()
        }
    };
    let waiting = context.hypervisor.waiting();
    context
        .metrics
        .pool
        .set(i64::try_from(waiting).unwrap_or(i64::MAX));
    let accelerator = context.hypervisor.accelerator();
    let message = match (&accelerator, files::space(&options.directory)) {
        (None, _) => Some("finding out whether KVM works".to_owned()),
        (Some(_), Ok(space)) if space.available < LEAST_DISK => Some(format!(
            "only {} MiB of disk are free for VMs and images in {}: make room there, or remove images with `monopod image rm`",
            space.available >> 20,
            options.directory.display()
        )),
        (Some(_), _) => None,
    };
    let ready = message.is_none();
    let split = accelerator
        .as_deref()
        .map(|text| text.split_once(": ").unwrap_or((text, "")));
    let (accelerator, reason) = split.unzip();
    let limits = context.hypervisor.limits();
    fields["status"] = json!({
        "ready": ready,
        "message": message,
        "accelerator": accelerator,
        "acceleratorReason": reason,
        "vmLimits": limits.set,
        "vmLimitsReason": limits.reason,
        "images": images,
        "runtimeVersion": context.runtime_version,
    });
    let host = api
        .patch_status(&options.name, &parameters, &Patch::Apply(&fields))
        .await?;
    tracing::trace!(host = %host.name_any(), "heartbeat");
    Ok(ready)
}

/// Renews this host's lease. Nobody needs its duration but people: control counts by its own clock.
async fn renew<H: Hypervisor>(
    context: &Context<H>,
    parameters: &PatchParams,
) -> Result<(), kube::Error> {
    let name = &context.options.name;
    let api: Api<Lease> = Api::namespaced(context.client.clone(), &names::host_namespace(name));
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": name, "labels": {labels::HOST: name}},
        "spec": {
            "holderIdentity": name,
            "leaseDurationSeconds": LEASE.as_secs(),
            "renewTime": MicroTime(Timestamp::now()),
        },
    });
    api.patch(name, parameters, &Patch::Apply(&lease)).await?;
    Ok(())
}
