//! The guest's namespaces, each kept by a bind mount, and work done inside them.

use anyhow::{Context, Result};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The network namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Namespace {
    /// The link to the host and the metadata endpoint.
    Platform,
    /// The interface and the kubelet.
    Node,
    /// The pod.
    Workload,
}

impl Namespace {
    const ALL: [Self; 3] = [Self::Platform, Self::Node, Self::Workload];

    fn path(self) -> PathBuf {
        let name = match self {
            Self::Platform => "platform",
            Self::Node => "node",
            Self::Workload => "workload",
        };
        Path::new("/run/netns").join(name)
    }

    /// The namespace as a file.
    pub(super) fn open(self) -> Result<File> {
        let path = self.path();
        File::open(&path).with_context(|| format!("opening {}", path.display()))
    }
}

/// Where the pod's IPC namespace is kept.
const POD_IPC: &str = "/run/ns/ipc";

/// Makes all namespaces.
pub(super) fn create_all() -> Result<()> {
    for namespace in Namespace::ALL {
        keep("net", UnshareFlags::NEWNET, &namespace.path())?;
    }
    keep("ipc", UnshareFlags::NEWIPC, Path::new(POD_IPC))
}

/// Makes one namespace in a thread of its own and binds it to a file.
fn keep(kind: &str, flag: UnshareFlags, path: &Path) -> Result<()> {
    File::create(path)?;
    in_thread(|| {
        unshare(flag)?;
        rustix::mount::mount_bind(format!("/proc/thread-self/ns/{kind}"), path)?;
        Ok(())
    })
    .with_context(|| format!("making {}", path.display()))
}

/// Does something in a thread that has moved into a network namespace. What the thread starts,
/// sockets and processes, belongs there.
pub(super) fn inside<T: Send>(
    namespace: Namespace,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    in_thread(|| {
        rustix::thread::move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&namespace.open()?),
            Some(LinkNameSpaceType::Network),
        )?;
        work()
    })
    .with_context(|| format!("in the namespace {namespace:?}"))
}

fn in_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        scope
            .spawn(work)
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread panicked")))
    })
}

/// Does something in a network namespace that ends with it.
#[cfg(test)]
pub(super) fn in_new_network(work: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    in_thread(|| {
        unshare(UnshareFlags::NEWNET)?;
        work()
    })
}

#[expect(
    unsafe_code,
    reason = "the only call for a new namespace is marked unsafe"
)]
fn unshare(flag: UnshareFlags) -> Result<()> {
    // SAFETY: only NEWNET and NEWIPC come here; the danger is in FILES.
    unsafe { rustix::thread::unshare_unsafe(flag) }?;
    Ok(())
}
