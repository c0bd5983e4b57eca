//! Whether a certificate request for a node or a host may be approved.
//!
//! The host makes key and requests for exactly the node that an Environment names. Nobody else is
//! given one: not another host, not a guest, not a pod, whatever the request says. A machine is given
//! a host's certificate once, for the name that its token was made for, and then renews it itself.

use k8s_openapi::api::certificates::v1::CertificateSigningRequestSpec;
use monopod_api::environment::Environment;
use monopod_api::labels;

/// Signer of the certificates with which kubelets call the API server.
pub const CLIENT_SIGNER: &str = "kubernetes.io/kube-apiserver-client-kubelet";
/// Signer of the certificates with which kubelets serve.
pub const SERVING_SIGNER: &str = "kubernetes.io/kubelet-serving";
/// Signer of the certificates of hosts.
pub const HOST_SIGNER: &str = "kubernetes.io/kube-apiserver-client";
/// Seconds that a node's certificate lasts, unless the cluster signs for less.
pub const LIFETIME_SECONDS: i32 = 3600;

/// What the PKCS #10 request in a certificate request says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Requested {
    /// Common names of the subject.
    pub common_names: Vec<String>,
    /// Organizations of the subject.
    pub organizations: Vec<String>,
    /// IP addresses among the alternative names.
    pub addresses: Vec<std::net::IpAddr>,
    /// How many other alternative names there are (DNS, URI, mail, …).
    pub other_names: usize,
}

/// What to do about a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Not for our signers and nodes; somebody else's business.
    NotOurs,
    /// Exactly what an Environment's host may ask for.
    Approve,
    /// Refused, for this reason.
    Deny(String),
}

/// A token with which one machine joins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Invitation {
    /// The host that it is for.
    pub host: String,
    /// The request that was approved for it.
    pub used_by: Option<String>,
}

/// The id of the token by which a request for a host's certificate was made; none if it is not one.
pub fn invited(spec: &CertificateSigningRequestSpec) -> Option<&str> {
    asked_by(spec, labels::INVITED_GROUP, labels::BOOTSTRAP_USER_PREFIX)
}

/// Who of a group asks for a host's certificate, without the prefix of the group's users.
fn asked_by<'a>(
    spec: &'a CertificateSigningRequestSpec,
    group: &str,
    prefix: &str,
) -> Option<&'a str> {
    let user = spec.username.as_deref()?;
    let groups = spec.groups.as_deref().unwrap_or_default();
    (spec.signer_name == HOST_SIGNER && groups.iter().any(|g| g == group))
        .then(|| user.strip_prefix(prefix))
        .flatten()
}

/// Judges a request by who has a token. `uid` is the request's.
pub fn judge_host(
    uid: &str,
    spec: &CertificateSigningRequestSpec,
    requested: &Requested,
    invitation: Option<&Invitation>,
) -> Verdict {
    let deny = |reason: String| Verdict::Deny(reason);
    let Some(Invitation { host, used_by }) = invitation else {
        return deny(
            "there is no such token any more; make another with `monopod host token NAME`"
                .to_owned(),
        );
    };
    if used_by.as_deref().is_some_and(|used| used != uid) {
        return deny(format!(
            "the token was used already; make another with `monopod host token {host}`"
        ));
    }
    if requested.common_names != [format!("{}{host}", labels::HOST_USER_PREFIX)] {
        return deny(format!("the token is for the host {host} and no other"));
    }
    judge_form(spec, requested)
}

/// The name of the host that asks for a host's certificate itself; none if no host asks for one.
pub fn renewing(spec: &CertificateSigningRequestSpec) -> Option<&str> {
    asked_by(spec, labels::HOSTS_GROUP, labels::HOST_USER_PREFIX)
}

/// Judges a host's request by its name, and whether the cluster has it as a host.
pub fn judge_renewal(
    host: &str,
    is_member: bool,
    spec: &CertificateSigningRequestSpec,
    requested: &Requested,
) -> Verdict {
    if !is_member {
        return Verdict::Deny(format!(
            "there is no host {host} any more; join again with a token of `monopod host token {host}`"
        ));
    }
    if requested.common_names != [format!("{}{host}", labels::HOST_USER_PREFIX)] {
        return Verdict::Deny(format!(
            "the host {host} may renew its own certificate only"
        ));
    }
    judge_form(spec, requested)
}

