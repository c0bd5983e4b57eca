//! Which stored images are removed, by age and by space.

use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeSet;

/// What was used a moment ago is about to be used again: the kubelet's `imageMinimumGCAge`.
const YOUNG: SignedDuration = SignedDuration::from_mins(2);

/// A stored image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its digest.
    pub digest: String,
    /// Bytes on the disk.
    pub size: u64,
    /// When a pod last began to use it, or it was stored.
    pub last_used: Timestamp,
    /// An operator loaded it, or a VM or an environment of this host uses it.
    pub kept: bool,
}

/// The file system that images are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Bytes in all.
    pub capacity: u64,
    /// Bytes that are free.
    pub available: u64,
}

/// When images are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Percent of the file system from which on images are removed.
    pub high: u8,
    /// Percent down to which they are.
    pub low: u8,
    /// Images that no pod used for this long are removed whatever space there is.
    pub max_age: Option<SignedDuration>,
}

/// Digests of the images to remove: first those that are too old, then the least recently used
/// until the space is at the low mark.
pub fn victims(stored: &[Stored], space: Space, limits: &Limits, now: Timestamp) -> Vec<String> {
    let age = |image: &Stored| now.duration_since(image.last_used);
    let mut candidates: Vec<&Stored> = stored
        .iter()
        .filter(|image| !image.kept && age(image) >= YOUNG)
        .collect();
    candidates.sort_by(|a, b| (a.last_used, &a.digest).cmp(&(b.last_used, &b.digest)));
    let share = |percent: u8| u128::from(space.capacity) * u128::from(percent.min(100)) / 100;
    let mut used = u128::from(space.capacity.saturating_sub(space.available));
    let full = used >= share(limits.high);
    let mut removed = BTreeSet::new();
    let mut victims = Vec::new();
    for image in candidates {
        let old = limits.max_age.is_some_and(|limit| age(image) >= limit);
        if (old || (full && used > share(limits.low))) && removed.insert(&image.digest) {
            used = used.saturating_sub(u128::from(image.size));
            victims.push(image.digest.clone());
        }
    }
    victims
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn image(number: usize, size: u64, minutes_ago: i64, kept: bool) -> Stored {
        Stored {
            digest: format!("sha256:{number}"),
            size,
            last_used: Timestamp::UNIX_EPOCH - SignedDuration::from_mins(minutes_ago),
            kept,
        }
    }

    const LIMITS: Limits = Limits {
        high: 85,
        low: 80,
        max_age: Some(SignedDuration::from_hours(24)),
    };

    proptest! {
        /// Kept and young images stay; below the high mark only old ones go; above it as many go
        /// as are needed, the least recently used first, and no more.
        #[test]
        fn only_what_must_go_goes(
            images in prop::collection::vec((0u64..40, 0i64..3000, any::<bool>()), 0..12),
            available in 0u64..=100,
        ) {
            let stored: Vec<Stored> = images
                .iter()
                .enumerate()
                .map(|(number, (size, minutes, kept))| image(number, *size, *minutes, *kept))
                .collect();
            let space = Space { capacity: 100, available };
            let victims = victims(&stored, space, &LIMITS, Timestamp::UNIX_EPOCH);
            let gone = |image: &Stored| victims.contains(&image.digest);
            let old = |image: &Stored| image.last_used <= Timestamp::UNIX_EPOCH - SignedDuration::from_hours(24);
            let mut used = 100 - available;
            for image in &stored {
                let young = image.last_used > Timestamp::UNIX_EPOCH - YOUNG;
                prop_assert!(!gone(image) || !(image.kept || young));
                prop_assert!(!old(image) || image.kept || gone(image), "an old image stays");
                if gone(image) {
                    used = used.saturating_sub(image.size);
                }
            }
            let full = 100 - available >= 85;
            for image in stored.iter().filter(|image| gone(image) && !old(image)) {
                prop_assert!(full);
                for other in stored.iter().filter(|other| !other.kept && other.last_used < image.last_used) {
                    prop_assert!(gone(other), "a less recently used image stays");
                }
            }
            if full && used > 80 {
                let left = stored.iter().filter(|i| !gone(i) && !i.kept && i.last_used <= Timestamp::UNIX_EPOCH - YOUNG);
                prop_assert_eq!(left.count(), 0, "it is too full and something could go");
            }
            if let Some(last) = victims.last().and_then(|digest| stored.iter().find(|i| i.digest == *digest))
                && !old(last)
            {
                prop_assert!(used + last.size > 80 || used == 0, "one too many went");
            }
        }
    }
}
