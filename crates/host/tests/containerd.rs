//! An image with everything that is odd has the same files here as containerd shows (the Debian
//! package `containerd`), and the same again when it is made a second time.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use monopod_host::images::Store;
use rustix::fs::{lgetxattr, llistxattr};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tar::{Builder, EntryType, Header};

/// A capability set of `cap_net_raw+ep` with a line's end and an equals sign in it, which break
/// those who read extended headers as lines.
const CAPABILITY: &[u8] = b"\x01\0\0\x02\0\x20\0\0\n=\0\0\0\0\0\0\0\0\0\0";

struct Layer(Builder<Vec<u8>>);

impl Layer {
    fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    fn add(
        mut self,
        kind: EntryType,
        path: &str,
        change: impl FnOnce(&mut Header),
        content: &[u8],
    ) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_mtime(1_000_000_000);
        header.set_size(content.len() as u64);
        change(&mut header);
        self.0.append_data(&mut header, path, content).unwrap();
        self
    }

    fn file(self, path: &str, content: &[u8]) -> Self {
        self.add(EntryType::Regular, path, |_| {}, content)
    }

    fn directory(self, path: &str, mode: u32) -> Self {
        self.add(EntryType::Directory, path, |h| h.set_mode(mode), b"")
    }

    fn link(mut self, kind: EntryType, path: &str, target: &str) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o777);
        header.set_size(0);
        self.0.append_link(&mut header, path, target).unwrap();
        self
    }

    fn device(self, kind: EntryType, path: &str, major: u32, minor: u32) -> Self {
        self.add(
            kind,
            path,
            |h| {
                h.set_device_major(major).unwrap();
                h.set_device_minor(minor).unwrap();
            },
            b"",
        )
    }

    fn xattrs(mut self, pairs: &[(&str, &[u8])]) -> Self {
        let named: Vec<(String, &[u8])> = pairs
            .iter()
            .map(|(name, value)| (format!("SCHILY.xattr.{name}"), *value))
            .collect();
        self.0
            .append_pax_extensions(named.iter().map(|(name, value)| (name.as_str(), *value)))
            .unwrap();
        self
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

fn layers() -> Vec<Vec<u8>> {
    let long = format!("long/{}/{}", "d".repeat(90), "f".repeat(120));
    let first = Layer::new()
        .directory("./", 0o711)
        .directory("bin", 0o755)
        .add(
            EntryType::Regular,
            "bin/setuid",
            |h| h.set_mode(0o4755),
            b"program",
        )
        .add(
            EntryType::Regular,
            "bin/setgid",
            |h| h.set_mode(0o2711),
            b"program",
        )
        .directory("tmp", 0o1777)
        .xattrs(&[("security.capability", CAPABILITY)])
        .file("bin/capable", b"program")
        .xattrs(&[("user.note", b"a\nb=c"), ("user.empty", b"")])
        .file("noted", b"x")
        .add(
            EntryType::Regular,
            "odd-owner",
            |h| {
                h.set_uid(2_000_000_000);
                h.set_gid(65_534);
            },
            b"x",
        )
        .file(&long, b"long")
        .link(EntryType::Link, "hard", "bin/setuid")
        .link(EntryType::Symlink, "dangling", "/nowhere")
        .link(EntryType::Symlink, "usr-bin", "bin")
        .link(EntryType::Symlink, "far", &"l".repeat(150))
        .device(EntryType::Char, "null", 1, 3)
        .device(EntryType::Block, "loop", 7, 255)
        .add(EntryType::Fifo, "pipe", |_| {}, b"")
        .file("gone", b"x")
        .file("kept", b"old")
        .directory("opaque", 0o755)
        .file("opaque/old", b"x")
        .file("opaque/deep/old", b"x")
        .directory("removed", 0o755)
        .file("removed/inside", b"x")
        .file("becomes-directory", b"x")
        .directory("becomes-file", 0o755)
        .file("becomes-file/inside", b"x")
        .file("empty", b"")
        .bytes();
    let second = Layer::new()
        .file(".wh.gone", b"")
        .file(".wh.removed", b"")
        .file("kept", b"new")
        .directory("opaque", 0o700)
        .file("opaque/.wh..wh..opq", b"")
        .file("opaque/new", b"x")
        .add(
            EntryType::Directory,
            "bin",
            |h| {
                h.set_mode(0o750);
                h.set_uid(7);
            },
            b"",
        )
        .file("bin/later", b"x")
        .link(EntryType::Link, "hard-to-lower", "odd-owner")
        .file(".wh.becomes-directory", b"")
        .directory("becomes-directory", 0o755)
        .file("becomes-directory/x", b"x")
        .file("becomes-file", b"now a file")
        .bytes();
    vec![first, second, sparse()]
}

/// A layer of GNU tar with holes, in the form that containerd knows.
fn sparse() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(directory.path().join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"data", 5 << 20).unwrap();
    file.set_len(9 << 20).unwrap();
    let output = Command::new("tar")
        .args(["--sparse", "--format=pax", "-cC"])
        .arg(directory.path())
        .arg("sparse")
        .output()
        .unwrap();
    output.stdout
}

