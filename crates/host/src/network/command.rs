//! Programs that change the network, each with its input and a bounded piece of its output.

use super::NetworkError;
use std::process::Stdio;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Runs `ip -batch` with these lines, in a namespace if one is named.
pub(super) async fn batch(namespace: Option<&str>, lines: &str) -> Result<(), NetworkError> {
    match namespace {
        Some(namespace) => run("ip", &["-n", namespace, "-batch", "-"], lines).await,
        None => run("ip", &["-batch", "-"], lines).await,
    }
}

/// Runs a program to its end.
pub(super) async fn run(
    program: &str,
    arguments: &[&str],
    input: &str,
) -> Result<(), NetworkError> {
    output(program, arguments, input).await.map(drop)
}

/// Runs a program to its end and gives what it printed.
pub(super) async fn output(
    program: &str,
    arguments: &[&str],
    input: &str,
) -> Result<String, NetworkError> {
    let start = |source| NetworkError::Start {
        program: program.to_owned(),
        source,
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(start)?;
    let stdin = child.stdin.take();
    let write = async {
        if let Some(mut stdin) = stdin
            && let Err(error) = stdin.write_all(input.as_bytes()).await
        {
            // A program that ends before it read everything says why in its output.
            tracing::debug!(program, %error, "input was not read to the end");
        }
    };
    let wait = child.wait_with_output();
    let ((), result) = tokio::join!(write, wait);
    let result = result.map_err(start)?;
    if result.status.success() {
        return Ok(String::from_utf8_lossy(&result.stdout).into_owned());
    }
    let mut message = String::from_utf8_lossy(&result.stderr).trim().to_owned();
    message.truncate(message.floor_char_boundary(2000));
    Err(NetworkError::Failed {
        program: format!("{program} {}", arguments.join(" ")),
        output: message,
    })
}
