//! Against the archives of GNU tar and of the library that writes ours, and arbitrary bytes.

use super::*;
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

fn read(bytes: &[u8]) -> Result<Vec<(Member, Vec<u8>)>, ArchiveError> {
    let mut archive = Archive::new(bytes);
    let mut members = Vec::new();
    while let Some(member) = archive.next()? {
        let mut content = Vec::new();
        if member.size < 1 << 24 {
            archive.read_to_end(&mut content)?;
        }
        members.push((member, content));
    }
    Ok(members)
}

/// What GNU tar makes of a directory with everything that is odd, in each of its formats.
#[test]
fn archives_of_gnu_tar_are_understood() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let long = "d".repeat(120);
    std::fs::create_dir(at(&long)).unwrap();
    std::fs::write(at(&long).join("x".repeat(120)), "long").unwrap();
    let holes = std::fs::File::create(at("holes")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&holes, b"middle", 1 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&holes, b"later", 3 << 20).unwrap();
    holes.set_len(4 << 20).unwrap();
    std::fs::hard_link(at("holes"), at("same")).unwrap();
    std::os::unix::fs::symlink("l".repeat(130), at("link")).unwrap();
    std::fs::write(at("odd"), "x").unwrap();
    std::os::unix::fs::chown(at("odd"), Some(3_000_000_000), Some(7)).unwrap();
    std::fs::set_permissions(at("odd"), std::fs::Permissions::from_mode(0o4711)).unwrap();
    let expected = std::fs::read(at("holes")).unwrap();
    for format in [
        &["--format=gnu"][..],
        &["--format=gnu", "--sparse"],
        &["--format=pax"],
        &["--format=pax", "--sparse", "--sparse-version=0.0"],
        &["--format=pax", "--sparse", "--sparse-version=0.1"],
        &["--format=pax", "--sparse", "--sparse-version=1.0"],
    ] {
        let output = Command::new("tar")
            .args(format)
            .args(["--sort=name", "--numeric-owner", "-cC"])
            .arg(directory.path())
            .arg(".")
            .output()
            .unwrap();
        let members = read(&output.stdout).unwrap();
        let find = |name: &str| {
            let path = format!("./{name}").into_bytes();
            members.iter().find(|(m, _)| m.path == path).unwrap()
        };
        let (holes, content) = find("holes");
        assert_eq!(
            (holes.kind, holes.size),
            (Kind::File, 4 << 20),
            "{format:?}"
        );
        assert!(
            *content == expected,
            "{format:?}: the content of a sparse file"
        );
        assert_eq!(find("same").0.kind, Kind::HardLink);
        assert_eq!(find("same").0.link, b"./holes");
        assert_eq!(find("link").0.link, "l".repeat(130).as_bytes());
        let odd = &find("odd").0;
        assert_eq!((odd.mode, odd.uid, odd.gid), (0o4711, 3_000_000_000, 7));
        assert_eq!(find(&format!("{long}/{}", "x".repeat(120))).1, b"long");
        assert_eq!(members.len(), 7, "{format:?}");
    }
}

fn sample() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let value: Vec<u8> = (0..=255).collect();
    builder
        .append_pax_extensions([
            ("SCHILY.xattr.security.capability", &value[..]),
            ("SCHILY.xattr.user.a", b"line\nline"),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("SCHILY.xattr.system.posix_acl_access", b"x"),
            ("mtime", b"12.5"),
        ])
        .unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_size(5);
    header.set_mode(0o100_755);
    header.set_cksum();
    builder
        .append_data(&mut header, "a/b", &b"bytes"[..])
        .unwrap();
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::Char);
    header.set_device_major(3).unwrap();
    header.set_device_minor(4).unwrap();
    header.set_size(0);
    header.set_cksum();
    builder.append_data(&mut header, "dev", &b""[..]).unwrap();
    builder.into_inner().unwrap()
}

#[test]
fn attributes_may_hold_any_bytes() {
    let members = read(&sample()).unwrap();
    let (file, content) = &members[0];
    assert_eq!((file.mode, file.mtime), (0o755, 12));
    assert_eq!(content, b"bytes");
    let names: Vec<_> = file.xattrs.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["security.capability", "user.a"]);
    assert_eq!(file.xattrs[0].1, (0..=255).collect::<Vec<u8>>());
    let device = &members[1].0;
    assert_eq!(
        (device.kind, device.major, device.minor),
        (Kind::Character, 3, 4)
    );
}

#[test]
fn endless_headers_are_refused() {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::XHeader);
    header.set_size(1 << 40);
    header.set_cksum();
    let error = Archive::new(header.as_bytes().chain(io::repeat(b'1')))
        .next()
        .unwrap_err();
    assert!(error.to_string().contains("1 MiB"), "{error}");
    let mut global = tar::Header::new_ustar();
    global.set_entry_type(tar::EntryType::XGlobalHeader);
    global.set_size(0);
    global.set_cksum();
    let many = global.as_bytes().repeat(1000);
    assert!(
        read(&many)
            .unwrap_err()
            .to_string()
            .contains("too many headers")
    );
}

proptest! {
    /// Bytes are refused or read; the members' contents have the sizes that they claim.
    #[test]
    fn changed_archives_do_no_harm(changes in prop::collection::vec((0usize..4096, any::<u8>()), 1..8), fix in any::<bool>()) {
        let mut bytes = sample();
        for (at, byte) in changes {
            let length = bytes.len();
            bytes[at % length] = byte;
        }
        if fix {
            // Headers with right sums get further.
            for block in bytes.chunks_exact_mut(BLOCK) {
                let sum: u32 = block.iter().enumerate().map(|(at, &b)| if (148..156).contains(&at) { 32 } else { u32::from(b) }).sum();
                if block[257..262] == *b"ustar" {
                    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
                }
            }
        }
        if let Ok(members) = read(&bytes) {
            for (member, content) in members {
                prop_assert!(member.size >= 1 << 24 || content.len() as u64 == member.size);
            }
        }
    }

    #[test]
    fn arbitrary_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
        let _read = read(&bytes).is_ok();
        let _parsed = pax::parse(&bytes).is_ok();
    }
}
