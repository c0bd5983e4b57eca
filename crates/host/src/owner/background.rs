//! What an owner waits for beside its VM: the node's credentials, and what its images are.

use super::images::{Failure, Ready};
use super::{RETRY, until};
use crate::Context;
use crate::credentials::{self, Issued};
use crate::hypervisor::Hypervisor;
use kube::ResourceExt;
use monopod_api::environment::Environment;
use std::sync::Arc;
use tokio::sync::mpsc;

/// What the background tasks of an owner found.
pub(super) enum Found {
    Issued(Box<Issued>),
    /// This host answers for the pod's logs.
    Answering,
    /// An image can be attached.
    Image(String, Box<Ready>),
    /// An image is not there; it is tried again.
    Missing(String, Failure),
    /// Bytes of an image that were downloaded, and in all.
    Progress(String, u64, u64),
}

/// Has credentials issued at once if there are none, and renewed in time, until it is dropped.
pub(super) async fn keep_credentials<H: Hypervisor>(
    context: Arc<Context<H>>,
    environment: Environment,
    stored: Option<Issued>,
    found: mpsc::Sender<Found>,
) {
    if let Some(issued) = stored {
        tokio::time::sleep(until(issued.renew_at)).await;
    }
    let mut denied = 0u32;
    loop {
        let delay = match credentials::issue(
            context.client.clone(),
            &environment,
            &context.options.cluster_ca,
        )
        .await
        {
            Ok(issued) => {
                denied = 0;
                let delay = until(issued.renew_at);
                if found.send(Found::Issued(Box::new(issued))).await.is_err() {
                    return;
                }
                delay
            }
            Err(error) => {
                let name = environment.name_any();
                tracing::warn!(environment = %name, error = &error as &dyn std::error::Error, "no credentials; tried again");
                error.delay(&mut denied).unwrap_or(RETRY)
            }
        };
        tokio::time::sleep(delay).await;
    }
}