/// An archive of an image, which both can load.
fn archive(directory: &Path, layers: &[Vec<u8>]) -> PathBuf {
    let blobs = directory.join("layout/blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let blob = |bytes: &[u8], media_type: &str| {
        let hex = hex::encode(Sha256::digest(bytes));
        std::fs::write(blobs.join(&hex), bytes).unwrap();
        json!({"mediaType": media_type, "digest": format!("sha256:{hex}"), "size": bytes.len()})
    };
    let described: Vec<_> = layers
        .iter()
        .map(|layer| blob(layer, "application/vnd.oci.image.layer.v1.tar"))
        .collect();
    let diff_ids: Vec<_> = described.iter().map(|d| d["digest"].clone()).collect();
    let config = json!({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}});
    let config = blob(
        config.to_string().as_bytes(),
        "application/vnd.oci.image.config.v1+json",
    );
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest =
        json!({"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": described});
    let mut manifest = blob(manifest.to_string().as_bytes(), media_type);
    manifest["annotations"] = json!({"io.containerd.image.name": "example.com/odd:1"});
    let layout = directory.join("layout");
    let index = json!({"schemaVersion": 2, "manifests": [manifest]});
    std::fs::write(layout.join("index.json"), index.to_string()).unwrap();
    std::fs::write(
        layout.join("oci-layout"),
        r#"{"imageLayoutVersion":"1.0.0"}"#,
    )
    .unwrap();
    let archive = directory.join("image.tar");
    run(Command::new("tar")
        .arg("-cf")
        .arg(&archive)
        .arg("-C")
        .arg(&layout)
        .args(["oci-layout", "index.json", "blobs"]));
    archive
}

/// What a command prints, which must succeed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// A containerd of the test's own, ended when it is dropped. It collects no garbage: nothing refers
/// to the snapshot that is looked at, and a collection follows every import.
struct Containerd {
    child: Child,
    directory: PathBuf,
}

