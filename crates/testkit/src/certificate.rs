//! Requests for certificates, as somebody makes them who wants what is not theirs.

use crate::{Cluster, Output, wait};
use k8s_openapi::ByteString;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use serde_json::{Value, json};
use std::time::Duration;

impl Cluster {
    /// Asks for a certificate of this name and organization, by a kubeconfig as [`Cluster::kubectl_as`] takes it.
    ///
    /// # Panics
    /// If the request cannot be made.
    #[track_caller]
    pub fn request_certificate(
        &self,
        user: &str,
        name: &str,
        signer: &str,
        (organization, common_name): (&str, &str),
    ) -> Output {
        let key = KeyPair::generate().expect("a key");
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name = DistinguishedName::new();
        for (kind, value) in [
            (DnType::OrganizationName, organization),
            (DnType::CommonName, common_name),
        ] {
            parameters.distinguished_name.push(kind, value);
        }
        let request = parameters.serialize_request(&key);
        let pem = request.and_then(|request| request.pem());
        let object = json!({
            "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {"name": name},
            "spec": {
                "request": ByteString(pem.expect("a request").into_bytes()), "signerName": signer,
                "usages": ["digital signature", "client auth"],
            },
        });
        self.kubectl_as(user, &["create", "-f", "-"], &object.to_string())
    }

    /// Waits until a request is denied, and deletes it.
    ///
    /// # Panics
    /// If it is not, or has a certificate.
    #[track_caller]
    pub fn wait_denied(&self, name: &str) {
        wait("the request is denied", Duration::from_secs(15), || {
            let request = self.get("", "csr", name).unwrap_or_default();
            let conditions = request["status"]["conditions"].as_array();
            let mut conditions = conditions.into_iter().flatten();
            if conditions.any(|condition| condition["type"] == "Denied") {
                Ok(())
            } else {
                Err(request["status"].to_string())
            }
        });
        let request = self.get("", "csr", name).unwrap_or_default();
        assert_eq!(request["status"]["certificate"], Value::Null);
        self.kubectl(&["delete", "csr", name]);
    }
}
