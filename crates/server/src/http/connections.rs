//! Who is connected. There is a place for so many; beyond that the connection that has been idle longest makes room,
//! of the peer that has most of them.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub struct Connections {
    most: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    connected: HashMap<u64, Connected>,
}

struct Connected {
    peer: IpAddr,
    /// `None` while a request is being answered.
    idle_since: Option<Instant>,
    closed: CancellationToken,
}

/// Of one connection; given back when it is dropped.
pub(super) struct Place {
    connections: Arc<Connections>,
    number: u64,
    /// It has to make room for another.
    pub(super) closed: CancellationToken,
    is_busy: AtomicBool,
}

/// While it lives, its connection is not idle.
pub(super) struct Busy(Arc<Place>);

impl Connections {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, table: Mutex::default() })
    }

    /// `None` where every place is taken by a request that is being answered.
    pub(super) fn enter(self: &Arc<Self>, peer: IpAddr) -> Option<Place> {
        let mut table = self.table();
        if table.connected.len() >= self.most {
            table.make_room()?;
        }
        let (number, closed) = (table.next, CancellationToken::new());
        table.next += 1;
        let idle_since = Some(Instant::now());
        table.connected.insert(number, Connected { peer, idle_since, closed: closed.clone() });
        drop(table);
        let is_busy = AtomicBool::new(false);
        Some(Place { connections: Arc::clone(self), number, closed, is_busy })
    }

    pub(super) fn count(&self) -> usize {
        self.table().connected.len()
    }

    pub(super) fn most(&self) -> usize {
        self.most
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn make_room(&mut self) -> Option<()> {
        let mut by_peer: HashMap<IpAddr, usize> = HashMap::new();
        for connected in self.connected.values() {
            *by_peer.entry(connected.peer).or_default() += 1;
        }
        let idle = self.connected.iter().filter_map(|(number, connected)| {
            let since = connected.idle_since?;
            let of_its_peer = by_peer.get(&connected.peer).copied().unwrap_or_default();
            Some((usize::MAX - of_its_peer, since, *number))
        });
        let (_, _, number) = idle.min()?;
        self.connected.remove(&number)?.closed.cancel();
        Some(())
    }
}

impl Place {
    pub(super) fn busy(self: &Arc<Self>) -> Busy {
        self.set_idle_since(None);
        Busy(Arc::clone(self))
    }

    pub(super) fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::SeqCst)
    }

    fn set_idle_since(&self, idle_since: Option<Instant>) {
        self.is_busy.store(idle_since.is_none(), Ordering::SeqCst);
        if let Some(connected) = self.connections.table().connected.get_mut(&self.number) {
            connected.idle_since = idle_since;
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set_idle_since(Some(Instant::now()));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.table().connected.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, time::Duration};

    use super::*;

    fn peer(last: u8) -> IpAddr {
        Ipv4Addr::new(192, 0, 2, last).into()
    }

    #[tokio::test(start_paused = true)]
    async fn the_idlest_of_the_most_connected_peer_makes_room() {
        let connections = Connections::new(4);
        let mut places = Vec::new();
        for last in [1, 2, 2, 2] {
            places.push(Arc::new(connections.enter(peer(last)).unwrap()));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        // Its head has come meanwhile.
        let busy = places[1].busy();
        let new = connections.enter(peer(3)).unwrap();
        let closed: Vec<_> = places.iter().map(|place| place.closed.is_cancelled()).collect();
        assert_eq!(closed, [false, false, true, false]);
        drop((busy, new));
        assert_eq!(connections.count(), 3);
    }

    #[tokio::test]
    async fn requests_under_way_make_no_room() {
        let connections = Connections::new(2);
        let places: Vec<_> =
            (0..2).map(|_| Arc::new(connections.enter(peer(1)).unwrap())).collect();
        let mut busy: Vec<_> = places.iter().map(Place::busy).collect();
        assert!(connections.enter(peer(2)).is_none());
        busy.pop();
        assert!(connections.enter(peer(2)).is_some());
        assert!(!places[0].closed.is_cancelled() && places[1].closed.is_cancelled());
    }
}
