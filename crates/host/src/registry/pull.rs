//! Pulls for all pods of this host: each image is downloaded once, however many wait for it.
//!
//! ```text
//!  pod ──▶ resolve by its own credentials ──▶ stored, and covered? ──yes──▶ its proof is noted
//!                                                │ no
//!                                                ▼
//!                         flight of (name, digest): joined, or started by the first
//! ```
//!
//! A flight ends when nobody waits for it any more; what it had downloaded stays for the next.

use super::download::{Target, download};
use super::resolve::{Resolved, candidates, resolve};
use super::wire::Http;
use super::{PullError, RegistryError};
use crate::images::{ImageError, Pulled, Store, StoredImage};
use crate::owner::chain;
use monopod_core::image::endpoints::Registries;
use monopod_core::image::keyring::{Credential, Keyrings};
use monopod_core::image::reference::Reference;
use rand::RngCore as _;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// Images that are downloaded and unpacked at once: each costs a processor while it is unpacked.
const FLIGHTS: usize = 3;
/// References that are resolved at once.
const QUESTIONS: usize = 16;
/// How often the progress is told.
const PROGRESS: Duration = Duration::from_millis(500);
/// Interrupted downloads are kept this long.
const LEFTOVERS: Duration = Duration::from_hours(1);

/// What a pod needs.
#[derive(Clone, Debug)]
pub struct Request {
    /// The image.
    pub reference: Reference,
    /// The pod's credentials.
    pub keyrings: Arc<Keyrings>,
}

/// A pulled image.
#[derive(Clone, Debug)]
pub struct Acquired {
    /// As it is stored.
    pub image: StoredImage,
    /// How long the pull itself took.
    pub pull: Duration,
    /// How long with the wait for other pulls.
    pub total: Duration,
    /// Bytes in the registry.
    pub size: u64,
}

/// Pulls images into a store. Clones share everything.
#[derive(Clone)]
pub struct Puller(Arc<Inner>);

impl std::fmt::Debug for Puller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Puller").finish_non_exhaustive()
    }
}

struct Inner {
    store: Store,
    http: Arc<Http>,
    /// Drawn once per store, so that fingerprints cannot be guessed from outside.
    salt: [u8; 32],
    flights: Mutex<BTreeMap<Key, Weak<Flight>>>,
    /// Who works in a layout. An abandoned flight still packs while the next one begins.
    turns: Mutex<BTreeMap<PathBuf, Arc<Turn>>>,
    places: Semaphore,
    questions: Semaphore,
}

/// Content is shared between pods, but not between names: see `core::image::access`.
type Key = (String, String);

type Turn = tokio::sync::Mutex<()>;

struct Flight {
    state: watch::Receiver<State>,
    abandoned: CancellationToken,
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.abandoned.cancel();
    }
}

#[derive(Clone, Debug)]
enum State {
    Going { done: u64, total: u64 },
    Landed { pull: Duration },
    Failed(String),
}

impl Puller {
    /// Pulls into this store. Cleans what an earlier process left half made.
    pub fn new(store: Store, registries: Registries) -> Result<Self, ImageError> {
        store.sweep()?;
        let salt = salt(&store.directory().join("salt"))?;
        Ok(Self(Arc::new(Inner {
            http: Arc::new(Http::new(registries)),
            salt,
            flights: Mutex::default(),
            turns: Mutex::default(),
            places: Semaphore::new(FLIGHTS),
            questions: Semaphore::new(QUESTIONS),
            store,
        })))
    }

    /// Fingerprints of the credentials that a pod would show for an image.
    pub fn fingerprints(&self, reference: &Reference, keyrings: &Keyrings) -> Vec<String> {
        let all = candidates(&self.0.http, reference, keyrings);
        all.iter().map(|c| self.fingerprint(c)).collect()
    }

