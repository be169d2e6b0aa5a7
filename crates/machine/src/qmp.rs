//! QEMU's control socket. One task owns the connection; every command has a deadline. Of all events only the guest's own
//! shutdown and a want of room on the host are noticed: the rest is asked for directly.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::StreamExt;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio_util::codec::{FramedRead, LinesCodec};

use crate::error::{Error, Result};

/// For commands that QEMU answers at once. Generous, since an emulated machine may be starved by its neighbours.
pub(crate) const PROMPT: Duration = Duration::from_secs(10);
/// A longer answer is not QEMU's: its console's 64 KiB in base64 is the longest asked for.
const LONGEST_LINE: usize = 1 << 20;
const WAITING_COMMANDS: usize = 16;
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Cheap to clone; the connection ends with the last one.
#[derive(Debug, Clone)]
pub(crate) struct Qmp {
    commands: mpsc::Sender<Command>,
    told: Arc<Told>,
}

/// By events.
#[derive(Debug, Default)]
struct Told {
    guest_shut_down: AtomicBool,
    /// A write found no room on the host, and QEMU has stopped the machine: its policy where none is set.
    out_of_room: AtomicBool,
}

impl Told {
    fn note(&self, message: &Value) {
        match message["event"].as_str() {
            Some("SHUTDOWN") if message["data"]["guest"] == true => {
                self.guest_shut_down.store(true, Ordering::Release);
            }
            Some("BLOCK_IO_ERROR") if message["data"]["action"] == "stop" => {
                self.out_of_room.store(true, Ordering::Release);
            }
            Some("RESUME") => self.out_of_room.store(false, Ordering::Release),
            Some(_) | None => {}
        }
    }
}

/// What was handed to QEMU can be opened there by a path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DescriptorSet(u64);

impl DescriptorSet {
    pub(crate) fn path(self) -> String {
        format!("/dev/fdset/{}", self.0)
    }
}

#[derive(Debug)]
struct Command {
    name: &'static str,
    arguments: Value,
    descriptor: Option<OwnedFd>,
    answer: oneshot::Sender<Result<Value>>,
}

impl Qmp {
    pub(crate) async fn connect(stream: UnixStream, deadline: Duration) -> Result<Self> {
        let (commands, received) = mpsc::channel(WAITING_COMMANDS);
        let told = Arc::new(Told::default());
        let qmp = Self { commands, told: told.clone() };
        tokio::spawn(async move {
            if let Err(error) = serve(&stream, received, &told).await {
                tracing::debug!(%error, "the control connection ended");
            }
        });
        qmp.run_within(deadline, "qmp_capabilities", json!({}), None).await?;
        Ok(qmp)
    }

    pub(crate) async fn run(&self, command: &'static str, arguments: Value) -> Result<Value> {
        self.run_within(PROMPT, command, arguments, None).await
    }

    /// Hands `descriptor` to QEMU, in a set of its own.
    pub(crate) async fn add_descriptor(&self, descriptor: OwnedFd) -> Result<DescriptorSet> {
        let added = self.run_within(PROMPT, "add-fd", json!({}), Some(descriptor)).await?;
        let refused = || Error::QmpRefused { command: "add-fd", reason: "it named no set".into() };
        added["fdset-id"].as_u64().map(DescriptorSet).ok_or_else(refused)
    }

    /// What was opened in it stays open.
    pub(crate) async fn remove_descriptor(&self, set: DescriptorSet) -> Result<()> {
        self.run("remove-fd", json!({ "fdset-id": set.0 })).await.map(drop)
    }

    /// Whether the guest has ended the machine itself. Waits shortly for the last words of a QEMU that has ended.
    pub(crate) async fn guest_has_shut_down(&self) -> bool {
        // An error means that the connection is still there.
        let _ = tokio::time::timeout(LAST_WORDS, self.commands.closed()).await;
        self.told.guest_shut_down.load(Ordering::Acquire)
    }

    pub(crate) fn is_out_of_room(&self) -> bool {
        self.told.out_of_room.load(Ordering::Acquire)
    }

    pub(crate) fn note_room(&self) {
        self.told.out_of_room.store(false, Ordering::Release);
    }

    /// Before a server connected, events went unheard.
    pub(crate) fn note_out_of_room(&self) {
        self.told.out_of_room.store(true, Ordering::Release);
    }

    pub(crate) async fn run_within(
        &self,
        deadline: Duration,
        name: &'static str,
        arguments: Value,
        descriptor: Option<OwnedFd>,
    ) -> Result<Value> {
        let (answer, answered) = oneshot::channel();
        let exchange = async {
            self.commands.send(Command { name, arguments, descriptor, answer }).await.ok()?;
            answered.await.ok()
        };
        match tokio::time::timeout(deadline, exchange).await {
            Ok(Some(result)) => result,
            Ok(None) => Err(Error::Lost),
            Err(_) => Err(Error::QmpSilent { command: name }),
        }
    }
}

