//! The HTTP API's vocabulary: ids, requests, resources, error codes. Data only, no IO.
//! Facts about what the published clients send and expect stand beside the fields they explain.

mod error;
mod exec;
mod file;
mod id;
mod key;
mod sandbox;
mod template;

pub use error::{ErrorBody, ErrorCode};
pub use exec::{ExecRequest, ExecResult};
pub use file::{DirListing, FileEntry, FileKind, FileWritten};
pub use id::{AccountId, ExecId, InvalidId, KeyId, SandboxId, SnapshotId, TemplateName, VolumeId};
pub use key::{CreateKey, Key, Me, NewKey, Scope};
pub use sandbox::{
    BootMode, CreateSandbox, Lifecycle, Sandbox, SandboxStatus, UpdateLifecycle, VolumeMount,
};
pub use template::{Build, BuildStatus, Template};
