//! The packet filter of the namespace `node`: `node.nft`, compiled when the image was built.
//!
//! It is the same in all guests and is loaded before READY. The pod's address is put into its one
//! set and one map after Go. Both are done by netlink, without starting a process.

use super::network::NODE;
use anyhow::{Context, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketFlags, SocketType, netlink};
use std::net::Ipv4Addr;

/// The compiled ruleset in the image: one batch of netlink messages.
const RULESET: &str = "/lib/node.ruleset";

/// Loads the ruleset.
pub(super) fn load() -> Result<()> {
    transact(&std::fs::read(RULESET).with_context(|| format!("reading {RULESET}"))?)
}

/// Puts the pod's address into the ruleset.
pub(super) fn assign(address: Ipv4Addr) -> Result<()> {
    change(NEW_ELEMENT, address)
}

/// Takes it out again.
pub(super) fn unassign(address: Ipv4Addr) -> Result<()> {
    change(DELETE_ELEMENT, address)
}

fn change(kind: u16, address: Ipv4Addr) -> Result<()> {
    let mut batch = Vec::new();
    message(&mut batch, BATCH_BEGIN, NLM_F_REQUEST, 0, BATCH_HEADER, &[]);
    let flags = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_ACK;
    let elements = [("pod4", address, None), ("wire4", NODE, Some(address))];
    for (sequence, (set, key, value)) in (1..).zip(elements) {
        let body = element("node", set, key, value);
        message(&mut batch, kind, flags, sequence, TABLE_HEADER, &body);
    }
    message(&mut batch, BATCH_END, NLM_F_REQUEST, 3, BATCH_HEADER, &[]);
    transact(&batch)
}

// linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_CREATE: u16 = 0x400;
const NLMSG_ERROR: u16 = 0x2;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// Subsystem 10 (nftables), message 12 (`NFT_MSG_NEWSETELEM`).
const NEW_ELEMENT: u16 = 0x0a0c;
/// Message 14 (`NFT_MSG_DELSETELEM`).
const DELETE_ELEMENT: u16 = 0x0a0e;
/// `struct nfgenmsg`: family, version, resource (big-endian).
const BATCH_HEADER: [u8; 4] = [0, 0, 0, 10];
/// Family `inet`.
const TABLE_HEADER: [u8; 4] = [1, 0, 0, 0];
const NESTED: u16 = 0x8000;
const HEADER: usize = 16;

/// Sends a batch, all or nothing, and waits until each message in it that asks for it is
/// acknowledged.
fn transact(batch: &[u8]) -> Result<()> {
    let mut expected = 0;
    for (_, flags, _) in messages(batch) {
        expected += usize::from(flags & NLM_F_ACK != 0);
    }
    ensure!(expected > 0, "the batch holds nothing");
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::NETFILTER),
    )?;
    rustix::net::bind(&socket, &netlink::SocketAddrNetlink::new(0, 0))?;
    rustix::io::write(&socket, batch)?;
    let mut acknowledged = 0;
    let mut buffer = [0; 4096];
    while acknowledged < expected {
        let length = rustix::io::read(&socket, &mut buffer)?;
        acknowledged += acknowledgements(&buffer[..length])?;
    }
    Ok(())
}

/// Kinds, flags and bodies of the messages in a buffer.
fn messages(mut buffer: &[u8]) -> impl Iterator<Item = (u16, u16, &[u8])> {
    std::iter::from_fn(move || {
        let [l0, l1, l2, l3, k0, k1, f0, f1, ..] = *buffer.first_chunk::<HEADER>()?;
        let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        let body = buffer.get(HEADER..length)?;
        buffer = buffer.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((
            u16::from_ne_bytes([k0, k1]),
            u16::from_ne_bytes([f0, f1]),
            body,
        ))
    })
}

/// Counts the acknowledgements in an answer; an error in it is the whole batch's.
fn acknowledgements(answer: &[u8]) -> Result<usize> {
    let mut count = 0;
    for (kind, _, body) in messages(answer) {
        if kind == NLMSG_ERROR {
            let code = body.first_chunk::<4>().context("short netlink error")?;
            match i32::from_ne_bytes(*code) {
                0 => count += 1,
                code => bail!(std::io::Error::from_raw_os_error(-code)),
            }
        }
    }
    Ok(count)
}

fn message(batch: &mut Vec<u8>, kind: u16, flags: u16, sequence: u32, head: [u8; 4], body: &[u8]) {
    let length = u32::try_from(HEADER + head.len() + body.len()).expect("our messages are small");
    batch.extend_from_slice(&length.to_ne_bytes());
    batch.extend_from_slice(&kind.to_ne_bytes());
    batch.extend_from_slice(&flags.to_ne_bytes());
    batch.extend_from_slice(&sequence.to_ne_bytes());
    batch.extend_from_slice(&0u32.to_ne_bytes());
    batch.extend_from_slice(&head);
    batch.extend_from_slice(body);
    batch.resize(batch.len().next_multiple_of(4), 0);
}

fn attribute(kind: u16, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + content.len()).expect("our attributes are small");
    let mut bytes = Vec::with_capacity(4 + content.len());
    bytes.extend_from_slice(&length.to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn element(table: &str, set: &str, key: Ipv4Addr, value: Option<Ipv4Addr>) -> Vec<u8> {
    let text = |kind, text: &str| attribute(kind, &[text.as_bytes(), b"\0"].concat());
    let data = |kind, address: Ipv4Addr| attribute(NESTED | kind, &attribute(1, &address.octets()));
    let mut content = data(1, key);
    if let Some(value) = value {
        content.extend(data(2, value));
    }
    let list = attribute(NESTED | 3, &attribute(NESTED | 1, &content));
    [text(1, table), text(2, set), list].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    const TEXT: &str = include_str!("node.nft");

    /// nft's own view of the address, in a namespace that ends with the thread.
    #[test]
    fn the_address_gets_into_the_ruleset() {
        super::super::namespaces::in_new_network(|| {
            let mut nft = Command::new("nft")
                .args(["-f", "-"])
                .stdin(Stdio::piped())
                .spawn()?;
            nft.stdin
                .take()
                .context("piped")?
                .write_all(TEXT.as_bytes())?;
            ensure!(nft.wait()?.success());
            assign(Ipv4Addr::new(10, 0, 1, 23))?;
            let list = Command::new("nft")
                .args(["list", "table", "inet", "node"])
                .output()?;
            let text = String::from_utf8(list.stdout)?;
            assert!(text.contains("elements = { 10.0.1.23 }"), "{text}");
            assert!(
                text.contains("elements = { 169.254.1.1 : 10.0.1.23 }"),
                "{text}"
            );
            // The same address again changes nothing.
            assign(Ipv4Addr::new(10, 0, 1, 23))?;
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn an_error_of_the_kernel_is_one_of_the_batch() {
        super::super::namespaces::in_new_network(|| {
            assert!(
                assign(Ipv4Addr::new(10, 0, 1, 23)).is_err(),
                "there is no table"
            );
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn the_ruleset_knows_the_node() {
        assert!(TEXT.contains(&format!("dnat ip to {NODE}")));
    }
}
