//! Keeps the firewall as the interfaces and security groups say, and shows both to the owners.

use crate::Context;
use crate::hypervisor::Hypervisor;
use crate::network::{API_DEVICE, Api, Firewall, Peers, UNDERLAY_DEVICE, Vpc};
use kube::ResourceExt;
use kube::runtime::watcher::Config;
use monopod_api::host::Host;
use monopod_api::names;
use monopod_api::network::{InterfacePhase, NetworkInterface, SecurityGroup, Subnet};
use monopod_core::vpc::{ApiLink, LocalInterface, Policy, Remote, UnderlayLink, remote};
use monopod_ops::admin::Readiness;
use monopod_ops::watch::{Change, changes};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Time between looks whether the rules are still those that were loaded.
const CHECK: Duration = Duration::from_secs(5);

/// Interfaces, groups, subnets and hosts by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    interfaces: BTreeMap<String, NetworkInterface>,
    groups: BTreeMap<String, SecurityGroup>,
    subnets: BTreeMap<String, Subnet>,
    hosts: BTreeMap<String, Host>,
}

impl View {
    /// The router's address for an interface, once its subnet is known.
    pub(crate) fn gateway(&self, interface: &str) -> Option<Ipv4Addr> {
        let subnet = &self.interfaces.get(interface)?.spec.subnet;
        let cidr = self.subnets.get(subnet)?.spec.cidr.parse().ok()?;
        Some(monopod_core::addresses::gateway(cidr))
    }

    fn remote(&self, host: &str) -> Remote {
        remote(host, self.hosts.values(), self.interfaces.values())
    }

    fn policy(&self, host: &str, vpc: &Vpc, remote: &Remote) -> Policy {
        let mut policy = Policy {
            api: match vpc.api {
                Api::Link { address, inner } => Some(ApiLink {
                    device: API_DEVICE.to_owned(),
                    address,
                    port: vpc.api_port,
                    inner,
                }),
                Api::Through { .. } => None,
            },
            underlay: vpc.underlay.as_ref().map(|underlay| UnderlayLink {
                device: UNDERLAY_DEVICE.to_owned(),
                own: underlay.address,
                api: vpc.api.address(),
                machines: remote.machines.clone(),
            }),
            ..Default::default()
        };
        // A rule may name a group by its id.
        let mut by_id = BTreeMap::new();
        for (name, group) in &self.groups {
            if let Some(uid) = group.uid() {
                by_id.insert(names::ec2_id("sg", &uid), name.clone());
            }
        }
        let resolve = |group: &String| by_id.get(group).unwrap_or(group).clone();
        for (name, group) in &self.groups {
            let mut spec = group.spec.clone();
            for rule in spec
                .ingress
                .iter_mut()
                .chain(spec.egress.iter_mut().flatten())
            {
                rule.groups = rule.groups.iter().map(resolve).collect();
            }
            policy.groups.insert(name.clone(), spec);
        }
        for interface in self.interfaces.values() {
            let in_use = interface
                .status
                .as_ref()
                .is_none_or(|s| s.phase == InterfacePhase::InUse);
            let Ok(address) = interface.spec.address.parse::<Ipv4Addr>() else {
                continue;
            };
            if !in_use {
                continue;
            }
            let groups: Vec<String> = interface.spec.security_groups.iter().map(resolve).collect();
            for group in &groups {
                policy
                    .members
                    .entry(group.clone())
                    .or_default()
                    .insert(address);
            }
            if interface.spec.host == host {
                // Not the object's text, which goes into a ruleset: the address determines it.
                policy.local.insert(LocalInterface {
                    address,
                    mac: names::mac(address),
                    groups,
                });
            }
        }
        policy
    }
}

/// Starts the watches; the future loads rulesets until the token is cancelled.
pub(crate) fn keep<H: Hypervisor>(
    context: &Context<H>,
    readiness: &Readiness,
    shutdown: &CancellationToken,
) -> (watch::Receiver<View>, impl Future<Output = ()> + use<H>) {
    let (sender, receiver) = watch::channel(View::default());
    let client = || context.client.clone();
    let stop = || shutdown.clone();
    for part in [
        "networkinterfaces",
        "securitygroups",
        "subnets",
        "hosts",
        "firewall",
    ] {
        readiness.expect(part);
    }
    let (to, ready) = (sender.clone(), readiness.clone());
    let interfaces = changes(client(), Config::default(), stop(), move |change| {
        store(&to, change, &ready, "networkinterfaces", |view| {
            &mut view.interfaces
        });
    });
    let (to, ready) = (sender.clone(), readiness.clone());
    let groups = changes(client(), Config::default(), stop(), move |change| {
        store(&to, change, &ready, "securitygroups", |view| {
            &mut view.groups
        });
    });
    let (to, ready) = (sender.clone(), readiness.clone());
    let subnets = changes(client(), Config::default(), stop(), move |change| {
        store(&to, change, &ready, "subnets", |view| &mut view.subnets);
    });
    let (to, ready) = (sender, readiness.clone());
    let hosts = changes(client(), Config::default(), stop(), move |change| {
        store(&to, change, &ready, "hosts", |view| &mut view.hosts);
    });
    let load = load(
        context.options.name.clone(),
        context.options.network.clone(),
        receiver.clone(),
        readiness.clone(),
        stop(),
    );
    (receiver, async move {
        tokio::join!(interfaces, groups, subnets, hosts, load);
    })
}

fn store<K: ResourceExt>(
    view: &watch::Sender<View>,
    change: Change<K>,
    readiness: &Readiness,
    part: &'static str,
    map: fn(&mut View) -> &mut BTreeMap<String, K>,
) {
    match change {
        Change::Applied(object) => view.send_modify(|view| {
            map(view).insert(object.name_any(), object);
        }),
        Change::Deleted { name, .. } => view.send_modify(|view| {
            map(view).remove(&name);
        }),
        Change::Synced => readiness.done(part),
    }
}

async fn load(
    host: String,
    vpc: Vpc,
    mut view: watch::Receiver<View>,
    readiness: Readiness,
    shutdown: CancellationToken,
) {
    let mut firewall = Firewall::new(vpc.clone());
    let mut peers = Peers::new(vpc.clone());
    let mut quiet = false;
    loop {
        if quiet && let Err(error) = firewall.check().await {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "the VPC's network cannot be made again; tried again"
            );
        }
        // Before the lists are complete a ruleset would deny what is allowed.
        let complete = !readiness
            .pending()
            .iter()
            .any(|part| ["networkinterfaces", "securitygroups", "hosts"].contains(part));
        let mut delay = Duration::from_millis(50);
        if complete {
            let (policy, remote) = {
                let view = view.borrow_and_update();
                let remote = view.remote(&host);
                (view.policy(&host, &vpc, &remote), remote)
            };
            let set = async {
                firewall.load(policy).await?;
                peers.set(&remote).await
            };
            match set.await {
                Ok(()) => {
                    readiness.done("firewall");
                    delay = CHECK;
                }
                Err(error) => {
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        "ruleset or routes not loaded; those before stay"
                    );
                    delay = Duration::from_secs(1);
                }
            }
        }
        quiet = tokio::select! {
            () = shutdown.cancelled() => return,
            changed = view.changed() => if changed.is_err() { return } else { false },
            () = tokio::time::sleep(delay) => delay == CHECK,
        };
    }
}
