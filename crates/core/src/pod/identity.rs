//! The user and groups that a container runs as.

use k8s_openapi::api::core::v1::{Container, Pod};
use std::collections::BTreeSet;

/// Numeric identity of a container's process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// User.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// All supplementary groups, sorted.
    pub groups: Vec<u32>,
}

/// Why an identity cannot be made. The container waits with `CreateContainerConfigError`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The image names a user that its `/etc/passwd` lacks.
    #[error("unable to find user {0}: no matching entries in passwd file")]
    NoUser(String),
    /// The image names a group that its `/etc/group` lacks.
    #[error("unable to find group {0}: no matching entries in group file")]
    NoGroup(String),
    /// `runAsNonRoot`, but the image runs as root.
    #[error("container has runAsNonRoot and image will run as root")]
    ImageIsRoot,
    /// `runAsNonRoot`, but the image's user is a name.
    #[error(
        "container has runAsNonRoot and image has non-numeric user ({0}), cannot verify user is non-root"
    )]
    ImageUserIsName(String),
    /// `runAsNonRoot` and `runAsUser: 0`.
    #[error("container's runAsUser breaks non-root policy")]
    RunAsRoot,
    /// A number that is no user or group.
    #[error("{0} is not a valid user or group id")]
    OutOfRange(i64),
}

/// What an image says about users.
#[derive(Clone, Copy, Debug, Default)]
pub struct ImageUsers<'a> {
    /// `USER` of its configuration.
    pub user: &'a str,
    /// Its `/etc/passwd`, empty if it has none.
    pub passwd: &'a str,
    /// Its `/etc/group`, empty if it has none.
    pub group: &'a str,
}

/// Decides who a container runs as.
pub fn identity(
    pod: &Pod,
    container: &Container,
    image: &ImageUsers<'_>,
) -> Result<Identity, IdentityError> {
    let pod_context = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.security_context.as_ref());
    let own = container.security_context.as_ref();
    let run_as_user = own
        .and_then(|c| c.run_as_user)
        .or_else(|| pod_context.and_then(|c| c.run_as_user));
    let run_as_group = own
        .and_then(|c| c.run_as_group)
        .or_else(|| pod_context.and_then(|c| c.run_as_group));
    let non_root = own
        .and_then(|c| c.run_as_non_root)
        .or_else(|| pod_context.and_then(|c| c.run_as_non_root))
        == Some(true);

    let (image_user, image_group) = image.user.split_once(':').unwrap_or((image.user, ""));
    let user = match run_as_user {
        Some(uid) => Passwd::by_uid(image.passwd, number(uid)?),
        None if image_user.is_empty() => Passwd::by_uid(image.passwd, 0),
        None => match image_user.parse::<u32>() {
            Ok(uid) => Passwd::by_uid(image.passwd, uid),
            Err(_) => Passwd::by_name(image.passwd, image_user)
                .ok_or_else(|| IdentityError::NoUser(image_user.to_owned()))?,
        },
    };
    if non_root {
        match run_as_user {
            Some(0) => return Err(IdentityError::RunAsRoot),
            None if user.uid == 0 => return Err(IdentityError::ImageIsRoot),
            None if image_user.parse::<u32>().is_err() => {
                return Err(IdentityError::ImageUserIsName(image_user.to_owned()));
            }
            Some(_) | None => {}
        }
    }
    let gid = match run_as_group {
        Some(gid) => number(gid)?,
        None if run_as_user.is_none() && !image_group.is_empty() => match image_group.parse() {
            Ok(gid) => gid,
            Err(_) => group_by_name(image.group, image_group)
                .ok_or_else(|| IdentityError::NoGroup(image_group.to_owned()))?,
        },
        None => user.gid,
    };

    let strict =
        pod_context.and_then(|c| c.supplemental_groups_policy.as_deref()) == Some("Strict");
    let mut groups = BTreeSet::from([gid]);
    if !strict && let Some(name) = user.name {
        groups.extend(groups_of(image.group, name));
    }
    for group in pod_context
        .iter()
        .flat_map(|c| c.supplemental_groups.iter().flatten())
    {
        groups.insert(number(*group)?);
    }
    if let Some(group) = pod_context.and_then(|c| c.fs_group) {
        groups.insert(number(group)?);
    }
    Ok(Identity {
        uid: user.uid,
        gid,
        groups: groups.into_iter().collect(),
    })
}

