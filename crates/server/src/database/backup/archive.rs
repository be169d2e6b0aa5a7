//! The write-ahead log on its way to the store: every segment that is full, and the one that is being written once there is
//! something new in it for a while, or nobody is connected any longer. A database that sleeps is in the store with all that it has.

use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

use tokio::time::{Instant, sleep, timeout};

use super::{
    super::{
        Databases, Entry, PORT,
        admin::{Admin, Refused},
    },
    plan::{self, Age},
    segment_name,
    store::BackupStore,
    wal::{self, Lsn, SEGMENT_BYTES},
};
use crate::{
    Error,
    db::ChainRow,
    sandbox::{InUse, State, Target},
};

/// In every database, made when its first backup is.
const SLOT: &str = "atoll";
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Between looks at a database that is in use.
const STEP: Duration = Duration::from_secs(5);
const AFTER_A_FAILURE: Duration = Duration::from_secs(30);
/// Nobody is connected for so long, or half of what lets it hibernate: what there is goes to the store now.
const LONGEST_PATIENCE: Duration = Duration::from_secs(20);
const DIAL: Duration = Duration::from_secs(15);
/// Of one query's answer.
const PIECE: u64 = 4 << 20;

/// Whether the segment that is being written is to be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Urge {
    /// When there is something new in it for as long as the settings say.
    Later,
    /// When there is something new in it.
    Now,
    /// So that every time until now can be reached.
    Always,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Archived {
    All,
    Partly,
}

/// What PostgreSQL says of itself.
#[derive(Debug)]
struct Look {
    flushed: Lsn,
    transactions: String,
    timeline: u32,
    /// Milliseconds.
    now: i64,
    slot: Option<Slot>,
}

#[derive(Debug)]
struct Slot {
    restart: Lsn,
    is_lost: bool,
}

const LOOK: &str = "SELECT pg_current_wal_flush_lsn()::text, pg_current_snapshot()::text, \
     left(pg_walfile_name(pg_current_wal_insert_lsn()), 8), \
     floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, s.restart_lsn::text, s.wal_status \
     FROM (VALUES (1)) one LEFT JOIN pg_replication_slots s ON s.slot_name = 'atoll'";

/// What whoever has the turn to read the log reads it with.
pub(super) struct Turn<'a> {
    pub(super) entry: &'a Entry,
    pub(super) store: &'a BackupStore,
    pub(super) admin: Admin,
    pub(super) chain: ChainRow,
}

impl Turn<'_> {
    fn has_base(&self) -> bool {
        self.entry.archive.known().bases.iter().any(|base| base.chain == self.chain.chain)
    }
}

/// What the loop remembers of one database between two looks.
struct Attention {
    /// Something may not be in the store yet.
    is_behind: bool,
    had_clients: bool,
    last_client: Instant,
    next: Instant,
    has_failed: bool,
    hold: Option<InUse>,
    session: Option<Admin>,
}

impl Databases {
    /// Runs beside a database's keeper.
    pub(in crate::database) async fn back_up(self: &Arc<Self>, entry: &Arc<Entry>) {
        if self.backups.store.is_none() {
            return std::future::pending().await;
        }
        let mut attention = Attention {
            is_behind: !entry.archive.known().chains.is_empty(),
            had_clients: false,
            last_client: Instant::now(),
            next: Instant::now(),
            has_failed: false,
            hold: None,
            session: None,
        };
        loop {
            let visited = timeout(LOOK_EVERY, entry.archive.visited.notified()).await.is_ok();
            self.attend(entry, &mut attention, visited).await;
        }
    }

