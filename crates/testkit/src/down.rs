//! What `monopod down` leaves of a host, which must be nothing but its data.

use crate::process::processes_with;
use crate::record::{grouped, running};
use crate::remains::Site;
use std::collections::BTreeSet;

impl Site {
    /// What is left of a host that is down and had these VMs; whoever asks made sure that it had some.
    ///
    /// # Panics
    /// If this machine does not tell.
    pub fn left_after_down(&self, vms: &BTreeSet<String>) -> Vec<String> {
        let data = self.data.display().to_string();
        let mut left = Vec::new();
        for (what, names) in [("process", running()), ("control group", grouped())] {
            let theirs = names.intersection(vms);
            left.extend(theirs.map(|vm| format!("{what} of {vm}")));
        }
        // VMs are not among them: what they have of the directory are descriptors.
        let processes = processes_with(&data);
        if processes > 0 {
            left.push(format!("{processes} processes"));
        }
        for what in [
            &["ip", "netns", "list"][..],
            &["ip", "-brief", "link"],
            &["nft", "list", "tables"],
        ] {
            let told = self.on_machine(what);
            assert!(told.success, "{what:?}: {}", told.err);
            let ours = told.out.split_whitespace().filter(|word| self.names(word));
            left.extend(ours.map(|word| format!("{word} in {}", what.join(" "))));
        }
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
        let ours = mounts.lines().filter(|mount| mount.contains(&data));
        left.extend(ours.map(|mount| format!("mount {mount}")));
        left
    }

    /// Whether the name of something is made of the host's prefix, which another's may begin with.
    fn names(&self, word: &str) -> bool {
        word.split(['-', '@']).any(|part| part == self.name)
    }
}
