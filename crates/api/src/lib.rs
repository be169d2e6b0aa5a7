//! The HTTP API's vocabulary: ids, requests, resources, error codes. Data only, no IO.
//! Facts about what the published clients send and expect stand beside the fields they explain.

mod account;
mod database;
mod error;
mod event;
mod exec;
mod file;
mod fork;
mod id;
mod key;
mod machine;
mod network;
mod port;
mod repl;
mod sandbox;
mod snapshot;
mod template;
mod terminal;
mod transfer;
mod volume;

pub use account::{Account, Price, Quotas, Usage, UsedAmounts};
pub use database::{
    CloneDatabase, CreateDatabase, Database, DatabaseConnection, DatabaseList, DatabaseSize,
    DatabaseStatus, UpdateDatabase,
};
pub use error::{ErrorBody, ErrorCode};
pub use event::{
    CpuMetrics, DiskMetrics, Event, EventKind, EventList, MemoryMetrics, Metrics, NetworkMetrics,
};
pub use exec::{
    Exec, ExecList, ExecOutput, ExecRequest, ExecResult, ExecState, ExecStream, StartExec,
};
pub use file::{
    BeginUpload, ChangeFile, CompleteUpload, DirListing, FileEntry, FileEvent, FileKind,
    FileWritten, MakeDirectory, MoveFile, Unpacked, Upload, UploadList, UploadParts,
};
pub use fork::{Fork, ForkTree, Forked, ForkedTree, Promote, Promoted};
pub use id::{
    AccountId, DatabaseId, ExecId, InvalidId, KeyId, PreviewTokenId, SandboxId, SnapshotId,
    TemplateName, TerminalId, VolumeId, VolumeName,
};
pub use key::{CreateKey, Key, Me, NewKey, Scope};
pub use machine::{
    AttachVolume, CreateMachine, DetachVolume, Machine, MachineList, MachineVolume,
    MachineVolumeRequest,
};
pub use network::{CreateNetwork, Egress, Network, NetworkPolicy, UpdateNetwork};
pub use port::{
    CreatePreviewToken, ExposePort, NewPreviewToken, Port, PortList, PreviewToken, PreviewTokenList,
};
pub use repl::{
    CodeOutput, CodeResult, CodeSession, CodeSessionStatus, CreateCodeSession, RunCode,
};
pub use sandbox::{
    BootMode, CreateSandbox, Lifecycle, Sandbox, SandboxStatus, UpdateLifecycle, VolumeMount,
};
pub use snapshot::{CreateSnapshot, Snapshot, SnapshotList};
pub use template::{Build, BuildStatus, Template};
pub use terminal::{Terminal, TerminalControl, TerminalList, TerminalSignal};
pub use transfer::{ExportFile, FileTransferred, ImportFile};
pub use volume::{CreateVolume, UpdateVolume, Volume, VolumeKind, VolumeList, VolumeState};
