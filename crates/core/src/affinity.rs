//! Which zones' nodes a pod's `nodeSelector` and required node affinity permit.
//!
//! A Fargate node is made for its pod, so no preference and nothing about other pods matters. But a
//! requirement that no such node meets is not ignored: the pod was meant to run elsewhere.

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PodSpec};
use std::collections::BTreeMap;

/// Labels of a node.
pub type Labels = BTreeMap<String, String>;

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

/// An empty term matches no node, as upstream.
fn is_met(term: &NodeSelectorTerm, labels: &Labels) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    // The only field is the node's name, which nobody can know before the node is made for the pod.
    let nameless = Labels::new();
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(|r| holds(r, labels))
        && fields.iter().all(|r| holds(r, &nameless))
}

fn holds(requirement: &NodeSelectorRequirement, labels: &Labels) -> bool {
    let value = labels.get(&requirement.key);
    let values = requirement.values.as_deref().unwrap_or_default();
    let number = |text: &String| text.parse::<i64>().ok();
    let compared = |order: fn(&i64, &i64) -> bool| {
        let limit = values.first().and_then(number);
        value
            .and_then(number)
            .zip(limit)
            .is_some_and(|(value, limit)| order(&value, &limit))
    };
    match requirement.operator.as_str() {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared(i64::gt),
        "Lt" => compared(i64::lt),
        // An operator of a later Kubernetes version: what cannot be judged is not met.
        _other => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::node::labels_in;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn spec(selector: &Value, terms: &Value) -> PodSpec {
        let mut spec = json!({"containers": [], "nodeSelector": selector});
        if !terms.is_null() {
            spec["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        }
        serde_json::from_value(spec).expect("a spec")
    }

    fn is_permitted(selector: &Value, terms: &Value) -> bool {
        unmet(&spec(selector, terms), &labels_in("r", "z")).is_empty()
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
                &labels_in("r", "z")
            ),
            [
                "spec.nodeSelector kubernetes.io/arch=arm64",
                "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
            ]
        );
    }

    proptest! {
        /// One requirement holds exactly if its opposite does not.
        #[test]
        fn an_operator_and_its_opposite_never_agree(key in "[ab]", values in prop::collection::vec("[0-9]{1,2}", 1..3), labels in prop::collection::btree_map("[ab]", "[0-9]{1,2}", 0..3)) {
            let holds = |operator: &str| holds(&NodeSelectorRequirement { key: key.clone(), operator: operator.to_owned(), values: Some(values.clone()) }, &labels);
            prop_assert_ne!(holds("In"), holds("NotIn"));
            prop_assert_ne!(holds("Exists"), holds("DoesNotExist"));
            prop_assert!(!(holds("Gt") && holds("Lt")));
        }
    }
}
