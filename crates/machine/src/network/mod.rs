//! Gives each machine a network of its own, prepared ahead: a namespace with the guest's tap, the way out
//! through the host, a resolver at the gateway, and the rules that make the internet all there is.
//!
//! ```text
//! guest ── tap0 (10.200.0.1) ─ namespace: NAT, DNS ─ up0 ── at<instance>.<slot> ─ host: rules, NAT ── internet
//! ```
//!
//! All guests have the same address, so a snapshot fits into any namespace. Everything is known by its
//! name: whatever a server that died has left is found again, adopted or swept.

mod address;
mod command;
mod destination;
mod gate;
mod guard;
mod host;
mod namespace;
mod policy;
mod resolver;
mod rules;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeSet,
    fs, io,
    net::{Ipv4Addr, SocketAddr},
    os::fd::OwnedFd,
    sync::Arc,
    time::Duration,
};

use tracing::{info, warn};

pub use self::{
    address::{GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, GUEST_PREFIX},
    destination::{Destination, DestinationError},
    gate::Gate,
    host::{OnHost, instances_on_host},
    policy::{Door, Egress, HostPolicy, Policy, Traffic},
};
use self::{
    address::{Instance, LINK_PREFIX, Slot, TAP, UPLINK},
    command::Program,
    guard::Guard,
    resolver::{Forwarder, OwnNames, Upstream},
};
use crate::tap::Tap;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("instance {0} is out of range; there are 0 to 1023")]
    NoSuchInstance(u16),
    #[error("network slot {0} is out of range; there are 0 to 1023")]
    NoSuchSlot(u16),
    #[error("run `{program}`")]
    Start { program: &'static str, source: io::Error },
    #[error("`{program}` refused: {reason}")]
    Refused { program: &'static str, reason: String },
    #[error("{what} did not finish within {deadline:?}")]
    Stuck { what: &'static str, deadline: Duration },
    #[error("{action} {object}")]
    Kernel { action: &'static str, object: String, source: io::Error },
    /// Nothing to adopt: the host was restarted, or somebody removed it.
    #[error("network namespace {0} is gone")]
    Gone(String),
    /// The tap of an adopted namespace is in the hands of its machine.
    #[error("network namespace {0} was adopted; prepare another one for a new machine")]
    NoTap(String),
}

impl Error {
    fn kernel(action: &'static str, object: impl Into<String>, source: io::Error) -> Self {
        Self::Kernel { action, object: object.into(), source }
    }
}

#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// 0 to 1023; no two servers of a host may have the same.
    pub instance: u16,
    /// The bounds of what sandboxes may reach.
    pub policy: HostPolicy,
    /// Asked in this order; they may be where no guest can reach.
    pub resolvers: Vec<SocketAddr>,
}

impl NetworkConfig {
    /// The resolvers that the host itself uses.
    pub fn resolvers_of_host() -> Result<Vec<SocketAddr>, Error> {
        const PATH: &str = "/etc/resolv.conf";
        match fs::read_to_string(PATH) {
            Ok(text) => Ok(resolver::parse_resolv_conf(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(resolver::parse_resolv_conf(""))
            }
            Err(source) => Err(Error::kernel("read", PATH, source)),
        }
    }
}

/// All networks of one instance, and the host's rules for them.
#[derive(Debug)]
pub struct Networks {
    instance: Instance,
    policy: Arc<HostPolicy>,
    upstream: Arc<Upstream>,
    guard: Guard,
}

impl Networks {
    /// Puts the host's rules in place, instead of those of an earlier run; running sandboxes are covered
    /// throughout.
    pub async fn new(config: NetworkConfig) -> Result<Self, Error> {
        let instance = Instance::new(config.instance)?;
        namespace::ensure_names()?;
        // The rules come first: from the moment the host forwards they must hold.
        let guard = Guard::start(instance, rules::host_table(instance, &config.policy)).await?;
        forward_on_host()?;
        if config.policy.door.is_some() {
            make_door(instance).await?;
        } else {
            remove_door(instance).await?;
        }
        warn_of_dropped_forwards().await;
        Ok(Self { guard, ..Self::unguarded(instance, config) })
    }

    fn unguarded(instance: Instance, config: NetworkConfig) -> Self {
        let suffix = config.policy.door.as_ref().and_then(|door| door.suffix.clone());
        let own_names = suffix.map(|suffix| OwnNames { suffix, address: instance.door() });
        Self {
            instance,
            policy: Arc::new(config.policy),
            upstream: Arc::new(Upstream::new(config.resolvers, own_names)),
            guard: Guard::default(),
        }
    }

    /// Leaves the host as it is, so nothing that it prepared would be walled in: for what only takes away.
    pub fn without_rules(config: NetworkConfig) -> Result<Self, Error> {
        Ok(Self::unguarded(Instance::new(config.instance)?, config))
    }

    /// The bounds within which sandboxes have policies of their own.
    pub fn host_policy(&self) -> &HostPolicy {
        &self.policy
    }

    /// The address at which sandboxes reach the ports of [`HostPolicy::door`].
    pub fn door(&self) -> Ipv4Addr {
        self.instance.door()
    }

    /// The slot of the sandbox that comes from this address, which nobody else on this host can have.
    pub fn slot_of(&self, address: Ipv4Addr) -> Option<u16> {
        self.instance.slot_of_address(address).map(Slot::index)
    }

    /// Makes the network of `slot`, in place of whatever was left there; it has the default policy. What a
    /// failed or abandoned attempt has made goes away with the next attempt, or the next sweep.
    pub async fn prepare(&self, slot: u16) -> Result<Namespace, Error> {
        let slot = self.instance.slot(slot)?;
        if namespace::path(slot).exists() || namespace::has_link(slot) {
            erase(&[slot]).await?;
        }
        match self.build(slot).await {
            Ok(namespace) => Ok(namespace),
            Err(error) => {
                if let Err(leftover) = erase(&[slot]).await {
                    warn!(slot = slot.index(), error = %leftover, "a half-made network is left over");
                }
                Err(error)
            }
        }
    }

    async fn build(&self, slot: Slot) -> Result<Namespace, Error> {
        fault::point!("create.network_making", |source| Error::kernel(
            "make the namespace",
            slot.namespace(),
            source
        ));
        let (netns, (tap, nft)) = namespace::create(slot, || {
            settings_inside()?;
            Ok((namespace::make_tap()?, command::start(Program::Nft)?))
        })
        .await?;
        // The namespace's rules and the pair of interfaces do not need each other; but no packet passes
        // before both are there, since the inside is brought up last.
        let policy = Policy::default();
        let rules = rules::namespace_tables(self.instance, &self.policy, &policy);
        let outside = outside(slot);
        tokio::try_join!(nft.finish(&rules), command::run(Program::Ip, &outside))?;
        fault::point!("create.network_linked", |source| Error::kernel(
            "bring up",
            slot.namespace(),
            source
        ));
        settings_outside(slot)?;
        let ip = namespace::visit(&netns, || command::start(Program::Ip)).await?;
        ip.finish(&inside(slot)).await?;
        let namespace = self.namespace(slot, netns, Some(tap), &policy).await?;
        fault::point!("create.network_made");
        Ok(namespace)
    }

    /// Takes over the network of `slot` from a server that ended while the machine went on. Its rules are
    /// put in place anew: the host's owner may have said something else since, or somebody changed them.
    pub async fn adopt(&self, slot: u16, policy: &Policy) -> Result<Namespace, Error> {
        let slot = self.instance.slot(slot)?;
        let netns = namespace::open(slot)?;
        let nft = namespace::visit(&netns, || {
            settings_inside()?;
            command::start(Program::Nft)
        })
        .await?;
        nft.finish(&rules::namespace_tables(self.instance, &self.policy, policy)).await?;
        settings_outside(slot)?;
        self.namespace(slot, netns, None, policy).await
    }

    async fn namespace(
        &self,
        slot: Slot,
        netns: OwnedFd,
        tap: Option<OwnedFd>,
        policy: &Policy,
    ) -> Result<Namespace, Error> {
        let forwarder = self.forwarder(&netns, policy.egress).await?;
        let gate = Gate::new(slot, netns, Arc::clone(&self.policy), forwarder.switch());
        Ok(Namespace { slot, gate, tap, forwarder })
    }

    async fn forwarder(&self, netns: &OwnedFd, egress: Egress) -> Result<Forwarder, Error> {
        let sockets = namespace::visit(netns, || {
            resolver::bind(GATEWAY)
                .map_err(|source| Error::kernel("listen at", format!("{GATEWAY}:53"), source))
        })
        .await?;
        Forwarder::start(sockets, Arc::clone(&self.upstream), egress)
            .map_err(|source| Error::kernel("start", "the resolver of a namespace", source))
    }

    /// Removes every network of this instance except those of the slots in `keep`, whoever made them;
    /// how many there were.
    pub async fn sweep(&self, keep: &BTreeSet<u16>) -> Result<usize, Error> {
        let mut slots = namespace::named(self.instance)?;
        slots.extend(namespace::linked(self.instance)?);
        slots.sort_unstable_by_key(|slot| slot.index());
        slots.dedup();
        slots.retain(|slot| !keep.contains(&slot.index()));
        erase(&slots).await?;
        if self.policy.door.is_none() {
            remove_door(self.instance).await?;
        }
        if !slots.is_empty() {
            info!(count = slots.len(), "removed networks that were left over");
        }
        Ok(slots.len())
    }

    /// Removes the host's rules. Machines that still run would be without them: sweep first.
    pub async fn close(&self) -> Result<(), Error> {
        self.guard.stop().await;
        remove_door(self.instance).await?;
        command::run(Program::Nft, &rules::host_table_removal(self.instance)).await?;
        Ok(())
    }
}

/// The network of one machine. Dropping it ends only its resolver: the machine keeps the rest, which
/// [`Networks::adopt`] finds again.
#[derive(Debug)]
pub struct Namespace {
    slot: Slot,
    gate: Gate,
    tap: Option<OwnedFd>,
    forwarder: Forwarder,
}

impl Namespace {
    /// The guest's tap, for QEMU. Also kept here, so that one machine can follow another.
    pub fn tap(&self) -> Result<Tap, Error> {
        let name = || self.slot.namespace();
        let tap = self.tap.as_ref().ok_or_else(|| Error::NoTap(name()))?;
        let failed = |source| Error::kernel("hand out the tap of", name(), source);
        Ok(Tap {
            fd: tap.try_clone().map_err(failed)?,
            netns: self.gate.netns().try_clone().map_err(failed)?,
        })
    }

    /// What this network lets through, to be asked and changed.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// The address, unique on this host, under which the host sees the guest.
    pub fn host_address(&self) -> Ipv4Addr {
        self.slot.namespace_end()
    }

    pub fn slot(&self) -> u16 {
        self.slot.index()
    }

    /// Takes everything away. A machine that still runs is cut off at once; the namespace ends with it.
    pub async fn remove(self) -> Result<(), Error> {
        self.forwarder.stop().await;
        // The last descriptor of a tap takes the interface with it, which the kernel waits for.
        let closed = tokio::task::spawn_blocking(move || drop((self.tap, self.gate)));
        let erased = erase(&[self.slot]).await;
        // It cannot panic, and a runtime that shuts down closes everything anyway.
        let _ = closed.await;
        erased
    }
}

fn has_door(instance: Instance) -> bool {
    nix::net::if_::if_nametoindex(instance.door_link().as_str()).is_ok()
}

/// An interface of its own, so that its address is there whatever else the host has. A pair, because every host that runs
/// machines has those; nothing goes over it. Also twice.
async fn make_door(instance: Instance) -> Result<(), Error> {
    let (link, peer) = (instance.door_link(), instance.door_peer());
    let address = instance.door();
    let add = if has_door(instance) {
        String::new()
    } else {
        format!("link add {link} type veth peer name {peer}\n")
    };
    let text = format!(
        "{add}link set {peer} addrgenmode none up\n\
         link set {link} addrgenmode none up\n\
         address replace {address}/32 dev {link}\n"
    );
    command::run(Program::Ip, &text).await.map(drop)
}

/// Fine when there is none.
async fn remove_door(instance: Instance) -> Result<(), Error> {
    if !has_door(instance) {
        return Ok(());
    }
    let text = format!("link delete {}\n", instance.door_link());
    match command::run(Program::Ip, &text).await {
        Err(Error::Refused { .. }) if !has_door(instance) => Ok(()),
        other => other.map(drop),
    }
}

/// The host's end of the pair.
fn outside(slot: Slot) -> String {
    let (link, namespace, host) = (slot.link(), slot.namespace(), slot.host_end());
    format!(
        "link add {link} type veth peer name {UPLINK} netns {namespace}\n\
         address add {host}/{LINK_PREFIX} dev {link}\n\
         link set {link} addrgenmode none up\n"
    )
}

/// Everything inside the namespace. The guest's MAC is known, so nobody has to ask for it.
fn inside(slot: Slot) -> String {
    let (own, host) = (slot.namespace_end(), slot.host_end());
    format!(
        "link set lo up\n\
         link set {TAP} address {GATEWAY_MAC} up\n\
         address add {GATEWAY}/{GUEST_PREFIX} dev {TAP}\n\
         neighbour replace {GUEST} lladdr {GUEST_MAC} dev {TAP} nud permanent\n\
         address add {own}/{LINK_PREFIX} dev {UPLINK}\n\
         link set {UPLINK} up\n\
         route add default via {host}\n"
    )
}

/// Removes what bears the names of `slots`; fine when there is nothing.
async fn erase(slots: &[Slot]) -> Result<(), Error> {
    let links: String = slots
        .iter()
        .filter(|slot| namespace::has_link(**slot))
        .map(|slot| format!("link delete {}\n", slot.link()))
        .collect();
    for slot in slots {
        namespace::forget(*slot)?;
    }
    fault::point!("delete.namespace_forgotten");
    if links.is_empty() {
        return Ok(());
    }
    match command::run(Program::IpRegardless, &links).await {
        // The kernel may have been faster, clearing up a namespace that ended.
        Err(Error::Refused { .. }) if !slots.iter().any(|slot| namespace::has_link(*slot)) => {
            Ok(())
        }
        other => other.map(drop),
    }
}

/// In the calling thread's namespace.
fn settings_inside() -> Result<(), Error> {
    namespace::set_if_there("ipv6/conf/all/disable_ipv6", "1")?;
    namespace::set_if_there("ipv6/conf/default/disable_ipv6", "1")?;
    // Of packets that come in pieces the kernel holds so much until the rest is there, for each namespace.
    namespace::set_if_there("ipv4/ipfrag_low_thresh", "196608")?;
    namespace::set_if_there("ipv4/ipfrag_high_thresh", "262144")?;
    namespace::set("ipv4/ip_forward", "1")
}

/// The host's end: no IPv6, and no address but its own namespace's.
fn settings_outside(slot: Slot) -> Result<(), Error> {
    let link = slot.link();
    namespace::set_if_there(&format!("ipv6/conf/{link}/disable_ipv6"), "1")?;
    // The link's name has a dot in it; as a path it is one word all the same.
    namespace::set(&format!("ipv4/conf/{link}/rp_filter"), "1")
}

fn forward_on_host() -> Result<(), Error> {
    const PATH: &str = "/proc/sys/net/ipv4/ip_forward";
    let now = fs::read_to_string(PATH).map_err(|source| Error::kernel("read", PATH, source))?;
    if now.trim() == "0" {
        namespace::set("ipv4/ip_forward", "1")?;
        info!("turned on net.ipv4.ip_forward, which sandboxes need for the internet");
    }
    Ok(())
}

/// Somebody else's firewall is not ours to change; but its owner must learn why sandboxes are cut off.
async fn warn_of_dropped_forwards() {
    match command::run(Program::NftListChains, "").await {
        Ok(chains) => {
            for table in rules::tables_that_drop_forwarded(&chains) {
                warn!(
                    table,
                    "this table drops forwarded packets; accept those from and to interfaces named at* there, \
                     or sandboxes have no internet"
                );
            }
        }
        Err(error) => warn!(%error, "could not look at the host's firewall"),
    }
}
