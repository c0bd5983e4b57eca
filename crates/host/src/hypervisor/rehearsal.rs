//! A pod's start for practice, in a VM of the pool: its disks and what its guest is told.
//!
//! The guest plays all parts itself ([`monopod_wire::Rehearsal`]); names, keys and addresses are made
//! up here and are of no use anywhere. The disks are taken away again afterwards.

use super::launch;
use super::qemu_vm::QemuVm;
use super::scratch::Disks;
use super::{Events, HypervisorError, SCRATCH, Shape, Vm, slot_serial};
use crate::go::go;
use crate::images::squash;
use crate::network;
use monopod_wire::{
    ContainerImageConfig, Credentials, GuestMessage, HostMessage, Image, ImageState, PodIdentity,
    Rehearsal, Task,
};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use std::fs::File;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

/// Longest wait for a rehearsal, which comes after everything else that runs on the machine.
const PATIENCE: Duration = Duration::from_mins(2);
/// Size of the scratch disk.
const SCRATCH_BYTES: u64 = 1 << 30;
/// Addresses for documentation (RFC 5737), which no pod has.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 254);
/// Name of the image.
const IMAGE: &str = "monopod.local/rehearsal";
/// Where its program is.
const PROGRAM: &str = "wait";

/// The smallest program that waits for a signal: an ELF header, one segment, and
/// `again: mov eax, 34 (pause); syscall; jmp again`.
const WAIT: [u8; 129] = {
    const CODE: [u8; 9] = [0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];
    let mut file = [0; 129];
    // e_ident: 64-bit, little-endian, version 1; e_type: executable; e_machine: x86-64; e_version.
    let start = *b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0";
    // e_entry; e_phoff; e_shoff; e_flags; e_ehsize; e_phentsize; e_phnum; no sections.
    let rest = *b"\x78\0\x40\0\0\0\0\0\x40\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x40\0\x38\0\x01\0\0\0\0\0\0\0";
    // p_type: load; p_flags: read, execute; p_offset; p_vaddr; p_paddr; p_filesz; p_memsz; p_align.
    let segment = *b"\x01\0\0\0\x05\0\0\0\0\0\0\0\0\0\0\0\0\0\x40\0\0\0\0\0\0\0\x40\0\0\0\0\0\x81\0\0\0\0\0\0\0\x81\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\0";
    put(&mut file, 0, &start);
    put(&mut file, 24, &rest);
    put(&mut file, 64, &segment);
    put(&mut file, 120, &CODE);
    file
};

const fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    let mut index = 0;
    while index < bytes.len() {
        file[at + index] = bytes[index];
        index += 1;
    }
}

/// What all rehearsals use.
#[derive(Debug)]
pub(super) struct Props {
    image: File,
    credentials: Credentials,
}

impl Props {
    /// Makes an image and keys.
    pub(super) async fn make(directory: &Path) -> Result<Self, HypervisorError> {
        let directory = directory.to_owned();
        let image = tokio::task::spawn_blocking(move || image(&directory));
        let image = image.await.unwrap_or_else(|died| {
            Err(HypervisorError::io("make the rehearsal's image")(
                died.into(),
            ))
        })?;
        let credentials = credentials().map_err(|error| HypervisorError::Program {
            program: "rcgen",
            message: error.to_string(),
        })?;
        Ok(Self { image, credentials })
    }

    /// Lets a VM whose guest is ready go through a start, until its guest is as ready again.
    pub(super) async fn rehearse(
        &self,
        vm: &mut QemuVm,
        events: &mut Events,
        disks: &Disks,
        shape: Shape,
    ) -> Result<(), HypervisorError> {
        let slot = slot_serial(0);
        let disk = vm
            .lend(SCRATCH, &disks.make(SCRATCH_BYTES).await?, false)
            .await?;
        let image = vm.lend(&slot, &self.image, true).await?;
        let plan = self.plan(shape, &slot);
        vm.send(HostMessage::Rehearse(Box::new(plan)))?;
        match tokio::time::timeout(PATIENCE, launch::said(events, &GuestMessage::Rehearsed)).await {
            Ok(outcome) => outcome?,
            Err(_elapsed) => return Err(HypervisorError::NotReady { patience: PATIENCE }),
        }
        vm.take_back(SCRATCH, disk).await?;
        vm.take_back(&slot, image).await
    }

