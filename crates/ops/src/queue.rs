//! A work queue of keys: each at most once at a time, again if it was asked for meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
struct State<K> {
    due: BTreeMap<K, Instant>,
    running: BTreeSet<K>,
}

/// Keys that wait for work. Clones share the queue.
#[derive(Debug)]
pub struct Queue<K> {
    state: Arc<Mutex<State<K>>>,
    changed: Arc<Notify>,
}

impl<K> Clone for Queue<K> {
    fn clone(&self) -> Self {
        Self {
            state: Arc::clone(&self.state),
            changed: Arc::clone(&self.changed),
        }
    }
}

impl<K: Ord + Clone + Send + 'static> Default for Queue<K> {
    fn default() -> Self {
        let state = State {
            due: BTreeMap::new(),
            running: BTreeSet::new(),
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            changed: Arc::new(Notify::new()),
        }
    }
}

impl<K: Ord + Clone + Send + 'static> Queue<K> {
    /// Asks for work on a key now.
    pub fn add(&self, key: K) {
        self.add_after(key, Duration::ZERO);
    }

    /// Asks for work on a key after a delay, unless it is asked for sooner.
    pub fn add_after(&self, key: K, delay: Duration) {
        let at = Instant::now() + delay;
        let mut state = self.lock();
        let due = state.due.entry(key).or_insert(at);
        *due = (*due).min(at);
        drop(state);
        self.changed.notify_one();
    }

    /// Works on keys until the token is cancelled, `parallel` at a time; then waits for those under way.
    pub async fn run<F>(&self, parallel: usize, shutdown: CancellationToken, work: impl Fn(K) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let places = Arc::new(Semaphore::new(parallel));
        let tasks = tokio_util::task::TaskTracker::new();
        loop {
            let wait = match self.take() {
                Ok(key) => {
                    // The semaphore is never closed, so a place always comes.
                    let place = Arc::clone(&places).acquire_owned().await;
                    let (queue, done) = (self.clone(), work(key.clone()));
                    tasks.spawn(async move {
                        done.await;
                        queue.lock().running.remove(&key);
                        queue.changed.notify_one();
                        drop(place);
                    });
                    continue;
                }
                Err(wait) => wait,
            };
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = self.changed.notified() => {}
                () = sleep_until(wait) => {}
            }
        }
        tasks.close();
        tasks.wait().await;
    }

    /// A due key that is not being worked on, or when to look again.
    fn take(&self) -> Result<K, Option<Instant>> {
        let mut state = self.lock();
        let now = Instant::now();
        let free = state
            .due
            .iter()
            .filter(|(key, _)| !state.running.contains(*key));
        match free
            .min_by_key(|(_, at)| **at)
            .map(|(key, at)| (key.clone(), *at))
        {
            Some((key, at)) if at <= now => {
                state.due.remove(&key);
                state.running.insert(key.clone());
                Ok(key)
            }
            Some((_, at)) => Err(Some(at)),
            None => Err(None),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[tokio::test(start_paused = true)]
    async fn a_key_asked_for_during_its_work_is_worked_on_again_and_never_twice_at_once() {
        let queue: Queue<u8> = Queue::default();
        let (runs, at_once) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let shutdown = CancellationToken::new();
        queue.add(1);
        let (again, stop) = (queue.clone(), shutdown.clone());
        let (runs_in, at_once_in) = (Arc::clone(&runs), Arc::clone(&at_once));
        queue
            .run(4, shutdown, move |key| {
                let (runs, at_once) = (Arc::clone(&runs_in), Arc::clone(&at_once_in));
                let (again, stop) = (again.clone(), stop.clone());
                async move {
                    assert_eq!(at_once.fetch_add(1, Ordering::SeqCst), 0);
                    if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                        again.add(key);
                        tokio::time::sleep(Duration::from_secs(5)).await;
                    } else {
                        stop.cancel();
                    }
                    at_once.fetch_sub(1, Ordering::SeqCst);
                }
            })
            .await;
        assert_eq!(runs.load(Ordering::SeqCst), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn the_sooner_of_two_requests_counts() {
        let queue: Queue<u8> = Queue::default();
        let shutdown = CancellationToken::new();
        queue.add_after(1, Duration::from_secs(100));
        queue.add_after(1, Duration::from_secs(3));
        queue.add_after(1, Duration::from_secs(50));
        let (start, stop) = (Instant::now(), shutdown.clone());
        queue
            .run(1, shutdown, move |_| {
                let stop = stop.clone();
                async move {
                    assert_eq!(start.elapsed().as_secs(), 3);
                    stop.cancel();
                }
            })
            .await;
    }
}
