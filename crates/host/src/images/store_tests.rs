//! Small images made here, loaded, and read back by `unsquashfs`.

use super::*;
use serde_json::json;
use std::process::Command;
use tar::{EntryType, Header};

struct Layer(tar::Builder<Vec<u8>>);

impl Default for Layer {
    fn default() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }
}

impl Layer {
    fn add(mut self, kind: EntryType, path: &str, link: &str, content: &str) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o751);
        header.set_uid(7);
        header.set_gid(8);
        header.set_size(content.len() as u64);
        // Written as it is, whatever it is.
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_link_name_literal(link).unwrap();
        header.set_cksum();
        self.0.append(&header, content.as_bytes()).unwrap();
        self
    }

    fn file(self, path: &str, content: &str) -> Self {
        self.add(EntryType::Regular, path, "", content)
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

struct Fixture {
    directory: tempfile::TempDir,
    store: Store,
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

fn compress(number: usize, plain: &[u8]) -> Vec<u8> {
    match number % 3 {
        0 => {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(plain).unwrap();
            encoder.finish().unwrap()
        }
        1 => zstd::encode_all(plain, 1).unwrap(),
        _ => plain.to_vec(),
    }
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("store")).unwrap();
        Self { directory, store }
    }

    fn layout(&self) -> PathBuf {
        self.directory.path().join("layout")
    }

    fn blob(&self, bytes: &[u8]) -> serde_json::Value {
        let digest = digest(bytes);
        let blobs = self.layout().join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        std::fs::write(blobs.join(&digest["sha256:".len()..]), bytes).unwrap();
        json!({"digest": digest, "size": bytes.len()})
    }

    fn image(&self, layers: Vec<Layer>) -> PathBuf {
        let plain: Vec<_> = layers.into_iter().map(Layer::bytes).collect();
        self.layout_of(&plain)
    }

    fn layout_of(&self, plain: &[Vec<u8>]) -> PathBuf {
        let diff_ids: Vec<_> = plain.iter().map(|layer| digest(layer)).collect();
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": {"Entrypoint": ["/bin/x"], "Cmd": null, "Volumes": {"/data": {}}, "User": "1:2"},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        let blobs: Vec<_> = plain
            .iter()
            .enumerate()
            .map(|(n, layer)| self.blob(&compress(n, layer)))
            .collect();
        let manifest = json!({
            "schemaVersion": 2, "config": self.blob(config.to_string().as_bytes()), "layers": blobs,
        });
        let mut ours = self.blob(manifest.to_string().as_bytes());
        ours["platform"] = json!({"os": "linux", "architecture": "amd64"});
        let mut other = ours.clone();
        other["platform"]["architecture"] = json!("arm64");
        let index = json!({"schemaVersion": 2, "manifests": [other, ours]});
        std::fs::write(self.layout().join("index.json"), index.to_string()).unwrap();
        self.layout()
    }
}

/// Paths with their kinds, owners and contents.
fn unsquash(image: &StoredImage) -> Vec<String> {
    let list = Command::new("unsquashfs")
        .arg("-lln")
        .arg(&image.squashfs)
        .output()
        .unwrap();
    String::from_utf8(list.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            let path = line.split_once("squashfs-root")?.1;
            Some(format!("{} {} {path}", words[0], words[1]))
        })
        .collect()
}

fn content(image: &StoredImage, path: &str) -> String {
    let cat = Command::new("unsquashfs")
        .arg("-cat")
        .arg(&image.squashfs)
        .arg(path)
        .output()
        .unwrap();
    String::from_utf8(cat.stdout).unwrap()
}

fn layers() -> Vec<Layer> {
    vec![
        Layer::default()
            .add(EntryType::Directory, "./etc/", "", "")
            .file("./etc/old", "old")
            .file("./etc/kept", "kept")
            .add(EntryType::Link, "etc/link", "./etc/kept", "")
            .add(EntryType::Symlink, "lib", "usr/../usr/lib", ""),
        Layer::default()
            .file("etc/.wh.old", "")
            .file("etc/kept", "replaced")
            .file("/bin/x", "program"),
        Layer::default().file("lib/y", "library"),
    ]
}

