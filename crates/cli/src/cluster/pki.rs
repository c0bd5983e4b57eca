//! Keys and certificates of an embedded cluster.
//!
//! Four authorities, so that no certificate opens a door that it was not made for: `ca` (users,
//! nodes and the API server), `etcd-ca`, `front-proxy-ca` (aggregated APIs) and `webhook-ca`
//! (the API server when it calls the webhook). What exists is kept, but for the API server's own
//! certificate, as its addresses may change. The webhook's own certificate is control's to make.

use anyhow::Context;
use monopod_api::labels;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What certificates are made for.
#[derive(Debug, Clone)]
pub struct Names {
    /// Addresses of the API server.
    pub api_addresses: Vec<IpAddr>,
    /// The cluster's DNS domain.
    pub cluster_domain: String,
    /// Name of this machine as a Host.
    pub host: String,
}

/// A certificate to make.
struct Leaf<'a> {
    file: &'a str,
    authority: &'a str,
    common_name: String,
    organization: Option<&'a str>,
    addresses: Vec<IpAddr>,
    dns: Vec<String>,
    usages: &'a [ExtendedKeyUsagePurpose],
}

const CLIENT: &[ExtendedKeyUsagePurpose] = &[ExtendedKeyUsagePurpose::ClientAuth];
const SERVER: &[ExtendedKeyUsagePurpose] = &[ExtendedKeyUsagePurpose::ServerAuth];
const BOTH: &[ExtendedKeyUsagePurpose] = &[
    ExtendedKeyUsagePurpose::ServerAuth,
    ExtendedKeyUsagePurpose::ClientAuth,
];
const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

/// The API server's own certificate.
const API_SERVER: &str = "apiserver";

/// Users that have a kubeconfig: the file's name, the user's name, its group.
pub fn users(host: &str) -> Vec<(String, String, Option<&'static str>)> {
    vec![
        (
            "admin".to_owned(),
            "monopod:admin".to_owned(),
            Some("system:masters"),
        ),
        (
            "controller-manager".to_owned(),
            "system:kube-controller-manager".to_owned(),
            None,
        ),
        (
            "scheduler".to_owned(),
            "system:kube-scheduler".to_owned(),
            None,
        ),
        ("control".to_owned(), labels::CONTROL_USER.to_owned(), None),
        (
            "host".to_owned(),
            format!("{}{host}", labels::HOST_USER_PREFIX),
            Some(labels::HOSTS_GROUP),
        ),
    ]
}

/// Makes whatever is missing in the directory.
pub fn ensure(dir: &Path, names: &Names) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    for authority in ["ca", "etcd-ca", "front-proxy-ca", "webhook-ca"] {
        ensure_authority(dir, authority)?;
    }
    ensure_service_account_key(dir)?;
    for leaf in leaves(names) {
        let (certificate, key) = files(dir, leaf.file);
        if leaf.file == API_SERVER || !certificate.exists() || !key.exists() {
            make_leaf(dir, &leaf)?;
        }
    }
    Ok(())
}

/// Keeps an authority's certificate, whose key is on another machine.
pub fn keep_authority(dir: &Path, certificate: &str) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    write(&files(dir, "ca").0, certificate, 0o644)
}

