//! Loads the compiled ruleset into the VPC's namespace.

use super::command::{output, run};
use super::{Api, NetworkError, Vpc};
use monopod_core::vpc::{Policy, compile};
use std::time::{SystemTime, UNIX_EPOCH};

/// The ruleset of one VPC. Only one may load rulesets at a time.
#[derive(Debug)]
pub struct Firewall {
    vpc: Vpc,
    generation: u32,
    loaded: Option<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    policy: Policy,
    /// As the kernel tells it.
    table: String,
}

impl Firewall {
    /// A firewall that has loaded nothing yet; what another one loaded stays until then.
    pub fn new(vpc: Vpc) -> Self {
        // Flows live on when the host process restarts, so it begins above every earlier number.
        let seconds = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        let generation = u32::try_from(seconds & 0x7fff_ffff).unwrap_or(1);
        Self {
            vpc,
            generation,
            loaded: None,
        }
    }

    /// Loads the policy's ruleset in one transaction, unless it is loaded already.
    pub async fn load(&mut self, policy: Policy) -> Result<(), NetworkError> {
        if self.loaded.as_ref().is_some_and(|l| l.policy == policy) {
            return Ok(());
        }
        self.generation = self.generation.wrapping_add(1).max(1);
        let text = compile(&policy, self.generation);
        let namespace = format!("--net={}", self.vpc.namespace_path().display());
        self.loaded = None;
        run("nsenter", &[&namespace, "nft", "-f", "-"], &text).await?;
        let table = self.table().await?;
        self.loaded = Some(Loaded { policy, table });
        Ok(())
    }

    /// Looks whether the table is still what was loaded, and whether the machine still has its route to the
    /// pods and the table at which the API server is published. If somebody changed or deleted one, all that
    /// the VPC has on this machine is made again, and the next load is not spared.
    pub async fn check(&mut self) -> Result<(), NetworkError> {
        let Some(loaded) = &self.loaded else {
            return Ok(());
        };
        let intact = self.is_intact(&loaded.table).await.unwrap_or_else(|error| {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "a part of the VPC is not there");
            false
        });
        if intact {
            return Ok(());
        }
        tracing::warn!("somebody changed the VPC's nftables or routes; made again");
        self.loaded = None;
        super::ensure(&self.vpc).await
    }

    async fn is_intact(&self, loaded: &str) -> Result<bool, NetworkError> {
        self.is_published().await?;
        Ok(self.is_routed().await? && self.table().await? == loaded)
    }

    /// The VPC's table, without what is counted.
    async fn table(&self) -> Result<String, NetworkError> {
        let namespace = format!("--net={}", self.vpc.namespace_path().display());
        let list = ["nft", "--stateless", "list", "table", "inet", "monopod"];
        output("nsenter", &[&[namespace.as_str()], &list[..]].concat(), "").await
    }

    /// Whether the machine has its route to the pods, if it is to have one. It goes with the link or its
    /// address too, as when a network service of the machine starts again.
    async fn is_routed(&self) -> Result<bool, NetworkError> {
        let Api::Link { inner, .. } = self.vpc.api else {
            return Ok(true);
        };
        let (cidr, via) = (self.vpc.cidr.to_string(), inner.to_string());
        let device = self.vpc.host_device();
        let show = ["route", "show", &cidr, "via", &via, "dev", &device];
        Ok(!output("ip", &show, "").await?.trim().is_empty())
    }

    /// An error if the machine's table must be there, and is not.
    async fn is_published(&self) -> Result<(), NetworkError> {
        if !self.vpc.is_published() {
            return Ok(());
        }
        let table = self.vpc.table();
        run("nft", &["list", "table", "ip", &table], "").await
    }
}
