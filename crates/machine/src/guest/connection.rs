//! The two tasks of a connection. The reader sorts frames into the queues of their streams and never waits for a
//! stream; the writer sends small things before bulk data.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use protocol::frame::{self, Kind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::handshake::Greeted;
use super::stream::{End, StreamState};
use crate::error::{Error, Result};

/// Frames of bulk data that wait for the writer, over all streams.
const WAITING_BULK: usize = 16;
/// Frames written at once; a small thing waits for no more than these.
const BATCH: usize = 8;
const READ: usize = 128 * 1024;
/// Bytes that may wait for their readers, over all streams of a guest.
pub(super) const WAITING: usize = 128 << 20;
/// Frames a guest may send: one that sends more, smaller ones waits for us, as it would for a slow host. Data at full
/// speed needs a tenth of that.
const FRAMES_PER_SECOND: u32 = 100_000;
/// How many of them come between two looks at the clock.
const FRAMES_AT_ONCE: u32 = 4_096;

/// What waits in all streams of one connection.
#[derive(Debug, Default)]
pub(super) struct Budget(AtomicUsize);

impl Budget {
    /// One stream holds `after` bytes instead of `before`. False when it took more and all of them are too many.
    pub(super) fn change(&self, before: usize, after: usize) -> bool {
        if after <= before {
            self.0.fetch_sub(before - after, Ordering::Relaxed);
            return true;
        }
        let more = after - before;
        self.0.fetch_add(more, Ordering::Relaxed) + more <= WAITING
    }

    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Keeps a guest from spending the server's time on frames that carry nothing.
struct Pace {
    begun: Instant,
    frames: u32,
}

impl Pace {
    fn new() -> Self {
        Self { begun: Instant::now(), frames: 0 }
    }

    async fn keep(&mut self) {
        self.frames += 1;
        if self.frames < FRAMES_AT_ONCE {
            return;
        }
        let due = self.begun + Duration::from_secs(1) * self.frames / FRAMES_PER_SECOND;
        tokio::time::sleep_until(due).await;
        *self = Self::new();
    }
}

/// A place among the streams, kept until the last frame about the stream is written: so the queue of small things is
/// bounded although nothing ever waits to enter it.
pub(super) type Place = Arc<OwnedSemaphorePermit>;

pub(super) struct Outgoing {
    /// Whole frames, or the header of one.
    pub(super) head: Bytes,
    pub(super) payload: Bytes,
    #[expect(dead_code, reason = "it is held, not read")]
    pub(super) place: Place,
}

#[derive(Debug)]
pub(super) struct Connection {
    shared: Arc<Shared>,
    tasks: [JoinHandle<()>; 2],
    version: u32,
}

#[derive(Debug)]
pub(super) struct Shared {
    streams: Mutex<Streams>,
    small: mpsc::UnboundedSender<Outgoing>,
    bulk: mpsc::Sender<Outgoing>,
    places: Arc<Semaphore>,
    budget: Arc<Budget>,
}

#[derive(Debug, Default)]
struct Streams {
    open: HashMap<u32, Arc<StreamState>>,
    last: u32,
    lost: bool,
}

impl Connection {
    pub(super) fn start(stream: UnixStream, greeted: Greeted) -> Self {
        let (small, small_queue) = mpsc::unbounded_channel();
        let (bulk, bulk_queue) = mpsc::channel(WAITING_BULK);
        let places = Arc::new(Semaphore::new(protocol::MAX_STREAMS));
        let (streams, budget) = (Mutex::default(), Arc::default());
        let shared = Arc::new(Shared { streams, small, bulk, places, budget });
        let (read_half, write_half) = stream.into_split();
        let reader = tokio::spawn({
            let shared = shared.clone();
            async move {
                if let Err(error) = read(read_half, greeted.rest, &shared).await {
                    tracing::debug!(%error, "the guest channel ended");
                }
                shared.lose();
            }
        });
        let writer = tokio::spawn({
            let shared = shared.clone();
            async move {
                if let Err(error) = write(write_half, small_queue, bulk_queue).await {
                    tracing::debug!(%error, "the guest channel cannot be written to");
                }
                shared.lose();
            }
        });
        Self { shared, tasks: [reader, writer], version: greeted.version }
    }