    /// Asks the registry what the reference means, by the pod's own credentials, and downloads
    /// what is not stored. `progress` is told bytes done and in all.
    pub async fn acquire(
        &self,
        request: &Request,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Acquired, PullError> {
        let start = Instant::now();
        let resolved = {
            // Never closed.
            let _place = self.0.questions.acquire().await;
            resolve(&self.0.http, &request.reference, &request.keyrings).await?
        };
        let fingerprint = resolved
            .repository
            .credential()
            .map(|c| self.fingerprint(c));
        let (digest, size) = (resolved.documents.digest(), resolved.documents.size());
        let name = resolved.digest.clone();
        let reuse = || {
            let pulled = Pulled {
                reference: &request.reference,
                resolved: &name,
                fingerprint: fingerprint.as_deref(),
            };
            self.0.store.reuse(&digest, &pulled)
        };
        if let Some(image) = reuse()? {
            let total = start.elapsed();
            return Ok(Acquired {
                image,
                pull: total,
                total,
                size,
            });
        }
        let flight = self.join(request, resolved, fingerprint.clone());
        let mut state = flight.state.clone();
        let pull = loop {
            match state.borrow_and_update().clone() {
                State::Going { done, total } => progress(done, total),
                State::Landed { pull } => break pull,
                State::Failed(why) => return Err(PullError::Shared(why)),
            }
            if state.changed().await.is_err() {
                return Err(PullError::Shared("the pull was interrupted".to_owned()));
            }
        };
        // This pod's own proof, whoever's the download was.
        match reuse()? {
            Some(image) => Ok(Acquired {
                image,
                pull,
                total: start.elapsed(),
                size,
            }),
            None => Err(PullError::Shared(
                "the image was removed as soon as it was stored".to_owned(),
            )),
        }
    }

    /// Removes downloads that were interrupted long ago.
    pub fn sweep(&self) -> std::io::Result<()> {
        let pulls = self.0.store.directory().join("pulls");
        if !pulls.exists() {
            return Ok(());
        }
        let working: Vec<PathBuf> = self.working().keys().cloned().collect();
        for entry in std::fs::read_dir(&pulls)? {
            let entry = entry?;
            let age = SystemTime::now()
                .duration_since(entry.metadata()?.modified()?)
                .unwrap_or_default();
            if age >= LEFTOVERS && !working.contains(&entry.path()) {
                std::fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }

    fn flights(&self) -> std::sync::MutexGuard<'_, BTreeMap<Key, Weak<Flight>>> {
        self.0
            .flights
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The layouts in which somebody works or is about to.
    fn working(&self) -> std::sync::MutexGuard<'_, BTreeMap<PathBuf, Arc<Turn>>> {
        let mut turns = self.0.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        turns
    }

    fn turn(&self, layout: &Path) -> Arc<Turn> {
        Arc::clone(self.working().entry(layout.to_owned()).or_default())
    }

    fn layout(&self, (name, digest): &Key) -> PathBuf {
        let sum = Sha256::digest(format!("{name}\n{digest}"));
        let pulls = self.0.store.directory().join("pulls");
        pulls.join(&hex::encode(sum)[..32])
    }

    fn fingerprint(&self, credential: &Credential) -> String {
        let mut hash = Sha256::new();
        hash.update(self.0.salt);
        for part in [&credential.username, &credential.password] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        hex::encode(hash.finalize())
    }

    fn join(
        &self,
        request: &Request,
        resolved: Resolved,
        fingerprint: Option<String>,
    ) -> Arc<Flight> {
        let key = (request.reference.name.clone(), resolved.documents.digest());
        let mut flights = self.flights();
        let running = flights.get(&key).and_then(Weak::upgrade);
        if let Some(flight) = running.filter(|flight| {
            // One that ended is not joined: its failure was for those who waited.
            matches!(*flight.state.borrow(), State::Going { .. })
        }) {
            return flight;
        }
        flights.retain(|_, flight| flight.strong_count() > 0);
        let parts = resolved.documents.parts();
        let total = parts.iter().map(|part| part.size).sum();
        let (sender, state) = watch::channel(State::Going { done: 0, total });
        let abandoned = CancellationToken::new();
        let flight = Arc::new(Flight {
            state,
            abandoned: abandoned.clone(),
        });
        flights.insert(key.clone(), Arc::downgrade(&flight));
        drop(flights);
        let work = Work {
            layout: self.layout(&key),
            reference: request.reference.clone(),
            resolved,
            fingerprint,
            abandoned,
            total,
        };
        let this = self.clone();
        tokio::spawn(async move {
            let end = match this.fly(work, &sender).await {
                Ok(pull) => State::Landed { pull },
                Err(error) => State::Failed(chain(&error)),
            };
            sender.send_replace(end);
        });
        flight
    }

    async fn fly(&self, work: Work, state: &watch::Sender<State>) -> Result<Duration, PullError> {
        let abandoned = work.abandoned.clone();
        let given_up = || PullError::Download {
            reference: work.reference.to_string(),
            source: Box::new(RegistryError::Abandoned),
        };
        let mine = async {
            let turn = self.turn(&work.layout).lock_owned().await;
            // Never closed.
            (turn, self.0.places.acquire().await)
        };
        let (turn, _place) = tokio::select! {
            mine = mine => mine,
            () = abandoned.cancelled() => return Err(given_up()),
        };
        let start = Instant::now();
        let digest = work.resolved.documents.digest();
        if self.0.store.reuse(&digest, &work.pulled())?.is_some() {
            // By the flight before, which nobody waited for.
            return Ok(start.elapsed());
        }
        let (done, total) = (Arc::new(AtomicU64::new(0)), work.total);
        let (store, counter) = (self.0.store.clone(), Arc::clone(&done));
        let runtime = tokio::runtime::Handle::current();
        // Hashing, writing and packing block.
        let mut landing = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            land(&runtime, &store, &work, &counter)
        });
        let mut tick = tokio::time::interval(PROGRESS);
        loop {
            tokio::select! {
                landed = &mut landing => {
                    return match landed {
                        Ok(landed) => landed.map(|()| start.elapsed()),
                        Err(error) => Err(PullError::Shared(format!("the pull died: {error}"))),
                    };
                }
                _ = tick.tick() => {
                    let done = done.load(Ordering::Relaxed).min(total);
                    state.send_if_modified(|state| {
                        let changed = matches!(state, State::Going { done: before, .. } if *before != done);
                        *state = State::Going { done, total };
                        changed
                    });
                }
            }
        }
    }
}

