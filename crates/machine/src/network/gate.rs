//! What one network lets through: its sandbox's policy, and how much went by.

use std::{fs, io, os::fd::OwnedFd, sync::Arc};

use tokio::{
    net::{TcpSocket, TcpStream},
    sync::Mutex,
};

use super::{
    Error,
    address::{GUEST, Slot},
    command::{self, Program},
    namespace,
    policy::{HostPolicy, Policy, Traffic},
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
