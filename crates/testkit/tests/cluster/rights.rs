//! Rights of Monopod's own processes that nothing needed in the whole suite are too many.

use monopod_testkit::{Cluster, is_whole};
use serde_json::Value;
use std::collections::BTreeSet;

/// The API server's policy for its audit log.
pub(crate) const POLICY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/audit.yaml");

/// What somebody may do, or did: verb, API group, resource.
type Right = (String, String, String);

fn words(value: &Value) -> Vec<String> {
    let words = value.as_array().into_iter().flatten();
    words
        .filter_map(|word| Some(word.as_str()?.to_owned()))
        .collect()
}

/// All that a role's rules say.
fn rights(role: &Value) -> BTreeSet<Right> {
    let mut rights = BTreeSet::new();
    for rule in role["rules"].as_array().into_iter().flatten() {
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                for verb in words(&rule["verbs"]) {
                    rights.insert((verb, group.clone(), resource.clone()));
                }
            }
        }
    }
    // Looked at by an admission plug-in, when a request is approved.
    rights.retain(|(verb, ..)| verb != "approve");
    rights
}

/// What users whose names begin so asked for.
fn used(cluster: &Cluster, user: &str) -> BTreeSet<Right> {
    let log =
        std::fs::read_to_string(cluster.data().join("logs/audit.log")).expect("the audit log");
    let events = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    events
        .filter(|event| text(&event["user"]["username"]).starts_with(user))
        .map(|event| {
            let object = &event["objectRef"];
            let resource = match object["subresource"].as_str() {
                Some(part) => format!("{}/{part}", text(&object["resource"])),
                None => text(&object["resource"]),
            };
            (text(&event["verb"]), text(&object["apiGroup"]), resource)
        })
        // An apply creates what is not there, and needs the right to.
        .flat_map(|(verb, group, resource)| {
            let creates =
                (verb == "patch").then(|| ("create".to_owned(), group.clone(), resource.clone()));
            creates.into_iter().chain([(verb, group, resource)])
        })
        .collect()
}

pub(crate) fn minimal(cluster: &Cluster) {
    assert!(
        is_whole(),
        "only the whole suite uses every right: run it without a filter"
    );
    let mut unused = Vec::new();
    for (user, namespace, role) in [
        ("monopod:control", "", "monopod:control"),
        ("monopod:control", "kube-system", "monopod:control"),
        ("monopod:control", "monopod-host-host-1", "monopod:control"),
        ("monopod:host:", "", "monopod:host"),
        ("monopod:host:", "monopod-host-host-1", "monopod:host"),
    ] {
        let kind = if namespace.is_empty() {
            "clusterrole"
        } else {
            "role"
        };
        let role = cluster.get(namespace, kind, role).expect("a role");
        let used = used(cluster, user);
        let rights = rights(&role);
        unused.extend(
            rights
                .difference(&used)
                .map(|right| format!("{user} {namespace} {right:?}")),
        );
    }
    assert!(unused.is_empty(), "{}", unused.join("\n"));
}