async fn serve(
    stream: &UnixStream,
    mut commands: mpsc::Receiver<Command>,
    told: &Told,
) -> io::Result<()> {
    let reader = ReadHalf(stream);
    let mut lines = FramedRead::new(reader, LinesCodec::new_with_max_length(LONGEST_LINE));
    let mut waiting: HashMap<u64, (&'static str, oneshot::Sender<Result<Value>>)> = HashMap::new();
    let mut next_id = 0u64;
    loop {
        tokio::select! {
            command = commands.recv() => {
                let Some(command) = command else { return Ok(()) };
                next_id += 1;
                let text = json!({ "execute": command.name, "arguments": command.arguments, "id": next_id });
                waiting.retain(|_, (_, answer)| !answer.is_closed());
                waiting.insert(next_id, (command.name, command.answer));
                send(stream, format!("{text}\n").as_bytes(), command.descriptor).await?;
            }
            line = lines.next() => {
                let Some(line) = line else { return Ok(()) };
                let line = line.map_err(io::Error::other)?;
                let Ok(mut message) = serde_json::from_str::<Value>(&line) else { continue };
                told.note(&message);
                let Some((name, answer)) = message["id"].as_u64().and_then(|id| waiting.remove(&id)) else { continue };
                let result = match message.get("error") {
                    Some(error) => Err(Error::QmpRefused {
                        command: name,
                        reason: error["desc"].as_str().unwrap_or("without a reason").into(),
                    }),
                    None => Ok(message["return"].take()),
                };
                // Whoever asked may have stopped waiting.
                let _ = answer.send(result);
            }
        }
    }
}

/// The descriptor goes with the first byte.
async fn send(
    stream: &UnixStream,
    mut bytes: &[u8],
    mut descriptor: Option<OwnedFd>,
) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        let sent = stream.try_io(Interest::WRITABLE, || {
            let numbers: Vec<_> =
                descriptor.iter().map(|descriptor| descriptor.as_fd().as_raw_fd()).collect();
            let rights = [ControlMessage::ScmRights(&numbers)];
            let control = if numbers.is_empty() { &rights[..0] } else { &rights[..] };
            let flags = MsgFlags::MSG_NOSIGNAL;
            sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None)
                .map_err(io::Error::from)
        });
        match sent {
            Ok(count) => {
                descriptor = None;
                bytes = bytes.get(count..).unwrap_or_default();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads without taking the stream apart: sending descriptors needs the whole of it.
struct ReadHalf<'a>(&'a UnixStream);

impl tokio::io::AsyncRead for ReadHalf<'_> {
    fn poll_read(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
        buffer: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        loop {
            std::task::ready!(self.0.poll_read_ready(context))?;
            match self.0.try_read(buffer.initialize_unfilled()) {
                Ok(count) => {
                    buffer.advance(count);
                    return std::task::Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return std::task::Poll::Ready(Err(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    use super::*;

    /// Answers the handshake, and then each command with what `answer` makes of it.
    fn fake(mut answer: impl FnMut(&Value) -> Vec<Value> + Send + 'static) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        tokio::spawn(async move {
            let (reader, mut writer) = theirs.into_split();
            let mut lines = BufReader::new(reader).lines();
            writer.write_all(b"{\"QMP\": {}}\n{\"event\": \"RESUME\"}\n").await.unwrap();
            while let Ok(Some(line)) = lines.next_line().await {
                let command: Value = serde_json::from_str(&line).unwrap();
                let answers = match command["execute"].as_str() {
                    Some("qmp_capabilities") => vec![json!({ "return": {}, "id": command["id"] })],
                    _ => answer(&command),
                };
                for answer in answers {
                    writer.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
                }
            }
        });
        ours
    }

    #[tokio::test]
    async fn a_refusal_names_the_command_and_the_reason() {
        let refusal = json!({ "class": "GenericError", "desc": "no such node" });
        let stream = fake(move |command| vec![json!({ "error": refusal, "id": command["id"] })]);
        let qmp = Qmp::connect(stream, PROMPT).await.unwrap();
        let error = qmp.run("block_resize", json!({})).await.unwrap_err();
        assert!(
            matches!(error, Error::QmpRefused { command: "block_resize", ref reason } if reason == "no such node"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn a_late_answer_is_not_taken_for_the_next_commands() {
        let mut late = Vec::new();
        let stream = fake(move |command| {
            late.push(json!({ "return": command["execute"], "id": command["id"] }));
            if command["execute"] == "stop" { Vec::new() } else { std::mem::take(&mut late) }
        });
        let qmp = Qmp::connect(stream, PROMPT).await.unwrap();
        let silent = qmp.run_within(Duration::from_millis(20), "stop", json!({}), None).await;
        assert!(matches!(silent, Err(Error::QmpSilent { command: "stop" })));
        assert_eq!(qmp.run("cont", json!({})).await.unwrap(), json!("cont"));
    }

    #[tokio::test]
    async fn a_machine_without_room_is_one_until_it_runs_again() {
        let stream = fake(|command| {
            let event = match command["execute"].as_str() {
                Some("cont") => json!({ "event": "RESUME" }),
                Some("other") => {
                    json!({ "event": "BLOCK_IO_ERROR", "data": { "action": "report" } })
                }
                _ => {
                    json!({ "event": "BLOCK_IO_ERROR", "data": { "action": "stop", "nospace": true } })
                }
            };
            vec![event, json!({ "return": {}, "id": command["id"] })]
        });
        let qmp = Qmp::connect(stream, PROMPT).await.unwrap();
        for (command, out_of_room) in [("other", false), ("write", true), ("cont", false)] {
            qmp.run(command, json!({})).await.unwrap();
            assert_eq!(qmp.is_out_of_room(), out_of_room, "{command}");
        }
    }

    #[tokio::test]
    async fn a_connection_that_ends_fails_its_commands_at_once() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(matches!(Qmp::connect(ours, PROMPT).await, Err(Error::Lost)));
    }
}
