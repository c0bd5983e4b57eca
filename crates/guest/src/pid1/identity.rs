//! What must differ between two guests: randomness, time and name.

use anyhow::{Context, Result, ensure};
use rustix::ioctl::{NoArg, Setter, ioctl, opcode};
use std::fs::File;

const SEED_BYTES: usize = 32;

/// The argument of `RNDADDENTROPY` (`struct rand_pool_info` in linux/random.h).
#[repr(C)]
struct Pool {
    entropy_bits: i32,
    size: i32,
    bytes: [u8; SEED_BYTES],
}

/// Credits the host's seed to the kernel and makes it reseed at once.
pub(super) fn add_entropy(seed: &str) -> Result<()> {
    let bytes = decode(seed).context("the seed is not 32 bytes in hexadecimal")?;
    let pool = Pool {
        entropy_bits: 8 * 32,
        size: 32,
        bytes,
    };
    let random = File::options().write(true).open("/dev/random")?;
    credit(&random, pool)?;
    Ok(())
}

#[expect(unsafe_code, reason = "ioctl numbers are not checked by the compiler")]
fn credit(random: &File, pool: Pool) -> rustix::io::Result<()> {
    // The size in the number is that of the two integers alone.
    const ADD_ENTROPY: rustix::ioctl::Opcode = opcode::write::<[i32; 2]>(b'R', 0x03);
    const RESEED: rustix::ioctl::Opcode = opcode::none(b'R', 0x07);
    // SAFETY: RNDADDENTROPY reads a rand_pool_info, which `Pool` is; RNDRESEEDCRNG takes nothing.
    unsafe {
        ioctl(random, Setter::<ADD_ENTROPY, Pool>::new(pool))?;
        ioctl(random, NoArg::<RESEED>::new())
    }
}

fn decode(hex: &str) -> Option<[u8; SEED_BYTES]> {
    if hex.len() != 2 * SEED_BYTES || !hex.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; SEED_BYTES];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

/// Sets the host name, which the kernel limits to 64 bytes.
pub(super) fn set_hostname(name: &str) -> Result<()> {
    ensure!(
        !name.is_empty() && name.len() <= 64,
        "a host name has 1 to 64 bytes"
    );
    Ok(rustix::system::sethostname(name.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_seeds_are_taken() {
        assert_eq!(decode(&"0f".repeat(32)), Some([0x0f; 32]));
        for bad in [
            "",
            "0f",
            &"0g".repeat(32),
            &"é".repeat(32),
            &"+f".repeat(32),
        ] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }
}
