//! Whether KVM works here, found out by booting the guest image with it, in the jail that VMs have.
//!
//! That `/dev/kvm` exists says little: inside many VMs it can be opened but runs nothing.

use super::accelerator::Accelerator;
use super::arguments;
use super::jail::{self, Jail, Program};
use super::process::Process;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::unix::pipe;

/// With KVM the guest's first process speaks after a fraction of this.
const PATIENCE: Duration = Duration::from_secs(10);
/// How the guest's first process begins its lines. Without any device it fails and says so.
const SIGN_OF_LIFE: &[u8] = b"pid1:";
/// What is kept of the output for the reason.
const REASON: usize = 1024;
/// A user that no VM has: the lowest of theirs, of number 0.
const UID: u32 = 1 << 30;

/// Boots the guest image under KVM up to its first process. The error is the reason, for people.
pub(super) async fn kvm(program: &Program, guest_image: &Path) -> Result<(), String> {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return Err(format!("/dev/kvm cannot be opened: {error}"));
    }
    let (vm, output) = start(program, guest_image)
        .map_err(|error| format!("a VM under KVM cannot be started: {error}"))?;
    let alive = tokio::time::timeout(PATIENCE, until_alive(output)).await;
    if let Err(error) = vm.end().await {
        tracing::warn!(%error, "the VM of the KVM probe cannot be ended");
    }
    match alive {
        Ok(Ok(())) => Ok(()),
        Ok(Err(said)) => Err(format!("a VM under KVM ends at once: {said}")),
        Err(_) => Err(format!(
            "a VM under KVM does not come up within {} s",
            PATIENCE.as_secs()
        )),
    }
}

/// A process that ends with this.
struct Ending(Process);

impl Ending {
    async fn end(self) -> std::io::Result<()> {
        self.0.kill()?;
        self.0.exited().await
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill() {
            tracing::warn!(%error, "the VM of the KVM probe cannot be killed");
        }
    }
}

fn start(program: &Program, guest_image: &Path) -> std::io::Result<(Ending, pipe::Receiver)> {
    let inherited = [
        OwnedFd::from(File::open(guest_image.join("vmlinux"))?),
        OwnedFd::from(File::open(guest_image.join("initramfs.cpio"))?),
    ];
    let [kernel, initramfs] = inherited
        .each_ref()
        .map(|file| format!("/proc/self/fd/{}", file.as_raw_fd()));
    let command_line = arguments::kernel_command_line(Accelerator::Kvm);
    let arguments: Vec<String> = [
        "-M",
        "microvm",
        "-accel",
        "kvm",
        "-cpu",
        "host",
        "-m",
        "512",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-serial",
        "stdio",
        "-sandbox",
        arguments::SANDBOX,
        "-kernel",
        &kernel,
        "-initrd",
        &initramfs,
        "-append",
        &command_line,
    ]
    .map(str::to_owned)
    .into();
    let (sender, output) = pipe::pipe()?;
    let child = jail::start(&Jail {
        program,
        arguments: &arguments,
        uid: UID,
        inherited: &inherited,
        preload: None,
        groups: &[],
        file_bytes: 0,
        kvm: true,
        output: sender.into_blocking_fd()?,
    })?;
    let gone = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let pid = i32::try_from(child.id()).map_err(|_large| gone())?;
    Ok((Ending(Process::with_pid(pid)?.ok_or_else(gone)?), output))
}

/// Reads until the guest speaks. The error is the last that was printed before the end.
async fn until_alive(mut output: impl AsyncRead + Unpin) -> Result<(), String> {
    let mut seen = Vec::new();
    while let Ok(1..) = output.read_buf(&mut seen).await {
        if seen
            .windows(SIGN_OF_LIFE.len())
            .any(|window| window == SIGN_OF_LIFE)
        {
            return Ok(());
        }
        // The end can still be the beginning of the sign, or the reason.
        seen.drain(..seen.len().saturating_sub(REASON));
    }
    Err(String::from_utf8_lossy(&seen).trim().replace('\n', "; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    async fn after(output: &[&[u8]]) -> Result<(), String> {
        let (mut vm, host) = tokio::io::duplex(64);
        let print = async move {
            for piece in output {
                // Nobody reads on once it is decided.
                if vm.write_all(piece).await.is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        };
        let (alive, ()) = tokio::join!(until_alive(host), print);
        alive
    }

    #[tokio::test]
    async fn the_first_process_is_heard_wherever_its_words_are_cut() {
        let noise = [b'x'; 5000];
        assert_eq!(
            after(&[&noise, b"pi", b"d1", b": no link", &noise]).await,
            Ok(())
        );
    }

    #[tokio::test]
    async fn the_last_words_of_a_failure_are_the_reason() {
        let noise = [b'x'; 5000];
        let said = after(&[&noise, b"\n", b"ioctl(KVM_CREATE_VM) failed: \xff\n"])
            .await
            .unwrap_err();
        assert!(
            said.ends_with("ioctl(KVM_CREATE_VM) failed: \u{fffd}"),
            "{said}"
        );
        assert!(said.len() <= 2 * REASON, "{}", said.len());
        assert_eq!(after(&[]).await, Err(String::new()));
    }
}
