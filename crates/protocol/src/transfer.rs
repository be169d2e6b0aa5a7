//! A file fetched from, or put to, an address by the sandbox itself: what the agent's program is told on its standard input
//! when it is started as `transfer`, and what it answers on its standard output. Both are encoded as messages are, and
//! change as they do: variants are appended, structs stay.

use serde::{Deserialize, Serialize};

use crate::message::{Failure, FileWrite, PathBytes};

/// After it nothing more of the output is looked at.
pub const LONGEST_OUTCOME: usize = 64 << 10;

#[derive(Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Transfer {
    pub task: Task,
    /// Its query is a credential.
    pub url: String,
    /// Sent with the request, beside those that HTTP needs.
    pub headers: Vec<(String, String)>,
    /// For all of it, with what is tried again.
    pub deadline_ms: u64,
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("task", &self.task).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub enum Task {
    Import {
        file: FileWrite,
        /// In lower-case hexadecimal; the file appears only if it is right.
        sha256: Option<String>,
    },
    Export {
        path: PathBytes,
        /// `PUT` or `POST`.
        method: String,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub enum Outcome {
    Done(Transferred),
    Failed(TransferFailure),
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Transferred {
    pub bytes: u64,
    /// In lower-case hexadecimal.
    pub sha256: String,
    /// Of the last answer.
    pub status: u16,
    /// As the other side has it.
    pub etag: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub enum TransferFailure {
    /// The address, a header or the method cannot be used.
    Invalid(String),
    /// About the file in this sandbox.
    File(Failure),
    /// The other side refused.
    Answered {
        status: u16,
        /// `<Code>` of an object storage's answer.
        code: Option<String>,
        /// `<Message>` of it, or the beginning of what it said.
        message: String,
    },
    /// Not reached, or broken off, each time; the last reason.
    Unreachable(String),
    /// It is another content than was asked for.
    Digest {
        sha256: String,
    },
    OutOfTime,
}
