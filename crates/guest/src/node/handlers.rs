//! What probes and hooks do in a container or to it.

use super::server::{Outcome as Ended, execute};
use super::shared::Run;
use super::{grpc_probe, http_probe};
use k8s_openapi::api::core::v1::{
    Container, GRPCAction, HTTPGetAction, LifecycleHandler, TCPSocketAction,
};
use monopod_kubelet::request::ExecOptions;
use std::time::Duration;

/// The signal that ends a command which took too long.
const KILL: i32 = 9;
/// How long a command may take to be started, which its own time does not count.
const START: Duration = Duration::from_secs(30);
/// Bytes of a command's output that are kept; the kubelet's.
const MAX_OUTPUT: usize = 10 << 10;

/// A container that runs.
#[derive(Clone, Debug)]
pub(crate) struct Site {
    /// Its run.
    pub(crate) run: Run,
    /// Its spec.
    pub(crate) container: Container,
    /// The pod's address.
    pub(crate) address: String,
}

/// What came of it, with the words of the event where there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It succeeded.
    Success,
    /// It succeeded in a way that may not be meant.
    Warning(String),
    /// It failed.
    Failure(String),
    /// It could not be carried out.
    Unknown(String),
}

/// Executes a command and waits for its end, at most so long; then it is killed.
pub(crate) async fn exec(site: &Site, command: &[String], timeout: Option<Duration>) -> Outcome {
    let options = ExecOptions {
        command: command.to_vec(),
        stdout: true,
        stderr: true,
        ..ExecOptions::default()
    };
    let mut running = match tokio::time::timeout(START, execute(&site.run, &options)).await {
        Ok(Ok(running)) => running,
        // Such as a command that does not exist: upstream decides nothing by it either.
        Ok(Err(error)) => return Outcome::Unknown(error.to_string()),
        Err(_) => return Outcome::Unknown("the command was not started in time".to_owned()),
    };
    let mut output = Vec::new();
    let wait = running.collect(&mut output, MAX_OUTPUT);
    let ended = tokio::time::timeout(timeout.unwrap_or(Duration::MAX), wait).await;
    let Ok(ended) = ended else {
        running.signal(KILL).await;
        return Outcome::Failure(format!(
            "command timed out: {command:?} timed out after {}s",
            timeout.unwrap_or_default().as_secs()
        ));
    };
    match ended {
        Ended::Exited(0) => Outcome::Success,
        Ended::Exited(_) => Outcome::Failure(String::from_utf8_lossy(&output).into_owned()),
        Ended::Failed(message) => Outcome::Unknown(message),
    }
}

/// Asks by HTTP.
pub(crate) async fn http(site: &Site, action: &HTTPGetAction, timeout: Duration) -> Outcome {
    http_probe::probe(&site.address, &site.container, action, timeout).await
}

/// Opens a connection.
pub(crate) async fn tcp(site: &Site, action: &TCPSocketAction, timeout: Duration) -> Outcome {
    http_probe::tcp(&site.address, &site.container, action, timeout).await
}

/// Asks by gRPC.
pub(crate) async fn grpc(site: &Site, action: &GRPCAction, timeout: Duration) -> Outcome {
    grpc_probe::probe(&site.address, action, timeout).await
}

/// Runs a hook to its end. How it failed is for the log alone: it may name secrets.
pub(crate) async fn hook(site: &Site, handler: &LifecycleHandler) -> Result<Warned, String> {
    if let Some(action) = &handler.exec {
        let command = action.command.as_deref().unwrap_or_default();
        match exec(site, command, None).await {
            Outcome::Success | Outcome::Warning(_) => Ok(None),
            Outcome::Failure(message) | Outcome::Unknown(message) => Err(message),
        }
    } else if let Some(action) = &handler.http_get {
        http_probe::hook(&site.address, &site.container, action).await
    } else if let Some(action) = &handler.sleep {
        let seconds = u64::try_from(action.seconds).unwrap_or(0);
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        Ok(None)
    } else {
        // Of `tcpSocket` the API says that it fails here.
        Err("invalid handler".to_owned())
    }
}

/// A hook that succeeded otherwise than it says: reason and message of an event.
pub(crate) type Warned = Option<(&'static str, String)>;
