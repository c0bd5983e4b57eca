use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

const PREFIX: &str = "Pod not supported on Fargate: ";

fn pod(spec: &Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"namespace": "ns"}, "spec": spec})).expect("a pod")
}

fn claims() -> Claims {
    let bound = |driver: Option<&str>| Claim::Bound {
        volume: "pv-1".to_owned(),
        driver: driver.map(str::to_owned),
    };
    [
        ("waiting", Claim::Unbound),
        ("efs", bound(Some("efs.csi.aws.com"))),
        ("ebs", bound(Some("ebs.csi.aws.com"))),
        ("local", bound(None)),
    ]
    .map(|(name, claim)| (("ns".to_owned(), name.to_owned()), claim))
    .into()
}

/// The message, without what all have in common.
fn check(spec: &Value, allow: &Allowances) -> String {
    let found = violations(&pod(spec), &claims(), allow);
    if found.is_empty() {
        return String::new();
    }
    let message = monopod_api::messages::pod_not_supported(&found);
    message.strip_prefix(PREFIX).expect("begins so").to_owned()
}

fn with(context: &Value) -> Value {
    json!({"containers": [{"name": "c", "securityContext": context}]})
}

fn adding(names: &[&str]) -> Value {
    with(&json!({"capabilities": {"add": names}}))
}

fn mounting(source: &Value) -> Value {
    let mut volume = json!({"name": "v"});
    for (key, value) in source.as_object().expect("a volume source") {
        volume[key] = value.clone();
    }
    json!({"containers": [{"name": "c"}], "volumes": [volume]})
}

/// Messages as users pasted them from real clusters.
#[test]
fn real_events_are_reproduced() {
    let privileged = json!({"name": "c", "securityContext": {"privileged": true}});
    let reading = json!({"name": "a", "securityContext": {"capabilities": {"add": ["DAC_READ_SEARCH", "DAC_OVERRIDE"]}}});
    for (spec, expected) in [
        (json!({"containers": [{"name": "c"}]}), ""),
        (
            json!({"hostNetwork": true, "containers": [{"name": "c", "securityContext": {"privileged": true}, "ports": [{"containerPort": 1, "hostPort": 1}]}]}),
            "fields not supported: HostNetwork, invalid SecurityContext fields: Privileged, port contains HostIP or HostPort",
        ),
        (
            json!({"hostNetwork": true, "containers": [{"name": "c", "ports": [{"containerPort": 1, "hostPort": 1}]}]}),
            "fields not supported: HostNetwork, port contains HostIP or HostPort",
        ),
        (
            json!({"containers": [privileged], "volumes": [{"name": "x", "hostPath": {"path": "/"}}]}),
            "invalid SecurityContext fields: Privileged, volumes not supported: x is of an unsupported volume Type",
        ),
        (
            json!({"containers": [reading, reading]}),
            "invalid SecurityContext fields: Capabilities added: DAC_READ_SEARCH,Capabilities added: DAC_READ_SEARCH",
        ),
        (
            json!({"initContainers": [privileged], "containers": [privileged]}),
            "invalid SecurityContext fields: Privileged,Privileged",
        ),
        (
            json!({"hostNetwork": true, "hostPID": true, "hostIPC": true, "containers": []}),
            "fields not supported: HostNetwork, HostPID, HostIPC",
        ),
    ] {
        assert_eq!(check(&spec, &Allowances::default()), expected);
    }
}

