//! Where this process is in the machine's hierarchies of control groups.

use std::path::{Path, PathBuf};

/// What is limited by control groups, as version 1 and 2 name it.
pub(super) const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];

/// A hierarchy that is mounted, and where this process is in it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hierarchy {
    /// Version 2, the one for all controllers.
    pub(super) unified: bool,
    /// Where it is mounted.
    pub(super) top: PathBuf,
    /// This process's own group.
    pub(super) own: PathBuf,
}

/// The hierarchies that may limit something and whose groups can be reached, from
/// `/proc/self/mountinfo` and `/proc/self/cgroup`. One that is mounted twice is named once.
pub(super) fn find(mountinfo: &str, cgroup: &str) -> Vec<Hierarchy> {
    let mut found: Vec<Hierarchy> = Vec::new();
    let mut seen = Vec::new();
    for mount in mountinfo.lines().filter_map(Mount::parse) {
        let Some((key, own)) = mount.own_group(cgroup) else {
            continue;
        };
        let matters = mount.unified || key.split(',').any(|name| CONTROLLERS.contains(&name));
        if !matters || seen.contains(&key) {
            continue;
        }
        // A group outside of what is mounted cannot be reached here.
        let Ok(below) = Path::new(own).strip_prefix(&mount.root) else {
            continue;
        };
        seen.push(key);
        found.push(Hierarchy {
            unified: mount.unified,
            own: mount.point.join(below),
            top: mount.point,
        });
    }
    found
}

/// A line of mountinfo: `31 24 0:26 ROOT POINT options … - TYPE source OPTIONS`.
struct Mount<'a> {
    unified: bool,
    root: PathBuf,
    point: PathBuf,
    options: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let unified = match right.next()? {
            "cgroup" => false,
            "cgroup2" => true,
            _other => return None,
        };
        Some(Self {
            unified,
            root: unescape(root).into(),
            point: unescape(point).into(),
            options: right.nth(1)?,
        })
    }

    /// The line of `/proc/self/cgroup` that is of this hierarchy: its controllers, and the group.
    fn own_group<'c>(&self, cgroup: &'c str) -> Option<(&'c str, &'c str)> {
        cgroup.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let mut options = self.options.split(',');
            let same = match controllers.split(',').next()? {
                "" => self.unified,
                first => !self.unified && options.any(|option| option == first),
            };
            same.then_some((controllers, path))
        })
    }
}

/// Spaces and the like are written as three octal digits.
fn unescape(text: &str) -> String {
    [
        (r"\040", " "),
        (r"\011", "\t"),
        (r"\012", "\n"),
        (r"\134", "\\"),
    ]
    .iter()
    .fold(text.to_owned(), |text, (code, is)| text.replace(code, is))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hierarchy(unified: bool, top: &str, own: &str) -> Hierarchy {
        Hierarchy {
            unified,
            top: top.into(),
            own: own.into(),
        }
    }

    #[test]
    fn version_2_alone() {
        let mountinfo = "24 30 0:22 / /sys rw - sysfs sysfs rw\n\
             35 24 0:29 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
        let found = find(mountinfo, "0::/user.slice/user-0.slice/session-3.scope\n");
        let own = "/sys/fs/cgroup/user.slice/user-0.slice/session-3.scope";
        assert_eq!(found, [hierarchy(true, "/sys/fs/cgroup", own)]);
    }

    #[test]
    fn version_1_beside_an_empty_version_2() {
        let mountinfo = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
             32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
             35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
             40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
             41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let cgroup = "9:name=systemd:/\n4:memory:/a/b\n1:cpu,cpuacct:/\n0::/\n";
        let at = |name: &str| format!("/sys/fs/cgroup/{name}");
        assert_eq!(
            find(mountinfo, cgroup),
            [
                hierarchy(false, &at("cpu,cpuacct"), &at("cpu,cpuacct")),
                hierarchy(false, &at("memory"), &at("memory/a/b")),
                hierarchy(true, &at("unified"), &at("unified")),
            ]
        );
    }

    /// As in a container without a namespace of control groups.
    #[test]
    fn part_of_a_hierarchy_is_mounted() {
        let mountinfo = "40 38 0:30 /docker/1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
             41 38 0:30 /docker/1 /elsewhere\\040too ro - cgroup cgroup rw,memory\n";
        let found = find(mountinfo, "4:memory:/docker/1/app\n");
        let own = "/sys/fs/cgroup/memory/app";
        assert_eq!(found, [hierarchy(false, "/sys/fs/cgroup/memory", own)]);
        let found = find(mountinfo.lines().nth(1).unwrap(), "4:memory:/docker/1\n");
        assert_eq!(found[0].top, Path::new("/elsewhere too"));
        assert_eq!(find(mountinfo, "4:memory:/docker/2\n"), []);
    }
}
