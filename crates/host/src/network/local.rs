//! A pod's address on this machine itself, once its VM is gone.
//!
//! It is put on the loopback of the VPC's namespace. An address there is found before any route,
//! so this works also while the VM's tap still exists. Packets of pods do not get to it: the
//! ruleset's chain `router` drops them. The API server's do.

use super::command::run;
use super::namespace::within;
use super::{NetworkError, Vpc};
use std::net::{Ipv4Addr, TcpListener as StdListener};
use tokio::net::TcpListener;

/// Takes a pod's address. It is fine if it was taken.
pub async fn claim(vpc: &Vpc, address: Ipv4Addr) -> Result<(), NetworkError> {
    let (namespace, address) = (vpc.namespace(), format!("{address}/32"));
    let arguments = [
        "-n", &namespace, "address", "replace", &address, "dev", "lo",
    ];
    run("ip", &arguments, "").await
}

/// Gives a pod's address up. It is fine if it was not taken.
pub async fn disclaim(vpc: &Vpc, address: Ipv4Addr) -> Result<(), NetworkError> {
    let (namespace, address) = (vpc.namespace(), format!("{address}/32"));
    let arguments = ["-n", &namespace, "address", "delete", &address, "dev", "lo"];
    match run("ip", &arguments, "").await {
        Err(NetworkError::Failed { output, .. })
            if output.contains("Cannot assign requested address")
                || output.contains("Address not found") =>
        {
            Ok(())
        }
        result => result,
    }
}

/// Listens at an address that was taken.
pub async fn listen(vpc: &Vpc, address: Ipv4Addr, port: u16) -> Result<TcpListener, NetworkError> {
    let system = |what| move |source| NetworkError::System { what, source };
    let listener = within(vpc.namespace_path(), move || {
        let listener =
            StdListener::bind((address, port)).map_err(system("listen at a pod's address"))?;
        listener
            .set_nonblocking(true)
            .map_err(system("listen at a pod's address"))?;
        Ok(listener)
    })
    .await?;
    TcpListener::from_std(listener).map_err(system("listen at a pod's address"))
}
