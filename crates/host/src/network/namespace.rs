//! Work in the VPC's namespace.

use super::NetworkError;
use rustix::fd::AsFd;
use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::path::PathBuf;

/// Does something in a namespace.
///
/// A thread of its own enters it, so that no other thread ever leaves the machine's.
pub(super) async fn within<T: Send + 'static>(
    namespace: PathBuf,
    work: impl FnOnce() -> Result<T, NetworkError> + Send + 'static,
) -> Result<T, NetworkError> {
    let (send, receive) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("namespace".to_owned())
        .spawn(move || {
            let outcome = enter(&namespace).and_then(|()| work());
            // Nobody waits any more if the sender fails; what was made is then closed.
            drop(send.send(outcome));
        })
        .map_err(|source| NetworkError::System {
            what: "start a thread",
            source,
        })?;
    receive.await.map_err(|_dropped| NetworkError::Thread)?
}

fn enter(namespace: &PathBuf) -> Result<(), NetworkError> {
    let file = rustix::fs::open(namespace, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(system("open the VPC's network namespace"))?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(system("enter the VPC's network namespace"))
}

/// Says what a system call was for.
pub(super) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> NetworkError {
    move |error| NetworkError::System {
        what,
        source: error.into(),
    }
}
