//! What an owner tells its guest: who it is, its images, its credentials.

use super::images::{Failure, Ready};
use super::{State, chain};
use crate::go::go;
use crate::hypervisor::{Hypervisor, IMAGE_SLOTS, Vm};
use crate::images::StoredImage;
use crate::network::Interface;
use monopod_api::environment::EnvironmentPhase;
use monopod_api::names;
use monopod_wire::{HostMessage, Image, ImageState, PodIdentity, Pulled, Task};
use std::net::Ipv4Addr;

impl<H: Hypervisor> State<H> {
    /// Sends all that the guest must know. All of it may have been sent before.
    pub(super) fn tell_everything(&mut self) {
        let Some(gateway) = self.gateway else {
            return;
        };
        let go = go(self.task(gateway));
        self.tell(HostMessage::Go(Box::new(go)));
        let images: Vec<Image> = self
            .images
            .iter()
            .map(|(reference, state)| Image {
                reference: reference.clone(),
                state: state.clone(),
            })
            .collect();
        for image in images {
            self.tell(HostMessage::Image(image));
        }
        if let Some(issued) = &*self.issued.borrow() {
            self.tell(HostMessage::Credentials(Box::new(
                issued.credentials.clone(),
            )));
        }
        self.status.enter(EnvironmentPhase::Joining);
    }

    pub(super) fn tell(&self, message: HostMessage) {
        let Some(vm) = self.vm.as_ref().filter(|_| self.listening) else {
            return;
        };
        // What is lost is sent again after the next connection.
        if let Err(error) = vm.send(message) {
            tracing::debug!(environment = %self.name, %error, "message not sent");
        }
    }

    /// The pod's interface, by which the router is reached.
    pub(super) fn interface(&self, gateway: Ipv4Addr) -> Interface {
        Interface {
            address: self.address,
            gateway,
        }
    }

    fn task(&self, gateway: Ipv4Addr) -> Task {
        let (options, spec) = (&self.context.options, &self.environment.spec);
        Task {
            environment: self.name.clone(),
            pod: PodIdentity {
                namespace: spec.pod.namespace.clone(),
                name: spec.pod.name.clone(),
                uid: spec.pod.uid.clone(),
            },
            node: spec.node.clone(),
            hostname: names::hostname(self.address, &options.region),
            region: options.region.clone(),
            zone: options.zone.clone(),
            host: options.name.clone(),
            provider_id: format!("monopod:///{}/{}", options.zone, self.name),
            api_server: options.api_server.clone(),
            cluster_dns: options.cluster_dns,
            cluster_domain: options.cluster_domain.clone(),
            kubernetes_version: spec.kubernetes_version.clone(),
            cpu_millis: spec.size.cpu_millis,
            memory_mib: spec.size.memory_mib,
            scratch_bytes: u64::from(spec.scratch_gib) << 30,
            interface: self.interface(gateway).as_told(),
        }
    }

    pub(super) async fn image(&mut self, reference: String, ready: Ready) {
        let Ready {
            image,
            pulled,
            attached,
        } = ready;
        let state = self.attach(&reference, image, pulled).await;
        if matches!(state, ImageState::Attached { .. }) {
            self.image_step(&reference);
        }
        // Whoever brought the image waits to know whether to bring it again.
        let _told = attached
            .send(matches!(state, ImageState::Attached { .. }))
            .is_ok();
        self.image_state(reference, state);
    }

    pub(super) fn image_missing(&mut self, reference: String, failure: Failure) {
        let Failure { reason, message } = failure;
        let reason = reason.to_owned();
        self.image_state(reference, ImageState::Failed { reason, message });
    }

    /// Keeps the state of an image, and tells it to the guest and to the API server if it is new.
    pub(super) fn image_state(&mut self, reference: String, state: ImageState) {
        let known = self.images.get(&reference);
        // The failure stays to be seen until it is overcome: the next try begins with nothing done.
        let only_again = matches!(state, ImageState::Pulling { done: 0, .. })
            && matches!(known, Some(ImageState::Failed { .. }));
        if known == Some(&state) || only_again {
            return;
        }
        self.status.image(&reference, &state);
        self.images.insert(reference.clone(), state.clone());
        self.tell(HostMessage::Image(Image { reference, state }));
    }

    async fn attach(
        &mut self,
        reference: &str,
        stored: StoredImage,
        pulled: Option<Pulled>,
    ) -> ImageState {
        let Some(vm) = &mut self.vm else {
            return ImageState::Pulling { done: 0, total: 0 };
        };
        self.context.in_use.has(&self.name, &stored.squashfs);
        let attached = vm.attached();
        let slot = attached
            .iter()
            .find(|(_, path)| *path == stored.squashfs)
            .map(|(slot, _)| *slot);
        let free = (0..IMAGE_SLOTS).find(|slot| attached.iter().all(|(used, _)| used != slot));
        let Some(slot) = slot.or(free) else {
            return ImageState::Failed {
                reason: "ErrImagePull".to_owned(),
                message: format!(
                    "{reference}: a pod can use at most {IMAGE_SLOTS} different images"
                ),
            };
        };
        match vm.attach(slot, &stored.squashfs).await {
            Ok(serial) => ImageState::Attached {
                serial,
                digest: stored.digest,
                id: stored.id,
                size: stored.size,
                pulled,
                config: Box::new(stored.config),
            },
            Err(error) => ImageState::Failed {
                reason: "ErrImagePull".to_owned(),
                message: chain(&error),
            },
        }
    }
}
