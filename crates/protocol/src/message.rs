//! Requests and replies. They are encoded with postcard, in which a field has no name: variants are only ever
//! appended, and a struct is never changed once released; a new one is added beside it.

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::files::{FilesReply, FilesRequest};
use crate::kernel::{KernelRun, KernelStart, KernelStatus};

/// # Panics
/// Never: the types here have no map without length and no failing serializer.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_stdvec(message).expect("messages are plain data")
}

/// # Errors
/// The bytes are not exactly one message of this type.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Malformed> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) | Err(_) => Err(Malformed),
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a message cannot be read")]
pub struct Malformed;

/// Names in a guest are bytes: they need not be UTF-8. Absolute, without NUL; the agent resolves `.` and `..`.
pub type PathBytes = serde_bytes::ByteBuf;

/// Opens a stream. Beside each: what comes back on it. Every stream may instead end with [`Reply::Failed`].
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub enum Request {
    /// [`Reply::Done`]. Proves that the guest answers.
    Ping,
    /// [`Reply::Done`]. After a restore, before anything else: entropy, clock, file systems thawed, names, network, root
    /// grown, volumes mounted, and the user's processes thawed last. A failure leaves these frozen: such a guest must not
    /// go on.
    Repair(Repair),
    /// [`Reply::Done`]. Flush every writable file system on a disk.
    Sync,
    /// [`Reply::Done`], then the guest powers off: execs ended (TERM, grace, KILL), file systems flushed, root read-only.
    Shutdown { grace_ms: u32 },

    /// [`Reply::Done`]: quiet for a bake or a snapshot. Caches are written, the user's processes frozen, then every writable
    /// file system that lies on a disk. Whatever else is asked waits or answers as ever, but nothing is written. Takes at
    /// most [`crate::QUIESCE_LIMIT`]; where it fails, everything goes on as if it had not been asked. Idempotent.
    /// Quiet ends with [`Request::Thaw`], [`Request::Repair`], or by itself when the host has not sent anything for
    /// [`crate::QUIET_LIMIT`] of the guest's time.
    Quiesce,
    /// [`Reply::Done`]: the clock is set, file systems thawed, what [`Request::VolumesUnmount`] took away meanwhile is mounted
    /// again, and the user's processes go on, in this order. Idempotent. A failure names a volume that could not be mounted;
    /// everything else has gone on all the same.
    Thaw { unix_time_ns: u64 },
    /// [`Reply::Done`]: all of them are mounted, or none, and the reason. Also while quiet, where their directories are
    /// there already. What is mounted so already stays.
    VolumesMount { volumes: Vec<Mount> },
    /// [`Reply::Done`]: flushed, unmounted wherever they were mounted, and their slots refuse reads and writes until a
    /// [`Request::VolumesMount`]. [`ErrorCode::Conflict`] names the path and who uses it; then all are mounted as before.
    /// Slots of which nothing is mounted are fine. Also while quiet.
    VolumesUnmount { slots: Vec<u8> },
    /// [`Reply::Done`]: the mounted file system has the size of its disk, which was resized before.
    VolumeGrow { slot: u8 },
    /// [`Reply::Done`]: before a sandbox with volumes is deleted or stopped. Execs and all other processes are ended (TERM,
    /// grace, KILL) and no more begun, volumes flushed and unmounted.
    Release { grace_ms: u32 },

    /// Starts an exec and watches it, as [`Request::ExecWatch`] from offset 0 does: [`Reply::ExecStarted`] first.
    /// Where [`ExecStart::has_stdin`], `Content` data and a finish from the host are its standard input. An id that exists already:
    /// [`ErrorCode::Conflict`], nothing is started. A reset of the stream ends the watching, never the exec.
    ExecStart(ExecStart),
    /// [`Reply::ExecStarted`], then `Stdout` and `Stderr` data from these offsets on as they come, in the order the
    /// agent read them; after the last byte of both [`Reply::ExecEnded`] and a finish. Unknown: [`ErrorCode::NotFound`].
    ExecWatch { id: String, stdout_offset: u64, stderr_offset: u64 },
    /// [`Reply::ExecStatus`] at once.
    ExecStatus { id: String },
    /// [`Reply::Execs`].
    ExecList,
    /// [`Reply::Done`]: TERM to the whole tree, KILL after the grace. Idempotent.
    ExecCancel { id: String, grace_ms: u32 },
    /// [`Reply::Done`]: the host needs the records and output of these ended execs no longer. Those that still run are left
    /// alone. Idempotent.
    ExecsForget { ids: Vec<String> },

    /// [`Reply::File`], then `Content` data and a finish. Only regular files.
    FileRead(FileRead),
    /// `Content` data and a finish from the host, then [`Reply::Written`]. Without the finish nothing becomes visible.
    FileWrite(FileWrite),
    /// [`Reply::Done`], also when it is missing; recursive; a link is deleted, not what it points to.
    FileDelete { path: PathBytes },
    /// [`Reply::Entries`] in batches, then a finish. `depth` 1: the directory's own entries.
    DirList { path: PathBytes, depth: u32 },
    /// [`Reply::Entries`] with one entry. Links are not followed.
    FileStat { path: PathBytes },

    /// [`Reply::Connected`], then `Content` data both ways: a TCP connection to what listens on this port, at 127.0.0.1,
    /// ::1 or an address of the guest's own. A finish of either side ends that side alone; the connection ends with both, or
    /// with a reset. Nothing listens: [`ErrorCode::NotFound`].
    Dial { port: u16 },
    /// [`Reply::Listeners`].
    Listeners,
    /// Of version 2. Before a bake, and like [`Request::KernelStart`]: where the guest has Python's kernel, one stands ready
    /// for the first session, and more are begun without importing anything.
    KernelPrepare,
    /// Of version 2. [`KernelEvent`](crate::kernel::KernelEvent)s as `Content`, then a finish. A session with a kernel of
    /// this language begins. An id that exists: [`ErrorCode::Conflict`].
    KernelStart(KernelStart),
    /// Of version 2. [`KernelEvent`](crate::kernel::KernelEvent)s as `Content`, then a finish. A reset ends the watching,
    /// never the cell.
    KernelRun(KernelRun),
    /// Of version 2. Like [`Request::KernelStart`]: everything in the session ends, and it begins anew.
    KernelRestart { id: String },
    /// Of version 2. [`Reply::Done`]: the session is gone, with all its processes. Unknown: [`ErrorCode::NotFound`].
    KernelEnd { id: String },
    /// Of version 2. [`Reply::Kernels`], in the order of their starts.
    KernelList,
    /// Begins a terminal and attaches to it, as [`Request::TerminalAttach`] does. An id that exists already:
    /// [`ErrorCode::Conflict`], nothing is begun.
    TerminalOpen(TerminalOpen),
    /// [`Reply::TerminalAttached`], then `Content` data: what is remembered of the output from `offset` on, or all of it, and
    /// what follows. `Content` data from the host is typed. After the last byte [`Reply::TerminalEnded`] and a finish. Whoever
    /// was attached before is told [`ErrorCode::Conflict`]. A reset detaches; so does a new epoch.
    TerminalAttach { id: String, offset: Option<u64>, size: Option<WindowSize> },
    /// [`Reply::Done`].
    TerminalResize { id: String, size: WindowSize },
    /// [`Reply::Done`]: to what is in the foreground.
    TerminalSignal { id: String, signal: u8 },
    /// [`Reply::Done`]: the line is dropped (HUP), and what is left of it killed after the grace. Idempotent.
    TerminalEnd { id: String, grace_ms: u32 },
    /// [`Reply::Terminals`], the oldest first.
    TerminalList,

    /// As the request inside is answered, with the rights of this user on files: a name or number, also `user:group`. What is
    /// made belongs to them, unless the request names another owner.
    FileAs { user: String, request: FileRequest },
    /// See there. With the rights of this user, as above.
    Files { user: Option<String>, request: FilesRequest },
}