#[test]
fn every_kind_of_volume_is_judged() {
    for kind in [
        json!({"emptyDir": {}}),
        json!({"secret": {"secretName": "s"}}),
        json!({"configMap": {"name": "c"}}),
        json!({"projected": {"sources": []}}),
        json!({"downwardAPI": {"items": []}}),
        json!({"nfs": {"server": "s", "path": "/"}}),
        json!({"persistentVolumeClaim": {"claimName": "efs"}}),
    ] {
        assert_eq!(
            check(&mounting(&kind), &Allowances::default()),
            "",
            "{kind}"
        );
    }
    for kind in [
        json!({"hostPath": {"path": "/"}}),
        json!({"csi": {"driver": "efs.csi.aws.com"}}),
        json!({"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}),
        json!({"awsElasticBlockStore": {"volumeID": "vol-1"}}),
        json!({"iscsi": {"targetPortal": "t", "iqn": "i", "lun": 0}}),
        json!({"image": {"reference": "r"}}),
        json!({"fc": {}}),
        // A type of a later Kubernetes version, which our types drop when they read the pod.
        json!({"quantumDisk": {}}),
    ] {
        assert_eq!(
            check(&mounting(&kind), &Allowances::default()),
            "volumes not supported: v is of an unsupported volume Type",
            "{kind}"
        );
    }
    for (claim, why) in [
        ("waiting", "PVC waiting not bound"),
        ("absent", "persistentvolumeclaim \"absent\" not found"),
        (
            "ebs",
            "PVC ebs bound to invalid PV pv-1 with CSI Driver: ebs.csi.aws.com",
        ),
        (
            "local",
            "PVC local bound to invalid PV pv-1 with nil CSI spec",
        ),
    ] {
        let spec = mounting(&json!({"persistentVolumeClaim": {"claimName": claim}}));
        assert_eq!(
            check(&spec, &Allowances::default()),
            format!("volumes not supported: v not supported because: {why}")
        );
    }
    let two = json!({"containers": [], "volumes": [
        {"name": "a", "hostPath": {"path": "/"}},
        {"name": "b", "persistentVolumeClaim": {"claimName": "waiting"}},
    ]});
    assert_eq!(
        check(&two, &Allowances::default()),
        "volumes not supported: a is of an unsupported volume Type, b not supported because: PVC waiting not bound"
    );
}

#[test]
fn a_claim_stands_for_the_volume_that_it_is_bound_to() {
    let volume: PersistentVolume = serde_json::from_value(json!({"metadata": {"name": "pv-1"},
        "spec": {"csi": {"driver": "ebs.csi.aws.com", "volumeHandle": "vol-1"}}}))
    .expect("a volume");
    let volumes = BTreeMap::from([("pv-1".to_owned(), volume)]);
    let read = |name: Option<&str>, phase: &str| {
        let value = json!({"metadata": {"name": "c"}, "spec": {"volumeName": name}, "status": {"phase": phase}});
        claim(&serde_json::from_value(value).expect("a claim"), &volumes)
    };
    let bound = Claim::Bound {
        volume: "pv-1".to_owned(),
        driver: Some("ebs.csi.aws.com".to_owned()),
    };
    assert_eq!(read(Some("pv-1"), "Bound"), bound);
    assert_eq!(read(Some("pv-1"), "Pending"), Claim::Unbound);
    assert_eq!(read(Some("pv-2"), "Bound"), Claim::Unbound);
    assert_eq!(read(None, "Pending"), Claim::Unbound);
}

#[test]
fn containers_of_every_kind_are_judged() {
    let gpu = json!({"limits": {"nvidia.com/gpu": "1", "cpu": "1"}, "requests": {"hugepages-2Mi": "4Mi"}});
    for (fields, expected) in [
        (
            json!({"securityContext": {"privileged": true}}),
            "invalid SecurityContext fields: Privileged",
        ),
        (
            json!({"securityContext": {"allowPrivilegeEscalation": true}}),
            "invalid SecurityContext fields: AllowPrivilegeEscalation",
        ),
        (
            json!({"securityContext": {"allowPrivilegeEscalation": false, "privileged": false}}),
            "",
        ),
        (
            json!({"volumeDevices": [{"name": "d", "devicePath": "/dev/d"}]}),
            "volumeDevices not supported",
        ),
        (
            json!({"ports": [{"containerPort": 80, "hostPort": 80}]}),
            "port contains HostIP or HostPort",
        ),
        (
            json!({"ports": [{"containerPort": 80, "hostIP": "10.0.0.1"}]}),
            "port contains HostIP or HostPort",
        ),
        (json!({"ports": [{"containerPort": 80, "hostIP": ""}]}), ""),
        (
            json!({ "resources": gpu }),
            "resources not supported: hugepages-2Mi, nvidia.com/gpu",
        ),
    ] {
        for list in ["containers", "initContainers", "ephemeralContainers"] {
            let mut container = fields.clone();
            container["name"] = json!("c");
            let mut spec = json!({"containers": [{"name": "main"}]});
            spec[list] = json!([container]);
            assert_eq!(
                check(&spec, &Allowances::default()),
                expected,
                "{list} {fields}"
            );
        }
    }
}

#[test]
fn capabilities_are_bare_names_of_the_default_set() {
    for (names, expected) in [
        (&["CHOWN", "NET_BIND_SERVICE", "SYS_CHROOT"][..], ""),
        (&["CAP_CHOWN"], "Capabilities added: CAP_CHOWN"),
        (&["ALL"], "Capabilities added: ALL"),
        (
            &["SYS_PTRACE", "KILL", "NET_ADMIN"],
            "Capabilities added: SYS_PTRACE, NET_ADMIN",
        ),
    ] {
        let expected = match expected {
            "" => String::new(),
            refused => format!("invalid SecurityContext fields: {refused}"),
        };
        assert_eq!(check(&adding(names), &Allowances::default()), expected);
    }
    let dropping = with(&json!({"capabilities": {"drop": ["ALL", "CAP_KILL"]}}));
    assert_eq!(check(&dropping, &Allowances::default()), "");
}

#[test]
fn a_profile_opens_what_it_names_and_nothing_else() {
    let allow = |value: Value| serde_json::from_value::<Allowances>(value).expect("allowances");
    let ptrace = allow(json!({"addedCapabilities": ["SYS_PTRACE"]}));
    assert_eq!(check(&adding(&["SYS_PTRACE"]), &ptrace), "");
    assert_eq!(
        check(&adding(&["SYS_PTRACE", "NET_ADMIN"]), &ptrace),
        "invalid SecurityContext fields: Capabilities added: NET_ADMIN"
    );
    let all = allow(json!({"addedCapabilities": ["ALL"]}));
    assert_eq!(check(&adding(&["SYS_ADMIN", "ALL"]), &all), "");
    assert_eq!(
        check(&adding(&["CAP_SYS_ADMIN"]), &all),
        "invalid SecurityContext fields: Capabilities added: CAP_SYS_ADMIN"
    );
    let escalating = with(&json!({"allowPrivilegeEscalation": true}));
    assert_eq!(
        check(&escalating, &allow(json!({"privilegeEscalation": true}))),
        ""
    );
    assert_ne!(check(&escalating, &all), "");

    let privileged = with(&json!({"privileged": true}));
    assert_eq!(check(&privileged, &allow(json!({"privileged": true}))), "");
    assert_ne!(check(&privileged, &all), "");
    let hosts = |port: Value| {
        json!({
            "hostNetwork": true, "hostPID": true, "hostIPC": true,
            "containers": [{"name": "c", "ports": [port]}],
        })
    };
    let namespaces = allow(json!({"hostNamespaces": true}));
    let own = json!({"containerPort": 80, "hostPort": 80});
    assert_eq!(check(&hosts(own.clone()), &namespaces), "");
    let refused = "port contains HostIP or HostPort";
    for other in [
        json!({"containerPort": 80, "hostPort": 81}),
        json!({"containerPort": 80, "hostPort": 80, "hostIP": "127.0.0.1"}),
    ] {
        assert_eq!(check(&hosts(other), &namespaces), refused);
    }
    let without = json!({"containers": [{"name": "c", "ports": [own]}]});
    assert_eq!(check(&without, &namespaces), refused);
}

#[test]
fn a_pod_of_a_daemon_set_is_refused() {
    let owned = |controller: bool| -> Pod {
        serde_json::from_value(json!({
            "metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": controller}]},
            "spec": {"containers": [{"name": "c"}]},
        }))
        .expect("a pod")
    };
    let judge = |pod: &Pod| violations(pod, &Claims::new(), &Allowances::default());
    assert_eq!(judge(&owned(true)), ["DaemonSet not supported"]);
    assert!(judge(&owned(false)).is_empty());
}

