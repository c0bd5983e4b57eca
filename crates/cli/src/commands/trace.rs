//! `monopod trace`: a pod's start, step by step.

use super::status::Output;
use crate::cluster::client;
use crate::settings::Layout;
use anyhow::{Context, bail};
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use monopod_api::environment::Environment;
use monopod_api::{labels, names};
use monopod_core::timeline::{Row, waterfall};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Characters of the bars: with the columns before them a line fits a terminal of 100.
const BARS: usize = 56;

#[derive(Args, Debug)]
pub(crate) struct Trace {
    /// The pod's name
    pod: String,
    /// The pod's namespace
    #[arg(short, long, default_value = "default")]
    namespace: String,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Trace {
    pub(crate) async fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let Self {
            pod,
            namespace,
            output,
        } = self;
        let environment = find(layout, &namespace, &pod).await?;
        let status = environment.status.clone().unwrap_or_default();
        let rows = waterfall(&status.timeline, BARS);
        if rows.is_empty() {
            bail!(
                "nothing is known of the start of pod {namespace}/{pod} yet (its environment is {:?}); see `monopod status`",
                status.phase
            );
        }
        let title = format!(
            "{namespace}/{pod} on {}, {}, environment {}: {:?}",
            environment.spec.node,
            environment.spec.size,
            environment.name_any(),
            status.phase
        );
        match output {
            Output::Json => println!("{:#}", json(&environment, &rows)),
            Output::Table => println!("{title}\n\n{}", table(&rows).join("\n")),
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The pod's environment, or why there is none.
async fn find(layout: &Layout, namespace: &str, name: &str) -> anyhow::Result<Environment> {
    let admin = client::connect(&layout.kubeconfig("admin")).await?;
    let pods: Api<Pod> = Api::namespaced(admin.clone(), namespace);
    let pod = pods.get_opt(name).await?.with_context(|| {
        format!(
            "there is no pod {namespace}/{name}: a trace is kept as long as its pod; see `monopod kubectl get pods -n {namespace}`"
        )
    })?;
    let environments: Api<Environment> = Api::all(admin);
    let environment = names::environment(&pod.uid().unwrap_or_default());
    if let Some(found) = environments.get_opt(&environment).await? {
        return Ok(found);
    }
    let scheduler = pod.spec.and_then(|spec| spec.scheduler_name);
    if scheduler.as_deref() == Some(labels::SCHEDULER_NAME) {
        bail!(
            "pod {namespace}/{name} has no environment yet; `monopod kubectl describe pod -n {namespace} {name}` says what it waits for"
        );
    }
    bail!(
        "pod {namespace}/{name} was never Monopod's: no Fargate profile selected it; `monopod profile match` tells why"
    )
}

fn total(rows: &[Row]) -> f64 {
    let ends = rows.iter().map(|row| row.start_ms + row.duration_ms);
    ends.fold(0.0, f64::max)
}

fn json(environment: &Environment, rows: &[Row]) -> Value {
    let steps: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "step": row.step, "detail": row.detail,
                "startMs": row.start_ms, "durationMs": row.duration_ms,
            })
        })
        .collect();
    json!({
        "namespace": environment.spec.pod.namespace, "pod": environment.spec.pod.name,
        "environment": environment.name_any(), "node": environment.spec.node,
        "phase": environment.status.as_ref().map(|status| status.phase),
        "totalMs": total(rows), "steps": steps,
    })
}

fn table(rows: &[Row]) -> Vec<String> {
    let header = format!("{:<18} {:>9} {:>9}", "STEP", "START", "TOOK");
    let lines = rows.iter().map(|row| {
        let (before, length) = row.bar;
        let line = format!(
            "{:<18} {:>9} {:>9}  {}{}",
            row.step.name(),
            time(row.start_ms),
            time(row.duration_ms),
            " ".repeat(before),
            "█".repeat(length),
        );
        match &row.detail {
            Some(detail) => format!("{line} {detail}"),
            None => line,
        }
    });
    let total = format!("{:<18} {:>9} {:>9}", "total", "", time(total(rows)));
    std::iter::once(header)
        .chain(lines)
        .chain([total])
        .collect()
}

/// Milliseconds with what is worth reading of them.
fn time(milliseconds: f64) -> String {
    if milliseconds < 1000.0 {
        format!("{milliseconds:.1} ms")
    } else {
        format!("{:.2} s", milliseconds / 1000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use monopod_api::timeline::Step;

    #[test]
    fn a_line_has_the_step_its_times_and_its_bar() {
        let row = |step, detail: Option<&str>, start_ms, duration_ms, bar| Row {
            step,
            detail: detail.map(str::to_owned),
            start_ms,
            duration_ms,
            bar,
        };
        let rows = [
            row(Step::Request, None, 0.0, 12.34, (0, 1)),
            row(Step::Image, Some("busybox"), 12.34, 1487.66, (1, 4)),
        ];
        assert_eq!(
            table(&rows),
            [
                "STEP                   START      TOOK",
                "request               0.0 ms   12.3 ms  █",
                "image                12.3 ms    1.49 s   ████ busybox",
                "total                           1.50 s",
            ]
        );
    }
}
