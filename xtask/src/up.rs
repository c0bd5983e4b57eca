//! `cargo xtask up`: from a checkout to a first pod that answers.

use crate::dist::{build, root, step};
use crate::kernel::{output, run};
use anyhow::{Context, Result, anyhow};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long the first pod may take, image and all.
const LIMIT: Duration = Duration::from_mins(2);

/// Builds, brings up the cluster, and waits until nginx answers.
pub(crate) fn first_pod() -> Result<()> {
    let start = Instant::now();
    build()?;
    step("cluster", || run(&mut monopod(&["up"])))?;
    step("a Deployment of nginx", deploy)?;
    step("its pod runs and is Ready", ready)?;
    let address = step("it answers", answers)?;
    println!(
        "\nnginx answers with HTTP 200 at http://{address}/ after {:.1} s.",
        start.elapsed().as_secs_f64()
    );
    run(&mut kubectl(&[
        "get",
        "pods,nodes,environments",
        "-o",
        "wide",
    ]))?;
    println!("\nTry: bin/monopod kubectl exec deploy/nginx -- uname -r    Stop: bin/monopod down");
    Ok(())
}

fn monopod(arguments: &[&str]) -> Command {
    let mut command = Command::new(root().join("bin/monopod"));
    command.args(arguments);
    command
}

fn kubectl(arguments: &[&str]) -> Command {
    let mut command = monopod(&["kubectl"]);
    command.args(arguments);
    command
}

fn deploy() -> Result<()> {
    let manifest = root().join("docs/examples/nginx.yaml");
    run(kubectl(&["apply", "-f"]).arg(manifest))
}

fn ready() -> Result<()> {
    let timeout = format!("--timeout={}s", LIMIT.as_secs());
    run(&mut kubectl(&[
        "rollout",
        "status",
        "deployment/nginx",
        &timeout,
    ]))
    .context("look with `bin/monopod kubectl describe pods` and `bin/monopod status`")
}

/// Waits until a pod of the Deployment answers. The one that was Ready may have been lost with an earlier end of the
/// cluster, which Kubernetes finds out only now; then another takes its place.
fn answers() -> Result<Ipv4Addr> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let why = match address().and_then(|address| Ok((address, ask(address)?))) {
            Ok((address, answer)) if answer.starts_with("HTTP/1.1 200") => return Ok(address),
            Ok((address, answer)) => anyhow!("{address} answered: {answer}"),
            Err(error) => error,
        };
        if Instant::now() >= deadline {
            return Err(
                why.context("nginx does not answer; look with `bin/monopod kubectl describe pods`")
            );
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The address of a pod of the Deployment that runs.
fn address() -> Result<Ipv4Addr> {
    let ip = output(&mut kubectl(&[
        "get",
        "pods",
        "-l",
        "app=nginx",
        // Beside it there may be the remains of one whose VM ended with an earlier `monopod down`.
        "--field-selector=status.phase=Running",
        "-o",
        "jsonpath={.items[*].status.podIP}",
    ]))?;
    let first = ip.split_whitespace().next();
    let first = first.context("no pod of nginx runs")?;
    first
        .parse()
        .with_context(|| format!("the pod's address {first:?} is none"))
}

fn ask(address: Ipv4Addr) -> std::io::Result<String> {
    let patience = Duration::from_secs(3);
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((address, 80)), patience)?;
    stream.set_read_timeout(Some(patience))?;
    write!(
        stream,
        "GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = vec![0; 256];
    let read = stream.read(&mut answer)?;
    answer.truncate(read);
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
