//! Rights of Monopod's own processes that nothing needed in the whole suite are too many.

use monopod_api::names::host_namespace;
use monopod_api::rights::{CONTROL, HOST};
use monopod_testkit::{Cluster, is_whole};
use serde_json::Value;
use std::collections::BTreeSet;

/// The API server's policy for its audit log.
pub(crate) const POLICY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/audit.yaml");

/// What somebody may do with objects of a kind: of any name, or of this one.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Clone)]
struct Right {
    verb: String,
    group: String,
    resource: String,
    name: Option<String>,
}

/// What somebody did.
struct Request {
    right: Right,
    /// Of the object; empty if it has none, or all were asked for.
    namespace: String,
}

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
        let names = words(&rule["resourceNames"]);
        let names: Vec<_> = if names.is_empty() {
            vec![None]
        } else {
            names.into_iter().map(Some).collect()
        };
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                for verb in words(&rule["verbs"]) {
                    rights.extend(names.iter().map(|name| Right {
                        verb: verb.clone(),
                        group: group.clone(),
                        resource: resource.clone(),
                        name: name.clone(),
                    }));
                }
            }
        }
    }
    // Looked at by an admission plug-in, when a request is approved.
    rights.retain(|right| right.verb != "approve");
    rights
}

/// What processes of users whose names begin so asked for; not what checks did in their names, all by kubectl.
fn requests(cluster: &Cluster, user: &str) -> Vec<Request> {
    let log =
        std::fs::read_to_string(cluster.data().join("logs/audit.log")).expect("the audit log");
    let events = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    events
        .filter(|event| text(&event["user"]["username"]).starts_with(user))
        .filter(|event| !text(&event["userAgent"]).starts_with("kubectl/"))
        .map(|event| {
            let object = &event["objectRef"];
            let resource = match object["subresource"].as_str() {
                Some(part) => format!("{}/{part}", text(&object["resource"])),
                None => text(&object["resource"]),
            };
            Request {
                right: Right {
                    verb: text(&event["verb"]),
                    group: text(&object["apiGroup"]),
                    resource,
                    name: object["name"].as_str().map(str::to_owned),
                },
                namespace: text(&object["namespace"]),
            }
        })
        .collect()
}

/// Whether the request needs the right.
fn needs(request: &Request, right: &Right) -> bool {
    let asked = &request.right;
    let verbs: &[&str] = match asked.verb.as_str() {
        // An apply creates what is not there, and needs the right to.
        "patch" => &["patch", "create"],
        // Informers list, unless the API server streams them the list.
        "watch" => &["watch", "list"],
        verb => &[verb],
    };
    verbs.contains(&right.verb.as_str())
        && asked.group == right.group
        && asked.resource == right.resource
        && (right.name.is_none() || right.name == asked.name)
}

/// Rights that hold in one namespace must be needed there, those that hold everywhere elsewhere.
pub(crate) fn minimal(cluster: &Cluster) {
    assert!(
        is_whole(),
        "only the whole suite uses every right: run it without a filter"
    );
    let own = host_namespace("host-1");
    let mut unused = Vec::new();
    for (role, namespaces) in [(CONTROL, vec!["kube-system", &own]), (HOST, vec![&own[..]])] {
        let requests = requests(cluster, role);
        let granted = |namespace: &str| {
            let kind = if namespace.is_empty() {
                "clusterrole"
            } else {
                "role"
            };
            rights(&cluster.get(namespace, kind, role).expect("a role"))
        };
        let mut there = BTreeSet::new();
        for namespace in &namespaces {
            for right in granted(namespace) {
                let used = requests
                    .iter()
                    .any(|request| request.namespace == *namespace && needs(request, &right));
                if !used {
                    unused.push(format!("{role} in {namespace}: {right:?}"));
                }
                there.insert((*namespace, right));
            }
        }
        for right in granted("") {
            let used = requests.iter().any(|request| {
                let also = there.iter().any(|(namespace, right)| {
                    request.namespace == *namespace && needs(request, right)
                });
                !also && needs(request, &right)
            });
            if !used {
                unused.push(format!("{role} everywhere: {right:?}"));
            }
        }
    }
    assert!(unused.is_empty(), "{}", unused.join("\n"));
}
