//! QEMU, as it is jailed: which files it opens by itself.

use super::HypervisorError;
use super::jail::Program;
use std::path::{Path, PathBuf};

pub(super) const PATH: &str = "/usr/bin/qemu-system-x86_64";

/// Firmware for the machine `microvm` that is started with a kernel.
const FIRMWARE: [&str; 5] = [
    "bios-microvm.bin",
    "qboot.rom",
    "linuxboot_dma.bin",
    "pvh.bin",
    "kvmvapic.bin",
];
/// Where distributions keep it.
const FIRMWARE_DIRECTORIES: [&str; 3] = [
    "/usr/share/qemu",
    "/usr/share/seabios",
    "/usr/share/qemu-firmware",
];
/// Emulation is a module in some distributions.
const MODULE: &str = "accel-tcg-x86_64.so";
const MODULE_DIRECTORIES: [&str; 3] = [
    "/usr/lib/x86_64-linux-gnu/qemu",
    "/usr/lib64/qemu",
    "/usr/lib/qemu",
];

/// Brings QEMU and what it needs under `directory`.
pub(super) fn prepare(directory: &Path) -> Result<Program, HypervisorError> {
    let firmware = FIRMWARE_DIRECTORIES
        .into_iter()
        .flat_map(|directory| FIRMWARE.map(|name| Path::new(directory).join(name)));
    let modules = MODULE_DIRECTORIES.map(|directory| Path::new(directory).join(MODULE));
    let data: Vec<PathBuf> = firmware.chain(modules).collect();
    Program::prepare(directory, Path::new(PATH), &data).map_err(HypervisorError::io(format!(
        "prepare {PATH}; install qemu-system-x86"
    )))
}
