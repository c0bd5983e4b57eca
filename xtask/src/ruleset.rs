//! Compiles an nftables ruleset into the netlink messages that make it.
//!
//! So the guest needs neither nft nor its libraries, and loads its filter in a few milliseconds.
//! nft loads the text into an empty network namespace, and what the kernel then says about its
//! tables, sets, chains and rules is what a guest's kernel is told.

use anyhow::{Context, Result, ensure};
use rustix::fd::AsFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netlink};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::io::{Read, Write};
use std::process::{Command, Stdio};

// linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h
const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;
const MESSAGE_ERROR: u16 = 0x2;
const MESSAGE_DONE: u16 = 0x3;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const SUBSYSTEM: u8 = 10;
const FAMILY_INET: u8 = 1;
const HEADER: usize = 16;
const FAMILY_HEADER: usize = 4;
const SET_ID: u16 = 10;

/// A kind of object: how it is asked for and made, and which of its attributes make it.
struct Kind {
    get: u8,
    new: u8,
    attributes: &'static [u16],
}

/// In the order in which they are made. What is left out are handles and use counts.
const KINDS: [Kind; 4] = [
    // Tables: name, flags.
    Kind {
        get: 1,
        new: 0,
        attributes: &[1, 2],
    },
    // Sets: table, name, flags, types and lengths of key and data, policy, description, user data.
    Kind {
        get: 10,
        new: 9,
        attributes: &[1, 2, 3, 4, 5, 6, 7, 8, 9, 13],
    },
    // Chains: table, name, hook, policy, type.
    Kind {
        get: 4,
        new: 3,
        attributes: &[1, 3, 4, 5, 7],
    },
    // Rules: table, chain, expressions.
    Kind {
        get: 7,
        new: 6,
        attributes: &[1, 2, 4],
    },
];

/// One batch of messages that makes everything in the ruleset.
pub(crate) fn compile(ruleset: &str) -> Result<Vec<u8>> {
    in_empty_network(|| {
        load(ruleset)?;
        read_back()
    })
}

/// Does something in a network namespace that goes afterwards.
fn in_empty_network<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    // The namespace is this process's, which lives as long as it can read.
    let mut keeper = Command::new("unshare")
        .args(["--net", "sh", "-c", "echo; exec cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting unshare")?;
    let mut output = keeper.stdout.take().context("piped above")?;
    output
        .read_exact(&mut [0])
        .context("making a network namespace")?;
    let path = format!("/proc/{}/ns/net", keeper.id());
    let result = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let namespace = std::fs::File::open(&path)?;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            work()
        });
        worker
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the thread panicked")))
    });
    drop(keeper.stdin.take());
    keeper.wait()?;
    result
}

fn load(ruleset: &str) -> Result<()> {
    let mut nft = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .context("starting nft; install nftables")?;
    nft.stdin
        .take()
        .context("piped above")?
        .write_all(ruleset.as_bytes())?;
    ensure!(nft.wait()?.success(), "nft refused the ruleset");
    Ok(())
}

/// What the kernel has, as the messages that make it.
fn read_back() -> Result<Vec<u8>> {
    let mut batch = Batch::default();
    batch.message(BATCH_BEGIN, REQUEST, [0, 0, 0, SUBSYSTEM], &[]);
    for kind in KINDS {
        for object in dump(kind.get)? {
            let mut body = Vec::new();
            for (name, attribute) in attributes(&object) {
                if kind.attributes.contains(&name) {
                    body.extend_from_slice(attribute);
                    body.resize(body.len().next_multiple_of(4), 0);
                }
            }
            if kind.new == 9 {
                // Demanded, and told nothing by: sets are found by name.
                body.extend_from_slice(&8u16.to_ne_bytes());
                body.extend_from_slice(&SET_ID.to_ne_bytes());
                body.extend_from_slice(&batch.sequence.to_be_bytes());
            }
            let new = u16::from_be_bytes([SUBSYSTEM, kind.new]);
            batch.message(
                new,
                REQUEST | ACK | CREATE | APPEND,
                [FAMILY_INET, 0, 0, 0],
                &body,
            );
        }
    }
    batch.message(BATCH_END, REQUEST, [0, 0, 0, SUBSYSTEM], &[]);
    Ok(batch.bytes)
}

/// Everything of one kind in this namespace, each as a list of attributes.
fn dump(get: u8) -> Result<Vec<Vec<u8>>> {
    let socket = socket()?;
    let mut question = Batch::default();
    let get = u16::from_be_bytes([SUBSYSTEM, get]);
    question.message(get, REQUEST | DUMP, [FAMILY_INET, 0, 0, 0], &[]);
    rustix::io::write(&socket, &question.bytes)?;
    let mut objects = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = rustix::io::read(&socket, &mut buffer)?;
        let mut answer = &buffer[..length];
        while let Some((head, _)) = answer.split_first_chunk::<HEADER>() {
            let [l0, l1, l2, l3, k0, k1, ..] = *head;
            let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
            match u16::from_ne_bytes([k0, k1]) {
                MESSAGE_DONE => return Ok(objects),
                MESSAGE_ERROR => anyhow::bail!("the kernel refused to list its ruleset"),
                _ => {}
            }
            let body = answer
                .get(HEADER + FAMILY_HEADER..length)
                .context("short message")?;
            objects.push(body.to_vec());
            answer = answer.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

fn socket() -> Result<rustix::fd::OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::NETFILTER),
    )?)
}

/// Attributes with their numbers, each with its header.
fn attributes(mut body: &[u8]) -> Vec<(u16, &[u8])> {
    const NUMBER: u16 = 0x3fff;
    let mut list = Vec::new();
    while let [l0, l1, k0, k1, ..] = *body {
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let Some(attribute) = body.get(..length).filter(|_| length >= 4) else {
            break;
        };
        list.push((u16::from_ne_bytes([k0, k1]) & NUMBER, attribute));
        body = body.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    list
}

#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    sequence: u32,
}

impl Batch {
    fn message(&mut self, kind: u16, flags: u16, family: [u8; FAMILY_HEADER], body: &[u8]) {
        let length =
            u32::try_from(HEADER + FAMILY_HEADER + body.len()).expect("messages are small");
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        self.bytes.extend_from_slice(&self.sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&0u32.to_ne_bytes());
        self.bytes.extend_from_slice(&family);
        self.bytes.extend_from_slice(body);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self.sequence += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::output;

    const GUEST: &str = include_str!("../../crates/guest/src/pid1/node.nft");

    fn list() -> Result<String> {
        output(Command::new("nft").args(["list", "ruleset"]))
    }

    /// The messages make the same ruleset as the text.
    #[test]
    fn nothing_is_lost() {
        let expected = in_empty_network(|| {
            load(GUEST)?;
            list()
        });
        let batch = compile(GUEST).unwrap();
        let found = in_empty_network(|| {
            let socket = socket()?;
            rustix::io::write(&socket, &batch)?;
            // The kernel has acted when the call returns; an error would leave nothing to list.
            list()
        });
        assert_eq!(found.unwrap(), expected.unwrap());
    }
}
