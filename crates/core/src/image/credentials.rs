//! From secrets to what a host is given for one environment.

use super::keyring::{InvalidConfig, Keyring, Keyrings};
use super::reference::{Reference, normalise};
use k8s_openapi::api::core::v1::{Pod, Secret};
use monopod_api::environment::EnvironmentImage;
use monopod_api::profile::SecretReference;

/// Type and key of a secret with registry credentials, and the older form's.
const CONFIG_JSON: (&str, &str) = ("kubernetes.io/dockerconfigjson", ".dockerconfigjson");
const LEGACY: (&str, &str) = ("kubernetes.io/dockercfg", ".dockercfg");

/// Key of the secret that a host reads: [`Keyrings`] as JSON.
pub const DATA_KEY: &str = "keyrings";
/// Type of that secret.
pub const SECRET_TYPE: &str = "monopod.dev/pull-credentials";

/// The secrets of a pod's own `imagePullSecrets`, in order.
pub fn of_pod(pod: &Pod) -> Vec<SecretReference> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    pod.spec
        .iter()
        .flat_map(|spec| spec.image_pull_secrets.iter().flatten())
        .filter(|secret| !secret.name.is_empty())
        .map(|secret| SecretReference {
            namespace: namespace.clone(),
            name: secret.name.clone(),
        })
        .collect()
}

/// A secret that was asked for, with what there is of it.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Where it should be.
    pub reference: SecretReference,
    /// The secret; none if there is none.
    pub secret: Option<Secret>,
}

/// What the host is given, and what could not be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Assembled {
    /// The role's credentials, then the pod's.
    pub keyrings: Keyrings,
    /// Names of the pod's secrets that are missing or hold no credentials.
    pub unusable: Vec<String>,
    /// The role's secrets that are, with the reason: for the operator, not for the pod's user.
    pub unusable_of_role: Vec<(SecretReference, String)>,
}

/// Puts together what the host of one environment is given. Of the pod's secrets only what goes
/// with its images; the role's may be for mirrors as well, which only the host knows.
pub fn assemble(role: &[Asked], pod: &[Asked], images: &[EnvironmentImage]) -> Assembled {
    let mut assembled = Assembled::default();
    let mut of_role = Keyring::default();
    for asked in role {
        if let Err(why) = add(&mut of_role, asked.secret.as_ref()) {
            assembled
                .unusable_of_role
                .push((asked.reference.clone(), why));
        }
    }
    let mut of_pod = Keyring::default();
    for asked in pod {
        if add(&mut of_pod, asked.secret.as_ref()).is_err() {
            assembled.unusable.push(asked.reference.name.clone());
        }
    }
    let names: Vec<Reference> = images
        .iter()
        .filter_map(|image| normalise(&image.reference).ok())
        .collect();
    of_pod.retain_for(&names);
    assembled.keyrings.keyrings = vec![of_role, of_pod];
    assembled
}

fn add(keyring: &mut Keyring, secret: Option<&Secret>) -> Result<(), String> {
    let secret = secret.ok_or("it does not exist")?;
    let data = |key: &str| secret.data.as_ref().and_then(|data| data.get(key));
    let kind = secret.type_.as_deref().unwrap_or_default();
    let added: Option<Result<(), InvalidConfig>> = match kind {
        _ if kind == CONFIG_JSON.0 => data(CONFIG_JSON.1).map(|bytes| keyring.add(&bytes.0)),
        _ if kind == LEGACY.0 => data(LEGACY.1).map(|bytes| keyring.add_legacy(&bytes.0)),
        _ => return Err(format!("its type must be {}", CONFIG_JSON.0)),
    };
    added
        .ok_or("its data lacks the docker config")?
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use monopod_api::environment::PullPolicy;
    use serde_json::json;

    fn secret(name: &str, kind: &str, key: &str, config: &serde_json::Value) -> Asked {
        let value = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, config.to_string());
        Asked {
            reference: SecretReference {
                namespace: "ns".to_owned(),
                name: name.to_owned(),
            },
            secret: serde_json::from_value(json!({"type": kind, "data": {key: value}})).unwrap(),
        }
    }

    fn images(reference: &str) -> Vec<EnvironmentImage> {
        vec![EnvironmentImage {
            reference: reference.to_owned(),
            pull_policy: PullPolicy::Always,
        }]
    }

    #[test]
    fn the_host_is_given_the_roles_whole_and_of_the_pods_what_its_images_need() {
        let config = |registry: &str| json!({"auths": {registry: {"username": registry, "password": "p"}, "other.io": {"username": "o", "password": "p"}}});
        let role = [secret(
            "role",
            CONFIG_JSON.0,
            CONFIG_JSON.1,
            &config("a.io"),
        )];
        let pod = [
            secret("pod", CONFIG_JSON.0, CONFIG_JSON.1, &config("a.io/team")),
            secret("old", LEGACY.0, LEGACY.1, &config("x")["auths"]),
        ];
        let assembled = assemble(&role, &pod, &images("a.io/team/app"));
        let users = |name: &str| -> Vec<String> {
            let found = assembled.keyrings.lookup(name);
            found.into_iter().map(|c| c.username).collect()
        };
        assert_eq!(users("a.io/team/app"), ["a.io", "a.io/team"]);
        assert_eq!(users("other.io/x"), ["o"], "from the role alone");
        assert_eq!(assembled.keyrings.keyrings[1].lookup("other.io/x").len(), 0);
        assert!(assembled.unusable.is_empty() && assembled.unusable_of_role.is_empty());
    }

    #[test]
    fn what_is_missing_or_something_else_is_named_and_the_rest_goes_on() {
        let good = json!({"auths": {"a.io": {"username": "u", "password": "p"}}});
        let missing = Asked {
            reference: SecretReference {
                namespace: "ns".to_owned(),
                name: "gone".to_owned(),
            },
            secret: None,
        };
        let pod = [
            missing.clone(),
            secret("opaque", "Opaque", "password", &json!("x")),
            secret("no-key", CONFIG_JSON.0, "other", &good),
            secret("broken", CONFIG_JSON.0, CONFIG_JSON.1, &json!([])),
            secret("good", CONFIG_JSON.0, CONFIG_JSON.1, &good),
        ];
        let assembled = assemble(&[missing], &pod, &images("a.io/x"));
        assert_eq!(assembled.unusable, ["gone", "opaque", "no-key", "broken"]);
        assert_eq!(assembled.unusable_of_role.len(), 1);
        assert_eq!(assembled.keyrings.lookup("a.io/x").len(), 1);
    }
}
