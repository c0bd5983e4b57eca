//! The files of volumes that show API objects, as functions of these objects.

use super::atomic::{File, Payload, is_safe};
use k8s_openapi::api::core::v1::{
    ConfigMap, Container, DownwardAPIVolumeFile, KeyToPath, Pod, Secret,
};
use monopod_core::pod::container_spec;
use monopod_core::pod::fields::{self, Facts};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The API's default for the mode of files.
pub(crate) const DEFAULT_MODE: i32 = 0o644;

/// Why a volume's files cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PayloadError {
    /// An item names a key that the object lacks.
    #[error("references non-existent config key: {0}")]
    NoKey(String),
    /// A path leaves the volume.
    #[error("path {0:?} is not inside the volume")]
    Path(String),
    /// A field that a pod cannot ask for.
    #[error("unsupported field {0}")]
    Field(String),
}

/// The files of a config map.
pub(crate) fn of_config_map(
    map: &ConfigMap,
    items: Option<&[KeyToPath]>,
    mode: i32,
    optional: bool,
) -> Result<Payload, PayloadError> {
    let mut data: BTreeMap<&str, &[u8]> = BTreeMap::new();
    for (key, text) in map.data.iter().flatten() {
        data.insert(key, text.as_bytes());
    }
    for (key, bytes) in map.binary_data.iter().flatten() {
        data.insert(key, &bytes.0);
    }
    of_keys(&data, items, mode, optional)
}

/// The files of a secret.
pub(crate) fn of_secret(
    secret: &Secret,
    items: Option<&[KeyToPath]>,
    mode: i32,
    optional: bool,
) -> Result<Payload, PayloadError> {
    let data = secret
        .data
        .iter()
        .flatten()
        .map(|(key, bytes)| (key.as_str(), bytes.0.as_slice()))
        .collect();
    of_keys(&data, items, mode, optional)
}

fn of_keys(
    data: &BTreeMap<&str, &[u8]>,
    items: Option<&[KeyToPath]>,
    mode: i32,
    optional: bool,
) -> Result<Payload, PayloadError> {
    let mut payload = Payload::new();
    match items.filter(|items| !items.is_empty()) {
        None => {
            for (key, bytes) in data {
                insert(&mut payload, key, bytes.to_vec(), mode)?;
            }
        }
        Some(items) => {
            for item in items {
                match data.get(item.key.as_str()) {
                    Some(bytes) => insert(
                        &mut payload,
                        &item.path,
                        bytes.to_vec(),
                        item.mode.unwrap_or(mode),
                    )?,
                    None if optional => {}
                    None => return Err(PayloadError::NoKey(item.key.clone())),
                }
            }
        }
    }
    Ok(payload)
}

/// The files of a downward API volume.
pub(crate) fn of_downward_api(
    pod: &Pod,
    facts: &Facts,
    items: &[DownwardAPIVolumeFile],
    mode: i32,
) -> Result<Payload, PayloadError> {
    let mut payload = Payload::new();
    for item in items {
        let mode = item.mode.unwrap_or(mode);
        let text = if let Some(reference) = &item.field_ref {
            fields::field(pod, facts, &reference.field_path)
                .ok_or_else(|| PayloadError::Field(reference.field_path.clone()))?
        } else if let Some(reference) = &item.resource_field_ref {
            let none = Container::default();
            let container = reference
                .container_name
                .as_deref()
                .and_then(|name| container_spec(pod, name))
                .unwrap_or(&none);
            fields::resource(container, facts, reference)
                .ok_or_else(|| PayloadError::Field(reference.resource.clone()))?
        } else {
            return Err(PayloadError::Field(item.path.clone()));
        };
        insert(&mut payload, &item.path, text.into_bytes(), mode)?;
    }
    Ok(payload)
}

/// Adds a file, unless its path leaves the volume.
pub(crate) fn insert(
    payload: &mut Payload,
    path: &str,
    bytes: Vec<u8>,
    mode: i32,
) -> Result<(), PayloadError> {
    let file = File {
        bytes,
        mode: u32::try_from(mode).unwrap_or(0o644) & 0o777,
        uid: None,
    };
    let path = PathBuf::from(path);
    if !is_safe(&path) {
        return Err(PayloadError::Path(path.display().to_string()));
    }
    payload.insert(path, file);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn map() -> ConfigMap {
        serde_json::from_value(json!({"data": {"a": "1", "b": "2"}, "binaryData": {"c": "AP8="}}))
            .unwrap()
    }

    #[test]
    fn all_keys_or_the_chosen_ones() {
        let all = of_config_map(&map(), None, 0o600, false).unwrap();
        assert_eq!(all.len(), 3);
        assert_eq!(all[&PathBuf::from("c")].bytes, [0, 255]);
        let items: Vec<KeyToPath> =
            serde_json::from_value(json!([{"key": "a", "path": "x/y", "mode": 0o400}])).unwrap();
        let chosen = of_config_map(&map(), Some(&items), 0o644, false).unwrap();
        assert_eq!(chosen.len(), 1);
        assert_eq!(chosen[&PathBuf::from("x/y")].mode, 0o400);
    }

    #[test]
    fn missing_keys_and_bad_paths_are_refused() {
        let items = |value| -> Vec<KeyToPath> { serde_json::from_value(value).unwrap() };
        let gone = items(json!([{"key": "gone", "path": "x"}]));
        assert_eq!(
            of_config_map(&map(), Some(&gone), 0o644, false),
            Err(PayloadError::NoKey("gone".to_owned()))
        );
        assert_eq!(
            of_config_map(&map(), Some(&gone), 0o644, true)
                .unwrap()
                .len(),
            0
        );
        let bad = items(json!([{"key": "a", "path": "../x"}]));
        assert!(matches!(
            of_config_map(&map(), Some(&bad), 0o644, false),
            Err(PayloadError::Path(_))
        ));
    }
}
