//! Honest guests lose nothing, hostile ones gain nothing.

use super::*;
use crate::pod::log::{Carried, Next, Progress};
use proptest::prelude::*;

fn file(container: &str, attempt: u32, generation: u64) -> LogFile {
    LogFile {
        container: container.to_owned(),
        attempt,
        generation,
    }
}

/// The host: an archive and the disk that it is about.
#[derive(Default)]
struct Host {
    archive: Archive,
    written_names: Vec<String>,
    disk: BTreeMap<FileName, Vec<u8>>,
}

impl Host {
    /// What the host answers: the length it has, or that it takes nothing.
    fn take(&mut self, of: &LogFile, offset: u64, bytes: &[u8]) -> Option<u64> {
        let decision = self.archive.offer(of, offset, bytes.len());
        if decision.new_name {
            self.written_names = self.archive.names().to_vec();
        }
        for gone in decision.delete {
            self.disk.remove(&gone);
        }
        match decision.verdict {
            Verdict::Append(name) => {
                let content = self.disk.entry(name).or_default();
                assert_eq!(content.len() as u64, offset, "appended where it belongs");
                content.extend_from_slice(bytes);
                let length = content.len() as u64;
                self.archive.stored(name, length);
                Some(length)
            }
            Verdict::Has(length) => Some(length),
            Verdict::Refused => None,
        }
    }

    fn restart(&mut self) {
        let files: Vec<_> = self
            .disk
            .iter()
            .map(|(name, content)| (*name, content.len() as u64))
            .collect();
        let (archive, delete) = Archive::found(self.written_names.clone(), files);
        for gone in delete {
            self.disk.remove(&gone);
        }
        self.archive = archive;
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let total: u64 = self.disk.values().map(|content| content.len() as u64).sum();
        prop_assert!(total <= POD_LIMIT);
        prop_assert!(self.archive.names().len() <= MAX_CONTAINERS);
        prop_assert!(self.disk.len() <= self.archive.names().len() * RUNS * FILES);
        for (name, content) in &self.disk {
            prop_assert!(content.len() as u64 <= MAX_FILE);
            prop_assert_eq!(self.archive.length(*name), Some(content.len() as u64));
            prop_assert_eq!(name.to_string().parse(), Ok(*name));
        }
        Ok(())
    }
}

/// The guest's log of one run, as the node writes it.
#[derive(Default)]
struct Log {
    progress: Progress,
    before: Vec<u8>,
    current: Vec<u8>,
}

impl Log {
    fn write(&mut self, bytes: &[u8]) {
        self.current.extend_from_slice(bytes);
        self.progress.current = self.current.len() as u64;
    }

    /// Only a file that has something is set aside.
    fn set_aside(&mut self) {
        if self.current.is_empty() {
            return;
        }
        self.before = std::mem::take(&mut self.current);
        self.progress = Progress {
            generation: self.progress.generation + 1,
            before: self.progress.current,
            current: 0,
            closed: false,
        };
    }

    fn content(&self, generation: u64) -> &[u8] {
        if generation == self.progress.generation {
            &self.current
        } else {
            &self.before
        }
    }
}

#[derive(Clone, Debug)]
enum Happens {
    Write(u8, Vec<u8>),
    SetAside(u8),
    /// A piece is carried; the flags: it arrives, it arrives twice, the answer arrives.
    Carry(u8, bool, bool, bool),
    HostRestarts,
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        4 => (0u8..2, prop::collection::vec(any::<u8>(), 1..20)).prop_map(|(c, b)| Happens::Write(c, b)),
        1 => (0u8..2).prop_map(Happens::SetAside),
        6 => (0u8..2, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(c, a, t, b)| Happens::Carry(c, a, t, b)),
        1 => Just(Happens::HostRestarts),
    ]
}

/// Carries one piece. False if there is none.
fn carry(
    container: u8,
    log: &Log,
    carried: &mut Carried,
    host: &mut Host,
    (arrives, twice, answered): (bool, bool, bool),
) -> bool {
    let Next::Piece {
        generation,
        offset,
        length,
    } = carried.next(&log.progress)
    else {
        return false;
    };
    let of = file(&format!("c{container}"), 3, generation);
    let from = usize::try_from(offset).unwrap();
    let to = from + usize::try_from(length.min(7)).unwrap();
    let piece = &log.content(generation)[from..to];
    if arrives {
        let mut answer = host.take(&of, offset, piece);
        if twice {
            answer = host.take(&of, offset, piece);
        }
        match answer {
            Some(length) if answered => carried.stored(generation, length),
            None if answered => carried.refused(generation),
            Some(_) | None => {}
        }
    }
    true
}

