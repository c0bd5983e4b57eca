//! What a user does, on a real cluster with real VMs. One cluster, one namespace per check.

mod admission;
mod apps;
mod byhand;
mod causes;
mod control;
mod dns;
mod doctor;
mod iam;
mod identity;
mod inside;
mod lifecycle;
mod limits;
mod logs;
mod metrics;
mod pods;
mod probes;
mod profiles;
mod registry;
mod rights;
mod services;
mod teardown;
mod trace;
mod upgrade;

use monopod_testkit::{Check, Cluster, number, run};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;

/// A VM's cold boot and a container's start, on two busy cores under emulation.
const START: Duration = Duration::from_secs(90);

const CHECKS: &[Check] = &[
    (
        "admission::a_matching_pod_is_changed_before_it_is_stored",
        admission::matching,
    ),
    (
        "admission::a_pod_outside_the_contract_is_told_why",
        admission::contract,
    ),
    (
        "admission::bad_objects_are_refused_by_name",
        admission::refusals,
    ),
    (
        "profiles::a_role_must_exist_and_trust_its_profiles",
        profiles::roles,
    ),
    (
        "profiles::the_webhook_is_asked_only_about_their_namespaces",
        profiles::webhook,
    ),
    (
        "profiles::a_refused_pod_is_looked_at_again",
        profiles::refusals,
    ),
    (
        "profiles::a_profile_opens_changes_and_drains",
        profiles::life,
    ),
    (
        "iam::a_pods_sdk_assumes_its_service_accounts_role",
        iam::role,
    ),
    (
        "identity::only_the_scheduler_binds_to_fargate_nodes",
        identity::binding,
    ),
    (
        "identity::certificates_go_to_the_environments_host_only",
        identity::certificates,
    ),
    (
        "identity::a_host_writes_only_its_own_objects",
        identity::hosts,
    ),
    (
        "identity::a_guest_is_its_own_node_and_nothing_more",
        identity::guest,
    ),
    (
        "pods::a_deployment_of_three_gets_three_nodes",
        pods::deployment,
    ),
    ("pods::exec_and_logs", pods::exec_and_logs),
    (
        "pods::volumes_environment_and_several_containers",
        pods::volumes,
    ),
    (
        "limits::a_pod_gets_its_size_and_the_host_says_what_it_limits",
        limits::limits,
    ),
    (
        "limits::a_pods_own_limits_and_runtime_class_hold",
        limits::of_the_pod,
    ),
    (
        "inside::containers_share_their_processes_with_nobody_else",
        inside::shared_processes,
    ),
    (
        "inside::what_a_profile_opens_works_and_the_platform_stays_closed",
        inside::opened,
    ),
    (
        "pods::security_groups_deny_what_they_do_not_allow",
        pods::security_groups,
    ),
    (
        "doctor::what_is_wrong_is_found_with_its_remedy",
        doctor::doctor,
    ),
    ("doctor::a_pod_that_waits_is_told_why", doctor::waiting),
    ("causes::a_pod_starts_by_itself_once_it_can", causes::go),
    ("trace::each_step_of_a_start_is_kept", trace::start),
    (
        "metrics::alerts_are_about_what_is_exported",
        metrics::exported,
    ),
    ("metrics::what_happens_is_counted", metrics::counted),
    (
        "metrics::a_start_that_fails_is_counted_and_tried_again",
        metrics::retried,
    ),
    ("trace::a_pod_without_a_trace_is_told_apart", trace::nothing),
    (
        "services::addresses_lead_to_pods_as_on_any_node",
        services::cluster_ip,
    ),
    (
        "services::the_api_server_answers_at_its_service",
        services::api_server,
    ),
    ("dns::names_are_those_of_the_cluster", dns::names),
    ("dns::the_pod_chooses_its_policy", dns::policies),
    ("dns::names_resolve_while_coredns_is_replaced", dns::heals),
    (
        "apps::two_tiers_roll_out_and_scale_without_a_failed_request",
        apps::two_tiers,
    ),
    ("apps::a_cron_job_runs_on_time", apps::cron_job),
    ("apps::helm_installs_upgrades_and_removes", apps::helm),
    ("pods::a_job_completes_and_frees_its_vm", pods::job),
    (
        "pods::a_crashing_container_is_restarted_with_back_off",
        pods::crash_loop,
    ),
    (
        "pods::a_missing_image_is_named_and_runs_once_it_is_loaded",
        pods::missing_image,
    ),
    (
        "probes::probes_hooks_sidecars_and_gates_are_as_a_kubelets",
        probes::probes,
    ),
    (
        "registry::a_public_image_is_pulled_once_and_told",
        registry::public,
    ),
    (
        "registry::a_private_image_heals_with_its_secret_and_needs_proof",
        registry::private,
    ),
    (
        "registry::a_roles_credentials_pull_and_stay_the_platforms",
        registry::role,
    ),
    (
        "identity::only_the_api_server_may_ask_the_webhook",
        identity::webhook,
    ),
    (
        "identity::a_second_pod_on_a_node_never_runs",
        identity::second_pod,
    ),
    (
        "lifecycle::a_pod_deleted_while_its_vm_boots_leaves_nothing",
        lifecycle::deleted_while_booting,
    ),
    (
        "lifecycle::control_killed_between_nomination_and_binding",
        lifecycle::control_killed,
    ),
    (
        "control::another_acts_within_15_seconds",
        control::takes_turns,
    ),
    (
        "lifecycle::a_vm_that_dies_fails_its_pod",
        lifecycle::vm_dies,
    ),
    (
        "lifecycle::a_restarted_host_adopts_its_vms",
        lifecycle::host_restarts,
    ),
    (
        "lifecycle::a_deleted_pod_honours_its_grace_period_and_leaves_nothing",
        lifecycle::deletion,
    ),
    (
        "byhand::what_is_deleted_under_a_pod_comes_back",
        byhand::repaired,
    ),
    (
        "byhand::the_node_of_a_finished_pod_stays_ready",
        byhand::finished,
    ),
    (
        "byhand::what_cannot_come_back_ends_the_pod_with_a_reason",
        byhand::retired,
    ),
    (
        "logs::a_finished_pod_keeps_its_logs_without_its_vm",
        logs::finished,
    ),
    (
        "logs::the_last_output_is_there_however_a_container_ended",
        logs::last_output,
    ),
    ("logs::a_flood_slows_only_its_own_pod", logs::flood),
    (
        "logs::whatever_ends_a_finished_pod_leaves_nothing",
        logs::leaves_nothing,
    ),
    (
        "logs::after_down_and_up_lost_pods_have_ended_and_keep_their_logs",
        logs::down_and_up,
    ),
    (
        "lifecycle::pods_go_on_while_everything_else_is_replaced",
        upgrade::handed_over,
    ),
    (
        "lifecycle::up_goes_on_where_a_supervisor_was_killed",
        lifecycle::supervisor_killed,
    ),
    (
        "lifecycle::up_again_finds_the_same_pods",
        lifecycle::up_again,
    ),
    ("rights::none_is_without_use", rights::minimal),
];