    async fn attend(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        attention: &mut Attention,
        visited: bool,
    ) {
        let (account, sandbox) = entry.sandbox();
        let has_clients = entry.sessions() > 0;
        if visited || has_clients {
            attention.is_behind = true;
            attention.had_clients = true;
            attention.last_client = Instant::now();
        }
        let state = self.sandboxes.state_of(&account, &sandbox);
        let runs = state == Some((State::Running, Target::Running));
        let is_left = !has_clients && attention.last_client.elapsed() >= patience(entry);
        let is_base_due = self.is_base_due(entry, attention.had_clients && is_left);
        if !runs || !(attention.is_behind || is_base_due) {
            (attention.hold, attention.session) = (None, None);
            return;
        }
        if attention.hold.is_none() && !attention.has_failed {
            attention.hold = self.sandboxes.unnoticed_use_of(&account, &sandbox).ok();
        }
        let has_begun = is_base_due || !entry.archive.known().chains.is_empty();
        if Instant::now() < attention.next || !has_begun {
            return;
        }
        let was_kept = attention.session.is_some();
        let urge = if is_left { Urge::Now } else { Urge::Later };
        match self.archive(entry, &mut attention.session, urge, is_base_due).await {
            Ok(archived) => {
                attention.next = Instant::now() + if is_left { Duration::ZERO } else { STEP };
                attention.has_failed = false;
                entry.archive.change(|known| known.error = None);
                if archived == Archived::All && is_left {
                    attention.is_behind = false;
                    (attention.hold, attention.session) = (None, None);
                }
            }
            // Ended with its machine, or with the password that it came with.
            Err(_) if was_kept => {}
            Err(error) => {
                // It may sleep: what is on its disk is not lost, and goes to the store when it wakes.
                (attention.hold, attention.session) = (None, None);
                attention.has_failed = true;
                attention.next = Instant::now() + AFTER_A_FAILURE;
                if self.sandboxes.state_of(&account, &sandbox) == state {
                    self.backups.failures.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(database = %entry.id(), %error, cause = error.causes(), "a database is not backed up");
                    entry.archive.change(|known| known.error = Some(error.message));
                }
            }
        }
    }

    fn is_base_due(&self, entry: &Entry, is_left: bool) -> bool {
        let known = entry.archive.known();
        let age =
            Age { now: self.clock.now_ms(), created_at: entry.look(|row| row.created_at), is_left };
        let settings = &self.backups.settings;
        plan::is_base_due(age, &known.chains, &known.bases, settings.first_after, settings.every)
    }

    /// One step of it, with or without a session that there is already.
    pub(super) async fn archive(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        session: &mut Option<Admin>,
        urge: Urge,
        is_base_due: bool,
    ) -> Result<Archived, Error> {
        let Some(store) = &self.backups.store else { return Ok(Archived::All) };
        let _turn = entry.archive.turn.lock().await;
        let admin = match session.take() {
            Some(admin) => admin,
            None => self.session_for_backups(entry).await?,
        };
        let look = Look::at(&admin).await?;
        let chain = self.chain(entry, &admin, &look).await?;
        let mut turn = Turn { entry, store, admin, chain };
        self.fetch(&mut turn, look.flushed).await?;
        let has_base = turn.has_base();
        // It would lead to no time before itself.
        let wants_base = urge != Urge::Always && (is_base_due || !has_base);
        // Others may be made for long: the log goes on meanwhile.
        let permit = wants_base.then(|| self.backups.bases.try_acquire().ok()).flatten();
        let has_new = look.has_new(&turn.chain);
        let is_time = look.is_time(&turn.chain, urge, self.backups.settings.archive_after);
        // Ahead of a base backup, which may fail or last: those before it lead to every time until now all the same. Without
        // one before it a mark leads nowhere; the first ends with one of its own.
        if is_time && has_base {
            self.mark(&mut turn).await?;
        }
        if permit.is_some() {
            self.make_base(&mut turn).await?;
            drop(permit);
            self.remove_outdated(entry, store).await?;
            *session = Some(turn.admin);
            return Ok(Archived::All);
        }
        *session = Some(turn.admin);
        Ok(archived(wants_base, has_new && !is_time))
    }

    /// A session of the server's own, if PostgreSQL takes one now.
    pub(super) async fn session_for_backups(&self, entry: &Entry) -> Result<Admin, Error> {
        let stream = self.dial_for_backups(entry).await?;
        let password = entry.look(|row| row.credentials.admin_password.clone());
        Admin::login(stream, "postgres", &password).await.map_err(|refused| match refused {
            Refused::Other(error) => error,
            Refused::NotYet | Refused::WrongPassword => not_now(),
        })
    }

    pub(super) async fn dial_for_backups(
        &self,
        entry: &Entry,
    ) -> Result<tokio::net::TcpStream, Error> {
        let (account, sandbox) = entry.sandbox();
        let dialled = timeout(DIAL, self.sandboxes.dial(&account, &sandbox, PORT)).await;
        match dialled {
            Ok(Some(Ok(stream))) => Ok(stream),
            Ok(Some(Err(error))) => Err(not_now().because(error)),
            Ok(None) | Err(_) => Err(not_now()),
        }
    }