#[test]
fn layers_are_merged_into_one_file_system() {
    let fixture = Fixture::new();
    let image = fixture
        .store
        .load(&fixture.image(layers()), Some("monopod.local/x"))
        .unwrap();
    assert_eq!(
        unsquash(&image),
        [
            "drwxr-xr-x 0/0 ",
            "drwxr-xr-x 0/0 /bin",
            "-rwxr-x--x 7/8 /bin/x",
            "drwxr-x--x 7/8 /etc",
            "-rwxr-x--x 7/8 /etc/kept",
            "-rwxr-x--x 7/8 /etc/link",
            "lrwxrwxrwx 7/8 /lib -> usr/../usr/lib",
            "drwxr-xr-x 0/0 /usr",
            "drwxr-xr-x 0/0 /usr/lib",
            "-rwxr-x--x 7/8 /usr/lib/y",
        ]
    );
    assert_eq!(content(&image, "etc/kept"), "replaced");
    assert_eq!(content(&image, "etc/link"), "kept");
    assert_eq!(image.config.entrypoint, ["/bin/x"]);
    assert_eq!(image.config.volumes, ["/data"]);
    assert_eq!(image.size, image.squashfs.metadata().unwrap().len());
}

#[test]
fn references_find_the_image_and_only_it() {
    let fixture = Fixture::new();
    let layout = fixture.image(layers());
    // The same as an archive.
    let archive = fixture.directory.path().join("archive.tar");
    let mut builder = tar::Builder::new(File::create(&archive).unwrap());
    builder.append_dir_all(".", &layout).unwrap();
    builder.finish().unwrap();
    let image = fixture
        .store
        .load(&archive, Some("monopod.local/x:1"))
        .unwrap();
    let again = fixture
        .store
        .load(&layout, Some("monopod.local/x:1"))
        .unwrap();
    let image = StoredImage {
        last_used: again.last_used,
        ..image
    };
    assert_eq!(again, image);
    let by_digest = format!("monopod.local/x@{}", image.digest);
    for found in ["monopod.local/x:1", &by_digest] {
        assert_eq!(
            fixture.store.resolve(found).unwrap().as_ref(),
            Some(&image),
            "{found}"
        );
    }
    let elsewhere = format!("monopod.local/y@{}", image.digest);
    for missing in ["monopod.local/x", "x:1", &elsewhere] {
        assert_eq!(fixture.store.resolve(missing).unwrap(), None, "{missing}");
    }
    assert_eq!(fixture.store.list().unwrap(), [image]);
    assert!(matches!(
        fixture.store.load(&layout, None),
        Err(ImageError::Unsupported { .. })
    ));
    assert!(matches!(
        fixture.store.load(&layout, Some(&by_digest)),
        Err(ImageError::InvalidName { .. })
    ));
}

#[test]
fn hostile_layers_are_refused_and_leave_nothing() {
    for (layer, what) in [
        (
            Layer::default().file("../outside", "x"),
            "a path that leaves the image",
        ),
        (
            Layer::default().file("a/../../outside", "x"),
            "a path that leaves it later",
        ),
        (
            Layer::default().add(EntryType::Link, "a", "/etc/shadow", ""),
            "a link to nothing of the image",
        ),
        (
            Layer::default().add(EntryType::Link, "a", "../../etc/shadow", ""),
            "a link to the outside",
        ),
        (
            Layer::default().add(EntryType::new(b'?'), "a", "", ""),
            "an unknown kind",
        ),
        (
            Layer::default().file("a", "x").file("a/b", "x"),
            "a file as a directory",
        ),
    ] {
        let fixture = Fixture::new();
        let error = fixture
            .store
            .load(&fixture.image(vec![layer]), Some("x"))
            .expect_err(what);
        assert!(
            matches!(error, ImageError::Hostile { .. }),
            "{what}: {error:?}"
        );
        assert_eq!(fixture.store.list().unwrap(), []);
        let left: Vec<_> = std::fs::read_dir(fixture.directory.path().join("store"))
            .unwrap()
            .collect();
        assert_eq!(left.len(), 0, "nothing is left: {left:?}");
    }
}

