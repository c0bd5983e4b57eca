//! One layer as a stream of entries, with both of its digests checked.

use super::ImageError;
use super::digest::Digest;
use super::manifest::Descriptor;
use super::source::Source;
use sha2::{Digest as _, Sha256};
use std::cell::Cell;
use std::io::{BufRead, BufReader, Read};
use std::rc::Rc;

/// Most bytes of all layers together, uncompressed: what fits behind a disk slot.
const UNPACKED: u64 = 64 << 30;
/// Memory that a layer packed by zstd may ask for: 128 MiB, as other runtimes allow.
const WINDOW: u32 = 27;
/// How many times its packed size an image may have, once it is larger than [`SMALL`]. Layers of
/// text have up to ten times, gzip can a thousand times.
const RATIO: u64 = 100;
const SMALL: u64 = 1 << 30;

/// What an image of this packed size may have in all, uncompressed.
pub(super) fn budget(compressed: u64) -> u64 {
    compressed.saturating_mul(RATIO).clamp(SMALL, UNPACKED)
}

/// Calls `visit` with a reader over the layer's uncompressed form, then checks that what was
/// read is what the image named. Takes what was read off the budget.
pub(super) fn read(
    source: &mut Source,
    (descriptor, diff_id): &(Descriptor, Digest),
    budget: &mut u64,
    visit: impl FnOnce(&mut dyn Read) -> Result<(), ImageError>,
) -> Result<(), ImageError> {
    let what = format!("layer {}", descriptor.digest);
    let reading = || ImageError::io(format!("read {what}"));
    let compressed = Hashed::new(source.blob(descriptor)?);
    let compressed_digest = Rc::clone(&compressed.digest);
    let mut buffered = BufReader::with_capacity(128 << 10, compressed);
    let magic = buffered.fill_buf().map_err(reading())?;
    let plain: Box<dyn Read + '_> = match magic {
        [0x1f, 0x8b, ..] => Box::new(flate2::bufread::MultiGzDecoder::new(buffered)),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let mut decoder = zstd::Decoder::with_buffer(buffered).map_err(reading())?;
            decoder.window_log_max(WINDOW).map_err(reading())?;
            Box::new(decoder)
        }
        [..] => Box::new(buffered),
    };
    // One byte more than is allowed, to see that there is more.
    let mut plain = Hashed::new(plain.take(budget.saturating_add(1)));
    let visited = visit(&mut plain);
    // What follows the last entry counts for the digests too.
    let rest =
        visited.and_then(|()| std::io::copy(&mut plain, &mut std::io::sink()).map_err(reading()));
    let left = plain.inner.limit();
    if left == 0 {
        return Err(ImageError::damaged(
            what,
            format!(
                "the image is a bomb: unpacked it has more than {RATIO} times its size, or more than {UNPACKED} bytes"
            ),
        ));
    }
    rest?;
    *budget = left - 1;
    let plain_digest = Rc::clone(&plain.digest);
    drop(plain);
    for (digest, expected) in [
        (plain_digest, diff_id),
        (compressed_digest, &descriptor.digest),
    ] {
        if hex::encode(digest.take().finalize()) != expected.hex() {
            return Err(ImageError::damaged(
                what,
                format!("its content is not {expected}"),
            ));
        }
    }
    Ok(())
}

/// Hashes what is read through it. The sum outlives the reader, which decoders swallow.
struct Hashed<R> {
    inner: R,
    digest: Rc<Cell<Sha256>>,
}

impl<R> Hashed<R> {
    fn new(inner: R) -> Self {
        Self {
            inner,
            digest: Rc::default(),
        }
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.inner.read(buffer)?;
        let mut digest = self.digest.take();
        digest.update(&buffer[..length]);
        self.digest.set(digest);
        Ok(length)
    }
}
