//! Debian's stock cloud kernel, taken apart for direct boot.
//!
//! A VM boots `vmlinux` by its PVH entry, which spares it the unpacking of the `bzImage`, and loads
//! the few modules it needs in a fixed order, so that the guest needs neither depmod nor modprobe.
//! The result is cached under the package's file name, which holds its version.

use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What the guest uses. Dependencies are added; what the kernel has built in is not listed.
const MODULES: [&str; 13] = [
    // The machine's devices. virtio_mmio comes last of these: it probes what is there.
    "virtio_blk",
    "virtio_console",
    "virtio_net",
    "virtio_rng",
    "virtio_mmio",
    // Images and containers.
    "squashfs",
    "overlay",
    // The three network namespaces.
    "bridge",
    "veth",
    "nf_tables",
    "nft_chain_nat",
    "nft_ct",
    "nft_nat",
];

/// Counted up when something else is made of the same package.
const LAYOUT: u32 = 2;

/// A kernel ready for direct boot.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// The package, its version and what is made of it.
    pub(crate) build: String,
    /// `uname -r` of it.
    pub(crate) release: String,
    /// The uncompressed ELF file.
    pub(crate) vmlinux: PathBuf,
    /// Stripped modules in the order in which they are loaded.
    pub(crate) modules: Vec<PathBuf>,
}

/// The current kernel of this Debian release, downloaded and taken apart once per version.
pub(crate) fn fetch(cache: &Path) -> Result<Kernel> {
    let cache = cache.join("kernel");
    std::fs::create_dir_all(&cache)?;
    let package = package()?;
    let build = format!("{package}-{LAYOUT}");
    let done = cache.join(&build);
    if !done.join("order").exists() {
        let work = cache.join(format!("{package}.tmp"));
        if work.exists() {
            std::fs::remove_dir_all(&work)?;
        }
        std::fs::create_dir_all(work.join("modules"))?;
        take_apart(&package, &work).with_context(|| format!("taking {package} apart"))?;
        std::fs::rename(&work, &done)?;
    }
    let modules = std::fs::read_to_string(done.join("order"))?
        .lines()
        .map(|name| done.join("modules").join(name))
        .collect();
    Ok(Kernel {
        build,
        release: std::fs::read_to_string(done.join("release"))?,
        vmlinux: done.join("vmlinux"),
        modules,
    })
}

/// `name=version` of the newest cloud kernel that apt knows.
fn package() -> Result<String> {
    let show = output(Command::new("apt-cache").args([
        "show",
        "--no-all-versions",
        "linux-image-cloud-amd64",
    ]))
    .context("no cloud kernel known to apt; run apt-get update")?;
    let depends = show
        .lines()
        .find_map(|line| line.strip_prefix("Depends: "))
        .context("linux-image-cloud-amd64 depends on nothing")?;
    let (name, version) = depends
        .strip_suffix(')')
        .and_then(|depends| depends.split_once(" (= "))
        .context("linux-image-cloud-amd64 does not depend on one exact version")?;
    Ok(format!("{name}={version}"))
}

fn take_apart(package: &str, work: &Path) -> Result<()> {
    let scratch = tempfile::tempdir_in(work)?;
    // apt's own user may not write here; it then downloads as root and says so on stderr.
    run(Command::new("apt-get")
        .args(["-qq", "download", package])
        .stderr(Stdio::null())
        .current_dir(scratch.path()))?;
    let deb = std::fs::read_dir(scratch.path())?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .context("apt-get download left no package")?;
    let root = scratch.path().join("root");
    run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&root))?;
    let tree = std::fs::read_dir(root.join("lib/modules"))?
        .next()
        .context("package without modules")??;
    let release = tree
        .file_name()
        .into_string()
        .ok()
        .context("release is not text")?;
    let image = std::fs::read(root.join("boot").join(format!("vmlinuz-{release}")))?;
    std::fs::write(work.join("vmlinux"), trim(vmlinux(&image)?)?)?;

    let mut files = BTreeMap::new();
    collect(&tree.path(), &mut files)?;
    let order = order(&files)?;
    for name in &order {
        let stripped = work.join("modules").join(name);
        run(Command::new("objcopy")
            .args([
                "--strip-debug",
                "-R",
                ".BTF",
                "-R",
                ".comment",
                "-R",
                ".note.Linux",
            ])
            .arg(&files[name])
            .arg(&stripped))?;
    }
    std::fs::write(work.join("release"), release)?;
    std::fs::write(work.join("order"), order.join("\n"))?;
    Ok(())
}

