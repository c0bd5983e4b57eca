//! Which nodes a pod's `nodeSelector` and node affinity permit and prefer.
//!
//! A Fargate node is made for its pod, and has its labels from where it is made. A requirement that no such
//! node meets is not ignored: the pod was meant to run elsewhere.

use crate::selector::{Labels, holds};
use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PodSpec};

/// What the pod requires of its node and these labels do not give; empty if they do.
pub fn unmet(spec: &PodSpec, labels: &Labels) -> Vec<String> {
    let selector = spec.node_selector.iter().flatten();
    let mut found: Vec<String> = selector
        .filter(|(key, value)| labels.get(*key) != Some(value))
        .map(|(key, value)| format!("spec.nodeSelector {key}={value}"))
        .collect();
    let required = spec
        .affinity
        .as_ref()
        .and_then(|a| a.node_affinity.as_ref())
        .and_then(|a| {
            a.required_during_scheduling_ignored_during_execution
                .as_ref()
        });
    if let Some(required) = required
        && !required
            .node_selector_terms
            .iter()
            .any(|term| is_met(term, labels))
    {
        found.push(
            "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution".to_owned(),
        );
    }
    found
}

/// How much the pod prefers a node with these labels: the weights of the terms that it meets.
pub fn preference(spec: &PodSpec, labels: &Labels) -> i64 {
    let affinity = spec
        .affinity
        .as_ref()
        .and_then(|a| a.node_affinity.as_ref());
    let preferred = affinity.and_then(|a| {
        a.preferred_during_scheduling_ignored_during_execution
            .as_ref()
    });
    let met = preferred
        .into_iter()
        .flatten()
        .filter(|term| is_met(&term.preference, labels));
    met.map(|term| i64::from(term.weight)).sum()
}

/// An empty term matches no node, as upstream.
fn is_met(term: &NodeSelectorTerm, labels: &Labels) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    // The only field is the node's name, which nobody can know before the node is made for the pod.
    let nameless = Labels::new();
    let all = |rules: &[NodeSelectorRequirement], labels| {
        let values = |rule: &NodeSelectorRequirement| rule.values.clone().unwrap_or_default();
        rules
            .iter()
            .all(|rule| holds(&rule.key, &rule.operator, &values(rule), labels))
    };
    !(expressions.is_empty() && fields.is_empty())
        && all(expressions, labels)
        && all(fields, &nameless)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::node::labels_on;
    use serde_json::{Value, json};

    fn spec(selector: &Value, terms: &Value) -> PodSpec {
        let mut spec = json!({"containers": [], "nodeSelector": selector});
        if !terms.is_null() {
            spec["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        }
        serde_json::from_value(spec).expect("a spec")
    }

    fn is_permitted(selector: &Value, terms: &Value) -> bool {
        unmet(&spec(selector, terms), &labels_on("r", "z", "h")).is_empty()
    }

    #[test]
    fn requirements_are_judged_by_the_labels_of_fargate_nodes() {
        let zone = "topology.kubernetes.io/zone";
        let compute = "eks.amazonaws.com/compute-type";
        let rule = |key: &str, operator: &str, values: &[&str]| json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]);
        for (terms, permitted) in [
            (Value::Null, true),
            (rule(zone, "In", &["z", "y"]), true),
            (rule(zone, "In", &["y"]), false),
            (rule(zone, "NotIn", &["y"]), true),
            (rule(compute, "NotIn", &["fargate"]), false),
            (rule("disk", "Exists", &[]), false),
            (rule("disk", "DoesNotExist", &[]), true),
            (rule("cores", "Gt", &["4"]), false),
            (rule(zone, "Near", &["z"]), false),
            (json!([{}]), false),
            (
                json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}]),
                false,
            ),
            (
                json!([{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n"]}]}]),
                true,
            ),
        ] {
            assert_eq!(is_permitted(&json!({}), &terms), permitted, "{terms}");
        }
        assert!(is_permitted(
            &json!({"kubernetes.io/arch": "amd64"}),
            &Value::Null
        ));
        assert_eq!(
            unmet(
                &spec(&json!({"kubernetes.io/arch": "arm64"}), &json!([{}])),
                &labels_on("r", "z", "h")
            ),
            [
                "spec.nodeSelector kubernetes.io/arch=arm64",
                "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
            ]
        );
    }

    #[test]
    fn preferences_add_up() {
        let term = |zone: &str, weight: i32| json!({"weight": weight, "preference": {"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": [zone]}]}});
        let spec: PodSpec = serde_json::from_value(json!({"containers": [], "affinity": {"nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [term("z", 3), term("y", 50), term("z", 4), {"weight": 9, "preference": {}}],
        }}}))
        .expect("a spec");
        assert_eq!(preference(&spec, &labels_on("r", "z", "h")), 7);
    }
}
