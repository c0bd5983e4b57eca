//! Loads the compiled ruleset into the VPC's namespace.

use super::command::run;
use super::{NetworkError, Vpc};
use monopod_core::vpc::{Policy, compile};
use std::time::{SystemTime, UNIX_EPOCH};

/// The ruleset of one VPC. Only one may load rulesets at a time.
#[derive(Debug)]
pub struct Firewall {
    vpc: Vpc,
    generation: u32,
    loaded: Option<Policy>,
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
        if self.loaded.as_ref() == Some(&policy) {
            return Ok(());
        }
        self.generation = self.generation.wrapping_add(1).max(1);
        let text = compile(&policy, self.generation);
        let namespace = format!("--net={}", self.vpc.namespace_path().display());
        run("nsenter", &[&namespace, "nft", "-f", "-"], &text).await?;
        self.loaded = Some(policy);
        Ok(())
    }
}
