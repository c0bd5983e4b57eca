//! Images as OCI archives: busybox and nginx from Debian packages, agnhost and `CoreDNS` from their Go
//! modules; for the tests Redis and Python from Debian. Each is one layer; the same inputs give the same archive.

use crate::dist::unless_done;
use crate::go;
use crate::kernel::{output, run};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Fills a root file system, and gives the image's configuration.
type Recipe = fn(&Path, &Path) -> Result<Value>;

/// An image's name and recipe, and what goes into it beside the recipe.
type Image = (&'static str, Recipe, &'static [&'static [u8]]);

/// What every cluster has.
const BUILT_IN: [Image; 4] = [
    ("busybox", busybox, &[]),
    ("nginx", nginx, &[]),
    ("agnhost", agnhost, &[crate::KUBERNETES_VERSION.as_bytes()]),
    (
        "coredns",
        coredns,
        &[
            include_bytes!("../../coredns/main.go"),
            include_bytes!("../../coredns/go.mod"),
            include_bytes!("../../coredns/go.sum"),
        ],
    ),
];
/// What only the tests use.
const FOR_TESTS: [Image; 2] = [("redis", redis, &[]), ("python", python, &[])];
/// What keeps a pod's namespaces on an ordinary node.
const FOR_PEER: [Image; 1] = [("pause", pause, &[crate::KUBERNETES_VERSION.as_bytes()])];

/// Builds the images that `monopod up` loads into `out`, each unless it is up to date.
pub(crate) fn build(out: &Path, downloads: &Path) -> Result<()> {
    build_all(&BUILT_IN, out, downloads)
}

/// Builds the images that only the tests use.
pub(crate) fn build_for_tests(out: &Path, downloads: &Path) -> Result<()> {
    fs::create_dir_all(out)?;
    build_all(&FOR_TESTS, out, downloads)
}

/// Builds the images that only an ordinary node uses.
pub(crate) fn build_for_peer(out: &Path, downloads: &Path) -> Result<()> {
    build_all(&FOR_PEER, out, downloads)
}

fn build_all(images: &[Image], out: &Path, downloads: &Path) -> Result<()> {
    let work = tempfile::tempdir()?;
    for &(name, recipe, inputs) in images {
        let archive = out.join(format!("{name}.tar"));
        // The recipe is this file; the packages are those that apt gave when it was first followed.
        unless_done(
            &archive,
            &[&[&include_bytes!("images.rs")[..]], inputs].concat(),
            || {
                println!("    image {name}");
                let root = work.path().join(name);
                fs::create_dir_all(&root)?;
                let config = recipe(&root, downloads).with_context(|| format!("image {name}"))?;
                pack(&root, &config, name, &archive)
            },
        )?;
    }
    Ok(())
}

fn busybox(root: &Path, downloads: &Path) -> Result<Value> {
    base(root, downloads)?;
    Ok(json!({"Cmd": ["sh"], "Env": [PATH]}))
}

/// A shell and its tools.
fn base(root: &Path, downloads: &Path) -> Result<()> {
    unpack(root, downloads, &["busybox-static"])?;
    accounts(root)?;
    applets(root)
}

fn nginx(root: &Path, downloads: &Path) -> Result<Value> {
    unpack(root, downloads, &["nginx-light", "busybox-static"])?;
    accounts(root)?;
    applets(root)?;
    // What the packages' maintainer scripts would do.
    for directory in ["var/log/nginx", "var/lib/nginx", "usr/share/nginx/html"] {
        fs::create_dir_all(root.join(directory))?;
    }
    fs::write(
        root.join("etc/nginx/nginx.conf"),
        "daemon off;\nuser www-data;\nworker_processes 1;\npid /run/nginx.pid;\nerror_log /dev/stderr;\nevents {}\n\
         http {\n  access_log /dev/stdout;\n  include mime.types;\n  server { listen 80; root /usr/share/nginx/html; }\n}\n",
    )?;
    fs::write(
        root.join("usr/share/nginx/html/index.html"),
        "<!doctype html>\n<title>Welcome to nginx!</title>\n<p>Served from a microVM of its own.</p>\n",
    )?;
    Ok(
        json!({"Cmd": ["nginx"], "Env": [PATH], "ExposedPorts": {"80/tcp": {}}, "StopSignal": "SIGQUIT"}),
    )
}

fn agnhost(root: &Path, downloads: &Path) -> Result<Value> {
    base(root, downloads)?;
    go::build(
        "kubernetes",
        "-s -w",
        &root.join("agnhost"),
        "k8s.io/kubernetes/test/images/agnhost",
    )?;
    Ok(json!({"Entrypoint": ["/agnhost"], "Cmd": ["pause"], "Env": [PATH]}))
}

/// The program alone: it needs no shell, and whoever breaks into it finds none.
fn coredns(root: &Path, _downloads: &Path) -> Result<Value> {
    accounts(root)?;
    go::build("coredns", "-s -w", &root.join("coredns"), ".")?;
    Ok(
        json!({"Entrypoint": ["/coredns"], "Env": [PATH], "ExposedPorts": {"53/udp": {}, "53/tcp": {}}}),
    )
}

fn redis(root: &Path, downloads: &Path) -> Result<Value> {
    unpack(root, downloads, &["redis-server", "busybox-static"])?;
    accounts(root)?;
    applets(root)?;
    Ok(
        json!({"Entrypoint": ["redis-server"], "Env": [PATH], "User": "65534", "WorkingDir": "/tmp", "ExposedPorts": {"6379/tcp": {}}}),
    )
}

fn python(root: &Path, downloads: &Path) -> Result<Value> {
    unpack(
        root,
        downloads,
        &["python3", "python3-redis", "busybox-static"],
    )?;
    accounts(root)?;
    applets(root)?;
    // As the packages' maintainer scripts do; an emulated CPU takes a minute for what one program imports.
    run(Command::new("chroot")
        .arg(root)
        .args(["python3", "-m", "compileall", "-q"])
        .args(["--invalidation-mode", "unchecked-hash", "/usr/lib"])
        .env("PYTHONHASHSEED", "0"))?;
    Ok(json!({"Entrypoint": ["python3", "-u"], "Env": [PATH]}))
}

/// Upstream's, from the source of the same version.
fn pause(root: &Path, _downloads: &Path) -> Result<Value> {
    let source = output(
        Command::new("go")
            .args(["list", "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes"])
            .current_dir(crate::dist::root().join("kubernetes")),
    )?;
    run(Command::new("gcc")
        .args(["-Os", "-static", "-s", "-DVERSION=pause", "-o"])
        .arg(root.join("pause"))
        .arg(Path::new(source.trim()).join("build/pause/linux/pause.c")))?;
    Ok(json!({"Entrypoint": ["/pause"], "User": "65535:65535"}))
}

/// Unpacks packages of this Debian release, with all that they depend on.
fn unpack(root: &Path, downloads: &Path, packages: &[&str]) -> Result<()> {
    let archives = downloads.join("debs").join(packages.join("+"));
    fs::create_dir_all(archives.join("partial"))?;
    let cached = |path: &PathBuf| path.extension().is_some_and(|e| e == "deb");
    let list = || -> Result<Vec<PathBuf>> {
        let mut files: Vec<PathBuf> = fs::read_dir(&archives)?
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(cached)
            .collect();
        files.sort();
        Ok(files)
    };
    if list()?.is_empty() {
        let mut apt = Command::new("apt-get");
        apt.args(["-qq", "-o", "APT::Sandbox::User=root"])
            .stdout(Stdio::null())
            .current_dir(&archives);
        // As if nothing were installed, so that every dependency is fetched.
        apt.args([
            "-o",
            "Dir::State::status=/dev/null",
            "-o",
            "Debug::NoLocking=1",
        ])
        .arg("-o")
        .arg(format!("Dir::Cache::archives={}", archives.display()))
        .args([
            "install",
            "-y",
            "--no-install-recommends",
            "--download-only",
        ]);
        run(apt.args(packages)).context("run `apt-get update` and try again")?;
    }
    for file in list()? {
        run(Command::new("dpkg-deb").arg("-x").arg(file).arg(root))?;
    }
    for unneeded in [
        "usr/share/doc",
        "usr/share/man",
        "usr/share/locale",
        "usr/share/info",
        "usr/share/lintian",
        "var/cache",
    ] {
        let path = root.join(unneeded);
        if path.exists() {
            fs::remove_dir_all(path)?;
        }
    }
    Ok(())
}

/// The accounts and directories that programs expect.
fn accounts(root: &Path) -> Result<()> {
    for directory in [
        "etc", "root", "proc", "sys", "dev", "run", "tmp", "var/log", "var/tmp", "home",
    ] {
        fs::create_dir_all(root.join(directory))?;
    }
    run(Command::new("chmod")
        .arg("1777")
        .arg(root.join("tmp"))
        .arg(root.join("var/tmp")))?;
    fs::write(
        root.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nwww-data:x:33:33:www-data:/var/www:/bin/false\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    )?;
    fs::write(
        root.join("etc/group"),
        "root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\n",
    )?;
    Ok(fs::write(
        root.join("etc/nsswitch.conf"),
        "hosts: files dns\n",
    )?)
}

/// Links for busybox's commands that the root file system lacks.
fn applets(root: &Path) -> Result<()> {
    let list = output(Command::new(root.join("bin/busybox")).arg("--list"))?;
    let places = ["bin", "sbin", "usr/bin", "usr/sbin"];
    for name in list.lines().filter(|name| *name != "busybox") {
        let present = places
            .iter()
            .any(|place| root.join(place).join(name).symlink_metadata().is_ok());
        if !present {
            symlink("/bin/busybox", root.join("bin").join(name))?;
        }
    }
    Ok(())
}

/// Writes a root file system as an OCI archive.
fn pack(root: &Path, config: &Value, name: &str, archive: &Path) -> Result<()> {
    let layout = tempfile::tempdir()?;
    let blobs = layout.path().join("blobs/sha256");
    fs::create_dir_all(&blobs)?;
    let plain = layout.path().join("layer");
    run(tar(root).arg("-cf").arg(&plain).arg("."))?;
    let diff = hex::encode(Sha256::digest(fs::read(&plain)?));
    run(Command::new("gzip").args(["-n", "-6"]).arg(&plain))?;
    let layer = blob(
        &blobs,
        &fs::read(plain.with_extension("gz"))?,
        "application/vnd.oci.image.layer.v1.tar+gzip",
    )?;
    fs::remove_file(plain.with_extension("gz"))?;
    let image = json!({
        "architecture": "amd64", "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{diff}")]},
    });
    let config = blob(
        &blobs,
        image.to_string().as_bytes(),
        "application/vnd.oci.image.config.v1+json",
    )?;
    let media = "application/vnd.oci.image.manifest.v1+json";
    let manifest =
        json!({"schemaVersion": 2, "mediaType": media, "config": config, "layers": [layer]});
    let mut manifest = blob(&blobs, manifest.to_string().as_bytes(), media)?;
    manifest["annotations"] =
        json!({"org.opencontainers.image.ref.name": format!("monopod.local/{name}:latest")});
    fs::write(
        layout.path().join("index.json"),
        json!({"schemaVersion": 2, "manifests": [manifest]}).to_string(),
    )?;
    fs::write(
        layout.path().join("oci-layout"),
        json!({"imageLayoutVersion": "1.0.0"}).to_string(),
    )?;
    let partial = archive.with_extension("partial");
    run(tar(layout.path())
        .arg("-cf")
        .arg(&partial)
        .args(["oci-layout", "index.json", "blobs"]))?;
    Ok(fs::rename(partial, archive)?)
}

/// tar with everything left out that differs between two runs.
fn tar(directory: &Path) -> Command {
    let mut tar = Command::new("tar");
    tar.args([
        "--sort=name",
        "--mtime=@0",
        "--numeric-owner",
        "--format=gnu",
        "-C",
    ])
    .arg(directory);
    tar
}

fn blob(blobs: &Path, bytes: &[u8], media_type: &str) -> Result<Value> {
    let digest = hex::encode(Sha256::digest(bytes));
    fs::write(blobs.join(&digest), bytes)?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()}))
}