fn any_container() -> impl Strategy<Value = Value> {
    let context = (
        any::<bool>(),
        any::<bool>(),
        prop::sample::subsequence(vec!["CHOWN", "SYS_PTRACE", "CAP_KILL", "ALL"], 0..4),
    );
    let other = (any::<bool>(), any::<bool>(), any::<bool>());
    (context, other).prop_map(|((privileged, escalate, add), (host_port, gpu, device))| {
        let mut container = json!({"name": "c", "securityContext": {"privileged": privileged,
            "allowPrivilegeEscalation": escalate, "capabilities": {"add": add}}});
        if host_port {
            container["ports"] = json!([{"containerPort": 1, "hostPort": 1}]);
        }
        if gpu {
            container["resources"] = json!({"limits": {"nvidia.com/gpu": "1"}});
        }
        if device {
            container["volumeDevices"] = json!([{"name": "d", "devicePath": "/dev/d"}]);
        }
        container
    })
}

proptest! {
    /// The same containers in another order are refused in the same words.
    #[test]
    fn the_order_of_containers_makes_no_difference(
        (one, other) in prop::collection::vec(any_container(), 0..5).prop_flat_map(|list| (Just(list.clone()), Just(list).prop_shuffle())),
        (init, later) in prop::collection::vec(any_container(), 0..3).prop_flat_map(|list| (Just(list.clone()), Just(list).prop_shuffle())),
    ) {
        let judge = |init: &[Value], list: &[Value]| check(&json!({"initContainers": init, "containers": list}), &Allowances::default());
        prop_assert_eq!(judge(&init, &one), judge(&later, &other));
    }

    /// What a profile allows is never refused more, and without it nothing more is let in.
    #[test]
    fn allowances_only_open(containers in prop::collection::vec(any_container(), 0..4), privilege_escalation: bool, all: bool, privileged: bool, host_namespaces: bool) {
        let added_capabilities = if all { vec!["ALL".to_owned()] } else { Vec::new() };
        let allow = Allowances { added_capabilities, privilege_escalation, privileged, host_namespaces };
        let spec = json!({ "hostNetwork": host_namespaces, "containers": containers });
        let (strict, open) = (check(&spec, &Allowances::default()), check(&spec, &allow));
        prop_assert!(open.len() <= strict.len(), "{strict:?} became {open:?}");
        prop_assert!(allow != Allowances::default() || strict == open);
    }
}
