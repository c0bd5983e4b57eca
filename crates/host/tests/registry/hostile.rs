//! Answers that no registry gives: endless, contradictory, or made to break who reads them.

use crate::fixture::{Fixture, chain, plain};
use crate::image::{Image, OCI_INDEX, OCI_MANIFEST, digest};
use crate::server::{answering, reply};
use serde_json::json;
use std::io::Write;
use std::net::TcpStream;

/// Sends a head and then bytes until nobody listens any more.
fn endless(client: &mut TcpStream, headers: &str) {
    let head = format!("HTTP/1.1 200 OK\r\n{headers}Connection: close\r\n\r\n");
    if client.write_all(head.as_bytes()).is_err() {
        return;
    }
    let bytes = vec![b' '; 64 << 10];
    while client.write_all(&bytes).is_ok() {}
}

async fn said(answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> String {
    let server = answering(answer);
    let fixture = Fixture::new(&plain(&[server.to_string()]));
    let error = fixture.pull(&format!("{server}/app:1")).await.unwrap_err();
    assert!(fixture.store.list().unwrap().is_empty());
    chain(&error)
}

fn kind(media_type: &str) -> String {
    format!("Content-Type: {media_type}\r\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_answers_are_cut() {
    let error = said(|_, client| endless(client, "")).await;
    assert!(error.contains("the manifest: it is larger than"), "{error}");
    let error = said(|_, client| {
        let head = "HTTP/1.1 500 Broken\r\nConnection: close\r\n\r\n";
        drop(client.write_all(head.as_bytes()));
        while client.write_all(&[b'x'; 4096]).is_ok() {}
    })
    .await;
    assert!(error.contains("500 Internal Server Error"), "{error}");
    let image = Image::small("x");
    let layer = image.blobs[0].digest();
    let error = said(move |request, client| {
        if request.contains("/manifests/") {
            reply(client, "200 OK", &kind(OCI_MANIFEST), &image.manifest.bytes);
        } else if request.contains(&layer) {
            endless(client, "");
        } else {
            reply(client, "200 OK", "", &image.blobs[1].bytes);
        }
    })
    .await;
    assert!(error.contains("it gives more than the"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn redirects_end() {
    let error = said(|request, client| {
        let path = request.split(' ').nth(1).unwrap_or_default();
        reply(
            client,
            "302 Found",
            &format!("Location: {path}/again\r\n"),
            b"",
        );
    })
    .await;
    assert!(
        error.contains("its redirects: there is no end to them"),
        "{error}"
    );
    for target in [
        "file:///etc/passwd",
        "http://169.254.169.254/latest",
        "gopher://x",
        "http://u:p@127.0.0.1:1/",
        "::",
    ] {
        let error = said(move |_, client| {
            reply(client, "302 Found", &format!("Location: {target}\r\n"), b"");
        })
        .await;
        assert!(
            error.contains("redirect")
                || error.contains("cannot be reached")
                || error.contains("404"),
            "{target}: {error}"
        );
        assert!(!error.contains("root:"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn indexes_that_name_themselves_end() {
    let entry = |bytes: &[u8]| {
        json!({"schemaVersion": 2, "manifests": [{"mediaType": OCI_INDEX, "digest": digest(bytes), "size": bytes.len()}]}).to_string()
    };
    // A chain of indexes, longer than any.
    let mut documents = vec![entry(b"nothing")];
    for _ in 0..8 {
        documents.push(entry(documents.last().unwrap().as_bytes()));
    }
    let top = documents.last().unwrap().clone();
    let error = said(move |request, client| {
        let found = documents
            .iter()
            .find(|d| request.contains(&digest(d.as_bytes())));
        reply(
            client,
            "200 OK",
            &kind(OCI_INDEX),
            found.unwrap_or(&top).as_bytes(),
        );
    })
    .await;
    assert!(error.contains("indexes are nested too deeply"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_image_is_named() {
    let image = Image::small("x");
    let body = String::from_utf8(image.manifest.bytes.clone()).unwrap();
    for (body, media_type, named) in [
        (
            body.replace("\"layers\"", "\"manifests\":[],\"layers\""),
            OCI_MANIFEST,
            "both at once",
        ),
        (body.clone(), OCI_INDEX, "something else than its type"),
        (
            body.replace("vnd.oci.image.config", "vnd.cncf.helm.config"),
            OCI_MANIFEST,
            "must be a container image",
        ),
        (
            body.replace("tar+gzip", "tar+gzip+encrypted"),
            OCI_MANIFEST,
            "encrypted",
        ),
        (
            "{".to_owned(),
            OCI_MANIFEST,
            "the manifest cannot be understood",
        ),
        (
            json!({"schemaVersion": 1, "fsLayers": []}).to_string(),
            OCI_MANIFEST,
            "first schema",
        ),
        (
            body.replace("sha256:", "sha256:../../"),
            OCI_MANIFEST,
            "the manifest cannot be understood",
        ),
    ] {
        let error =
            said(move |_, client| reply(client, "200 OK", &kind(media_type), body.as_bytes()))
                .await;
        assert!(error.contains(named), "{named}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn challenges_and_tokens_that_are_traps_do_no_harm() {
    for challenge in [
        "Bearer realm=\"file:///etc/passwd\"",
        "Bearer realm=\"http://127.0.0.1:1/token\"",
        "Bearer realm=\"not a url\"",
        "Bearer realm=",
        "Basic",
        "\u{7f}",
    ] {
        let header = format!("WWW-Authenticate: {challenge}\r\n");
        let error = said(move |_, client| reply(client, "401 Unauthorized", &header, b"{}")).await;
        assert!(
            error.contains("401 Unauthorized")
                || error.contains("token")
                || error.contains("invalid HTTP header"),
            "{challenge}: {error}"
        );
    }
    for token in [
        json!({"token": "a\r\nX: y"}),
        json!({"token": "\u{fc}"}),
        json!({}),
        json!([]),
        json!({"token": "x".repeat(100_000)}),
    ] {
        let server = answering(move |request, client| {
            if request.starts_with("GET /token") {
                reply(client, "200 OK", "", token.to_string().as_bytes());
            } else {
                let host = request
                    .lines()
                    .find_map(|l| l.strip_prefix("host: "))
                    .unwrap_or_default();
                let header = format!("WWW-Authenticate: Bearer realm=\"http://{host}/token\"\r\n");
                reply(client, "401 Unauthorized", &header, b"");
            }
        });
        let fixture = Fixture::new(&plain(&[server.to_string()]));
        let error = chain(&fixture.pull(&format!("{server}/app:1")).await.unwrap_err());
        assert!(
            error.contains("its token: the answer holds none"),
            "{error}"
        );
    }
}
