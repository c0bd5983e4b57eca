//! Kernel modules, in the order in which the image's builder listed them.

use anyhow::{Context, Result};
use std::path::Path;

const MODULES: &str = "/lib/modules";

/// Loads every module of the image.
pub(super) fn load_all() -> Result<()> {
    let order = std::fs::read_to_string(Path::new(MODULES).join("order"))?;
    for name in order.lines() {
        let file = std::fs::File::open(Path::new(MODULES).join(name))
            .with_context(|| format!("opening {name}"))?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).with_context(|| format!("loading {name}")),
        }
    }
    Ok(())
}
