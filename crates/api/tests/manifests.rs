//! What is generated in `deploy` is what the types and [`monopod_api::rights`] say.
//!
//! `cargo xtask generate` writes the files; it runs this test with `MONOPOD_UPDATE=1`.

use monopod_api::rights;
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;

/// Compares a file of `deploy` with what it must hold, after it was written if that is wanted.
fn is(file: &str, source: &str, objects: &[impl Serialize]) {
    let mut text = format!("# Generated from {source} by `cargo xtask generate`. Do not edit.\n");
    for object in objects {
        let yaml = serde_saphyr::to_string(object).expect("serialises");
        write!(text, "---\n{}\n", yaml.trim_end()).expect("a String takes everything");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy")
        .join(file);
    if std::env::var_os("MONOPOD_UPDATE").is_some() {
        std::fs::write(&path, &text).expect("written");
    }
    let stored = std::fs::read_to_string(&path).expect("it exists");
    assert!(
        stored == text,
        "deploy/{file} is not what {source} says: run `cargo xtask generate`"
    );
}

#[test]
fn the_checked_in_definitions_are_those_of_the_types() {
    is(
        "crds.yaml",
        "crates/api",
        &monopod_api::custom_resource_definitions(),
    );
}

#[test]
fn the_checked_in_rights_are_those_of_the_source() {
    let source = "crates/api/src/rights.rs";
    let cluster = rights::of_the_cluster().expect("serialises");
    is("rbac.yaml", source, &cluster);
    let host = rights::of_a_host().expect("serialises");
    is("host.yaml", source, &host);
}

/// `kubectl explain` shows these texts, so every field must have one.
#[test]
fn every_field_is_explained() {
    fn walk(path: &str, schema: &serde_json::Value, missing: &mut Vec<String>) {
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            if property["description"].as_str().is_none_or(str::is_empty) {
                missing.push(path.clone());
            }
            walk(&path, property, missing);
            walk(&path, &property["items"], missing);
        }
    }
    let mut missing = Vec::new();
    for crd in monopod_api::custom_resource_definitions() {
        let schema = serde_json::to_value(&crd.spec.versions[0].schema).expect("serialises");
        let properties = &schema["openAPIV3Schema"]["properties"];
        for part in ["spec", "status"] {
            walk(
                &format!("{}.{part}", crd.spec.names.kind),
                &properties[part],
                &mut missing,
            );
        }
    }
    assert!(
        missing.is_empty(),
        "fields without a description: {missing:#?}"
    );
}