/// What a flight works on.
struct Work {
    layout: PathBuf,
    reference: Reference,
    resolved: Resolved,
    fingerprint: Option<String>,
    abandoned: CancellationToken,
    total: u64,
}

impl Work {
    fn pulled(&self) -> Pulled<'_> {
        Pulled {
            reference: &self.reference,
            resolved: &self.resolved.digest,
            fingerprint: self.fingerprint.as_deref(),
        }
    }
}

/// Downloads, packs and stores. Blocks.
fn land(
    runtime: &tokio::runtime::Handle,
    store: &Store,
    work: &Work,
    done: &AtomicU64,
) -> Result<(), PullError> {
    let Resolved {
        documents,
        repository,
        ..
    } = &work.resolved;
    let reference = work.reference.to_string();
    tracing::info!(%reference, digest = %documents.digest(), bytes = documents.size(), host = repository.host(), "pulling");
    let target = Target {
        layout: &work.layout,
        done,
        abandoned: &work.abandoned,
    };
    runtime
        .block_on(download(repository, &documents.parts(), &target))
        .map_err(|source| PullError::Download {
            reference: reference.clone(),
            source: Box::new(source),
        })?;
    let unpack = || {
        documents.write(&work.layout)?;
        store.add_pulled(&work.layout, &work.pulled())
    };
    let unpacked = unpack().map_err(|source| PullError::Unpack { reference, source });
    // Its blobs are right, so what cannot be unpacked will not be the next time either.
    if let Err(error) = std::fs::remove_dir_all(&work.layout) {
        tracing::warn!(%error, layout = %work.layout.display(), "a download stays behind for a while");
    }
    unpacked.map(drop)
}

/// Drawn once, all or nothing: a later process must find what this one used.
fn salt(path: &Path) -> Result<[u8; 32], ImageError> {
    let read = || {
        if !path.exists() {
            let mut new = [0; 32];
            rand::rng().fill_bytes(&mut new);
            // Readable by its owner alone.
            let mut file = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(path))?;
            file.write_all(&new)?;
            file.as_file().sync_all()?;
            match file.persist_noclobber(path) {
                Err(error) if error.error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(error.error);
                }
                Ok(_) | Err(_) => {}
            }
        }
        let mut salt = [0; 32];
        std::fs::File::open(path)?.read_exact(&mut salt)?;
        Ok(salt)
    };
    read().map_err(|source| ImageError::Io {
        what: format!("use {}", path.display()),
        source,
    })
}
