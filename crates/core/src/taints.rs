//! Taints of nodes, and the pods that tolerate them, by Kubernetes' rules.

use jiff::SignedDuration;
use k8s_openapi::api::core::v1::{Taint, Toleration};
use monopod_api::labels;

/// The taint of every node of a pod: it keeps the pods of others away.
pub fn our_taint() -> Taint {
    Taint {
        key: labels::COMPUTE_TYPE.to_owned(),
        value: Some(labels::COMPUTE_TYPE_FARGATE.to_owned()),
        effect: "NoSchedule".to_owned(),
        time_added: None,
    }
}

/// Whether a pod with this toleration tolerates the taint. The operators `Lt` and `Gt` tolerate nothing, as long as
/// upstream has them behind a gate that is off.
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    let (key, effect) = (text(&toleration.key), text(&toleration.effect));
    let fits = match toleration.operator.as_deref() {
        Some("Exists") => key.is_empty() || key == taint.key,
        None | Some("" | "Equal") => {
            key == taint.key && text(&toleration.value) == text(&taint.value)
        }
        Some(_compares) => false,
    };
    fits && (effect.is_empty() || effect == taint.effect)
}

/// The taints for which a pod is evicted that does not tolerate them.
pub fn evicting(taints: &[Taint]) -> impl Iterator<Item = &Taint> {
    taints.iter().filter(|taint| taint.effect == "NoExecute")
}

/// How long after its node got these taints a pod is evicted; none if it stays. Of the tolerations that fit a taint
/// the first one counts, and of all taints the shortest time.
pub fn evicted_after(tolerations: &[Toleration], taints: &[Taint]) -> Option<SignedDuration> {
    evicting(taints)
        .filter_map(|taint| {
            match tolerations
                .iter()
                .find(|toleration| tolerates(toleration, taint))
            {
                Some(tolerated) => tolerated.toleration_seconds.map(|seconds| seconds.max(0)),
                None => Some(0),
            }
        })
        .min()
        .map(SignedDuration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn taint(key: &str, effect: &str) -> Taint {
        Taint {
            key: key.to_owned(),
            value: Some("v".to_owned()),
            effect: effect.to_owned(),
            time_added: None,
        }
    }

    fn after(tolerations: &Value, taints: &[Taint]) -> Option<i64> {
        let tolerations: Vec<Toleration> =
            serde_json::from_value(tolerations.clone()).expect("tolerations");
        evicted_after(&tolerations, taints).map(|after| after.as_secs())
    }

    #[test]
    fn a_toleration_fits_by_key_value_and_effect() {
        let cases = [
            (json!({"operator": "Exists"}), true),
            (json!({"operator": "Exists", "key": "k"}), true),
            (
                json!({"operator": "Exists", "key": "k", "effect": "NoExecute"}),
                true,
            ),
            (json!({"key": "k", "value": "v"}), true),
            (json!({"operator": "Equal", "key": "k", "value": "v"}), true),
            (json!({"operator": "Exists", "key": "other"}), false),
            (
                json!({"operator": "Exists", "key": "k", "effect": "NoSchedule"}),
                false,
            ),
            (json!({"key": "k"}), false),
            (json!({"key": "k", "value": "other"}), false),
            (json!({"value": "v"}), false),
            (json!({"operator": "Gt", "key": "k", "value": "v"}), false),
        ];
        for (toleration, fits) in cases {
            let parsed = serde_json::from_value(toleration.clone()).expect("a toleration");
            assert_eq!(
                tolerates(&parsed, &taint("k", "NoExecute")),
                fits,
                "{toleration}"
            );
        }
    }

    #[test]
    fn the_shortest_toleration_of_all_taints_counts() {
        let tolerations = json!([
            {"key": "ever", "operator": "Exists"},
            {"key": "short", "operator": "Exists", "tolerationSeconds": 10},
            {"key": "short", "operator": "Exists", "tolerationSeconds": 5},
            {"key": "long", "operator": "Exists", "tolerationSeconds": 300},
            {"key": "past", "operator": "Exists", "tolerationSeconds": -1},
        ]);
        let of = |keys: &[&str]| {
            let taints: Vec<Taint> = keys.iter().map(|key| taint(key, "NoExecute")).collect();
            after(&tolerations, &taints)
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&["ever"]), None);
        assert_eq!(of(&["long", "ever"]), Some(300));
        assert_eq!(of(&["long", "short"]), Some(10));
        assert_eq!(of(&["past", "long"]), Some(0));
        assert_eq!(of(&["long", "not tolerated"]), Some(0));
        assert_eq!(after(&json!([]), &[taint("k", "NoSchedule")]), None);
    }
}
