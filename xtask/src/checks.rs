//! Checks of the source itself.

use crate::dist::{cargo, root};
use crate::kernel::{output, run};
use anyhow::{Result, ensure};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Longest source file, tests apart (the house rule).
const MAX_LINES: usize = 600;

/// Writes the manifests of `deploy` that are made from `crates/api`.
pub(crate) fn write_manifests() -> Result<()> {
    run(cargo(&[
        "test",
        "--quiet",
        "--package",
        "monopod-api",
        "--test",
        "manifests",
        "the_checked_in",
    ])
    .env("MONOPOD_UPDATE", "1"))
}

/// Format, lints and the rules that no other tool knows.
pub(crate) fn all() -> Result<()> {
    run(&mut cargo(&["fmt", "--all", "--check"]))?;
    run(&mut cargo(&[
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]))?;
    tidy()
}

/// Orphaned modules, overlong files, crates without the workspace's lints, forbidden dependencies.
fn tidy() -> Result<()> {
    let mut problems = Vec::new();
    let list = output(
        Command::new("git")
            .args(["ls-files", "*.rs", "*/Cargo.toml"])
            .current_dir(root()),
    )?;
    let files: Vec<PathBuf> = list.lines().map(PathBuf::from).collect();
    for file in &files {
        let text = std::fs::read_to_string(root().join(file))?;
        if file.ends_with("Cargo.toml") {
            if !text.contains("[lints]\nworkspace = true") {
                problems.push(format!(
                    "{}: lacks `[lints] workspace = true`",
                    file.display()
                ));
            }
            problems.extend(forbidden(file, &text));
            continue;
        }
        if text.lines().count() > MAX_LINES && !is_test(file) {
            problems.push(format!(
                "{}: longer than {MAX_LINES} lines; find the seam",
                file.display()
            ));
        }
        if !text.starts_with("//!") && !is_test(file) {
            problems.push(format!(
                "{}: does not begin with what it is for",
                file.display()
            ));
        }
    }
    problems.extend(orphans(&files)?);
    ensure!(
        problems.is_empty(),
        "the source breaks house rules:\n  {}",
        problems.join("\n  ")
    );
    Ok(())
}

fn is_test(file: &Path) -> bool {
    file.components().any(|part| part.as_os_str() == "tests") || file.ends_with("tests.rs")
}

/// The direction of dependencies: control, host, guest, cli -> ops, core -> api, wire.
fn forbidden(file: &Path, manifest: &str) -> Vec<String> {
    let rules: [(&str, &[&str]); 4] = [
        ("crates/api/", &["monopod-", "tokio", "anyhow"]),
        ("crates/wire/", &["monopod-", "tokio", "anyhow"]),
        (
            "crates/core/",
            &[
                "monopod-ops",
                "monopod-control",
                "monopod-host",
                "tokio",
                "anyhow",
                "kube.",
            ],
        ),
        ("crates/ops/", &["monopod-"]),
    ];
    let dependencies = manifest.split("[dependencies]").nth(1).unwrap_or_default();
    let dependencies = dependencies
        .split("[dev-dependencies]")
        .next()
        .unwrap_or_default();
    rules
        .iter()
        .filter(|(folder, _)| file.starts_with(folder.trim_end_matches('/')))
        .flat_map(|(_, names)| names.iter())
        .filter(|name| dependencies.lines().any(|line| line.starts_with(**name)))
        .map(|name| format!("{}: must not depend on {name}", file.display()))
        .collect()
}

/// Source files that no `mod` declares: they pass every check because nothing compiles them.
fn orphans(files: &[PathBuf]) -> Result<Vec<String>> {
    let mut declared = BTreeSet::new();
    for file in files
        .iter()
        .filter(|file| file.extension().is_some_and(|e| e == "rs"))
    {
        let text = std::fs::read_to_string(root().join(file))?;
        for line in text.lines() {
            if let Some(path) = line
                .trim()
                .strip_prefix("#[path = \"")
                .and_then(|rest| rest.strip_suffix(".rs\"]"))
            {
                declared.insert(path.to_owned());
            }
            let line = line
                .trim()
                .trim_start_matches("pub(crate) ")
                .trim_start_matches("pub(super) ")
                .trim_start_matches("pub ");
            if let Some(name) = line
                .strip_prefix("mod ")
                .and_then(|rest| rest.strip_suffix(';'))
            {
                declared.insert(name.to_owned());
            }
        }
    }
    Ok(files
        .iter()
        .filter(|file| file.components().any(|part| part.as_os_str() == "src"))
        .filter(|file| file.extension().is_some_and(|e| e == "rs"))
        .filter_map(|file| {
            let stem = file.file_stem()?.to_str()?;
            let name = if stem == "mod" {
                file.parent()?.file_name()?.to_str()?
            } else {
                stem
            };
            let program = file.components().any(|part| part.as_os_str() == "bin");
            let entry = program || ["main", "lib"].contains(&name) || declared.contains(name);
            (!entry).then(|| format!("{}: no `mod {name};` declares it", file.display()))
        })
        .collect())
}