fn leaves(names: &Names) -> Vec<Leaf<'static>> {
    let client = |file, authority, common_name: &str, organization| Leaf {
        file,
        authority,
        common_name: common_name.to_owned(),
        organization,
        addresses: Vec::new(),
        dns: Vec::new(),
        usages: CLIENT,
    };
    let service = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"].map(str::to_owned);
    let full = format!("kubernetes.default.svc.{}", names.cluster_domain);
    vec![
        Leaf {
            file: API_SERVER,
            authority: "ca",
            common_name: "kube-apiserver".to_owned(),
            organization: None,
            addresses: names.api_addresses.clone(),
            dns: service
                .into_iter()
                .chain([full, "localhost".to_owned()])
                .collect(),
            usages: SERVER,
        },
        Leaf {
            file: "etcd",
            authority: "etcd-ca",
            common_name: "etcd".to_owned(),
            organization: None,
            addresses: vec![LOOPBACK],
            dns: vec!["localhost".to_owned()],
            usages: BOTH,
        },
        client(
            "apiserver-etcd",
            "etcd-ca",
            "kube-apiserver-etcd-client",
            None,
        ),
        client("apiserver-kubelet", "ca", labels::KUBELET_CLIENT_USER, None),
        client(
            "apiserver-webhook",
            "webhook-ca",
            "kube-apiserver-webhook-client",
            None,
        ),
        client("front-proxy", "front-proxy-ca", "front-proxy-client", None),
    ]
    .into_iter()
    .chain(
        users(&names.host)
            .into_iter()
            .map(|(file, user, group)| Leaf {
                // The set is small and fixed, and lives as long as the process needs it.
                file: match file.as_str() {
                    "admin" => "admin",
                    "controller-manager" => "controller-manager",
                    "scheduler" => "scheduler",
                    "control" => "control",
                    _host => "host",
                },
                authority: "ca",
                common_name: user,
                organization: group,
                addresses: Vec::new(),
                dns: Vec::new(),
                usages: CLIENT,
            }),
    )
    .collect()
}

/// The two files of a certificate.
pub fn files(dir: &Path, name: &str) -> (PathBuf, PathBuf) {
    (
        dir.join(format!("{name}.crt")),
        dir.join(format!("{name}.key")),
    )
}

fn ensure_authority(dir: &Path, name: &str) -> anyhow::Result<()> {
    let (certificate, key_file) = files(dir, name);
    if certificate.exists() && key_file.exists() {
        return Ok(());
    }
    let key = KeyPair::generate()?;
    write(&key_file, &key.serialize_pem(), 0o600)?;
    write(
        &certificate,
        &authority_parameters(name).self_signed(&key)?.pem(),
        0o644,
    )
}

/// The same for the same name, so that an authority can sign with nothing but its stored key.
pub fn authority_parameters(name: &str) -> CertificateParams {
    let mut parameters = CertificateParams::default();
    parameters
        .distinguished_name
        .push(DnType::CommonName, format!("monopod-{name}"));
    parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    parameters.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::CrlSign,
    ];
    parameters
}

fn make_leaf(dir: &Path, leaf: &Leaf<'_>) -> anyhow::Result<()> {
    let (certificate, key_file) = files(dir, leaf.file);
    let authority_key = fs::read_to_string(files(dir, leaf.authority).1)?;
    let authority_key =
        KeyPair::from_pem(&authority_key).context("authority's key is not readable")?;
    let issuer = Issuer::new(authority_parameters(leaf.authority), authority_key);
    let mut parameters = CertificateParams::new(leaf.dns.clone())?;
    parameters.distinguished_name = rcgen::DistinguishedName::new();
    if let Some(organization) = leaf.organization {
        parameters
            .distinguished_name
            .push(DnType::OrganizationName, organization);
    }
    parameters
        .distinguished_name
        .push(DnType::CommonName, leaf.common_name.as_str());
    parameters.subject_alt_names.extend(
        leaf.addresses
            .iter()
            .map(|address| SanType::IpAddress(*address)),
    );
    parameters.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::KeyEncipherment,
    ];
    parameters.extended_key_usages = leaf.usages.to_vec();
    parameters.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    write(&key_file, &key.serialize_pem(), 0o600)?;
    write(
        &certificate,
        &parameters.signed_by(&key, &issuer)?.pem(),
        0o644,
    )
}

fn ensure_service_account_key(dir: &Path) -> anyhow::Result<()> {
    let (public, private) = (
        dir.join("service-account.pub"),
        dir.join("service-account.key"),
    );
    if public.exists() && private.exists() {
        return Ok(());
    }
    let key = KeyPair::generate()?;
    write(&private, &key.serialize_pem(), 0o600)?;
    write(&public, &key.public_key_pem(), 0o644)
}

/// Writes a file at once and whole.
pub fn write(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    use std::io::Write;
    let partial = path.with_extension("partial");
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&partial)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&partial, path).with_context(|| format!("cannot write {}", path.display()))
}