#[test]
fn changed_bytes_are_noticed() {
    let fixture = Fixture::new();
    let layout = fixture.image(layers());
    for blob in std::fs::read_dir(layout.join("blobs/sha256")).unwrap() {
        let path = blob.unwrap().path();
        let honest = std::fs::read(&path).unwrap();
        let mut changed = honest.clone();
        let last = changed.len() - 1;
        changed[last] ^= 1;
        for content in [changed, honest[..last].to_vec()] {
            std::fs::write(&path, content).unwrap();
            assert!(
                fixture.store.load(&layout, Some("x")).is_err(),
                "{}",
                path.display()
            );
        }
        std::fs::write(&path, honest).unwrap();
    }
    fixture.store.load(&layout, Some("x")).unwrap();
}

/// Layers with everything, as one that a hostile change is made to.
fn sample() -> Vec<u8> {
    let mut layer = Layer::default()
        .add(EntryType::Directory, "./etc/", "", "")
        .file("etc/old", "old")
        .add(EntryType::Link, "etc/link", "etc/old", "")
        .add(EntryType::Symlink, "lib", "etc", "")
        .file("lib/.wh.old", "")
        .add(EntryType::Char, "null", "", "")
        .add(EntryType::Fifo, "pipe", "", "");
    let attributes = [("SCHILY.xattr.user.a", &b"b\nc"[..])];
    layer.0.append_pax_extensions(attributes).unwrap();
    layer.file("last", "content").bytes()
}

/// What one layer makes, without a file system of it.
fn flattened(fixture: &Fixture, plain: &[u8], budget: u64) -> Result<Vec<u8>, ImageError> {
    let layout = fixture.layout_of(&[plain.to_vec()]);
    let mut source = Source::open(&layout)?;
    let image = config::read(&mut source)?;
    let tree = flatten::survey(&mut source, &image.layers, budget)?;
    let mut output = Vec::new();
    flatten::write(&tree, &mut source, &image.layers, budget, &mut output)?;
    Ok(output)
}

#[test]
fn bombs_are_named_and_cut() {
    let fixture = Fixture::new();
    let large = "\0".repeat(3 << 20);
    let file = Layer::default().file("zeros", &large).bytes();
    let error = flattened(&fixture, &file, 1 << 20).unwrap_err();
    assert!(error.to_string().contains("too large together"), "{error}");
    assert!(flattened(&fixture, &file, 4 << 20).is_ok());
    let after = [Layer::default().bytes(), large.into_bytes()].concat();
    let error = flattened(&fixture, &after, 1 << 20).unwrap_err();
    assert!(error.to_string().contains("the image is a bomb"), "{error}");

    // A file of holes alone, larger than any disk, in a kilobyte.
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNUSparse);
    header.set_path("holes").unwrap();
    header.set_size(0);
    let bytes = header.as_mut_bytes();
    // Its size, in base 256: eight exbibytes less one.
    bytes[483] = 0x80;
    bytes[487..495].copy_from_slice(&i64::MAX.to_be_bytes());
    header.set_cksum();
    let mut layer = Layer::default();
    layer.0.append(&header, std::io::empty()).unwrap();
    let error = flattened(&fixture, &layer.bytes(), layer::budget(1024)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("holds \"holes\": the image's files are too large together"),
        "{error}"
    );

    assert_eq!(layer::budget(0), 1 << 30);
    assert_eq!(layer::budget(u64::MAX), 64 << 30);
}

#[test]
fn documents_that_are_too_large_are_refused() {
    let fixture = Fixture::new();
    let layout = fixture.image(layers());
    let index = layout.join("index.json");
    let honest = std::fs::read(&index).unwrap();
    let large = [honest, vec![b' '; 600 << 10]].concat();
    std::fs::write(&index, large).unwrap();
    let error = fixture.store.load(&layout, Some("x")).unwrap_err();
    assert!(error.to_string().contains("larger than"), "{error}");
}

