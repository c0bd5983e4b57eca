//! `cargo xtask test`.

use crate::checks;
use crate::dist::{build, build_for_tests, cargo, step, with_dist};
use crate::packages;
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// Every check and test. Its last line counts the tests.
pub(crate) fn run() -> Result<()> {
    let dist = build()?;
    step("Debian packages for tests", packages::ensure_for_tests)?;
    step("source checks", checks::all)?;
    build_for_tests(&dist)?;
    let mut counted = Counted::default();
    step("tests", || {
        // Real VMs share two cores, so test programs run one after the other, as cargo does it.
        let mut command = cargo(&["test", "--workspace", "--no-fail-fast"]);
        counted.run(with_dist(&mut command, &dist))
    })?;
    println!(
        "\n{} passed, {} failed, {} skipped",
        counted.passed, counted.failed, counted.ignored
    );
    ensure!(
        counted.failed == 0 && counted.succeeded,
        "tests failed; their output is above"
    );
    ensure!(counted.passed > 0, "no test ran");
    Ok(())
}

#[derive(Default)]
struct Counted {
    passed: usize,
    failed: usize,
    ignored: usize,
    succeeded: bool,
}

impl Counted {
    /// Runs cargo's tests, shows what they print, and adds up the result lines of all programs.
    fn run(&mut self, command: &mut Command) -> Result<()> {
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .context("cargo does not start")?;
        let output = child.stdout.take().context("cargo has no output")?;
        for line in BufReader::new(output).lines() {
            let line = line?;
            println!("{line}");
            if let Some(result) = line.strip_prefix("test result: ") {
                self.passed += number_before(result, " passed");
                self.failed += number_before(result, " failed");
                self.ignored += number_before(result, " ignored");
            }
        }
        self.succeeded = child.wait()?.success();
        Ok(())
    }
}

fn number_before(text: &str, word: &str) -> usize {
    let before = text.split(word).next().unwrap_or_default();
    before
        .rsplit(|c: char| !c.is_ascii_digit())
        .next()
        .and_then(|digits| digits.parse().ok())
        .unwrap_or(0)
}