    fn plan(&self, shape: Shape, serial: &str) -> Rehearsal {
        let interface = network::Interface {
            address: ADDRESS,
            gateway: GATEWAY,
        };
        let task = Task {
            environment: "rehearsal".to_owned(),
            pod: PodIdentity {
                namespace: "rehearsal".to_owned(),
                name: "rehearsal".to_owned(),
                uid: "rehearsal".to_owned(),
            },
            node: "rehearsal".to_owned(),
            hostname: "rehearsal".to_owned(),
            region: "none".to_owned(),
            zone: "none".to_owned(),
            host: "none".to_owned(),
            provider_id: "monopod:///none/rehearsal".to_owned(),
            api_server: "https://127.0.0.1:6443".to_owned(),
            cluster_dns: GATEWAY,
            cluster_domain: "cluster.local".to_owned(),
            kubernetes_version: monopod_api::KUBERNETES_VERSION.to_owned(),
            cpu_millis: shape.vcpus * 1000,
            memory_mib: shape.memory_mib,
            scratch_bytes: SCRATCH_BYTES,
            interface: interface.as_told(),
        };
        let config = ContainerImageConfig {
            entrypoint: vec![format!("/{PROGRAM}")],
            env: vec!["PATH=/".to_owned()],
            ..ContainerImageConfig::default()
        };
        Rehearsal {
            go: go(task),
            credentials: self.credentials.clone(),
            image: Image {
                reference: IMAGE.to_owned(),
                state: ImageState::Attached {
                    serial: serial.to_owned(),
                    digest: String::new(),
                    id: IMAGE.to_owned(),
                    size: 0,
                    pulled: None,
                    config: Box::new(config),
                },
            },
        }
    }
}

fn image(directory: &Path) -> Result<File, HypervisorError> {
    let failed = || HypervisorError::io("make the rehearsal's image");
    let work = tempfile::tempdir_in(directory).map_err(failed())?;
    let file = work.path().join("image");
    squash::make(&file, 0, |out| {
        let mut archive = tar::Builder::new(out);
        let mut header = tar::Header::new_ustar();
        header.set_size(WAIT.len() as u64);
        header.set_mode(0o755);
        archive
            .append_data(&mut header, PROGRAM, &WAIT[..])
            .and_then(|()| archive.finish())
            .map_err(crate::images::ImageError::io("write the rehearsal's image"))
    })
    .map_err(|error| HypervisorError::Program {
        program: "sqfstar",
        message: crate::owner::chain(&error),
    })?;
    // Its name goes with the directory.
    File::open(&file).map_err(failed())
}

fn credentials() -> Result<Credentials, rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = authority.self_signed(&key)?.pem();
    let issuer = Issuer::new(authority, &key);
    let certificate = |name: &str, address: Option<Ipv4Addr>| {
        let mut parameters = CertificateParams::default();
        let subject = &mut parameters.distinguished_name;
        subject.push(DnType::CommonName, name);
        let address = address.map(|address| SanType::IpAddress(address.into()));
        parameters.subject_alt_names.extend(address);
        Ok::<_, rcgen::Error>(parameters.signed_by(&key, &issuer)?.pem())
    };
    Ok(Credentials {
        ca,
        key: key.serialize_pem(),
        client_certificate: certificate("rehearsal", None)?,
        serving_certificate: certificate("rehearsal", Some(Ipv4Addr::LOCALHOST))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_waits_for_a_signal() {
        let file = tempfile::Builder::new()
            .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .tempfile()
            .unwrap();
        std::fs::write(file.path(), WAIT).unwrap();
        let path = file.into_temp_path();
        let mut child = std::process::Command::new(&*path).spawn().unwrap();
        assert_eq!(child.try_wait().unwrap(), None);
        child.kill().unwrap();
        let status = child.wait().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, Some(9), "{status}");
    }
}
