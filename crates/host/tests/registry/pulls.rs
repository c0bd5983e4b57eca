//! Tags, digests, indexes, packings, two pulls at once, interruptions, mirrors and certificates.

use crate::fixture::{Fixture, chain, content, plain, pusher};
use crate::image::{DOCKER_LIST, Image, OCI_INDEX, Packing, index, layer, noise};
use crate::server::{Pipe, Registry, Wants, free_port};
use std::sync::atomic::Ordering;

#[tokio::test(flavor = "multi_thread")]
async fn tags_digests_and_indexes_in_both_words_and_all_packings() {
    let registry = Registry::start(&Wants::Nothing, false);
    let push = pusher(&registry);
    let fixture = Fixture::new(&plain(&[registry.host()]));
    let layers = |tag: &str| {
        [
            (layer("plain", tag.as_bytes()), Packing::Plain),
            (layer("gzip", tag.as_bytes()), Packing::Gzip),
            (layer("zstd", tag.as_bytes()), Packing::Zstd),
            (layer("replaced", b"old"), Packing::Gzip),
            (layer("replaced", b"new"), Packing::Gzip),
        ]
    };
    for (tag, docker, list) in [("oci", false, OCI_INDEX), ("docker", true, DOCKER_LIST)] {
        let image = Image::new(&layers(tag), docker);
        push.image("team/app", tag, &image).await;
        let name = format!("{}/team/app", registry.host());
        let acquired = fixture.pull(&format!("{name}:{tag}")).await.unwrap();
        assert_eq!(acquired.image.digest, image.manifest.digest());
        assert_eq!(
            acquired.image.id,
            format!("{name}@{}", image.manifest.digest())
        );
        assert_eq!(acquired.image.config.cmd, ["/run"]);
        for file in ["plain", "gzip", "zstd"] {
            assert_eq!(content(&acquired.image, file), tag.as_bytes());
        }
        assert_eq!(content(&acquired.image, "replaced"), b"new");

        let index = index(&image, list);
        push.manifest("team/app", "list", &index).await;
        for reference in [format!("{name}:list"), format!("{name}@{}", index.digest())] {
            let acquired = fixture.pull(&reference).await.unwrap();
            assert_eq!(acquired.image.digest, image.manifest.digest());
            assert_eq!(acquired.image.id, format!("{name}@{}", index.digest()));
            assert!(fixture.store.resolve(&reference).unwrap().is_some());
        }
        // Also by the digest of what the index names.
        let direct = format!("{name}@{}", image.manifest.digest());
        assert!(fixture.store.resolve(&direct).unwrap().is_some());
    }
    assert_eq!(fixture.leftovers(), 0);
    let missing = format!("{}/team/app:none", registry.host());
    let error = chain(&fixture.pull(&missing).await.unwrap_err());
    assert_eq!(
        error,
        format!(
            "failed to resolve reference \"{missing}\": {} answered 404 Not Found: manifest unknown: manifest unknown",
            registry.host()
        )
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_pulls_at_once_fetch_each_blob_once() {
    let registry = Registry::start(&Wants::Nothing, false);
    let image = Image::new(
        &[
            (layer("a", &noise(3 << 20, 1)), Packing::Gzip),
            (layer("b", &noise(3 << 20, 2)), Packing::Zstd),
        ],
        false,
    );
    pusher(&registry).image("app", "1", &image).await;
    let fixture = Fixture::new(&plain(&[registry.host()]));
    let reference = format!("{}/app:1", registry.host());
    let pulls = (0..4).map(|_| fixture.pull(&reference));
    for acquired in futures::future::join_all(pulls).await {
        assert_eq!(acquired.unwrap().image.digest, image.manifest.digest());
    }
    for blob in &image.blobs[..2] {
        assert_eq!(registry.fetches(&blob.digest()), 1, "{}", registry.log());
    }
    // Nor again later.
    fixture.pull(&reference).await.unwrap();
    assert_eq!(registry.fetches(&image.blobs[0].digest()), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_pull_goes_on_where_it_was_also_in_another_process() {
    const SIZE: usize = 8 << 20;
    let registry = Registry::start(&Wants::Nothing, false);
    let image = Image::new(&[(layer("big", &noise(SIZE, 3)), Packing::Plain)], false);
    pusher(&registry).image("app", "1", &image).await;
    // Each connection breaks after a megabyte; three tries are not enough.
    let pipe = Pipe::to(registry.port, 1 << 20);
    let config = plain(&[format!("127.0.0.1:{}", pipe.port)]);
    let fixture = Fixture::new(&config);
    let reference = format!("127.0.0.1:{}/app:1", pipe.port);
    let error = chain(&fixture.pull(&reference).await.unwrap_err());
    assert!(error.contains("failed to download"), "{error}");
    assert_eq!(fixture.leftovers(), 1, "what came is kept");
    let before = pipe.passed.load(Ordering::SeqCst);
    assert!(before > 2 << 20, "{before}: each try went on");
    pipe.set_limit(usize::MAX);
    let fixture = fixture.restarted(&config);
    let acquired = fixture.pull(&reference).await.unwrap();
    assert_eq!(content(&acquired.image, "big"), noise(SIZE, 3));
    let rest = pipe.passed.load(Ordering::SeqCst) - before;
    assert!(rest < SIZE as u64 - (2 << 20), "{rest} bytes came again");
    assert_eq!(fixture.leftovers(), 0);
}

/// Its pod was deleted meanwhile. Packing cannot be stopped, and must not meet the next pull's.
#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_is_given_up_at_any_moment_does_not_disturb_the_next() {
    const SIZE: usize = 4 << 20;
    let registry = Registry::start(&Wants::Nothing, false);
    let fixture = Fixture::new(&plain(&[registry.host()]));
    for (number, patience) in (0..).zip([5, 20, 40, 60, 80, 100, 130]) {
        let image = Image::new(
            &[(layer("big", &noise(SIZE, number)), Packing::Plain)],
            false,
        );
        let name = format!("app{number}");
        pusher(&registry).image(&name, "1", &image).await;
        let reference = format!("{}/{name}:1", registry.host());
        let patience = std::time::Duration::from_millis(patience);
        let _given_up = tokio::time::timeout(patience, fixture.pull(&reference)).await;
        let acquired = fixture.pull(&reference).await.unwrap();
        assert_eq!(content(&acquired.image, "big"), noise(SIZE, number));
    }
    assert_eq!(fixture.leftovers(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blob_with_another_digest_is_named_and_the_next_pull_begins_clean() {
    let registry = Registry::start(&Wants::Nothing, false);
    let image = Image::small("right");
    pusher(&registry).image("app", "1", &image).await;
    let blob = &image.blobs[0];
    let mut wrong = blob.bytes.clone();
    *wrong.last_mut().unwrap() ^= 1;
    std::fs::write(registry.stored(&blob.digest()), &wrong).unwrap();
    let fixture = Fixture::new(&plain(&[registry.host()]));
    let reference = format!("{}/app:1", registry.host());
    let error = chain(&fixture.pull(&reference).await.unwrap_err());
    assert!(
        error.contains(&blob.digest()) && error.contains("its content has the digest"),
        "{error}"
    );
    assert!(fixture.store.list().unwrap().is_empty());
    std::fs::write(registry.stored(&blob.digest()), &blob.bytes).unwrap();
    fixture.pull(&reference).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_are_asked_first_and_the_registry_when_they_fail() {
    let registry = Registry::start(&Wants::Nothing, false);
    let mirror = Registry::start(&Wants::Nothing, false);
    pusher(&registry)
        .image("app", "only-there", &Image::small("registry"))
        .await;
    pusher(&mirror)
        .image("app", "1", &Image::small("mirror"))
        .await;
    pusher(&registry)
        .image("app", "1", &Image::small("registry"))
        .await;
    let config = format!(
        "mirrors:\n  \"{0}\":\n    endpoint: [\"http://127.0.0.1:{2}\", \"http://{1}\", \"http://{0}\"]\n",
        registry.host(),
        mirror.host(),
        free_port()
    );
    let fixture = Fixture::new(&config);
    let acquired = fixture
        .pull(&format!("{}/app:1", registry.host()))
        .await
        .unwrap();
    assert_eq!(content(&acquired.image, "mirror"), b"mirror");
    assert!(
        acquired.image.id.starts_with(&registry.host()),
        "the name stays"
    );
    assert!(mirror.log().contains(&format!("ns={}", registry.host())));
    let other = format!("{}/app:only-there", registry.host());
    let acquired = fixture.pull(&other).await.unwrap();
    assert_eq!(content(&acquired.image, "registry"), b"registry");
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_of_an_extra_authority_are_believed_for_its_host_alone() {
    let registry = Registry::start(&Wants::Nothing, true);
    let other = Registry::start(&Wants::Nothing, true);
    for registry in [&registry, &other] {
        pusher(registry)
            .image("app", "1", &Image::small("tls"))
            .await;
    }
    let ca = registry.ca.as_ref().unwrap().display();
    let config = format!(
        "configs:\n  \"{}\":\n    tls: {{ca_file: {ca}}}\n",
        registry.host()
    );
    let fixture = Fixture::new(&config);
    fixture
        .pull(&format!("{}/app:1", registry.host()))
        .await
        .unwrap();
    let error = chain(
        &fixture
            .pull(&format!("{}/app:1", other.host()))
            .await
            .unwrap_err(),
    );
    assert!(error.contains("certificate"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_is_refused_unless_it_is_named() {
    let registry = Registry::start(&Wants::Nothing, false);
    pusher(&registry)
        .image("app", "1", &Image::small("plain"))
        .await;
    let reference = format!("{}/app:1", registry.host());
    let refused = Fixture::new("");
    let error = chain(&refused.pull(&reference).await.unwrap_err());
    assert!(error.contains("cannot be reached"), "{error}");
    assert_eq!(registry.fetches("/v2/"), 0, "nothing was asked without TLS");
    Fixture::new(&plain(&[registry.host()]))
        .pull(&reference)
        .await
        .unwrap();
}