fn number(value: i64) -> Result<u32, IdentityError> {
    match u32::try_from(value) {
        Ok(number) => Ok(number),
        Err(_) => Err(IdentityError::OutOfRange(value)),
    }
}

struct Passwd<'a> {
    name: Option<&'a str>,
    uid: u32,
    gid: u32,
}

impl<'a> Passwd<'a> {
    fn entries(text: &'a str) -> impl Iterator<Item = Self> {
        text.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let uid = fields.nth(1)?.parse().ok()?;
            let gid = fields.next()?.parse().ok()?;
            Some(Self {
                name: Some(name),
                uid,
                gid,
            })
        })
    }

    /// The entry of a user, or root's group if the file has none.
    fn by_uid(text: &'a str, uid: u32) -> Self {
        Self::entries(text)
            .find(|entry| entry.uid == uid)
            .unwrap_or(Self {
                name: None,
                uid,
                gid: 0,
            })
    }

    fn by_name(text: &'a str, name: &str) -> Option<Self> {
        Self::entries(text).find(|entry| entry.name == Some(name))
    }
}

fn group_by_name(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then_some(())?;
        fields.nth(1)?.parse().ok()
    })
}

fn groups_of<'a>(text: &'a str, user: &'a str) -> impl Iterator<Item = u32> + 'a {
    text.lines().filter_map(move |line| {
        let mut fields = line.split(':');
        let gid = fields.nth(2)?.parse().ok()?;
        fields
            .next()?
            .split(',')
            .any(|member| member == user)
            .then_some(gid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nweb:x:101:102::/:/bin/false\nbroken\n";
    const GROUP: &str = "root:x:0:\nweb:x:102:\nlogs:x:200:web,other\n";

    fn get(
        user: &str,
        pod: &serde_json::Value,
        container: &serde_json::Value,
    ) -> Result<(u32, u32, Vec<u32>), String> {
        let pod: Pod = serde_json::from_value(json!({"metadata": {}, "spec": {
            "securityContext": pod,
            "containers": [{"name": "c", "securityContext": container}]}}))
        .unwrap();
        let image = ImageUsers {
            user,
            passwd: PASSWD,
            group: GROUP,
        };
        identity(&pod, &pod.spec.as_ref().unwrap().containers[0], &image)
            .map(|i| (i.uid, i.gid, i.groups))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn users_of_images_and_specs() {
        assert_eq!(get("", &json!({}), &json!({})), Ok((0, 0, vec![0])));
        assert_eq!(
            get("web", &json!({}), &json!({})),
            Ok((101, 102, vec![102, 200]))
        );
        assert_eq!(
            get("101:200", &json!({}), &json!({})),
            Ok((101, 200, vec![200]))
        );
        assert_eq!(get("5000", &json!({}), &json!({})), Ok((5000, 0, vec![0])));
        assert_eq!(
            get(
                "",
                &json!({"runAsUser": 101, "fsGroup": 7, "supplementalGroups": [9]}),
                &json!({"runAsGroup": 3})
            ),
            Ok((101, 3, vec![3, 7, 9, 200]))
        );
        assert_eq!(
            get(
                "web",
                &json!({"supplementalGroupsPolicy": "Strict"}),
                &json!({})
            ),
            Ok((101, 102, vec![102]))
        );
    }

    #[test]
    fn refusals() {
        let non_root = json!({"runAsNonRoot": true});
        for (user, pod, part) in [
            ("nobody", json!({}), "unable to find user nobody"),
            ("web:nogroup", json!({}), "unable to find group nogroup"),
            ("", non_root.clone(), "image will run as root"),
            ("web", non_root.clone(), "non-numeric user (web)"),
            (
                "web",
                json!({"runAsNonRoot": true, "runAsUser": 0}),
                "breaks non-root policy",
            ),
            ("", json!({"runAsUser": -1}), "not a valid user"),
        ] {
            assert!(
                get(user, &pod, &json!({})).unwrap_err().contains(part),
                "{user} {part}"
            );
        }
        assert!(get("101", &non_root, &json!({})).is_ok());
    }

    proptest! {
        /// Files of an image are hostile.
        #[test]
        fn any_files(passwd in "\\PC{0,80}", group in "\\PC{0,80}", user in "[a-z0-9:]{0,12}") {
            let pod = Pod::default();
            let image = ImageUsers { user: &user, passwd: &passwd, group: &group };
            let _result = identity(&pod, &Container::default(), &image);
        }
    }
}