#[test]
fn a_file_that_was_changed_is_not_used_again() {
    let fixture = Fixture::new();
    let image = fixture
        .store
        .load(&fixture.image(layers()), Some("monopod.local/x"))
        .unwrap();
    let mut bytes = std::fs::read(&image.squashfs).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::remove_file(&image.squashfs).unwrap();
    std::fs::write(&image.squashfs, bytes).unwrap();
    // Another process: this one has made the file itself.
    let store = Store::open(&fixture.directory.path().join("store")).unwrap();
    let reference = normalise("monopod.local/x").unwrap();
    let known = store.find(&reference).unwrap();
    assert!(known.is_some(), "nobody looked yet");
    assert_eq!(store.take(&reference).unwrap(), None);
    assert_eq!(store.list().unwrap(), []);
    assert!(!image.squashfs.exists());
    let again = store
        .load(&fixture.layout(), Some("monopod.local/x"))
        .unwrap();
    assert_eq!(again.digest, image.digest);
    assert!(store.take(&reference).unwrap().is_some());
    // Verified once, and removed by somebody since.
    std::fs::remove_file(&image.squashfs).unwrap();
    assert_eq!(store.take(&reference).unwrap(), None);
}

#[test]
fn removal_takes_all_references_and_spares_what_was_used_since() {
    let fixture = Fixture::new();
    let layout = fixture.image(layers());
    let image = fixture.store.load(&layout, Some("a.io/x:1")).unwrap();
    fixture.store.load(&layout, Some("a.io/x:2")).unwrap();
    let before = image.last_used - SignedDuration::from_secs(1);
    fixture
        .store
        .discard(std::slice::from_ref(&image.digest), before)
        .unwrap();
    assert_eq!(fixture.store.list().unwrap().len(), 2, "it was used since");
    assert!(fixture.store.remove("a.io/x:2").unwrap().is_some());
    assert_eq!(fixture.store.list().unwrap(), []);
    assert!(!image.squashfs.exists());
    assert!(fixture.store.remove("a.io/x:2").unwrap().is_none());
}

/// Pulled, loaded, and used images under the limits of an empty and of a full disk.
#[test]
fn unused_images_are_collected_and_others_are_not() {
    use crate::garbage::{InUse, remove};
    use monopod_core::image::garbage::Limits;
    let fixture = Fixture::new();
    let pull = |name: &str| {
        let reference = normalise(name).unwrap();
        let layout = fixture.image(vec![Layer::default().file("name", name)]);
        let image = config::read(&mut Source::open(&layout).unwrap()).unwrap();
        let pulled = Pulled {
            reference: &reference,
            resolved: &image.digest,
            fingerprint: None,
        };
        fixture.store.add_pulled(&layout, &pulled).unwrap()
    };
    let (unused, named, attached) = (
        pull("a.io/unused"),
        pull("a.io/named"),
        pull("a.io/attached"),
    );
    let loaded = fixture.image(vec![Layer::default().file("name", "loaded")]);
    fixture.store.load(&loaded, Some("a.io/loaded")).unwrap();
    let in_use = InUse::default();
    in_use.needs(
        "env-1",
        ["a.io/named".to_owned(), "?".to_owned()].into_iter(),
    );
    in_use.has("env-2", &attached.squashfs);
    let left = || -> Vec<String> {
        let images = fixture.store.list().unwrap().into_iter();
        images
            .map(|image| image.reference)
            .filter(|r| !r.contains('@'))
            .collect()
    };
    let limits = |high, hours| Limits {
        high,
        low: 0,
        max_age: Some(SignedDuration::from_hours(hours)),
    };
    let later = Timestamp::now() + SignedDuration::from_hours(2);
    remove(&fixture.store, &in_use, &limits(100, 3), later).unwrap();
    assert_eq!(left().len(), 4, "neither old nor is the disk full");
    remove(&fixture.store, &in_use, &limits(0, 1), Timestamp::now()).unwrap();
    assert_eq!(left().len(), 4, "all were used a moment ago");
    remove(&fixture.store, &in_use, &limits(100, 1), later).unwrap();
    assert_eq!(
        left(),
        [
            "a.io/attached:latest",
            "a.io/loaded:latest",
            "a.io/named:latest"
        ]
    );
    assert!(!unused.squashfs.exists() && named.squashfs.exists());
    in_use.release("env-1");
    remove(&fixture.store, &in_use, &limits(0, 1000), later).unwrap();
    assert_eq!(left(), ["a.io/attached:latest", "a.io/loaded:latest"]);
}