fn main() -> ExitCode {
    if run(
        || Cluster::up_with(number(0), &["--audit-policy", rights::POLICY]),
        CHECKS,
        ("teardown::down_leaves_nothing_behind", teardown::down),
    ) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A pod of busybox that runs a shell script.
fn shell_pod(namespace: &str, name: &str, script: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 2,
            "containers": [{"name": "main", "image": "monopod.local/busybox", "command": ["sh", "-c", script]}],
        },
    })
}

/// A namespace that a profile of its own selects.
fn namespace(cluster: &Cluster, name: &str) {
    cluster.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}));
    cluster.apply(&json!({
        "apiVersion": "monopod.dev/v1alpha1", "kind": "FargateProfile", "metadata": {"name": format!("fp-{name}")},
        "spec": {"podExecutionRole": "default", "selectors": [{"namespace": name}]},
    }));
    monopod_testkit::wait("the profile is ACTIVE", Duration::from_secs(10), || {
        let profile = cluster
            .get("", "fargateprofile", &format!("fp-{name}"))
            .unwrap_or_default();
        if profile["status"]["status"] == "ACTIVE" {
            Ok(())
        } else {
            Err(profile.to_string())
        }
    });
    monopod_testkit::wait(
        "the namespace has its service account",
        Duration::from_secs(10),
        || {
            cluster
                .get(name, "serviceaccount", "default")
                .map(drop)
                .ok_or_else(String::new)
        },
    );
}

/// A pod of Python that sleeps, for `python` to ask from.
fn python_pod(namespace: &str, name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "main", "image": "monopod.local/python", "imagePullPolicy": "IfNotPresent",
                "command": ["sleep", "100000"]}],
        },
    })
}

/// Runs a Python program in a pod and gives what it printed.
#[track_caller]
fn python(cluster: &Cluster, namespace: &str, pod: &str, program: &str) -> String {
    cluster.kubectl(&["exec", "-n", namespace, pod, "--", "python3", "-c", program])
}

fn event_messages(cluster: &Cluster, namespace: &str, pod: &str, reason: &str) -> Vec<String> {
    cluster
        .list(namespace, "events")
        .iter()
        .filter(|e| e["involvedObject"]["name"] == pod && e["reason"] == reason)
        .filter_map(|e| e["message"].as_str().map(str::to_owned))
        .collect()
}
