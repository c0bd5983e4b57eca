//! More machines for a cluster: network namespaces at one switch with this one.

use crate::cluster::{Cluster, Output, host_port, run};
use crate::remains::Site;
use crate::room::Room;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A switch between this machine and others that are made for a test; removed when it is dropped.
#[derive(Debug)]
pub struct Switch {
    number: u8,
}

impl Switch {
    /// The number is the cluster's.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(number: u8) -> Self {
        let (device, address) = (device(number), address(number, 1));
        sh(&format!(
            "ip link add {device} type bridge; ip address add {address}/24 dev {device}; ip link set {device} up"
        ));
        Self { number }
    }

    /// This machine's address.
    pub fn address(&self) -> String {
        address(self.number, 1)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        sh(&format!("ip link delete {}", device(self.number)));
    }
}

/// A machine's address: of the range for tests between networks (RFC 2544).
fn address(number: u8, machine: u8) -> String {
    format!("198.18.{number}.{machine}")
}

fn device(number: u8) -> String {
    format!("mt{number}u")
}

/// A machine that can join a cluster. What it runs is ended when it is dropped; then its disk, before the directory
/// on which that lies.
#[derive(Debug)]
pub struct Machine {
    room: Option<Room>,
    directory: tempfile::TempDir,
    monopod: PathBuf,
    number: u8,
    namespace: String,
    name: String,
    address: String,
    cable: String,
}

impl Machine {
    /// Makes a machine at a cluster's switch; `machine` is 2 or more.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(number: u8, machine: u8, monopod: &Path) -> Self {
        let made = Self {
            room: None,
            directory: tempfile::Builder::new()
                .prefix("monopod-test-")
                .tempdir()
                .expect("a temporary directory"),
            monopod: monopod.to_owned(),
            number,
            namespace: format!("mt{number}-m{machine}"),
            name: format!("m{machine}t{number}"),
            address: address(number, machine),
            cable: format!("mt{number}u{machine}"),
        };
        let Self {
            namespace, cable, ..
        } = &made;
        sh(&format!(
            "ip netns add {namespace}; ip -n {namespace} link set lo up
             ip link add {cable} type veth peer name eth0 netns {namespace}
             ip link set {cable} master {} up
             ip -n {namespace} address add {}/24 dev eth0; ip -n {namespace} link set eth0 up",
            device(number),
            made.address
        ));
        made
    }

    /// Gives it a small disk of its own for its data, of so many MiB; before it joins.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    pub fn with_room(mut self, mib: u64) -> Self {
        self.room = Some(Room::new(self.data(), mib));
        self
    }

    /// Its disk.
    ///
    /// # Panics
    /// If it has none of its own.
    pub fn room(&self) -> &Room {
        self.room.as_ref().expect("it has one of its own")
    }

    /// The machine's address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The data directory of its host.
    pub fn data(&self) -> &Path {
        self.directory.path()
    }

    /// Where its host keeps what it has.
    pub fn site(&self) -> Site {
        Site {
            data: self.data().to_owned(),
            name: self.name.clone(),
            namespace: Some(self.namespace.clone()),
            port: host_port(self.number),
        }
    }

    /// Makes it a host with a token, whatever comes of it.
    pub fn join(&self, token: &str) -> Output {
        self.join_with(token, &[])
    }

    /// The same with flags.
    pub fn join_with(&self, token: &str, flags: &[&str]) -> Output {
        let named = ["--underlay", &self.address, "--name", &self.name];
        self.monopod(&[&["host", "join", token], &named[..], flags].concat())
    }

    /// Runs `monopod` on it.
    pub fn monopod(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net=/run/netns/{}", self.namespace))
            .arg(&self.monopod)
            .arg("--data")
            .arg(self.data())
            .args(arguments);
        run(&mut command, "")
    }

    /// Takes it off the network, or puts it back.
    ///
    /// # Panics
    /// If its cable cannot be changed.
    pub fn plug(&self, connected: bool) {
        let state = if connected { "up" } else { "down" };
        sh(&format!("ip link set {} {state}", self.cable));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let output = self.monopod(&["down"]);
        if !output.success && !std::thread::panicking() {
            println!("monopod down failed: {}{}", output.out, output.err);
        }
        sh(&format!("ip netns delete {}", self.namespace));
    }
}

impl Cluster {
    /// A token with which a machine joins.
    ///
    /// # Panics
    /// If there is none.
    #[track_caller]
    pub fn token(&self, host: &str) -> String {
        let output = self.monopod(&["host", "token", host]);
        assert!(output.success, "no token: {}", output.err);
        output.out.trim().to_owned()
    }
}

#[track_caller]
fn sh(script: &str) {
    let output = Command::new("sh").args(["-ec", script]).output();
    let output = output.expect("sh runs");
    let err = String::from_utf8_lossy(&output.stderr);
    // A second panic in a destructor would hide the first.
    if !std::thread::panicking() {
        assert!(output.status.success(), "{script}\n{err}");
    }
}
