//! What label selectors and the requirements of nodes match.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use std::collections::BTreeMap;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// Whether a selector matches; one that is missing matches nothing, an empty one everything, as upstream.
pub fn selects(selector: Option<&LabelSelector>, labels: &Labels) -> bool {
    let Some(selector) = selector else {
        return false;
    };
    let mut equal = selector.match_labels.iter().flatten();
    let mut rules = selector.match_expressions.iter().flatten();
    equal.all(|(key, value)| labels.get(key) == Some(value))
        && rules.all(|rule| {
            let values = rule.values.as_deref().unwrap_or_default();
            holds(&rule.key, &rule.operator, values, labels)
        })
}

/// Whether one requirement holds.
pub(crate) fn holds(key: &str, operator: &str, values: &[String], labels: &Labels) -> bool {
    let value = labels.get(key);
    let number = |text: &String| text.parse::<i64>().ok();
    let compared = |order: fn(&i64, &i64) -> bool| {
        let limit = values.first().and_then(number);
        value
            .and_then(number)
            .zip(limit)
            .is_some_and(|(value, limit)| order(&value, &limit))
    };
    match operator {
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
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn a_missing_selector_selects_nothing_and_an_empty_one_everything() {
        let labels = Labels::from([("app".to_owned(), "web".to_owned())]);
        assert!(!selects(None, &labels));
        for (selector, selected) in [
            (json!({}), true),
            (json!({"matchLabels": {"app": "web"}}), true),
            (json!({"matchLabels": {"app": "db"}}), false),
            (
                json!({"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}),
                false,
            ),
            (
                json!({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]}),
                true,
            ),
        ] {
            let parsed = serde_json::from_value(selector.clone()).expect("a selector");
            assert_eq!(selects(Some(&parsed), &labels), selected, "{selector}");
        }
    }

    proptest! {
        /// One requirement holds exactly if its opposite does not.
        #[test]
        fn an_operator_and_its_opposite_never_agree(key in "[ab]", values in prop::collection::vec("[0-9]{1,2}", 1..3), labels in prop::collection::btree_map("[ab]", "[0-9]{1,2}", 0..3)) {
            let holds = |operator: &str| holds(&key, operator, &values, &labels);
            prop_assert_ne!(holds("In"), holds("NotIn"));
            prop_assert_ne!(holds("Exists"), holds("DoesNotExist"));
            prop_assert!(!(holds("Gt") && holds("Lt")));
        }
    }
}