/// Whether a request is for what hosts have, whoever's name it has.
fn judge_form(spec: &CertificateSigningRequestSpec, requested: &Requested) -> Verdict {
    let deny = |reason: String| Verdict::Deny(reason);
    if requested.organizations != [labels::HOSTS_GROUP] {
        return deny(format!(
            "the organization must be exactly {}",
            labels::HOSTS_GROUP
        ));
    }
    if requested.other_names != 0 || !requested.addresses.is_empty() {
        return deny("a host's certificate has no alternative names".to_owned());
    }
    if usages(spec) != CLIENT_USAGES {
        return deny("the usages must be digital signature and client auth".to_owned());
    }
    Verdict::Approve
}

/// A certificate that is good for nothing but calling the API server.
const CLIENT_USAGES: [&str; 2] = ["client auth", "digital signature"];

/// What a certificate is to be good for, in alphabetical order.
fn usages(spec: &CertificateSigningRequestSpec) -> Vec<&str> {
    let mut usages: Vec<&str> = spec.usages.iter().flatten().map(String::as_str).collect();
    usages.sort_unstable();
    usages
}

/// Judges a request. `environment` is the one whose node the subject names, if there is one.
pub fn judge(
    spec: &CertificateSigningRequestSpec,
    requested: &Requested,
    environment: Option<&Environment>,
) -> Verdict {
    let serving = match spec.signer_name.as_str() {
        CLIENT_SIGNER => false,
        SERVING_SIGNER => true,
        _other => return Verdict::NotOurs,
    };
    let [common_name] = requested.common_names.as_slice() else {
        return Verdict::NotOurs;
    };
    let Some(node) = common_name
        .strip_prefix("system:node:")
        .filter(|n| monopod_api::names::is_fargate_node(n))
    else {
        return Verdict::NotOurs;
    };
    let deny = |reason: &str| Verdict::Deny(format!("{reason} (node {node})"));
    let Some(environment) = environment.filter(|e| e.spec.node == node) else {
        return deny("no environment has this node");
    };
    if environment.metadata.deletion_timestamp.is_some() {
        return deny("the environment is being released");
    }
    let requestor = spec.username.as_deref().unwrap_or_default();
    if requestor.strip_prefix(labels::HOST_USER_PREFIX) != Some(environment.spec.host.as_str()) {
        return deny("only the environment's host may ask");
    }
    let groups = spec.groups.as_deref().unwrap_or_default();
    if groups.iter().any(|group| group == "system:nodes")
        || !groups.iter().any(|g| g == labels::HOSTS_GROUP)
    {
        return deny("a node may not ask for certificates of a node");
    }
    if requested.organizations != ["system:nodes"] {
        return deny("the organization must be exactly system:nodes");
    }
    if serving {
        let address = environment.spec.address.parse::<std::net::IpAddr>().ok();
        if requested.other_names != 0 || address.is_none_or(|a| requested.addresses != [a]) {
            return deny("the alternative names must be exactly the node's address");
        }
        if usages(spec) != ["digital signature", "server auth"] {
            return deny("the usages must be digital signature and server auth");
        }
    } else {
        if requested.other_names != 0 || !requested.addresses.is_empty() {
            return deny("a client certificate has no alternative names");
        }
        if usages(spec) != CLIENT_USAGES {
            return deny("the usages must be digital signature and client auth");
        }
    }
    Verdict::Approve
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn request(serving: bool) -> (CertificateSigningRequestSpec, Requested) {
        let environment = testing::environment("uid-1");
        let spec = CertificateSigningRequestSpec {
            signer_name: if serving {
                SERVING_SIGNER
            } else {
                CLIENT_SIGNER
            }
            .to_owned(),
            username: Some("monopod:host:host-1".to_owned()),
            groups: Some(vec![
                "monopod:hosts".to_owned(),
                "system:authenticated".to_owned(),
            ]),
            usages: Some(vec![
                "digital signature".to_owned(),
                if serving {
                    "server auth"
                } else {
                    "client auth"
                }
                .to_owned(),
            ]),
            ..Default::default()
        };
        let requested = Requested {
            common_names: vec![format!("system:node:{}", environment.spec.node)],
            organizations: vec!["system:nodes".to_owned()],
            addresses: if serving {
                vec![environment.spec.address.parse().expect("valid")]
            } else {
                vec![]
            },
            other_names: 0,
        };
        (spec, requested)
    }

    #[test]
    fn the_environments_host_gets_its_nodes_certificates() {
        let environment = testing::environment("uid-1");
        for serving in [false, true] {
            let (spec, requested) = request(serving);
            assert_eq!(
                judge(&spec, &requested, Some(&environment)),
                Verdict::Approve
            );
        }
    }

    /// One deviation each; every one must be refused.
    #[test]
    fn nobody_else_and_nothing_else_is_approved() {
        type Change = (
            &'static str,
            fn(&mut CertificateSigningRequestSpec, &mut Requested, &mut Environment),
        );
        let changes: &[Change] = &[
            ("another host", |s, _, _| {
                s.username = Some("monopod:host:host-2".to_owned());
            }),
            ("a guest", |s, _, e| {
                s.username = Some(format!("system:node:{}", e.spec.node));
                s.groups = Some(vec!["system:nodes".to_owned()]);
            }),
            ("a pod", |s, _, _| {
                s.username = Some("system:serviceaccount:default:default".to_owned());
            }),
            ("a host in system:nodes", |s, _, _| {
                s.groups
                    .get_or_insert_default()
                    .push("system:nodes".to_owned());
            }),
            ("a host's name without its group", |s, _, _| {
                s.groups = Some(vec![]);
            }),
            ("another node", |_, r, _| {
                r.common_names =
                    vec!["system:node:fargate-ip-10-0-9-9.r.compute.internal".to_owned()];
            }),
            ("more organizations", |_, r, _| {
                r.organizations.push("system:masters".to_owned());
            }),
            ("no organization", |_, r, _| r.organizations.clear()),
            ("another address", |_, r, _| {
                r.addresses = vec!["10.0.9.9".parse().expect("valid")];
            }),
            ("one more address", |_, r, _| {
                r.addresses.push("10.0.9.9".parse().expect("valid"));
            }),
            ("a DNS name", |_, r, _| r.other_names = 1),
            ("more usages", |s, _, _| {
                s.usages
                    .get_or_insert_default()
                    .push("cert sign".to_owned());
            }),
            ("a released environment", |_, _, e| {
                e.metadata.deletion_timestamp =
                    Some(serde_json::from_str("\"2026-01-01T00:00:00Z\"").expect("valid"));
            }),
        ];
        for serving in [false, true] {
            for (what, change) in changes {
                let (mut spec, mut requested) = request(serving);
                let mut environment = testing::environment("uid-1");
                change(&mut spec, &mut requested, &mut environment);
                let verdict = judge(&spec, &requested, Some(&environment));
                assert!(
                    matches!(verdict, Verdict::Deny(_)),
                    "{what}, serving {serving}: {verdict:?}"
                );
            }
            let (spec, requested) = request(serving);
            assert!(
                matches!(judge(&spec, &requested, None), Verdict::Deny(_)),
                "no environment"
            );
        }
    }

    fn host_request() -> (CertificateSigningRequestSpec, Requested) {
        let (mut spec, _) = request(false);
        spec.signer_name = HOST_SIGNER.to_owned();
        spec.username = Some("system:bootstrap:abcdef".to_owned());
        spec.groups = Some(vec![labels::INVITED_GROUP.to_owned()]);
        let requested = Requested {
            common_names: vec!["monopod:host:host-2".to_owned()],
            organizations: vec!["monopod:hosts".to_owned()],
            ..Default::default()
        };
        (spec, requested)
    }

    #[test]
    fn a_machine_gets_the_certificate_of_the_host_that_its_token_is_for_once() {
        type Change = (
            &'static str,
            fn(&mut CertificateSigningRequestSpec, &mut Requested),
        );
        let (spec, requested) = host_request();
        assert_eq!(invited(&spec), Some("abcdef"));
        let unused = Invitation {
            host: "host-2".to_owned(),
            used_by: None,
        };
        let used = |by: &str| Invitation {
            used_by: Some(by.to_owned()),
            ..unused.clone()
        };
        let judge = |spec: &_, requested: &_, token| judge_host("uid-1", spec, requested, token);
        assert_eq!(judge(&spec, &requested, Some(&unused)), Verdict::Approve);
        let again = used("uid-1");
        assert_eq!(judge(&spec, &requested, Some(&again)), Verdict::Approve);
        let changes: &[Change] = &[
            ("another host", |_, r| {
                r.common_names = vec!["monopod:host:host-1".to_owned()];
            }),
            ("an administrator", |_, r| {
                r.organizations = vec!["system:masters".to_owned()];
            }),
            ("control", |_, r| {
                r.common_names = vec!["monopod:control".to_owned()];
            }),
            ("one more name", |_, r| {
                r.common_names.push("monopod:host:host-1".to_owned());
            }),
            ("one more group", |_, r| {
                r.organizations.push("system:masters".to_owned());
            }),
            ("a DNS name", |_, r| r.other_names = 1),
            ("an address", |_, r| {
                r.addresses = vec!["10.0.9.9".parse().expect("valid")];
            }),
            ("a server's usage", |s, _| {
                s.usages = Some(vec!["server auth".to_owned()]);
            }),
            ("no usage", |s, _| s.usages = None),
        ];
        for (what, change) in changes {
            let (mut spec, mut requested) = host_request();
            change(&mut spec, &mut requested);
            let verdict = judge(&spec, &requested, Some(&unused));
            assert!(matches!(verdict, Verdict::Deny(_)), "{what}: {verdict:?}");
            let verdict = judge_renewal("host-2", true, &spec, &requested);
            assert!(matches!(verdict, Verdict::Deny(_)), "{what}: {verdict:?}");
        }
        assert_eq!(
            judge_renewal("host-2", true, &spec, &requested),
            Verdict::Approve
        );
        for (host, is_member) in [("host-2", false), ("host-1", true)] {
            let verdict = judge_renewal(host, is_member, &spec, &requested);
            assert!(matches!(verdict, Verdict::Deny(_)), "{host}: {verdict:?}");
        }
        for token in [None, Some(&used("uid-2"))] {
            let verdict = judge(&spec, &requested, token);
            assert!(matches!(verdict, Verdict::Deny(_)), "{verdict:?}");
        }
    }

    #[test]
    fn only_who_has_a_token_asks_for_a_hosts_certificate() {
        let changes: &[fn(&mut CertificateSigningRequestSpec)] = &[
            |s| s.username = Some("system:serviceaccount:default:default".to_owned()),
            |s| s.username = None,
            |s| s.groups = Some(vec!["system:bootstrappers:kubeadm".to_owned()]),
            |s| s.signer_name = CLIENT_SIGNER.to_owned(),
        ];
        for change in changes {
            let (mut spec, _) = host_request();
            change(&mut spec);
            assert_eq!(invited(&spec), None, "{spec:?}");
            assert_eq!(renewing(&spec), None, "{spec:?}");
        }
        let (mut spec, _) = host_request();
        spec.username = Some("monopod:host:host-2".to_owned());
        assert_eq!(renewing(&spec), None, "a host's name alone");
        spec.groups = Some(vec![labels::HOSTS_GROUP.to_owned()]);
        assert_eq!(renewing(&spec), Some("host-2"));
    }

    #[test]
    fn other_signers_and_nodes_are_left_alone() {
        let (mut spec, requested) = request(false);
        spec.signer_name = "kubernetes.io/kube-apiserver-client".to_owned();
        assert_eq!(judge(&spec, &requested, None), Verdict::NotOurs);
        let (spec, mut requested) = request(false);
        requested.common_names = vec!["system:node:worker-1".to_owned()];
        assert_eq!(judge(&spec, &requested, None), Verdict::NotOurs);
    }
}
