//! What a profile launches pods with, or why it is blocked for new launches.

use super::place::{Network, Subnet};
use crate::wildcard;
use monopod_api::messages::{self, ROLE_DOES_NOT_TRUST, ROLE_IS_MISSING};
use monopod_api::profile::{FargateProfileSpec, PodExecutionRoleSpec};
use std::collections::BTreeMap;

/// The group of interfaces whose profile names none.
const DEFAULT_GROUP: &str = "default";

/// What a profile's pods are launched with.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch<'a> {
    /// With what the platform acts for them.
    pub role: &'a PodExecutionRoleSpec,
    /// Where their interfaces may be, by name.
    pub subnets: Vec<(&'a str, &'a Subnet)>,
    /// Names of their interfaces' security groups.
    pub security_groups: Vec<String>,
}

/// Resolves what a profile names; the error is what its pods are told.
pub fn launch<'a>(
    name: &str,
    profile: &'a FargateProfileSpec,
    roles: &'a BTreeMap<String, PodExecutionRoleSpec>,
    network: &'a Network,
) -> Result<Launch<'a>, String> {
    let blocked = |why: &str| messages::profile_blocked(name, why);
    let role = roles
        .get(&profile.pod_execution_role)
        .ok_or_else(|| blocked(ROLE_IS_MISSING))?;
    if !trusts(role, name) {
        return Err(blocked(ROLE_DOES_NOT_TRUST));
    }
    Ok(Launch {
        role,
        subnets: subnets(profile, network).map_err(|why| blocked(&why))?,
        security_groups: groups(profile, network).map_err(|why| blocked(&why))?,
    })
}

/// Whether a profile may use a role.
pub fn trusts(role: &PodExecutionRoleSpec, profile: &str) -> bool {
    let mut patterns = role.profiles.iter();
    patterns.any(|pattern| wildcard::matches(pattern, profile))
}

fn subnets<'a>(
    profile: &'a FargateProfileSpec,
    network: &'a Network,
) -> Result<Vec<(&'a str, &'a Subnet)>, String> {
    let all = network.subnets.iter();
    if profile.subnets.is_empty() {
        let found: Vec<_> = all.map(|(name, subnet)| (name.as_str(), subnet)).collect();
        return if found.is_empty() {
            Err("the VPC has no subnet".to_owned())
        } else {
            Ok(found)
        };
    }
    let find = |wanted: &String| {
        all.clone()
            .find(|(name, subnet)| *name == wanted || subnet.id == *wanted)
            .map(|(name, subnet)| (name.as_str(), subnet))
            .ok_or_else(|| format!("subnet {wanted} does not exist"))
    };
    profile.subnets.iter().map(find).collect()
}

fn groups(profile: &FargateProfileSpec, network: &Network) -> Result<Vec<String>, String> {
    let default = [DEFAULT_GROUP.to_owned()];
    let wanted = if profile.security_groups.is_empty() {
        &default[..]
    } else {
        &profile.security_groups
    };
    let find = |group: &String| {
        let found = network.groups.get(group).cloned();
        found.ok_or_else(|| format!("security group {group} does not exist"))
    };
    wanted.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn role(profiles: &[&str]) -> PodExecutionRoleSpec {
        PodExecutionRoleSpec {
            profiles: profiles.iter().map(|&p| p.to_owned()).collect(),
            ..PodExecutionRoleSpec::default()
        }
    }

    #[test]
    fn a_role_trusts_the_profiles_that_it_names() {
        assert!(trusts(&PodExecutionRoleSpec::default(), "any"));
        assert!(trusts(&role(&["front", "team-*"]), "team-a"));
        assert!(!trusts(&role(&["front", "team-?"]), "team-ab"));
        assert!(!trusts(&role(&[]), "front"));
    }

    #[test]
    fn what_is_missing_blocks_the_profile_in_the_known_words() {
        let profile = FargateProfileSpec {
            pod_execution_role: "r".to_owned(),
            ..FargateProfileSpec::default()
        };
        let subnet = Subnet {
            id: "subnet-1".to_owned(),
            cidr: "10.0.1.0/24".parse().expect("valid"),
            zone: "z".to_owned(),
        };
        let network = Network {
            subnets: [("a".to_owned(), subnet)].into(),
            groups: [("default".to_owned(), "default".to_owned())].into(),
            ..Network::default()
        };
        let naming = |subnet: &str, group: &str| FargateProfileSpec {
            subnets: vec![subnet.to_owned()],
            security_groups: vec![group.to_owned()],
            ..profile.clone()
        };
        let trusting = BTreeMap::from([("r".to_owned(), role(&["p"]))]);
        let untrusting = BTreeMap::from([("r".to_owned(), role(&["q"]))]);
        let none = BTreeMap::new();
        for (profile, roles, network, why) in [
            (
                &profile,
                &none,
                &network,
                "Pod execution role is not found in auth config or does not have all required permissions for launching fargate pods.",
            ),
            (
                &profile,
                &untrusting,
                &network,
                "Failed to assume PodExecutionRole; Please make sure the role exists and trusts the eks-fargate-pods.amazonaws.com service principal",
            ),
            (
                &profile,
                &trusting,
                &Network::default(),
                "the VPC has no subnet",
            ),
            (
                &naming("b", "default"),
                &trusting,
                &network,
                "subnet b does not exist",
            ),
            (
                &naming("subnet-1", "sg-1"),
                &trusting,
                &network,
                "security group sg-1 does not exist",
            ),
        ] {
            assert_eq!(
                launch("p", profile, roles, network),
                Err(format!(
                    "Misconfigured Fargate Profile: fargate profile p blocked for new launches due to: {why}"
                ))
            );
        }
        let profile = naming("subnet-1", "default");
        let found = launch("p", &profile, &trusting, &network).expect("all");
        assert_eq!(found.subnets[0].0, "a");
        assert_eq!(found.security_groups, ["default"]);
    }
}
