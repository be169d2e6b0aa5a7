//! A sandbox that is given back when it is dropped, and what tests do with it most.

use api::{CreateSandbox, ExecRequest, ExecResult, SandboxId};
use bytes::Bytes;
use client::{Client, ExecEvent, Method, RequestBuilder, WriteOptions};
use time::OffsetDateTime;
use tokio::{runtime::Handle, sync::OwnedSemaphorePermit};

use crate::{Answer, Server};

/// What a guest's clock may be off by, counted in seconds on both sides.
const CLOCK_SECONDS: i64 = 3;

/// The smallest size that is baked ahead, and thus quick.
pub fn small() -> CreateSandbox {
    CreateSandbox {
        template: Some("base".to_owned()),
        cpu: Some(1),
        memory_mb: Some(1024),
        ttl_seconds: Some(3600),
        ..CreateSandbox::default()
    }
}

pub fn command(cmd: impl Into<String>) -> ExecRequest {
    ExecRequest { cmd: cmd.into(), ..ExecRequest::default() }
}

/// Content that differs everywhere, so that a piece in the wrong place is noticed.
pub fn patterned(length: usize) -> Vec<u8> {
    let byte = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    (0..length as u64).map(byte).collect()
}

pub struct Sandbox {
    pub id: SandboxId,
    /// As the create answered it.
    pub created: api::Sandbox,
    pub(crate) client: Client,
    runtime: Handle,
    /// Given back once it is deleted; `None` where its claim holds it.
    room: Option<OwnedSemaphorePermit>,
    is_deleted: bool,
}

impl Sandbox {
    pub(crate) fn new(
        created: api::Sandbox,
        client: Client,
        room: impl Into<Option<OwnedSemaphorePermit>>,
    ) -> Self {
        let runtime = Handle::current();
        Self { id: created.id, created, client, runtime, room: room.into(), is_deleted: false }
    }

    /// The same one, after its server has started again.
    #[must_use]
    pub fn on(mut self, server: &Server) -> Self {
        self.client = server.client().clone();
        self
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    /// # Panics
    /// There is no result; a command that fails has one.
    pub async fn exec(&self, request: ExecRequest) -> ExecResult {
        let shown: String = request.cmd.chars().take(200).collect();
        let result = self.client.exec(&self.id, &request).await;
        result.unwrap_or_else(|error| panic!("{shown}: {error:?}"))
    }

    /// What a command that must succeed prints.
    ///
    /// # Panics
    /// It fails.
    pub async fn run(&self, cmd: &str) -> String {
        let result = self.exec(command(cmd)).await;
        assert_eq!(result.exit_code, 0, "{cmd}: {result:?}");
        result.stdout
    }

    /// What a command prints piece by piece, and its exit code: the last event, if there is one.
    ///
    /// # Panics
    /// The command has no end, or the exit code is not the last event.
    pub async fn streamed(&self, request: &ExecRequest) -> (Vec<String>, Vec<String>, Option<i32>) {
        let events = self.client.exec_stream(&self.id, request).await;
        let mut events = events.expect("a command can be watched");
        let (mut out, mut err, mut code) = (Vec::new(), Vec::new(), None);
        while let Some(event) = events.next().await.expect("a stream has an end") {
            assert_eq!(code, None, "{event:?} came after the exit code");
            match event {
                ExecEvent::Stdout(chunk) => out.push(chunk),
                ExecEvent::Stderr(chunk) => err.push(chunk),
                ExecEvent::Exited { exit_code } => code = Some(exit_code),
                ExecEvent::Failed { message } => panic!("{message}"),
            }
        }
        (out, err, code)
    }

    /// # Panics
    /// Its clock is not ours.
    pub async fn clock_is_right(&self) {
        let before = OffsetDateTime::now_utc().unix_timestamp();
        let told: i64 = self.run("date +%s").await.trim().parse().expect("a number of seconds");
        let after = OffsetDateTime::now_utc().unix_timestamp();
        let right = before - CLOCK_SECONDS..=after + CLOCK_SECONDS;
        assert!(right.contains(&told), "{told} is not in {right:?}");
    }

    /// Of the agent, as the guest itself sees it.
    pub async fn agent_memory_bytes(&self) -> u64 {
        let kib = self.run("awk '/^VmRSS/ { print $2 }' /proc/1/status").await;
        kib.trim().parse::<u64>().expect("a process tells its memory") << 10
    }

    pub async fn write(&self, path: impl AsRef<[u8]>, content: impl Into<Bytes>) {
        let content: Bytes = content.into();
        let length = content.len() as u64;
        let written =
            self.client.write_file(&self.id, path, content, &WriteOptions::default()).await;
        assert_eq!(written.expect("a file can be written").bytes, length);
    }

    pub async fn read(&self, path: impl AsRef<[u8]>) -> Vec<u8> {
        let content = self.client.read_file(&self.id, path).await.expect("a file can be read");
        content.bytes().await.expect("a file has an end")
    }

    /// Of a directory, sorted.
    pub async fn names(&self, path: &str) -> Vec<String> {
        let listing =
            self.client.list_directory(&self.id, path).await.expect("a directory can be listed");
        let mut names: Vec<_> = listing.entries.into_iter().map(|entry| entry.name).collect();
        names.sort();
        names
    }

    /// A request to a route of this sandbox: `/exec`, or nothing for itself.
    pub fn request(&self, method: Method, route: &str) -> RequestBuilder {
        self.client.request(method, &format!("/v1/sandboxes/{}{route}", self.id))
    }

    pub async fn get(&self, route: &str) -> Answer {
        Answer::to(self.request(Method::GET, route)).await
    }

    pub async fn put(&self, path_and_query: &str, content: impl Into<client::Body>) -> Answer {
        Answer::to(self.request(Method::PUT, &format!("/fs?path={path_and_query}")).body(content))
            .await
    }

    /// # Panics
    /// It cannot be deleted.
    pub async fn delete(mut self) {
        self.client.delete_sandbox(&self.id).await.expect("a sandbox can be deleted");
        self.is_deleted = true;
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let (client, id, room) = (self.client.clone(), self.id, self.room.take());
        if !self.is_deleted {
            self.runtime.spawn(async move {
                // It may be gone already, and its server too.
                let _ = client.delete_sandbox(&id).await;
                drop(room);
            });
        }
    }
}
