//! Keeps the firewall as the interfaces and security groups say, and shows both to the owners.

use crate::Context;
use crate::hypervisor::Hypervisor;
use crate::network::{API_DEVICE, Firewall};
use kube::ResourceExt;
use kube::runtime::watcher::Config;
use monopod_api::names;
use monopod_api::network::{InterfacePhase, NetworkInterface, SecurityGroup, Subnet};
use monopod_core::vpc::{ApiLink, LocalInterface, Policy};
use monopod_ops::admin::Readiness;
use monopod_ops::watch::{Change, changes};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Interfaces, groups and subnets by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    interfaces: BTreeMap<String, NetworkInterface>,
    groups: BTreeMap<String, SecurityGroup>,
    subnets: BTreeMap<String, Subnet>,
}

impl View {
    /// The router's address for an interface, once its subnet is known.
    pub(crate) fn gateway(&self, interface: &str) -> Option<Ipv4Addr> {
        let subnet = &self.interfaces.get(interface)?.spec.subnet;
        let cidr = self.subnets.get(subnet)?.spec.cidr.parse().ok()?;
        Some(monopod_core::addresses::gateway(cidr))
    }

    fn policy(&self, host: &str, api: ApiLink) -> Policy {
        let mut policy = Policy {
            api: Some(api),
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
    for part in ["networkinterfaces", "securitygroups", "subnets", "firewall"] {
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
    let (to, ready) = (sender, readiness.clone());
    let subnets = changes(client(), Config::default(), stop(), move |change| {
        store(&to, change, &ready, "subnets", |view| &mut view.subnets);
    });
    let firewall = Firewall::new(context.options.network.clone());
    let api = ApiLink {
        device: API_DEVICE.to_owned(),
        address: context.options.network.host_address,
        port: context.options.api_port,
        inner: context.options.network.inner_address,
    };
    let load = load(
        firewall,
        context.options.name.clone(),
        api,
        receiver.clone(),
        readiness.clone(),
        stop(),
    );
    (receiver, async move {
        tokio::join!(interfaces, groups, subnets, load);
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
    mut firewall: Firewall,
    host: String,
    api: ApiLink,
    mut view: watch::Receiver<View>,
    readiness: Readiness,
    shutdown: CancellationToken,
) {
    loop {
        // Before the lists are complete a ruleset would deny what is allowed.
        let complete = !readiness
            .pending()
            .iter()
            .any(|part| ["networkinterfaces", "securitygroups"].contains(part));
        let mut delay = Duration::from_millis(50);
        if complete {
            let policy = view.borrow_and_update().policy(&host, api.clone());
            match firewall.load(policy).await {
                Ok(()) => {
                    readiness.done("firewall");
                    delay = Duration::MAX;
                }
                Err(error) => {
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        "ruleset not loaded; the one before stays"
                    );
                    delay = Duration::from_secs(1);
                }
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            changed = view.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(delay) => {}
        }
    }
}
