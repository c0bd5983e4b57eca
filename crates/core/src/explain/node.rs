//! What is said of a pod's node, and when the pod is evicted for it.

use crate::taints::evictions;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod};

/// What is in a pod's way that has to do with its node, and what comes next for that.
pub(super) struct Trouble {
    pub(super) because: Vec<String>,
    pub(super) next: String,
}

/// What is wrong with the node of this name, if anything is. `host` is the machine that its VM is on.
pub(super) fn trouble(
    pod: &Pod,
    name: &str,
    node: Option<&Node>,
    host: Option<&str>,
    now: Timestamp,
) -> Option<Trouble> {
    let look = host.map_or_else(
        || "It has no environment any more, so that it fails within seconds.".to_owned(),
        |host| format!("`monopod status` shows whether host {host} is there."),
    );
    let Some(node) = node else {
        return Some(Trouble {
            because: vec![format!(
                "Its node {name} is not there: Kubernetes deletes a pod that is on no node within the minute."
            )],
            next: format!("Its VM makes the node again within seconds, if it can. {look}"),
        });
    };
    let silence = silence(node);
    let evictions = evictions_of(pod, node, now);
    let next = match (&silence, evictions.is_empty()) {
        (None, true) => return None,
        (Some(_), _) => format!("Its node says that it is ready as soon as it can. {look}"),
        (None, false) => format!(
            "Who tainted the node can take that back: `kubectl describe node {name}` shows its taints."
        ),
    };
    Some(Trouble {
        because: silence.into_iter().chain(evictions).collect(),
        next: format!("{next} If it is evicted, its controller, if it has one, makes a new pod."),
    })
}

/// What Kubernetes says of a node that it does not hear of.
fn silence(node: &Node) -> Option<String> {
    let conditions = node
        .status
        .iter()
        .flat_map(|s| s.conditions.iter().flatten());
    let ready = conditions
        .into_iter()
        .find(|condition| condition.type_ == "Ready");
    let NodeCondition {
        status,
        message,
        last_transition_time,
        ..
    } = match ready {
        Some(ready) if ready.status == "True" => return None,
        Some(ready) => ready,
        None => return Some("Its node has not said that it is ready.".to_owned()),
    };
    let is = match status.as_str() {
        "Unknown" => "is silent",
        _said => "is not ready",
    };
    let since = last_transition_time
        .as_ref()
        .map_or_else(String::new, |time| format!(" since {:.0}", time.0));
    let message = message
        .iter()
        .filter(|message| !message.is_empty())
        .map(|message| format!(": {message}"));
    Some(format!(
        "Its node {is}{since}{}",
        message.collect::<String>()
    ))
}

/// When the pod is evicted for each taint of its node. That is about so: Kubernetes counts from when its controller saw
/// the taint, or one before it that it has not taken back.
fn evictions_of(pod: &Pod, node: &Node, now: Timestamp) -> Vec<String> {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref());
    let tolerations = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.tolerations.as_deref());
    evictions(tolerations.unwrap_or_default(), taints.unwrap_or_default())
        .map(|(taint, after)| {
            let since = taint.time_added.as_ref().map(|time| time.0);
            let when = match since.map(|since| since.checked_add(after)) {
                _ if after.is_zero() => "is evicted now".to_owned(),
                Some(Ok(at)) if at <= now => "is evicted now".to_owned(),
                Some(Ok(at)) => format!("is evicted at about {at:.0}, unless that ends before"),
                // No time is known, or no calendar has it.
                _unknown => format!(
                    "is evicted {} s after it was, unless that ends before",
                    after.as_secs()
                ),
            };
            format!("Its node is tainted with {}: the pod {when}.", taint.key)
        })
        .collect()
}
