//! Prepares the pod's volumes, and keeps them up to date.

use super::pod::Input;
use super::tools::Tools;
use super::volumes::Volumes;
use k8s_openapi::api::core::v1::Pod;
use monopod_core::pod::lifecycle::Event;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// The kubelet looks after volumes about as often.
const REFRESH: Duration = Duration::from_mins(1);
/// After this long, a volume that is still refused is told by an event.
const PATIENCE: Duration = Duration::from_secs(3);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Makes the volumes, says that the pod is prepared, then keeps them up to date.
pub(crate) async fn look_after_volumes(
    tools: Tools,
    pods: tokio::sync::watch::Receiver<Arc<Pod>>,
    inputs: mpsc::Sender<Input>,
) {
    let mut volumes = Volumes::new(tools.cluster.clone(), tools.facts());
    let mut ready = BTreeMap::new();
    let pod = Arc::clone(&pods.borrow());
    for volume in pod
        .spec
        .iter()
        .flat_map(|spec| spec.volumes.iter().flatten())
    {
        let begun = tokio::time::Instant::now();
        let mut pause = Duration::from_millis(50);
        loop {
            match volumes.make(&pod, volume).await {
                Ok(made) => {
                    ready.insert(volume.name.clone(), made);
                    break;
                }
                Err(error) => {
                    if !error.is_forbidden() || begun.elapsed() > PATIENCE {
                        let event = Event {
                            warning: true,
                            reason: "FailedMount",
                            message: format!(
                                "MountVolume.SetUp failed for volume \"{}\" : {error}",
                                volume.name
                            ),
                            container: None,
                        };
                        tools.recorder.record(&pod, event);
                    }
                    tracing::warn!(%error, volume = volume.name, "a volume is not there yet");
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = inputs.closed() => return,
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }
    let mut services = tools.services.clone();
    if services.wait_for(Option::is_some).await.is_err() {
        tracing::error!("services were never listed");
    }
    if inputs.send(Input::Prepared(ready)).await.is_err() {
        return;
    }
    loop {
        tokio::select! {
            () = tokio::time::sleep(REFRESH) => {}
            () = inputs.closed() => return,
        }
        let pod = Arc::clone(&pods.borrow());
        volumes.refresh(&pod).await;
    }
}
