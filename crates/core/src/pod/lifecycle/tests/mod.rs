//! Scenarios and random histories, played on a stage that stands for the node.

mod histories;
mod order;
mod probes_and_hooks;

use super::*;
use crate::pod::status::{View, phase, status};
use jiff::SignedDuration;
use proptest::prelude::*;
use serde_json::json;

fn at(second: i64) -> Timestamp {
    Timestamp::UNIX_EPOCH + SignedDuration::from_secs(second)
}

fn pod(policy: &str, spec: serde_json::Value) -> Pod {
    let mut spec = spec;
    spec["restartPolicy"] = json!(policy);
    spec["terminationGracePeriodSeconds"] = json!(30);
    serde_json::from_value(
        json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": spec}),
    )
    .unwrap()
}

fn one(policy: &str) -> Pod {
    pod(policy, json!({"containers": [{"name": "c", "image": "i"}]}))
}

fn images() -> BTreeMap<String, Image> {
    BTreeMap::from([(
        "i".to_owned(),
        Image::Present {
            id: "docker.io/library/i@sha256:1".to_owned(),
            pulled: None,
        },
    )])
}

struct Scene {
    pod: Pod,
    images: BTreeMap<String, Image>,
    state: PodState,
}

impl Scene {
    fn new(pod: Pod) -> Self {
        Self {
            state: PodState::new(&pod, at(0)),
            images: images(),
            pod,
        }
    }

    /// Starts, stops and the finish; events are left out.
    fn step(&mut self, second: i64) -> Vec<String> {
        let desired = Desired {
            pod: &self.pod,
            images: &self.images,
            prepared: true,
        };
        let decision = step(&mut self.state, &desired, at(second));
        assert_eq!(
            step(&mut self.state, &desired, at(second)).effects,
            [],
            "a step is idempotent"
        );
        decision
            .effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Start { container, attempt } => {
                    Some(format!("start {container} {attempt}"))
                }
                Effect::Stop {
                    container,
                    grace_seconds,
                    held,
                } => {
                    let held = if *held { " held" } else { "" };
                    Some(format!("stop {container} {grace_seconds}{held}"))
                }
                Effect::Release { container } => Some(format!("release {container}")),
                Effect::Kill { container } => Some(format!("kill {container}")),
                Effect::Finish { cause } => Some(format!("finish {cause:?}")),
                Effect::Event(_) => None,
            })
            .collect()
    }

    fn started(&mut self, name: &str, second: i64) {
        let observation = Observation::Started {
            container: name.to_owned(),
            id: format!("{name}-id"),
        };
        observe(&mut self.state, &self.pod, observation, at(second));
    }

    fn observe(&mut self, observation: Observation, second: i64) {
        observe(&mut self.state, &self.pod, observation, at(second));
    }

    fn signalled(&mut self, name: &str, second: i64) {
        let container = name.to_owned();
        self.observe(Observation::Signalled { container }, second);
    }

    fn unhealthy(&mut self, name: &str, why: Unhealthy, second: i64) {
        let container = name.to_owned();
        self.observe(Observation::Unhealthy { container, why }, second);
    }

    fn condition(&self, kind: &str) -> (String, Option<String>) {
        let conditions = self.status().conditions.unwrap();
        let condition = conditions.into_iter().find(|c| c.type_ == kind).unwrap();
        (condition.status, condition.reason)
    }

    fn exited(&mut self, name: &str, code: i32, second: i64) -> Vec<Event> {
        let exit = exit(code, second);
        observe(
            &mut self.state,
            &self.pod,
            Observation::Exited {
                container: name.to_owned(),
                exit,
            },
            at(second),
        )
    }

    fn delete(&mut self, grace: i64) {
        self.pod.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(0)));
        self.pod.metadata.deletion_grace_period_seconds = Some(grace);
    }

    fn status(&self) -> k8s_openapi::api::core::v1::PodStatus {
        status(
            &View {
                pod: &self.pod,
                images: &self.images,
                address: "10.0.0.1",
                prepared: true,
            },
            &self.state,
            None,
            at(0),
        )
    }

    fn waiting(&self, index: usize) -> Option<String> {
        self.status().container_statuses?[index]
            .state
            .clone()?
            .waiting?
            .reason
    }
}

fn exit(code: i32, second: i64) -> Exit {
    Exit {
        id: "x".to_owned(),
        code,
        signal: None,
        reason: if code == 0 { "Completed" } else { "Error" }.to_owned(),
        message: None,
        started_at: Some(at(second)),
        finished_at: at(second),
    }
}
