//! Pods in files: a pod itself, or the template of what makes pods.

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;

/// Largest manifest; the API server takes no larger object.
const LIMIT: u64 = 3 << 20;

/// Reads the first pod of a YAML or JSON file, whatever else is in it; `-` is standard input.
pub(crate) fn read_pod(file: &Path) -> anyhow::Result<Pod> {
    let mut text = String::new();
    let name = file.display();
    let read = if file == Path::new("-") {
        std::io::stdin().take(LIMIT + 1).read_to_string(&mut text)
    } else {
        std::fs::File::open(file).and_then(|file| file.take(LIMIT + 1).read_to_string(&mut text))
    };
    let length = read.with_context(|| format!("cannot read {name}"))?;
    ensure!(
        length as u64 <= LIMIT,
        "{name} is larger than {LIMIT} bytes"
    );
    // As kubectl reads it, `n` and `y` are texts.
    let options = serde_saphyr::options! { strict_booleans: true };
    let objects: Vec<Value> = serde_saphyr::from_multiple_with_options(&text, options)
        .with_context(|| format!("{name} is not YAML"))?;
    let pod = objects.iter().find_map(pod_of)
        .with_context(|| format!("{name} holds no pod: give a Pod, or what has a pod template (Deployment, StatefulSet, Job, CronJob)"))?;
    serde_json::from_value(pod).with_context(|| format!("{name} holds no valid pod"))
}

fn pod_of(object: &Value) -> Option<Value> {
    if object["kind"] == "Pod" {
        return Some(object.clone());
    }
    let template = [
        &object["spec"]["template"],
        &object["spec"]["jobTemplate"]["spec"]["template"],
    ]
    .into_iter()
    .find(|template| template["spec"].is_object())?;
    let mut metadata = template["metadata"].clone();
    if !metadata.is_object() {
        metadata = json!({});
    }
    metadata["namespace"] = object["metadata"]["namespace"].clone();
    if metadata["name"].is_null() {
        metadata["name"] = object["metadata"]["name"].clone();
    }
    Some(json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> anyhow::Result<Pod> {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("object.yaml");
        std::fs::write(&file, text).expect("written");
        read_pod(&file)
    }

    #[test]
    fn a_pod_is_found_in_what_makes_pods() {
        let container = "{containers: [{name: c, image: i}]}";
        for text in [
            format!("kind: Pod\nmetadata: {{name: n, namespace: ns}}\nspec: {container}"),
            format!(
                "kind: Deployment\nmetadata: {{name: n, namespace: ns}}\nspec: {{template: {{spec: {container}}}}}"
            ),
            format!(
                "---\nkind: Service\nspec: {{}}\n---\nkind: Job\nmetadata: {{name: n, namespace: ns}}\nspec: {{template: {{spec: {container}}}}}\n---\nkind: Pod\nspec: {{}}"
            ),
            format!(
                "kind: CronJob\nmetadata: {{name: n, namespace: ns}}\nspec: {{jobTemplate: {{spec: {{template: {{spec: {container}}}}}}}}}"
            ),
        ] {
            let pod = read(&text).expect("a pod");
            assert_eq!(pod.metadata.name.as_deref(), Some("n"));
            assert_eq!(pod.metadata.namespace.as_deref(), Some("ns"));
            assert_eq!(pod.spec.expect("a spec").containers.len(), 1);
        }
    }

    #[test]
    fn what_holds_no_pod_is_named() {
        for (text, part) in [
            ("kind: Service\nspec: {}", "holds no pod"),
            ("[1, 2", "is not YAML"),
            ("kind: Pod\nspec: {containers: 3}", "no valid pod"),
            ("", "holds no pod"),
        ] {
            let error = format!("{:#}", read(text).expect_err(text));
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