    /// The one that the slot keeps going, or a new one where PostgreSQL has thrown away what was not fetched.
    async fn chain(&self, entry: &Entry, admin: &Admin, look: &Look) -> Result<ChainRow, Error> {
        let id = entry.id();
        if let Some(last) = entry.archive.known().chains.last() {
            let goes_on = look
                .slot
                .as_ref()
                .is_some_and(|slot| !slot.is_lost && slot.restart.segment() <= last.next_segment);
            if goes_on && last.timeline == look.timeline {
                return Ok(last.clone());
            }
            tracing::warn!(database = %id, "the log in the store has a gap: a new base backup follows");
        }
        if look.slot.is_some() {
            admin.run(&format!("SELECT pg_drop_replication_slot('{SLOT}')")).await?;
        }
        let made =
            format!("SELECT lsn::text FROM pg_create_physical_replication_slot('{SLOT}', true)");
        let row = admin.row(&made).await?;
        let last = entry.archive.known().chains.last().map(|last| last.chain);
        let chain = ChainRow {
            chain: plan::next_id(self.clock.now_ms(), last),
            timeline: look.timeline,
            next_segment: position(&row, 0)?.segment(),
            archived_until: None,
            transactions: None,
        };
        self.keep_chain(entry, &chain).await?;
        Ok(chain)
    }

    async fn keep_chain(&self, entry: &Entry, chain: &ChainRow) -> Result<(), Error> {
        self.db.save_chain(&entry.id(), chain).await?;
        entry.archive.change(|known| {
            match known.chains.iter_mut().find(|known| known.chain == chain.chain) {
                Some(known) => known.clone_from(chain),
                None => known.chains.push(chain.clone()),
            }
        });
        Ok(())
    }

    /// While a base backup is made: the log goes on as it does without one.
    pub(super) async fn keep_up(&self, turn: &mut Turn<'_>) -> Result<(), Error> {
        let look = Look::at(&turn.admin).await?;
        self.fetch(turn, look.flushed).await?;
        let is_time = look.is_time(&turn.chain, Urge::Later, self.backups.settings.archive_after);
        if is_time && turn.has_base() {
            self.mark(turn).await?;
        }
        Ok(())
    }

    /// All that is complete now.
    async fn fetch_complete(&self, turn: &mut Turn<'_>) -> Result<(), Error> {
        let look = Look::at(&turn.admin).await?;
        self.fetch(turn, look.flushed).await
    }

    /// All that is complete before that position.
    async fn fetch(&self, turn: &mut Turn<'_>, until: Lsn) -> Result<(), Error> {
        let Turn { entry, store, admin, chain } = turn;
        let id = entry.id();
        for segment in chain.next_segment..until.segment() {
            let path = format!("pg_wal/{}", wal::file_name(chain.timeline, segment));
            self.admit_to_store(SEGMENT_BYTES)?;
            let mut upload = store.upload(&segment_name(&id, chain, segment), SEGMENT_BYTES);
            let copied = async {
                for offset in
                    (0..SEGMENT_BYTES).step_by(usize::try_from(PIECE).unwrap_or(usize::MAX))
                {
                    let (offset, length) = (signed(offset), signed(PIECE));
                    let bytes = admin.read_file(&path, offset, length).await?;
                    if bytes.len() as u64 != PIECE {
                        return Err(Error::internal(format!("{path} is shorter than a segment")));
                    }
                    upload.write(&bytes).await?;
                }
                Ok(())
            };
            match copied.await {
                Ok(()) => upload.finish().await?,
                Err(error) => {
                    upload.give_up().await;
                    return Err(error);
                }
            };
            fault::point!("backup.segment_stored", Error::internal);
            chain.next_segment = segment + 1;
            self.keep_chain(entry, chain).await?;
            // It may be thrown away. After a crash the slot may be back where it was; nothing is lost by that.
            let start = Lsn::start_of(segment + 1);
            admin
                .run(&format!(
                    "SELECT pg_replication_slot_advance('{SLOT}', '{start}') FROM pg_replication_slots \
                     WHERE slot_name = '{SLOT}' AND restart_lsn < '{start}'"
                ))
                .await?;
        }
        Ok(())
    }

