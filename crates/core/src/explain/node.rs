//! What is said of a pod's node, and when the pod is evicted for it.

use crate::taints::{evicted_after, evicting};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod};

/// What is in a pod's way that has to do with its node, and what comes next for that.
pub(super) struct Trouble {
    pub(super) because: Vec<String>,
    pub(super) next: String,
}

/// What is wrong with the node of this name, if anything is. `host` is the machine that its VM is on.
pub(super) fn trouble(pod: &Pod, name: &str, node: Option<&Node>, host: &str) -> Option<Trouble> {
    let Some(node) = node else {
        return Some(Trouble {
            because: vec![format!("Its node {name} is not there.")],
            next: format!(
                "The node makes itself again within a minute, if its VM runs: `monopod status` shows whether host {host} is there."
            ),
        });
    };
    let silence = silence(node);
    let eviction = eviction(pod, node);
    if silence.is_none() && eviction.is_none() {
        return None;
    }
    let next = if silence.is_some() {
        format!(
            "Its node says that it is ready as soon as it can: `monopod status` shows whether host {host} is there. If the pod is evicted, its controller, if it has one, makes a new one."
        )
    } else {
        format!(
            "Who tainted the node can take that back: `kubectl describe node {name}` shows its taints. If the pod is evicted, its controller, if it has one, makes a new one."
        )
    };
    Some(Trouble {
        because: silence.into_iter().chain(eviction).collect(),
        next,
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

/// When the pod is evicted for the taints of its node.
fn eviction(pod: &Pod, node: &Node) -> Option<String> {
    let taints = node.spec.as_ref()?.taints.as_deref().unwrap_or_default();
    let tolerations = pod.spec.as_ref()?.tolerations.as_deref();
    let after = evicted_after(tolerations.unwrap_or_default(), taints)?;
    let since: Option<Timestamp> = evicting(taints)
        .filter_map(|taint| taint.time_added.as_ref())
        .map(|time| time.0)
        .min();
    let keys: Vec<&str> = evicting(taints).map(|taint| taint.key.as_str()).collect();
    let keys = keys.join(", ");
    let when = match since {
        _ if after.is_zero() => "now".to_owned(),
        // No calendar has what lies beyond.
        Some(since) => format!("at {:.0}", since.checked_add(after).ok()?),
        None => format!("{} s after it was", after.as_secs()),
    };
    Some(format!(
        "Its node is tainted with {keys}: unless that ends before, the pod is evicted {when}."
    ))
}
