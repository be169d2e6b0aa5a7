//! Keeps the host's table in place: whoever flushes the host's rules, as restarting a firewall does, takes
//! the sandboxes' with them. The kernel tells of every change; what is missing is put back at once.
#![expect(
    unsafe_code,
    reason = "tokio watches a descriptor only on the promise that it stays open"
)]

use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
    },
};
use tokio::{io::unix::AsyncFd, sync::Mutex, task::JoinSet};
use tracing::{error, warn};

use super::{
    Error,
    address::Instance,
    command::{self, Program},
    forward_on_host,
};

/// Changes come in bursts; and other servers of the host make some as well.
const PAUSE: Duration = Duration::from_millis(200);
/// Beside the kernel's word: forwarding can be switched off, too.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// After a failure nobody may tell of a change any more.
const TRY_AGAIN: Duration = Duration::from_secs(1);
const LISTINGS: usize = 5;
/// `NFNLGRP_NFTABLES`, as a bit.
const CHANGES_OF_RULES: u32 = 1 << 6;

/// Dropping it ends it; the table stays.
#[derive(Debug, Default)]
pub(super) struct Guard(Mutex<JoinSet<()>>);

impl Guard {
    /// Puts the table in place, and keeps it there.
    pub(super) async fn start(instance: Instance, table: String) -> Result<Self, Error> {
        let changes = Changes::open()
            .map_err(|source| Error::kernel("watch", "the host's packet filter rules", source))?;
        let kept = Kept::put_for_the_first_time(instance, table).await?;
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            loop {
                tokio::select! {
                    () = changes.next() => {}
                    () = tokio::time::sleep(LOOK_AGAIN) => {}
                }
                while let Err(error) = kept.heal().await {
                    error!(%error, "failed to put the host's packet filter rules back");
                    tokio::time::sleep(TRY_AGAIN).await;
                }
                tokio::time::sleep(PAUSE).await;
            }
        });
        Ok(Self(Mutex::new(tasks)))
    }

    /// The table is nobody's afterwards.
    pub(super) async fn stop(&self) {
        self.0.lock().await.shutdown().await;
    }
}

struct Kept {
    instance: Instance,
    table: String,
    /// As the kernel tells it when nobody has changed it. It is learnt once: whoever changes the rules between
    /// their being put back and being listed would have the change taken for ours.
    as_listed: String,
}

impl Kept {
    async fn put_for_the_first_time(instance: Instance, table: String) -> Result<Self, Error> {
        let mut kept = Self { instance, table, as_listed: String::new() };
        kept.put().await?;
        kept.as_listed = kept.list().await?;
        // A change in just that moment would be told once, hardly twice.
        for _ in 0..LISTINGS {
            kept.put().await?;
            let again = kept.list().await?;
            if again == kept.as_listed {
                break;
            }
            kept.as_listed = again;
        }
        Ok(kept)
    }

    async fn put(&self) -> Result<(), Error> {
        command::run(Program::Nft, &self.table).await.map(drop)
    }

    async fn list(&self) -> Result<String, Error> {
        command::run(Program::NftListTable(self.instance), "").await
    }

    async fn heal(&self) -> Result<(), Error> {
        forward_on_host()?;
        match self.list().await {
            Ok(text) if text == self.as_listed => return Ok(()),
            Ok(_) | Err(Error::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
        self.put().await?;
        warn!(
            table = self.instance.table(),
            "somebody removed or changed the packet filter rules that sandboxes are behind; they are in place again"
        );
        Ok(())
    }
}

/// The kernel's word that some table of this network namespace has changed.
struct Changes(AsyncFd<OwnedFd>);

impl Changes {
    fn open() -> io::Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::NetlinkNetFilter,
        )?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, CHANGES_OF_RULES))?;
        // SAFETY: the socket is owned, and neither replaced nor closed before.
        let watched = unsafe { AsyncFd::register(socket) };
        Ok(Self(watched.map_err(io::Error::from)?))
    }

    /// Those that came together are one; losing some is no loss, since what they say is not read.
    async fn next(&self) {
        loop {
            let Ok(mut ready) = self.0.readable().await else {
                return std::future::pending().await;
            };
            let mut buffer = [0; 8192];
            let mut some = false;
            loop {
                match recv(self.0.as_fd().as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                    Ok(_) | Err(Errno::ENOBUFS) => some = true,
                    Err(Errno::EINTR) => {}
                    Err(Errno::EAGAIN) => break,
                    // The look now and then remains.
                    Err(_) => return std::future::pending().await,
                }
            }
            ready.clear_ready();
            if some {
                return;
            }
        }
    }
}
