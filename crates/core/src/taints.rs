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

/// Whether a pod with this toleration tolerates the taint. An API server takes none without a key but with `Exists`. The operators `Lt` and `Gt` tolerate nothing, as long as
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

/// The taints for which a pod is evicted, each with how long it may stay beside it: nothing if it does not tolerate
/// it. Of the tolerations that fit a taint the first one counts.
pub fn evictions<'a>(
    tolerations: &'a [Toleration],
    taints: &'a [Taint],
) -> impl Iterator<Item = (&'a Taint, SignedDuration)> {
    taints
        .iter()
        .filter(|taint| taint.effect == "NoExecute")
        .filter_map(|taint| {
            let tolerated = tolerations
                .iter()
                .find(|toleration| tolerates(toleration, taint));
            let seconds = tolerated.map_or(Some(0), |tolerated| tolerated.toleration_seconds)?;
            Some((taint, SignedDuration::from_secs(seconds.max(0))))
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn taint(key: &str, effect: &str) -> Taint {
        Taint {
            key: key.to_owned(),
            value: Some("v".to_owned()),
            effect: effect.to_owned(),
            time_added: None,
        }
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
    fn the_first_toleration_that_fits_says_how_long_a_pod_stays() {
        let tolerations: Vec<Toleration> = serde_json::from_value(json!([
            {"key": "ever", "operator": "Exists"},
            {"key": "short", "operator": "Exists", "tolerationSeconds": 10},
            {"key": "short", "operator": "Exists", "tolerationSeconds": 5},
            {"key": "past", "operator": "Exists", "tolerationSeconds": -1},
        ]))
        .expect("tolerations");
        let taints = ["ever", "short", "past", "other"].map(|key| taint(key, "NoExecute"));
        let all = [&taints[..], &[taint("other", "NoSchedule")]].concat();
        let found: Vec<(&str, i64)> = evictions(&tolerations, &all)
            .map(|(taint, after)| (taint.key.as_str(), after.as_secs()))
            .collect();
        assert_eq!(found, [("short", 10), ("past", 0), ("other", 0)]);
    }
}
