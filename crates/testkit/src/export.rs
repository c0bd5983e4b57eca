//! What processes export, as Prometheus reads it.

use crate::remains::Site;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io::{Error, Read as _, Result, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::AsFd as _;
use std::str::FromStr;

/// What is exported at a port on loopback now.
///
/// # Errors
/// If nobody answers there.
pub fn scrape(port: u16) -> Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// The value of a series in what was exported.
pub fn figure<T: FromStr>(text: &str, series: &str) -> Option<T> {
    let line = text.lines().find(|line| {
        line.strip_prefix(series)
            .is_some_and(|rest| rest.starts_with(' '))
    })?;
    line.rsplit(' ').next()?.parse().ok()
}

impl Site {
    /// What its host exports now.
    ///
    /// # Errors
    /// If its host does not answer.
    pub fn scrape(&self) -> Result<String> {
        let Some(namespace) = &self.namespace else {
            return scrape(self.port);
        };
        let namespace = File::open(format!("/run/netns/{namespace}"))?;
        let port = self.port;
        // A thread of its own, as it is in that network for good.
        let inside = std::thread::spawn(move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            scrape(port)
        });
        inside
            .join()
            .map_err(|_panic| Error::other("the thread ended"))?
    }
}