/// What [`Request::FileAs`] may hold.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub enum FileRequest {
    Read(FileRead),
    Write(FileWrite),
    Delete { path: PathBytes },
    List { path: PathBytes, depth: u32 },
    Stat { path: PathBytes },
}

impl Request {
    /// The first [`crate::VERSION`] whose agents know it.
    pub fn since(&self) -> u32 {
        match self {
            Self::Ping
            | Self::Repair(_)
            | Self::Sync
            | Self::Shutdown { .. }
            | Self::Quiesce
            | Self::Thaw { .. }
            | Self::VolumesMount { .. }
            | Self::VolumesUnmount { .. }
            | Self::VolumeGrow { .. }
            | Self::Release { .. }
            | Self::ExecStart(_)
            | Self::ExecWatch { .. }
            | Self::ExecStatus { .. }
            | Self::ExecList
            | Self::ExecCancel { .. }
            | Self::ExecsForget { .. }
            | Self::FileRead(_)
            | Self::FileWrite(_)
            | Self::FileDelete { .. }
            | Self::DirList { .. }
            | Self::FileStat { .. } => 1,
            Self::Dial { .. }
            | Self::Listeners
            | Self::KernelPrepare
            | Self::KernelStart(_)
            | Self::KernelRun(_)
            | Self::KernelRestart { .. }
            | Self::KernelEnd { .. }
            | Self::KernelList
            | Self::TerminalOpen(_)
            | Self::TerminalAttach { .. }
            | Self::TerminalResize { .. }
            | Self::TerminalSignal { .. }
            | Self::TerminalEnd { .. }
            | Self::TerminalList
            | Self::FileAs { .. }
            | Self::Files { .. } => 2,
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub enum Reply {
    Done,
    Failed(Failure),
    ExecStarted {
        pid: u32,
    },
    ExecEnded(ExecStatus),
    ExecStatus(ExecStatus),
    Execs(Vec<(String, ExecStatus)>),
    File(FileHead),
    Written {
        bytes: u64,
        etag: String,
    },
    Entries(Vec<Entry>),
    Connected,
    /// In no order, each address of a port once.
    Listeners(Vec<Listener>),
    /// Of version 2.
    Kernels(Vec<KernelStatus>),
    /// Where the data that follows begins, in bytes of output since the terminal began.
    TerminalAttached {
        offset: u64,
    },
    /// 128 + n for a death by signal n.
    TerminalEnded {
        exit_code: i32,
    },
    Terminals(Vec<TerminalStatus>),
    Files(FilesReply),
}

/// Everything by which a clone becomes a machine of its own.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct Repair {
    /// Mixed into the kernel's generator, which is then reseeded.
    pub entropy: [u8; 32],
    /// Nanoseconds since 1970, UTC.
    pub unix_time_ns: u64,
    pub host_name: String,
    /// 32 lower-case hexadecimal digits, for `/etc/machine-id`.
    pub machine_id: String,
    pub network: Network,
    /// Grow the root file system to the size of its disk (it was resized while the machine stood still).
    pub grow_root: bool,
    /// Volumes that were mounted when the snapshot was taken are mounted no more.
    pub volumes: Vec<Mount>,
}

/// A volume behind a slot, and where it belongs.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Mount {
    /// 0 to 7 can be written to, 8 to 15 cannot.
    pub slot: u8,
    /// Absolute; made if missing. Not `/`, nor below `/proc`, `/sys` or `/dev`. Empty: only the disk appears; where it is
    /// mounted already, it stays so.
    pub path: PathBytes,
    pub read_only: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Network {
    pub address: [u8; 4],
    pub prefix: u8,
    /// Also the resolver.
    pub gateway: [u8; 4],
}

#[derive(Clone, Serialize, Deserialize, PartialEq)]
pub struct ExecStart {
    /// Unique in this guest; `[A-Za-z0-9._-]{1,128}`.
    pub id: String,
    pub command: Command,
    /// Default: the user's home.
    pub working_directory: Option<PathBytes>,
    /// On top of `HOME`, `PATH`, `LANG`, `USER`.
    pub environment: Vec<(String, String)>,
    /// A name or a number, also `user:group`. Default root.
    pub user: Option<String>,
    pub has_stdin: bool,
    /// 0: none. The whole tree is killed then.
    pub timeout_ms: u64,
    /// Bytes kept of each stream; what comes beyond is counted and dropped.
    pub output_limit: u64,
}

impl std::fmt::Debug for ExecStart {
    /// The environment and the command may hold secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExecStart")
            .field("id", &self.id)
            .field("timeout_ms", &self.timeout_ms)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct TerminalOpen {
    /// Like that of an exec.
    pub id: String,
    /// `None`: the user's login shell.
    pub command: Option<Command>,
    pub working_directory: Option<PathBytes>,
    pub environment: Vec<(String, String)>,
    pub user: Option<String>,
    pub size: WindowSize,
    /// How long it goes on with nobody attached, in the guest's time.
    pub linger_ms: u64,
}

impl std::fmt::Debug for TerminalOpen {
    /// The environment and the command may hold secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TerminalOpen")
            .field("id", &self.id)
            .field("size", &self.size)
            .field("linger_ms", &self.linger_ms)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
pub struct WindowSize {
    pub rows: u16,
    pub columns: u16,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct TerminalStatus {
    pub id: String,
    pub user: String,
    pub size: WindowSize,
    pub attached: bool,
    /// `None`: it goes on.
    pub exit_code: Option<i32>,
    pub output_bytes: u64,
    pub age_ms: u64,
}

#[derive(Clone, Serialize, Deserialize, PartialEq, Eq)]
pub enum Command {
    /// For `bash -c` where there is bash, else `sh -c`, of any length.
    Script(serde_bytes::ByteBuf),
    Arguments(Vec<serde_bytes::ByteBuf>),
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct ExecStatus {
    pub state: ExecState,
    /// 128 + n for a death by signal n. `None` while running.
    pub exit_code: Option<i32>,
    pub killed_for_memory: bool,
    /// True counts, also of what was dropped.
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    pub truncated: bool,
    pub duration_ms: u64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
pub enum ExecState {
    Running,
    Exited,
    TimedOut,
    Cancelled,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct FileRead {
    pub path: PathBytes,
    pub range: Option<ReadRange>,
    /// Any of these: [`ErrorCode::NotModified`] instead of the content.
    pub unless_etags: Vec<String>,
    /// Only if its etag is still one of these; empty: whatever it is. For the range of an `If-Range`.
    pub range_if_etag: Option<String>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
pub enum ReadRange {
    /// `end` is exclusive; beyond the file's end it is cut.
    From {
        start: u64,
        end: Option<u64>,
    },
    Last(u64),
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct FileHead {
    /// Of the whole file.
    pub size: u64,
    /// The part that follows as data.
    pub start: u64,
    pub length: u64,
    /// True when the range that was asked for is the one that follows.
    pub partial: bool,
    pub modified_ns: i64,
    /// With its quotes, as in the header.
    pub etag: String,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct FileWrite {
    pub path: PathBytes,
    /// Default: of the file it replaces, else 0644.
    pub mode: Option<u32>,
    /// `user`, `user:group`, by name or number. Default: of the file it replaces, else root.
    pub owner: Option<String>,
    pub create_parents: bool,
    /// [`ErrorCode::PreconditionFailed`] unless the present etag is one of these (`*`: any that exists).
    pub if_etags: Vec<String>,
    /// [`ErrorCode::PreconditionFailed`] if it exists.
    pub only_new: bool,
    /// When known: refused for lack of space before the first byte.
    pub size: Option<u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Entry {
    /// Absolute.
    pub path: PathBytes,
    pub kind: EntryKind,
    pub size: u64,
    /// Permission bits, with set-uid, set-gid and sticky.
    pub mode: u32,
    pub modified_ns: i64,
    pub user: u32,
    pub group: u32,
    pub target: Option<PathBytes>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
pub enum EntryKind {
    File,
    Directory,
    Link,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// A TCP socket that takes connections.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Listener {
    pub port: u16,
    pub address: std::net::IpAddr,
    /// Whose it is, where that can be found.
    pub process: Option<ListenerProcess>,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct ListenerProcess {
    pub pid: u32,
    /// Its name, as the kernel has it: at most 15 bytes.
    pub name: serde_bytes::ByteBuf,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub code: ErrorCode,
    /// For the user: names the path or field and the way out.
    pub message: String,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
pub enum ErrorCode {
    Invalid,
    NotFound,
    /// A directory where a file was asked for, or a device, FIFO or socket.
    WrongKind,
    Denied,
    Exists,
    Conflict,
    NoSpace,
    TooLarge,
    PreconditionFailed,
    NotModified,
    /// The message holds nothing; see [`Failure::message`] for the size in decimal.
    RangeNotSatisfiable,
    /// Too many streams, execs or bytes at once; later it may work.
    Busy,
    Internal,
}
