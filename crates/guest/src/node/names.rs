//! Names of containers, and of signals.

use std::io::{self, Read as _};

/// A new container id: 32 random bytes.
pub(crate) fn new_id() -> io::Result<String> {
    use std::fmt::Write as _;
    let mut bytes = [0u8; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let mut id = String::with_capacity(64);
    for byte in bytes {
        // A String takes every write.
        let _infallible = write!(id, "{byte:02x}");
    }
    Ok(id)
}

/// The number of a signal as an image names it: `SIGQUIT`, `QUIT` or `3`.
pub(crate) fn signal_number(name: &str) -> Option<i32> {
    let name = name.trim().to_ascii_uppercase();
    if let Ok(number) = name.parse::<i32>() {
        return (1..=64).contains(&number).then_some(number);
    }
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    let known = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("ABRT", 6),
        ("KILL", 9),
        ("USR1", 10),
        ("USR2", 12),
        ("PIPE", 13),
        ("ALRM", 14),
        ("TERM", 15),
        ("CONT", 18),
        ("STOP", 19),
        ("PWR", 30),
        ("WINCH", 28),
    ];
    if let Some(offset) = name.strip_prefix("RTMIN+") {
        return offset
            .parse()
            .ok()
            .filter(|n| (0..=30).contains(n))
            .map(|n: i32| 34 + n);
    }
    known
        .into_iter()
        .find(|(known, _)| *known == name)
        .map(|(_, number)| number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_by_name_and_number() {
        assert_eq!(signal_number("SIGQUIT"), Some(3));
        assert_eq!(signal_number("term"), Some(15));
        assert_eq!(signal_number("28"), Some(28));
        assert_eq!(signal_number("SIGRTMIN+3"), Some(37));
        assert_eq!(signal_number("SIGNOTHING"), None);
        assert_eq!(signal_number("900"), None);
    }
}