    pub(super) fn version(&self) -> u32 {
        self.version
    }

    #[cfg(test)]
    pub(super) fn waiting_bytes(&self) -> usize {
        self.shared.budget.taken()
    }

    pub(super) fn is_lost(&self) -> bool {
        self.shared.streams().lost
    }

    /// A number and a place for a new stream.
    pub(super) fn admit(&self) -> Result<(u32, Arc<StreamState>, Place)> {
        let mut streams = self.shared.streams();
        if streams.lost {
            return Err(Error::Lost);
        }
        let place =
            Arc::new(self.shared.places.clone().try_acquire_owned().map_err(|_| Error::Busy)?);
        loop {
            // 0 is the connection's own.
            streams.last = streams.last.wrapping_add(1).max(1);
            if !streams.open.contains_key(&streams.last) {
                break;
            }
        }
        let (id, state) = (streams.last, Arc::new(StreamState::new(self.shared.budget.clone())));
        streams.open.insert(id, state.clone());
        Ok((id, state, place))
    }

    pub(super) fn forget(&self, id: u32) {
        self.shared.streams().open.remove(&id);
    }

    pub(super) fn send_small(&self, outgoing: Outgoing) -> Result<()> {
        self.shared.small.send(outgoing).map_err(|_| Error::Lost)
    }

    pub(super) async fn send_bulk(&self, outgoing: Outgoing) -> Result<()> {
        self.shared.bulk.send(outgoing).await.map_err(|_| Error::Lost)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Shared {
    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lose(&self) {
        let mut streams = self.streams();
        streams.lost = true;
        for (_, stream) in streams.open.drain() {
            stream.end(End::Lost);
        }
    }
}

async fn read(mut input: OwnedReadHalf, mut buffer: BytesMut, shared: &Shared) -> io::Result<()> {
    let mut pace = Pace::new();
    loop {
        loop {
            let (header, used) = match frame::decode(&buffer).map_err(io::Error::other)? {
                (Some(frame), used) => (frame.header, used),
                (None, padding) => {
                    buffer.advance(padding);
                    break;
                }
            };
            let mut payload = buffer.split_to(used);
            payload.advance(used - header.length);
            match header.kind {
                Kind::Reply | Kind::Data | Kind::Finish | Kind::Credit | Kind::Reset => {
                    // A stream that is not open here has just been given up, and its last frames still come.
                    let stream = shared.streams().open.get(&header.stream).cloned();
                    if let Some(stream) = stream {
                        stream.receive(&header, payload);
                    }
                }
                Kind::Hello | Kind::Request => {
                    return Err(io::Error::other("the agent sent what only a host sends"));
                }
            }
            pace.keep().await;
        }
        buffer.reserve(READ);
        if input.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
    }
}

async fn write(
    mut output: OwnedWriteHalf,
    mut small: mpsc::UnboundedReceiver<Outgoing>,
    mut bulk: mpsc::Receiver<Outgoing>,
) -> io::Result<()> {
    let mut batch = Vec::with_capacity(2 * BATCH);
    loop {
        let first = tokio::select! {
            biased;
            outgoing = small.recv() => outgoing,
            outgoing = bulk.recv() => outgoing,
        };
        let Some(first) = first else { return Ok(()) };
        batch.push(first);
        while batch.len() < BATCH {
            let Ok(outgoing) = small.try_recv().or_else(|_| bulk.try_recv()) else { break };
            batch.push(outgoing);
        }
        let pieces = batch.iter().flat_map(|outgoing| [&outgoing.head, &outgoing.payload]);
        let mut slices: Vec<_> =
            pieces.filter(|piece| !piece.is_empty()).map(|piece| IoSlice::new(piece)).collect();
        let mut slices = &mut slices[..];
        while !slices.is_empty() {
            let count = output.write_vectored(slices).await?;
            if count == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut slices, count);
        }
        batch.clear();
    }
}
