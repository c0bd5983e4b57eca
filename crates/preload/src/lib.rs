//! A library that is loaded into QEMU and gives it memory by descriptor.
//!
//! A clone maps its template's memory privately, for which a descriptor that can only be read is
//! enough. QEMU before 8.2 knows no such thing: it takes the memory's file by name and opens it for
//! writing (`file_ram_open`), so whoever takes over a clone could write to the template of all others.
//! Here an open of `/proc/self/fd/N` for writing gives a copy of descriptor N, with N's rights. All
//! else is opened as ever. See `jail.md`, section 2.

use libc::{c_char, c_int, mode_t};
use std::ffi::CStr;

/// `open64` of glibc, which is variadic; whole numbers are passed alike on all 64-bit machines.
///
/// # Safety
///
/// As C's: `path` ends with a zero.
#[expect(unsafe_code, reason = "it is C's function that is replaced")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: the caller's promise.
    match descriptor(unsafe { CStr::from_ptr(path) }) {
        Some(descriptor) if flags & libc::O_ACCMODE == libc::O_RDWR => {
            // SAFETY: copying a descriptor touches no memory.
            unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) }
        }
        // SAFETY: the caller's promise. `openat64` is not replaced.
        _ => unsafe { libc::openat64(libc::AT_FDCWD, path, flags, libc::c_uint::from(mode)) },
    }
}

/// What glibc's headers make of `open` when they check its arguments.
///
/// # Safety
///
/// As C's: `path` ends with a zero.
#[expect(unsafe_code, reason = "it is C's function that is replaced")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __open64_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { open64(path, flags, 0) }
}

fn descriptor(path: &CStr) -> Option<c_int> {
    path.to_str()
        .ok()?
        .strip_prefix("/proc/self/fd/")?
        .parse()
        .ok()
}