impl Containerd {
    fn start(directory: &Path) -> Self {
        let at = |name: &str| directory.join(name);
        let config = format!(
            "version = 2\nroot = \"{}\"\nstate = \"{}\"\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.internal.v1.opt\"]\n[grpc]\naddress = \"{}\"\n[ttrpc]\naddress = \"{}\"\n\
             [plugins.\"io.containerd.gc.v1.scheduler\"]\nstartup_delay = \"1h\"\nschedule_delay = \"1h\"\n",
            at("root").display(),
            at("state").display(),
            at("socket").display(),
            at("ttrpc").display()
        );
        std::fs::write(at("config.toml"), config).unwrap();
        let log = std::fs::File::create(at("log")).unwrap();
        let child = Command::new("containerd")
            .arg("--config")
            .arg(at("config.toml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("the Debian package containerd is installed");
        let this = Self {
            child,
            directory: directory.to_owned(),
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        while !this.ctr().arg("version").output().unwrap().status.success() {
            let log = std::fs::read_to_string(at("log")).unwrap_or_default();
            assert!(
                Instant::now() < deadline,
                "containerd does not answer: {log}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        this
    }

    fn ctr(&self) -> Command {
        let mut command = Command::new("ctr");
        command
            .arg("--address")
            .arg(self.directory.join("socket"))
            .args(["--namespace", "test"]);
        command
    }
}

impl Containerd {
    /// The directory of the unpacked image. The native snapshotter copies each layer, so that this
    /// is what a container sees, without a file system of its own in between.
    fn unpacked(&self, layers: &[Vec<u8>]) -> PathBuf {
        let chain = layers.iter().fold(String::new(), |chain, layer| {
            let layer = format!("sha256:{}", hex::encode(Sha256::digest(layer)));
            if chain.is_empty() {
                return layer;
            }
            let both = Sha256::digest(format!("{chain} {layer}"));
            format!("sha256:{}", hex::encode(both))
        });
        let snapshots = || {
            let mut command = self.ctr();
            command.args(["snapshots", "--snapshotter", "native"]);
            command
        };
        run(snapshots().args(["view", "seen", &chain]));
        // `mount -t bind SOURCE /mnt -o ro,rbind`
        let text = run(snapshots().args(["mounts", "/mnt", "seen"]));
        let source = text.split_whitespace().find(|word| word.starts_with('/'));
        assert!(source.is_some(), "no mount's source in {text:?}");
        source.unwrap().into()
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Everything that a program could see of a tree, path by path.
fn listing(root: &Path) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut names: BTreeMap<(u64, u64), String> = BTreeMap::new();
    let mut todo = vec![root.to_owned()];
    let mut paths = vec![root.to_owned()];
    while let Some(directory) = todo.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.symlink_metadata().unwrap().is_dir() {
                todo.push(path.clone());
            }
            paths.push(path);
        }
    }
    paths.sort();
    for path in paths {
        let meta = path.symlink_metadata().unwrap();
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let kind = meta.file_type();
        let what = if kind.is_symlink() {
            format!("link to {}", std::fs::read_link(&path).unwrap().display())
        } else if kind.is_dir() {
            "directory".to_owned()
        } else if kind.is_char_device() || kind.is_block_device() {
            let (major, minor) = (
                rustix::fs::major(meta.rdev()),
                rustix::fs::minor(meta.rdev()),
            );
            format!("device {} {major}:{minor}", kind.is_char_device())
        } else if kind.is_fifo() {
            "pipe".to_owned()
        } else {
            let first = names
                .entry((meta.dev(), meta.ino()))
                .or_insert_with(|| name.clone());
            let sum = hex::encode(Sha256::digest(std::fs::read(&path).unwrap()));
            format!("file of {} bytes {sum}, one with {first}", meta.len())
        };
        let seen = format!(
            "{what}, mode {:o}, owner {}:{}, attributes {:?}",
            meta.mode() & 0o7777,
            meta.uid(),
            meta.gid(),
            xattrs(&path)
        );
        all.insert(name, seen);
    }
    all
}

fn xattrs(path: &Path) -> BTreeMap<String, String> {
    let mut buffer = vec![0u8; 64 << 10];
    let length = llistxattr(path, &mut buffer[..]).unwrap();
    buffer[..length]
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let name = std::ffi::OsStr::from_bytes(name);
            let mut value = vec![0u8; 64 << 10];
            let length = lgetxattr(path, name, &mut value[..]).unwrap();
            (
                name.to_string_lossy().into_owned(),
                hex::encode(&value[..length]),
            )
        })
        .collect()
}

#[test]
fn the_files_of_an_image_are_those_that_containerd_shows() {
    let directory = tempfile::tempdir().unwrap();
    let layers = layers();
    let archive = archive(directory.path(), &layers);
    let containerd = Containerd::start(directory.path());
    run(containerd
        .ctr()
        .args(["images", "import", "--snapshotter", "native"])
        .arg(&archive));
    let expected = listing(&containerd.unpacked(&layers));

    let store = Store::open(&directory.path().join("store")).unwrap();
    let image = store.load(&archive, None).unwrap();
    let ours = directory.path().join("ours");
    run(Command::new("unsquashfs")
        .args(["-quiet", "-no-progress", "-d"])
        .arg(&ours)
        .arg(&image.squashfs));
    let found = listing(&ours);

    let differing: Vec<String> = expected
        .keys()
        .chain(found.keys())
        .filter(|path| expected.get(*path) != found.get(*path))
        .map(|path| {
            format!(
                "{path:?}:\n  containerd {:?}\n  here       {:?}",
                expected.get(path),
                found.get(path)
            )
        })
        .collect();
    assert!(differing.is_empty(), "{}", differing.join("\n"));
    assert!(found.len() >= 28, "{} files", found.len());

    // The same image gives the same bytes at another time: those have whole seconds.
    let made = std::fs::metadata(&image.squashfs)
        .unwrap()
        .modified()
        .unwrap();
    while made.elapsed().unwrap() < Duration::from_secs(1) {
        std::thread::yield_now();
    }
    let again = Store::open(&directory.path().join("again")).unwrap();
    let again = again.load(&archive, None).unwrap();
    assert!(std::fs::read(&image.squashfs).unwrap() == std::fs::read(&again.squashfs).unwrap());
}
