//! The pod's logs: archived while it runs, answered for once its VM is gone or has no more to say.

use super::State;
use super::background::Found;
use crate::archive::{self, Archive};
use crate::finished::{self, Finished};
use crate::hypervisor::Hypervisor;
use monopod_wire::{HostMessage, LogPiece};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

/// Whether this host answers for the pod's logs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Answering {
    Not,
    /// The listener is being opened.
    Soon,
    Now,
}

impl<H: Hypervisor> State<H> {
    /// Stores a piece of a log and tells the guest what is there.
    pub(super) fn log(&mut self, piece: LogPiece) {
        match self.store(piece) {
            Ok(stored) => self.tell(HostMessage::LogStored(stored)),
            // The guest asks again, not soon.
            Err(error) => {
                tracing::warn!(environment = %self.name, %error, "a log cannot be archived");
            }
        }
    }

    fn store(&mut self, piece: LogPiece) -> std::io::Result<monopod_wire::LogStored> {
        if self.archive.is_none() {
            let directory = archive::directory(&self.context.options.directory, &self.name);
            self.archive = Some(Archive::open(directory)?);
        }
        match &mut self.archive {
            Some(archive) => archive.store(piece),
            None => Err(std::io::ErrorKind::NotFound.into()),
        }
    }

    /// Answers at the node's address from now on. The guest is told, also when it asks again.
    pub(super) fn answer_for_logs(&mut self, tasks: &mut JoinSet<()>, found: &mpsc::Sender<Found>) {
        self.logs_complete = false;
        match self.answering {
            Answering::Not => self.answering = Answering::Soon,
            Answering::Soon => return,
            Answering::Now => return self.tell(HostMessage::LogsTaken),
        }
        let finished = Finished {
            environment: self.name.clone(),
            pod: self.environment.spec.pod.clone(),
            address: self.address,
            directory: archive::directory(&self.context.options.directory, &self.name),
            vpc: self.context.options.network.clone(),
        };
        let (listening, ready) = oneshot::channel();
        let serve = finished::serve(finished, self.issued.subscribe(), listening);
        let found = found.clone();
        tasks.spawn(async move {
            let tell = async {
                if ready.await.is_ok() && found.send(Found::Answering).await.is_err() {
                    tracing::debug!("the owner has gone on");
                }
            };
            tokio::join!(serve, tell);
        });
    }

    /// The address is this host's now.
    pub(super) fn answers(&mut self) {
        self.answering = Answering::Now;
        self.tell(HostMessage::LogsTaken);
    }
}
