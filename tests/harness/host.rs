//! What the claims of one suite share.

use std::sync::{Arc, Mutex, PoisonError};

use api::CreateSandbox;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};

use crate::{Footprint, Sandbox, Server, small};

/// Sandboxes at once: without hardware virtualization each keeps a core busy.
const ROOM: usize = 3;
/// Beside them, sandboxes in which a claim only waits for a limit to run out.
const IDLE_ROOM: usize = 4;

/// Cheap to clone.
#[derive(Clone)]
pub struct Host {
    shared: Arc<Shared>,
}

struct Shared {
    server: OnceCell<Arc<Server>>,
    room: Arc<Semaphore>,
    idle_room: Arc<Semaphore>,
    /// Of servers that single claims had for themselves.
    left: Mutex<Vec<Footprint>>,
}

impl Host {
    pub(crate) fn new() -> Self {
        let shared = Shared {
            server: OnceCell::new(),
            room: Arc::new(Semaphore::new(ROOM)),
            idle_room: Arc::new(Semaphore::new(IDLE_ROOM)),
            left: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The suite's server, started for the first claim that needs it.
    pub async fn server(&self) -> Arc<Server> {
        Arc::clone(self.shared.server.get_or_init(async || Arc::new(Server::start().await)).await)
    }

    /// Held while so many sandboxes exist; several are taken at once, so that two claims cannot wait for each other.
    ///
    /// # Panics
    /// More are asked for than there may ever be.
    pub async fn room(&self, sandboxes: usize) -> OwnedSemaphorePermit {
        assert!(sandboxes <= ROOM);
        let permits = u32::try_from(sandboxes).expect("there are few");
        let room = Arc::clone(&self.shared.room).acquire_many_owned(permits).await;
        room.expect("the semaphore is never closed")
    }

    /// A small sandbox of the suite's server.
    pub async fn sandbox(&self) -> Sandbox {
        self.sandbox_of(&small()).await
    }

    pub async fn sandbox_of(&self, request: &CreateSandbox) -> Sandbox {
        let room = self.room(1).await;
        let server = self.server().await;
        Sandbox::new(server.create(request).await, server.client().clone(), room)
    }

    /// In room that the claim holds already, for one that has several at a time.
    pub async fn sandbox_within(
        &self,
        _room: &OwnedSemaphorePermit,
        request: &CreateSandbox,
    ) -> Sandbox {
        let server = self.server().await;
        Sandbox::new(server.create(request).await, server.client().clone(), None)
    }

    /// For a claim that mostly waits.
    pub async fn idle_sandbox_of(&self, request: &CreateSandbox) -> Sandbox {
        let room = Arc::clone(&self.shared.idle_room).acquire_owned().await;
        let server = self.server().await;
        let created = server.create(request).await;
        Sandbox::new(created, server.client().clone(), room.expect("the semaphore is never closed"))
    }

    pub async fn sandbox_on(&self, server: &Server, request: &CreateSandbox) -> Sandbox {
        let room = self.room(1).await;
        Sandbox::new(server.create(request).await, server.client().clone(), room)
    }

    pub async fn two_sandboxes(&self, request: &CreateSandbox) -> [Sandbox; 2] {
        let mut room = self.room(2).await;
        let server = self.server().await;
        let half = room.split(1).expect("there are two");
        let (one, other) = (server.create(request).await, server.create(request).await);
        let client = server.client();
        [Sandbox::new(one, client.clone(), room), Sandbox::new(other, client.clone(), half)]
    }

    /// Ends a claim's own server. What it leaves behind is told at the suite's end.
    pub async fn end(&self, server: Server) {
        let left = server.end().await;
        self.shared.left.lock().unwrap_or_else(PoisonError::into_inner).push(left);
    }

    /// After a claim that failed.
    pub(crate) fn tell_complaints(&self) {
        if let Some(server) = self.shared.server.get() {
            server.tell_complaints();
        }
    }

    /// What the suite's servers left on the host; `None` if there was none.
    pub(crate) async fn close(self) -> Option<Vec<Footprint>> {
        let mut left =
            std::mem::take(&mut *self.shared.left.lock().unwrap_or_else(PoisonError::into_inner));
        if let Some(server) = self.shared.server.get().cloned() {
            drop(self);
            let server = Arc::into_inner(server).expect("the claims have ended");
            left.push(server.end().await);
        }
        (!left.is_empty()).then_some(left)
    }
}
