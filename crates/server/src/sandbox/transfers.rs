//! Files that a sandbox fetches and puts itself: a process of the agent's own program, started as a command is, so that it is
//! one of the user's. No byte of the file comes through the server.

use std::time::Duration;

use machine::guest::{
    Channel, Command, Event, ExecStart, ExecState, Guest, Reply, Request, Stream, decode, encode,
    transfer::{LONGEST_OUTCOME, Outcome, Transfer},
};
use uuid::Uuid;

use super::Running;
use crate::Error;

/// The first process of a guest is the agent, whatever has become of its file.
const PROGRAM: [&[u8]; 2] = [b"/proc/1/exe", b"transfer"];
/// Beyond the transfer's own deadline.
const PATIENCE: Duration = Duration::from_secs(30);
const GRACE_MS: u32 = 1000;
const END_DEADLINE: Duration = Duration::from_secs(30);
/// Agents from this version on can.
const SINCE: u32 = 2;

/// A transfer that nobody waits for any longer is ended.
struct Process {
    id: String,
    guest: Guest,
    is_over: bool,
}

impl Drop for Process {
    fn drop(&mut self) {
        let (guest, id, is_over) = (self.guest.clone(), self.id.clone(), self.is_over);
        tokio::spawn(async move {
            if !is_over {
                let cancel = Request::ExecCancel { id: id.clone(), grace_ms: GRACE_MS };
                // Fails where the sandbox has gone.
                let _ = guest.call(cancel, END_DEADLINE).await;
            }
            let _ = guest.call(Request::ExecsForget { ids: vec![id] }, END_DEADLINE).await;
        });
    }
}

impl Running {
    /// # Errors
    /// 409 where the agent is one of before; 503 when the process ends without a word.
    pub(crate) async fn transfer(&self, transfer: &Transfer) -> Result<Outcome, Error> {
        let speaks = self.guest.version();
        if speaks < SINCE {
            return Err(machine::Error::OldAgent { speaks, needs: SINCE }.into());
        }
        let deadline = Duration::from_millis(transfer.deadline_ms) + PATIENCE;
        let id = format!("transfer-{}", Uuid::new_v4().simple());
        let start = ExecStart {
            id: id.clone(),
            command: Command::Arguments(PROGRAM.map(|part| part.to_vec().into()).into()),
            working_directory: None,
            environment: Vec::new(),
            user: None,
            has_stdin: true,
            timeout_ms: u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX),
            output_limit: LONGEST_OUTCOME as u64,
        };
        let stream = self.guest.open(Request::ExecStart(start))?;
        let mut process = Process { id, guest: self.guest.clone(), is_over: false };
        let told = tokio::time::timeout(deadline, follow(&stream, transfer)).await;
        let (state, said) = told.map_err(|_| machine::Error::Silent)??;
        process.is_over = true;
        match decode(&said) {
            Ok(outcome) => Ok(outcome),
            Err(_) => {
                tracing::debug!(?state, "a transfer ended without a word");
                Err(Error::new(
                    api::ErrorCode::Unavailable,
                    "the process that moved the file was ended inside the sandbox; it may be short of memory",
                ))
            }
        }
    }
}

/// Tells it what to do, and hears what became of it.
async fn follow(
    stream: &Stream,
    transfer: &Transfer,
) -> Result<(ExecState, Vec<u8>), machine::Error> {
    // Fails where the process has not been started; the reason comes back.
    let _ = stream.send(encode(transfer).into()).await;
    let _ = stream.finish().await;
    let mut said = Vec::new();
    while let Some(event) = stream.next().await {
        match event? {
            Event::Data(Channel::Stdout, bytes) if said.len() + bytes.len() <= LONGEST_OUTCOME => {
                said.extend_from_slice(&bytes);
            }
            Event::Reply(Reply::ExecEnded(status)) => return Ok((status.state, said)),
            Event::Data(..) | Event::Reply(_) => {}
            Event::Finished => break,
        }
    }
    Err(machine::Error::Lost)
}