/// The ELF file inside a `bzImage` (Documentation/x86/boot.rst: `payload_offset`, `payload_length`).
fn vmlinux(image: &[u8]) -> Result<Vec<u8>> {
    let field = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("kernel image is too short")?;
        Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
    };
    let sectors = usize::from(*image.get(0x1f1).context("kernel image is too short")?);
    let start = (sectors + 1) * 512 + field(0x248)?;
    let payload = image
        .get(start..start + field(0x24c)?)
        .context("kernel payload lies outside the image")?;
    let program = match payload {
        [0x02, 0x21, 0x4c, 0x18, ..] => "lz4",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        [0xfd, b'7', b'z', b'X', b'Z', ..] => "xz",
        [0x1f, 0x8b, ..] => "gzip",
        _ => bail!("kernel payload has an unknown compression"),
    };
    // The payload's last four bytes are its size, which lz4 and zstd complain about at the end.
    let trimmed = &payload[..payload.len() - 4];
    let mut child = Command::new(program)
        .arg("-dcq")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("starting {program}; install its Debian package"))?;
    let mut stdin = child.stdin.take().expect("piped above");
    let elf = std::thread::scope(|scope| {
        scope.spawn(move || std::io::Write::write_all(&mut stdin, trimmed));
        child.wait_with_output()
    })?
    .stdout;
    ensure!(
        elf.starts_with(b"\x7fELF"),
        "kernel payload is not an ELF file"
    );
    Ok(elf)
}

/// Cuts off the zeros at the end of the last segment, some 10 MB that every VM would have to copy.
///
/// They are the kernel's `.bss` and the like, which it clears itself; and new memory is zero.
fn trim(mut elf: Vec<u8>) -> Result<Vec<u8>> {
    const PT_LOAD: u64 = 1;
    const PAGE: usize = 4096;
    let field = |elf: &[u8], at: usize, size: usize| -> Result<u64> {
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(elf.get(at..at + size).context("short ELF file")?);
        Ok(u64::from_le_bytes(bytes))
    };
    let table = usize::try_from(field(&elf, 32, 8)?)?;
    let entry = usize::try_from(field(&elf, 54, 2)?)?;
    let count = usize::try_from(field(&elf, 56, 2)?)?;
    let mut last: Option<(usize, usize, usize)> = None;
    for header in (0..count).map(|n| table + n * entry) {
        if field(&elf, header, 4)? == PT_LOAD {
            let offset = usize::try_from(field(&elf, header + 8, 8)?)?;
            let size = usize::try_from(field(&elf, header + 32, 8)?)?;
            if last.is_none_or(|(_, highest, _)| offset > highest) {
                last = Some((header, offset, size));
            }
        }
    }
    let (header, offset, size) = last.context("ELF file without segments")?;
    let content = elf.get(offset..offset + size).context("short ELF file")?;
    let used = content
        .iter()
        .rposition(|&byte| byte != 0)
        .map_or(0, |at| at + 1);
    let used = used.next_multiple_of(PAGE).min(size);
    for at in [header + 32, header + 40] {
        elf[at..at + 8].copy_from_slice(&(used as u64).to_le_bytes());
    }
    // The section headers behind it are of no use for booting.
    elf[40..48].fill(0);
    elf[60..64].fill(0);
    elf.truncate(offset + used);
    Ok(elf)
}

/// Finds `*.ko`; the kernel takes `-` and `_` in a module's name for the same.
fn collect(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "ko")
            && let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
        {
            files.insert(format!("{}.ko", stem.replace('-', "_")), path);
        }
    }
    Ok(())
}

fn order(files: &BTreeMap<String, PathBuf>) -> Result<Vec<String>> {
    fn add(module: &str, files: &BTreeMap<String, PathBuf>, order: &mut Vec<String>) -> Result<()> {
        let name = format!("{}.ko", module.replace('-', "_"));
        if order.contains(&name) {
            return Ok(());
        }
        let path = files
            .get(&name)
            .with_context(|| format!("kernel package has no module {module}"))?;
        for dependency in dependencies(&std::fs::read(path)?)? {
            add(&dependency, files, order)?;
        }
        order.push(name);
        Ok(())
    }
    let mut order = Vec::new();
    for module in MODULES {
        add(module, files, &mut order)?;
    }
    Ok(order)
}

/// The `depends=` entry of a module's `.modinfo`, which is a list of strings that end in NUL.
fn dependencies(module: &[u8]) -> Result<Vec<String>> {
    let entry = module
        .split(|&byte| byte == 0)
        .find_map(|entry| entry.strip_prefix(b"depends=".as_slice()))
        .context("module has no depends entry")?;
    Ok(std::str::from_utf8(entry)?
        .split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect())
}

/// Runs a command to its success.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("starting {command:?}"))?;
    ensure!(status.success(), "{command:?} failed: {status}");
    Ok(())
}

/// Runs a command to its success and gives what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("starting {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        output.status
    );
    Ok(String::from_utf8(output.stdout)?)
}