proptest! {
    /// Nothing twice, nothing missing: whatever gets lost on the way, in the end the host has the
    /// guest's files.
    #[test]
    fn what_an_honest_guest_wrote_is_there(history in prop::collection::vec(happens(), 0..80)) {
        let mut host = Host::default();
        let mut logs = [Log::default(), Log::default()];
        let mut carried = [Carried::default(); 2];
        for event in history {
            match event {
                Happens::Write(c, bytes) => logs[usize::from(c)].write(&bytes),
                Happens::SetAside(c) => logs[usize::from(c)].set_aside(),
                Happens::Carry(c, arrives, twice, answered) => {
                    let at = usize::from(c);
                    carry(c, &logs[at], &mut carried[at], &mut host, (arrives, twice, answered));
                }
                Happens::HostRestarts => host.restart(),
            }
            host.check()?;
        }
        for (number, container) in [(0u8, "c0"), (1, "c1")] {
            let at = usize::from(number);
            logs[at].progress.closed = true;
            let mut rounds = 0;
            while carry(number, &logs[at], &mut carried[at], &mut host, (true, false, true)) {
                rounds += 1;
                prop_assert!(rounds < 1000, "the end is reached");
            }
            prop_assert_eq!(carried[at].next(&logs[at].progress), Next::Done);
            let files = host.archive.run(container, false).expect("a run is known, even if it was silent");
            let newest = files.last().expect("a file");
            prop_assert_eq!(&host.disk[newest], logs[at].content(newest.generation));
            if logs[at].progress.generation > 0 && !logs[at].before.is_empty() {
                let generation = logs[at].progress.generation - 1;
                let older = files.iter().find(|f| f.generation == generation).expect("the one before");
                prop_assert_eq!(&host.disk[older], &logs[at].before);
            }
        }
    }

    /// A guest that floods, lies about offsets, or has containers without end harms only itself.
    #[test]
    fn a_hostile_guest_stays_within_its_limits(
        pieces in prop::collection::vec(
            ("[a-c]{0,2}|\\.\\./etc|x{64}", 0u32..4, 0u64..5, prop::option::of(0u64..40), 0usize..20, any::<bool>()),
            0..120,
        ),
    ) {
        let mut host = Host::default();
        for (container, attempt, generation, lie, length, restart) in pieces {
            let of = file(&container, attempt, generation);
            let before = host.disk.clone();
            // Most hostile where it is believed: at the very end of the file.
            let known = host.archive.names().iter().position(|name| *name == container);
            let end = known
                .and_then(|container| host.archive.length(FileName { container, attempt, generation }))
                .unwrap_or(0);
            let answer = host.take(&of, lie.unwrap_or(end), &vec![b'x'; length]);
            host.check()?;
            if container.is_empty() || container.len() > MAX_NAME {
                prop_assert_eq!(answer, None);
                prop_assert_eq!(&host.disk, &before);
            }
            for (name, content) in &before {
                // What is kept is never shortened or rewritten.
                if let Some(after) = host.disk.get(name) {
                    prop_assert!(after.starts_with(content));
                }
            }
            if restart {
                let archive = host.archive.clone();
                host.restart();
                prop_assert_eq!(host.archive.total(), archive.total());
            }
        }
    }

    #[test]
    fn names_of_files_are_exact(text in "[0-9.+a/]{0,12}") {
        if let Ok(name) = text.parse::<FileName>() {
            prop_assert_eq!(name.to_string(), text);
        }
    }
}

#[test]
fn the_limits_of_bytes_and_containers_are_kept() {
    let mut archive = Archive::default();
    let piece = 1 << 20;
    let mut fill = |container: &str, attempt: u32, generation: u64| {
        let of = file(container, attempt, generation);
        let mut length = 0;
        loop {
            let decision = archive.offer(&of, length, piece);
            match decision.verdict {
                Verdict::Append(name) => {
                    length += piece as u64;
                    archive.stored(name, length);
                }
                Verdict::Has(_) | Verdict::Refused => break length,
            }
        }
    };
    assert_eq!(fill("a", 0, 0), MAX_FILE, "a file's limit");
    for (attempt, generation) in [(0, 1), (0, 2), (7, 0), (7, 9)] {
        assert_eq!(fill("a", attempt, generation), MAX_FILE);
    }
    for container in ["b", "c", "d"] {
        for (attempt, generation) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            assert_eq!(fill(container, attempt, generation), MAX_FILE);
        }
    }
    assert_eq!(fill("e", 0, 0), 0, "the pod's limit");
    assert_eq!(archive.total(), POD_LIMIT);

    let mut archive = Archive::default();
    for number in 0..2 * MAX_CONTAINERS {
        let taken = archive
            .offer(&file(&format!("c{number}"), 0, 0), 0, 1)
            .verdict;
        assert_eq!(taken == Verdict::Refused, number >= MAX_CONTAINERS);
    }
}

#[test]
fn the_last_run_and_the_one_before() {
    let mut host = Host::default();
    for attempt in [0, 1, 4] {
        host.take(&file("c", attempt, 0), 0, b"");
        host.take(&file("c", attempt, 0), 0, b"x");
        host.take(&file("c", attempt, 1), 0, b"y");
    }
    let attempts = |previous| {
        let files = host.archive.run("c", previous).unwrap();
        files
            .iter()
            .map(|f| (f.attempt, f.generation))
            .collect::<Vec<_>>()
    };
    assert_eq!(attempts(false), [(4, 0), (4, 1)]);
    assert_eq!(attempts(true), [(1, 0), (1, 1)]);
    assert_eq!(host.archive.run("d", false), None);
    assert_eq!(
        host.take(&file("c", 0, 5), 0, b"late"),
        None,
        "an older run"
    );
    let mut one = Host::default();
    one.take(&file("c", 2, 0), 0, b"");
    assert_eq!(one.archive.run("c", true), None);
}
