//! What one network lets through: its sandbox's policy, and how much went by.

use std::{fs, io, os::fd::OwnedFd, sync::Arc};

use tokio::{
    net::{TcpSocket, TcpStream},
    sync::Mutex,
};

use super::{
    Error,
    address::{GUEST, Slot, TAP},
    command::{self, Program},
    namespace,
    policy::{Egress, HostPolicy, Policy, Traffic},
    resolver::Switch,
    rules,
};

/// Cheap to clone; stays with its network, whatever takes the slot afterwards.
#[derive(Debug, Clone)]
pub struct Gate(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    slot: Slot,
    netns: OwnedFd,
    host: Arc<HostPolicy>,
    names: Switch,
    /// Two changes at once would each tell the resolver and the rules something else.
    changes: Mutex<()>,
}

impl Gate {
    pub(super) fn new(slot: Slot, netns: OwnedFd, host: Arc<HostPolicy>, names: Switch) -> Self {
        Self(Arc::new(Inner { slot, netns, host, names, changes: Mutex::new(()) }))
    }

    pub(super) fn netns(&self) -> &OwnedFd {
        &self.0.netns
    }

    /// When this returns, every packet is judged by `policy`, also those of connections that were open before.
    /// After a failure the old one holds, except that names may no longer be resolved.
    pub async fn set_policy(&self, policy: &Policy) -> Result<(), Error> {
        let inner = &self.0;
        let _one_at_a_time = inner.changes.lock().await;
        // Closed before the rules change, opened after.
        inner.names.close_unless(policy.egress);
        let text = rules::policy_change(inner.slot.instance(), &inner.host, policy);
        let nft = namespace::visit(&inner.netns, || command::start(Program::Nft)).await?;
        nft.finish(&text).await?;
        inner.names.set(policy.egress);
        Ok(())
    }

    /// From now on the guest reaches nothing beyond its gateway, whatever the policy. A matter of microseconds, where
    /// another policy takes milliseconds.
    pub async fn shut(&self) -> Result<(), Error> {
        self.0.names.set(Egress::None);
        self.forward("0").await
    }

    /// After [`Gate::shut`]; the policy before was the default one.
    pub async fn open(&self, policy: &Policy) -> Result<(), Error> {
        if *policy == Policy::default() {
            self.0.names.set(policy.egress);
        } else {
            self.set_policy(policy).await?;
        }
        self.forward("1").await
    }

    /// What comes from the guest for others.
    async fn forward(&self, value: &'static str) -> Result<(), Error> {
        let name = format!("ipv4/conf/{TAP}/forwarding");
        namespace::visit(&self.0.netns, move || namespace::set(&name, value)).await
    }

    /// Connects to a port of the guest, from its gateway. No deadline but the kernel's.
    ///
    /// # Errors
    /// Nobody listens there, or the machine does not answer.
    pub async fn connect(&self, port: u16) -> io::Result<TcpStream> {
        let open = || {
            TcpSocket::new_v4()
                .map_err(|source| Error::kernel("open", "a socket for a guest", source))
        };
        let socket = namespace::visit(&self.0.netns, open).await.map_err(io::Error::other)?;
        socket.connect((GUEST, port).into()).await
    }

    /// Counted by the interface, so no change of rules loses any.
    pub fn traffic(&self) -> io::Result<Traffic> {
        let link = self.0.slot.link();
        let read = |name: &str| {
            let text = fs::read_to_string(format!("/sys/class/net/{link}/statistics/{name}"))?;
            text.trim().parse().map_err(io::Error::other)
        };
        Ok(Traffic { sent_bytes: read("rx_bytes")?, received_bytes: read("tx_bytes")? })
    }
}
