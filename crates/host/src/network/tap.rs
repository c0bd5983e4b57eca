//! Opens tap devices in the VPC's namespace.

use super::NetworkError;
use super::namespace::{system, within};
use rustix::fs::{Mode, OFlags};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR` of `linux/if_tun.h`; the last is what virtio-net expects.
const FLAGS: i16 = 0x0002 | 0x1000 | 0x4000;
/// `TUNSETIFF` of `linux/if_tun.h`.
const TUNSETIFF: rustix::ioctl::Opcode = 0x4004_54ca;

/// `struct ifreq` as `TUNSETIFF` reads it: a name of 16 bytes, the flags, and what the union pads.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: i16,
    padding: [u8; 22],
}

/// Makes a tap, which goes with the last copy of its descriptor.
pub(super) async fn open(namespace: PathBuf, device: String) -> Result<OwnedFd, NetworkError> {
    within(namespace, move || open_here(&device)).await
}

fn open_here(device: &str) -> Result<OwnedFd, NetworkError> {
    let tap = rustix::fs::open(
        "/dev/net/tun",
        OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )
    .map_err(system("open /dev/net/tun; the kernel needs CONFIG_TUN"))?;
    let mut request = Request {
        name: [0; 16],
        flags: FLAGS,
        padding: [0; 22],
    };
    for (to, from) in request.name.iter_mut().take(15).zip(device.bytes()) {
        *to = from;
    }
    attach(&tap, &mut request).map_err(system("make a tap device"))?;
    Ok(tap)
}

#[expect(
    unsafe_code,
    reason = "taps are made by ioctls that no safe interface offers"
)]
fn attach(tap: &OwnedFd, request: &mut Request) -> rustix::io::Result<()> {
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq`, which `Request` has the size and layout of.
    unsafe {
        rustix::ioctl::ioctl(
            tap,
            rustix::ioctl::Updater::<TUNSETIFF, Request>::new(request),
        )
    }
}
