//! The definitions in `deploy/crds.yaml` are those of the types.
//!
//! `cargo xtask crd` writes the file; it runs this test with `MONOPOD_UPDATE=1`.

use std::fmt::Write;
use std::path::Path;

#[test]
fn the_checked_in_definitions_are_those_of_the_types() {
    let mut text = String::from("# Generated from crates/api by `cargo xtask crd`. Do not edit.\n");
    for crd in monopod_api::custom_resource_definitions() {
        let yaml = serde_saphyr::to_string(&crd).expect("serialises");
        write!(text, "---\n{}\n", yaml.trim_end()).expect("a String takes everything");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds.yaml");
    if std::env::var_os("MONOPOD_UPDATE").is_some() {
        std::fs::write(&path, &text).expect("written");
    }
    let stored = std::fs::read_to_string(&path).expect("deploy/crds.yaml exists");
    assert!(
        stored == text,
        "deploy/crds.yaml is not what the types say: run `cargo xtask crd`"
    );
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