    /// Ends the segment that is being written, behind a transaction that is later than everything before it: a recovery to
    /// a time ends at the first transaction after it, and fails where there is none.
    pub(super) async fn mark(&self, turn: &mut Turn<'_>) -> Result<(), Error> {
        let before = Look::at(&turn.admin).await?;
        turn.admin.run("SELECT pg_current_xact_id()").await?;
        let after = Look::at(&turn.admin).await?;
        turn.admin.run("SELECT pg_switch_wal()").await?;
        self.fetch_complete(turn).await?;
        turn.chain.archived_until = Some(before.now - 1);
        turn.chain.transactions = Some(after.transactions);
        self.keep_chain(turn.entry, &turn.chain).await
    }
}

impl Look {
    /// Since the last mark.
    fn has_new(&self, chain: &ChainRow) -> bool {
        chain.transactions.as_deref() != Some(self.transactions.as_str())
    }

    /// For another mark.
    fn is_time(&self, chain: &ChainRow, urge: Urge, patience: Duration) -> bool {
        let waited = i128::from(self.now - chain.archived_until.unwrap_or_default());
        match urge {
            Urge::Later => self.has_new(chain) && waited >= millis(patience),
            Urge::Now => self.has_new(chain),
            Urge::Always => true,
        }
    }

    async fn at(admin: &Admin) -> Result<Self, Error> {
        let row = admin.row(LOOK).await?;
        let text = |column: usize| row.get(column).and_then(Option::as_deref).unwrap_or_default();
        let slot = match row.get(4) {
            Some(Some(_)) => Some(Slot {
                restart: position(&row, 4)?,
                is_lost: !matches!(text(5), "reserved" | "extended" | "unreserved"),
            }),
            // One that never was told where to begin, or has lost it.
            Some(None) if !text(5).is_empty() => {
                Some(Slot { restart: Lsn(u64::MAX), is_lost: true })
            }
            Some(None) | None => None,
        };
        Ok(Self {
            flushed: position(&row, 0)?,
            transactions: text(1).to_owned(),
            timeline: u32::from_str_radix(text(2), 16).map_err(Error::internal)?,
            now: text(3).parse().map_err(Error::internal)?,
            slot,
        })
    }
}

fn position(row: &[Option<String>], column: usize) -> Result<Lsn, Error> {
    let text = row.get(column).and_then(Option::as_deref).unwrap_or_default();
    Lsn::parse(text).ok_or_else(|| Error::internal(format!("`{text}` is no position in the log")))
}

/// A base backup that is due, but not made, is made with a later look: it stays awake for that.
fn archived(wants_base: bool, leaves_log: bool) -> Archived {
    if wants_base || leaves_log { Archived::Partly } else { Archived::All }
}

/// Half of what lets it hibernate: then it does so in time.
fn patience(entry: &Entry) -> Duration {
    let idle = entry.look(|row| if row.always_on { u64::MAX } else { row.idle_seconds });
    Duration::from_millis(idle.saturating_mul(500)).min(LONGEST_PATIENCE)
}

fn not_now() -> Error {
    Error::busy("PostgreSQL does not take connections yet", 5)
}

pub(super) async fn pause() {
    sleep(Duration::from_millis(500)).await;
}

fn millis(span: Duration) -> i128 {
    i128::try_from(span.as_millis()).unwrap_or(i128::MAX)
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_follows_what_is_new_when_it_has_waited_or_at_once() {
        let chain = ChainRow {
            chain: 1,
            timeline: 1,
            next_segment: 7,
            archived_until: Some(10_000),
            transactions: Some("7:7:".to_owned()),
        };
        let look = |transactions: &str, now| Look {
            flushed: Lsn(0),
            transactions: transactions.to_owned(),
            timeline: 1,
            now,
            slot: None,
        };
        let is_time = |look: &Look| {
            [Urge::Later, Urge::Now, Urge::Always]
                .map(|urge| look.is_time(&chain, urge, Duration::from_secs(60)))
        };
        assert_eq!(is_time(&look("7:7:", 90_000)), [false, false, true]);
        assert_eq!(is_time(&look("7:8:", 69_999)), [false, true, true]);
        assert_eq!(is_time(&look("7:8:", 70_000)), [true, true, true]);
    }

    #[test]
    fn a_database_whose_base_backup_has_to_wait_is_not_done() {
        assert_eq!(archived(true, false), Archived::Partly);
        assert_eq!(archived(false, true), Archived::Partly);
        assert_eq!(archived(false, false), Archived::All);
    }
}
