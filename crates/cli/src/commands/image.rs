//! `monopod image`: the images of this host.

use crate::cluster::parts::Programs;
use crate::settings::Layout;
use anyhow::Context;
use clap::{Args, Subcommand};
use jiff::Timestamp;
use monopod_host::images::{Store, StoredImage};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args, Debug)]
pub(crate) struct Image {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Load an OCI archive or layout
    Load {
        /// A tar file or a directory with an OCI image layout
        file: PathBuf,
        /// Reference to store it under; needed if the layout does not name its image
        #[arg(long)]
        name: Option<String>,
    },
    /// List the images with where they come from and when a pod last began to use them
    Ls,
    /// Remove an image, by any of its references; VMs that use it keep it until they end
    Rm {
        /// Its reference, with a tag or a digest
        reference: String,
    },
}

impl Image {
    pub(crate) fn run(self, layout: &Layout) -> anyhow::Result<ExitCode> {
        let store = store(layout)?;
        match self.command {
            Command::Load { file, name } => {
                let image = store
                    .load(&file, name.as_deref())
                    .with_context(|| format!("cannot load {}", file.display()))?;
                println!("{}  {}", image.reference, image.digest);
            }
            Command::Ls => print(&store.list()?),
            Command::Rm { reference } => {
                let removed = store
                    .remove(&reference)?
                    .with_context(|| format!("{reference} is not here; see `monopod image ls`"))?;
                println!("{}  {}", removed.reference, removed.digest);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Tags, and digests that no tag has any more.
fn print(images: &[StoredImage]) {
    let by_digest = |image: &StoredImage| image.reference.contains('@');
    let tagged = |image: &StoredImage| {
        images
            .iter()
            .any(|other| !by_digest(other) && other.id == image.id)
    };
    let shown: Vec<&StoredImage> = images
        .iter()
        .filter(|image| !by_digest(image) || !tagged(image))
        .collect();
    let width = shown
        .iter()
        .map(|image| image.reference.len())
        .max()
        .unwrap_or(0)
        .max("REFERENCE".len());
    println!(
        "{:<width$}   {:<19}   {:>10}   {:<8}   LAST USED",
        "REFERENCE", "DIGEST", "SIZE", "SOURCE"
    );
    for image in shown {
        let digest: String = image.digest.chars().take(19).collect();
        let size = format!("{:.1} MiB", as_mib(image.size));
        let source = if image.access.loaded {
            "loaded"
        } else {
            "pulled"
        };
        let used = if image.last_used == Timestamp::UNIX_EPOCH {
            "-".to_owned()
        } else {
            image.last_used.strftime("%Y-%m-%d %H:%M").to_string()
        };
        println!(
            "{:<width$}   {digest:<19}   {size:>10}   {source:<8}   {used}",
            image.reference
        );
    }
}

fn store(layout: &Layout) -> anyhow::Result<Store> {
    let directory = layout.host().join("images");
    Store::open(&directory)
        .with_context(|| format!("cannot open the image store in {}", directory.display()))
}

/// Loads the sample images that lie beside the program, unless they are there.
pub(crate) fn load_built_in(layout: &Layout, programs: &Programs) -> anyhow::Result<()> {
    let Some(directory) = programs
        .kubernetes
        .parent()
        .map(|beside| beside.join("images"))
    else {
        return Ok(());
    };
    let store = store(layout)?;
    let known = store.list()?;
    for name in ["busybox", "nginx", "agnhost", "coredns"] {
        let reference = format!("monopod.local/{name}:latest");
        let file = directory.join(format!("{name}.tar"));
        if file.exists() && !known.iter().any(|image| image.reference == reference) {
            let start = std::time::Instant::now();
            load(&store, &file, &reference)?;
            println!(
                "ok  image {reference:<32} {:6.1} s",
                start.elapsed().as_secs_f64()
            );
        }
    }
    Ok(())
}

fn load(store: &Store, file: &Path, reference: &str) -> anyhow::Result<()> {
    store
        .load(file, Some(reference))
        .with_context(|| format!("cannot load {}", file.display()))?;
    Ok(())
}

fn as_mib(bytes: u64) -> f64 {
    // Sizes are far below the point at which a float loses whole bytes.
    u32::try_from(bytes >> 10).map_or(f64::INFINITY, f64::from) / 1024.0
}
