//! Something to lose: a random file, and a process that holds random memory. Both tell their digests on demand.

use api::{CreateSandbox, SandboxId, SnapshotId};
use client::{Client, Error};

use crate::{Sandbox, Server, command, small};

/// Whoever asks writes to one pipe and reads from the other.
const HOLDER: &str = "\
import hashlib, os
held = os.urandom(4 << 20)
os.mkfifo('/run/ask'); os.mkfifo('/run/answer.new'); os.rename('/run/answer.new', '/run/answer')
while True:
    open('/run/ask').read()
    open('/run/answer', 'w').write(hashlib.sha256(held).hexdigest())
";

/// What a sandbox holds. Random, so equal only to itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub memory: String,
    pub file: String,
}

impl Held {
    /// Asked in the sandbox, whatever it was made from.
    ///
    /// # Errors
    /// The server refuses.
    ///
    /// # Panics
    /// The process has gone, or the file has.
    pub async fn of(client: &Client, id: &SandboxId) -> Result<Self, Error> {
        let asking = command("echo > /run/ask; cat /run/answer; echo; sha256sum < /root/held");
        let told = client.exec(id, &asking).await?;
        let mut words = told.stdout.split_whitespace().map(str::to_owned);
        let (Some(memory), Some(file)) = (words.next(), words.next()) else {
            panic!("{told:?}");
        };
        Ok(Self { memory, file })
    }
}

impl Sandbox {
    /// Puts something into it that can be lost.
    pub async fn hold(&self) -> Held {
        self.write("/root/holder.py", HOLDER).await;
        self.run(
            "head -c 1000000 /dev/urandom > /root/held; python3 /root/holder.py >/dev/null 2>&1 & \
             until [ -p /run/answer ]; do sleep 0.1; done",
        )
        .await;
        self.held().await
    }

    /// # Panics
    /// It holds nothing any longer.
    pub async fn held(&self) -> Held {
        Held::of(&self.client, &self.id).await.unwrap_or_else(|error| panic!("{error:?}"))
    }
}

impl Server {
    /// Without waiting for room: the claim holds it, for as many as it needs.
    pub async fn sandbox(&self, request: &CreateSandbox) -> Sandbox {
        Sandbox::new(self.create(request).await, self.client().clone(), None)
    }

    /// As [`Server::sandbox`], from a snapshot.
    pub async fn restored(&self, snapshot: &SnapshotId) -> Sandbox {
        self.sandbox(&from(snapshot)).await
    }
}

/// What it asks for beside the snapshot is decided by that.
pub fn from(snapshot: &SnapshotId) -> CreateSandbox {
    CreateSandbox { from_snapshot: Some(snapshot.to_string()), ..small() }
}