#[test]
fn what_a_killed_process_left_is_swept_and_what_is_being_made_is_not() {
    let fixture = Fixture::new();
    let store = fixture.directory.path().join("store");
    for name in [".make-dead", ".make-alive"] {
        std::fs::create_dir(store.join(name)).unwrap();
        std::fs::write(store.join(name).join("squashfs"), "x").unwrap();
    }
    let alive = File::open(store.join(".make-alive")).unwrap();
    rustix::fs::flock(&alive, FlockOperation::LockExclusive).unwrap();
    fixture.store.sweep().unwrap();
    assert!(!store.join(".make-dead").exists() && store.join(".make-alive").exists());
}

mod properties {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A layer whose bytes were changed, and whose digests say so, is read or refused.
        #[test]
        fn changed_layers_do_no_harm(changes in prop::collection::vec((0usize..8192, any::<u8>()), 1..6)) {
            let mut layer = sample();
            for (at, byte) in changes {
                let length = layer.len();
                layer[at % length] = byte;
            }
            for block in layer.chunks_exact_mut(512).filter(|block| block[257..262] == *b"ustar") {
                let sum: u32 = block.iter().enumerate().map(|(at, &b)| if (148..156).contains(&at) { 32 } else { u32::from(b) }).sum();
                block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            }
            let fixture = Fixture::new();
            if let Ok(output) = flattened(&fixture, &layer, 1 << 20) {
                prop_assert!(output.len() < 4 << 20);
                for entry in tar::Archive::new(&output[..]).entries().unwrap() {
                    let entry = entry.unwrap();
                    let path = entry.path_bytes().into_owned();
                    let outside = path.split(|&b| b == b'/').any(|part| part == b"..") || path.first() == Some(&b'/');
                    prop_assert!(!outside, "{}", String::from_utf8_lossy(&path));
                }
            }
        }

        #[test]
        fn arbitrary_layers_do_no_harm(layer in prop::collection::vec(any::<u8>(), 0..1500)) {
            let _refused = flattened(&Fixture::new(), &layer, 1 << 20).is_err();
        }
    }

    proptest! {
        // Each case may start a program.
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// An archive whose bytes were changed is loaded or refused, and a refusal leaves nothing.
        #[test]
        fn changed_archives_leave_nothing_behind(changes in prop::collection::vec((0usize..65536, any::<u8>()), 0..4), cut in prop::option::weighted(0.2, 0usize..65536)) {
            let fixture = Fixture::new();
            let archive = fixture.directory.path().join("archive.tar");
            let mut builder = tar::Builder::new(Vec::new());
            builder.append_dir_all(".", fixture.image(layers())).unwrap();
            let mut bytes = builder.into_inner().unwrap();
            for (at, byte) in changes {
                let length = bytes.len();
                bytes[at % length] = byte;
            }
            let length = bytes.len();
            bytes.truncate(cut.map_or(length, |cut| cut % length));
            std::fs::write(&archive, bytes).unwrap();
            let loaded = fixture.store.load(&archive, Some("x"));
            let mut left: Vec<String> = std::fs::read_dir(fixture.directory.path().join("store"))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .filter(|name| name != "lock")
                .collect();
            left.sort();
            if let Ok(image) = loaded {
                let file = image.squashfs.file_name().unwrap().to_str().unwrap().to_owned();
                prop_assert_eq!(left, ["index.json".to_owned(), file]);
            } else {
                prop_assert_eq!(left.len(), 0, "{:?}", left);
            }
        }
    }
}
