//! The process of a session: one loop that waits for calls, for what the kernel says and prints, for its end, and for
//! whoever reads the answers. Cells run one after another.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use protocol::kernel::{CellEnd, INTERRUPT_GRACE_MS, KernelEvent, KernelRun, MOST_WAITING};
use protocol::message::{ErrorCode, Failure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::cell::{Answer, Running, Waiting};
use super::channel::{self, Call, Start};
use super::exit;
use super::jupyter::{self, Said};
use super::launch::{self, Kernel, RENEW};
use crate::failure::refuse;

/// Read from one pipe before everything else gets its turn.
const TURN: usize = 256 << 10;
/// A first interrupt may come at a bad moment; a second one helps then.
const INTERRUPT_AGAIN: Duration = Duration::from_millis(INTERRUPT_GRACE_MS / 2);
const GIVE_UP: Duration = Duration::from_millis(INTERRUPT_GRACE_MS);
/// A kernel that rests without an answer to its request was interrupted while it was about to give one.
const ANSWER_PATIENCE: Duration = Duration::from_secs(1);
/// A kernel that was asked to end by its own cell has so long before the next cell is given to it.
const LEAVE: Duration = Duration::from_secs(10);
/// To settle in is a cell of a moment.
const SETTLE: Duration = Duration::from_secs(30);
/// For those who read the last answers.
const LAST_WORDS: Duration = Duration::from_secs(10);

struct Session {
    kernel: Kernel,
    running: Option<Running>,
    waiting: VecDeque<Waiting>,
    /// Of cells that have ended, and that somebody still reads.
    answers: Vec<Answer>,
    buffer: Vec<u8>,
    /// Standard output and error: one that is closed by everybody is not watched.
    is_open: [bool; 2],
    told_busy: Option<bool>,
    /// Until then the kernel's end is waited for.
    leaves: Option<Instant>,
}

/// Why the loop ends.
enum Over {
    /// The agent has let go of us.
    Left,
    Died,
    Restart,
    /// The kernel that was there does not do.
    NotBegun,
}

pub(super) fn run() -> anyhow::Result<i32> {
    // The only one: once it is closed, whoever calls learns of it.
    let calls = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3)?;
    let nowhere = std::fs::File::open("/dev/null")?;
    rustix::stdio::dup2_stdin(&nowhere)?;
    let Some((call, socket, nursery)) = next_call(&calls)? else { return Ok(exit::OVER) };
    let Call::Start(start) = call else { anyhow::bail!("a session began with a cell") };
    let mut answer = Answer::new(socket);
    let kernel = match launch::launch(&start, nursery) {
        Ok(kernel) => kernel,
        Err(failure) => {
            drop(calls);
            answer.say(&KernelEvent::Failed(failure));
            answer.finish(Instant::now() + LAST_WORDS);
            return Ok(exit::NOT_BEGUN);
        }
    };
    answer.say(&KernelEvent::Ready);
    let mut session = Session {
        kernel,
        running: None,
        waiting: VecDeque::new(),
        answers: vec![answer],
        buffer: vec![0; 64 << 10],
        is_open: [true; 2],
        told_busy: None,
        leaves: None,
    };
    session.tell_state(&calls);
    let over = session.serve(&calls).unwrap_or_else(|error| {
        crate::boot::report("talk to a kernel", Err::<(), _>(error));
        Over::Died
    });
    // Whoever calls from now on is told at once, and comes again.
    drop(calls);
    let code = match over {
        Over::Left => return Ok(exit::OVER),
        Over::Died => {
            session.read_output();
            let how = session.kernel.how_it_ended();
            session.end_all(&CellEnd::Died { how });
            exit::DEAD
        }
        Over::NotBegun => exit::NOT_BEGUN,
        Over::Restart => {
            session.end_all(&CellEnd::Restarted);
            exit::RESTART
        }
    };
    let end = Instant::now() + LAST_WORDS;
    for answer in &mut session.answers {
        answer.finish(end);
    }
    Ok(code)
}

type Called = (Call, OwnedFd, Option<OwnedFd>);

/// `None`: there will be no more. Waits for one.
fn next_call(calls: &OwnedFd) -> anyhow::Result<Option<Called>> {
    loop {
        let mut ready = [PollFd::new(calls, PollFlags::IN)];
        let _ = poll(&mut ready, None);
        match take_call(calls)? {
            Taken::Call(call) => return Ok(Some(*call)),
            Taken::Nothing => {}
            Taken::End => return Ok(None),
        }
    }
}

enum Taken {
    Call(Box<Called>),
    Nothing,
    End,
}

fn take_call(calls: &OwnedFd) -> anyhow::Result<Taken> {
    let descriptors = match channel::receive(calls) {
        Ok(Some((_, descriptors))) => descriptors,
        Ok(None) => return Ok(Taken::End),
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Taken::Nothing),
        Err(error) => return Err(error.into()),
    };
    let mut descriptors = descriptors.into_iter();
    let (Some(call), Some(socket)) = (descriptors.next(), descriptors.next()) else {
        return Ok(Taken::Nothing);
    };
    Ok(Taken::Call(Box::new((channel::read_call(call)?, socket, descriptors.next()))))
}

impl Session {
    fn serve(&mut self, calls: &OwnedFd) -> anyhow::Result<Over> {
        loop {
            for answer in &mut self.answers {
                answer.flush();
            }
            self.answers.retain(|answer| !answer.is_said());
            if let Some(running) = &mut self.running {
                running.answer.flush();
            }
            self.wait(calls)?;
            self.read_output();
            if !self.kernel.iopub.fill()? {
                return Ok(Over::Died);
            }
            while let Some(message) = self.kernel.iopub.next() {
                let (parent, said) = jupyter::understand(message)?;
                self.heard(&parent, said);
            }
            if !self.kernel.shell.fill()? {
                return Ok(Over::Died);
            }
            while let Some(message) = self.kernel.shell.next() {
                let (parent, said) = jupyter::understand(message)?;
                self.answered(&parent, &said);
            }
            if self.has_ended() {
                return Ok(Over::Died);
            }
            loop {
                match take_call(calls)? {
                    Taken::Call(call) => {
                        if let Some(over) = self.take(*call)? {
                            return Ok(over);
                        }
                    }
                    Taken::Nothing => break,
                    Taken::End => return Ok(Over::Left),
                }
            }
            self.finish_cell();
            if self.act_on_deadlines() {
                return Ok(Over::Restart);
            }
            self.begin_next()?;
            self.tell_state(calls);
        }
    }

    /// Whenever it has changed.
    fn tell_state(&mut self, calls: &OwnedFd) {
        let is_busy = self.running.is_some();
        if self.told_busy != Some(is_busy) {
            let state = if is_busy { channel::BUSY } else { channel::IDLE };
            // A queue that is full is one that nobody reads: told the next time.
            if channel::send(calls, &[state], &[]).is_ok() {
                self.told_busy = Some(is_busy);
            }
        }
    }

    fn wait(&self, calls: &OwnedFd) -> anyhow::Result<()> {
        let mut all = vec![
            PollFd::new(calls, PollFlags::IN),
            PollFd::new(&self.kernel.shell, PollFlags::IN),
            PollFd::new(&self.kernel.iopub, PollFlags::IN),
            PollFd::new(self.kernel.pidfd(), PollFlags::IN),
        ];
        let outputs = [&self.kernel.stdout, &self.kernel.stderr].into_iter().zip(self.is_open);
        let outputs = outputs.filter(|(_, is_open)| *is_open);
        all.extend(outputs.map(|(pipe, _)| PollFd::new(pipe, PollFlags::IN)));
        let running = self.running.as_ref().and_then(|running| running.answer.blocked());
        let blocked = self.answers.iter().filter_map(Answer::blocked).chain(running);
        all.extend(blocked.map(|socket| PollFd::new(socket, PollFlags::OUT)));
        let left = self.next_deadline().map(|deadline| {
            deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(1)
        });
        match poll(&mut all, left.and_then(|left| left.try_into().ok()).as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let running = self.running.as_ref().and_then(|running| {
            let rest = running.idle.map(|idle| idle + ANSWER_PATIENCE);
            let stop = match (running.timed_out, running.interrupts) {
                (None, _) => running.deadline,
                (Some(since), 0 | 1) => Some(since + INTERRUPT_AGAIN),
                (Some(since), _) => Some(since + GIVE_UP),
            };
            [rest, stop].into_iter().flatten().min()
        });
        let waiting = self.waiting.iter().filter_map(|waiting| waiting.deadline);
        waiting.chain(running).chain(self.leaves).min()
    }

    fn has_ended(&self) -> bool {
        let mut ready = [PollFd::new(self.kernel.pidfd(), PollFlags::IN)];
        poll(&mut ready, Some(&rustix::event::Timespec::default())) == Ok(1)
    }

    /// What is printed while no cell runs is nobody's.
    fn read_output(&mut self) {
        for is_error in [false, true] {
            let mut turn = TURN;
            while turn > 0 {
                let pipe = if is_error { &self.kernel.stderr } else { &self.kernel.stdout };
                match rustix::io::read(pipe, &mut self.buffer[..]) {
                    Ok(0) => {
                        self.is_open[usize::from(is_error)] = false;
                        break;
                    }
                    Err(Errno::AGAIN) => break,
                    Ok(count) => {
                        turn = turn.saturating_sub(count);
                        if let Some(running) = &mut self.running {
                            running.printed(is_error, &self.buffer[..count]);
                        }
                    }
                    Err(Errno::INTR) => {}
                    Err(_) => break,
                }
            }
        }
    }

    fn heard(&mut self, parent: &str, said: Said) {
        let Some(running) = &mut self.running else { return };
        if matches!(said, Said::TooLong) {
            running.is_cut();
        }
        if running.id != parent {
            return;
        }
        match said {
            Said::Stream { is_error, text } => running.printed(is_error, text.as_bytes()),
            Said::Result(forms) => running.result(forms),
            Said::Error { name, value, traceback } => running.error(name, value, traceback),
            Said::Idle => running.idle = Some(Instant::now()),
            Said::Answer { .. } | Said::TooLong | Said::Other => {}
        }
    }

    fn answered(&mut self, parent: &str, said: &Said) {
        if let (Some(running), Said::Answer { is_ok, leaves }) = (&mut self.running, said)
            && running.id == parent
        {
            running.answered = Some(Instant::now());
            running.leaves = *leaves;
            if !is_ok {
                running.failed();
            }
        }
    }

    fn take(&mut self, (call, socket, _): Called) -> anyhow::Result<Option<Over>> {
        match call {
            Call::Start(start) => {
                let settled = self.settle(&start)?;
                let is_settled = settled.is_ok();
                let mut answer = Answer::new(socket);
                answer.say(&settled.map_or_else(KernelEvent::Failed, |()| KernelEvent::Ready));
                self.answers.push(answer);
                // It is whoever asked that has it now.
                self.told_busy = None;
                return Ok((!is_settled).then_some(Over::NotBegun));
            }
            Call::Run(run) if self.waiting.len() >= MOST_WAITING => {
                let mut answer = Answer::new(socket);
                answer.say(&KernelEvent::Failed(too_many(&run)));
                self.answers.push(answer);
            }
            Call::Run(run) => self.waiting.push_back(Waiting::new(socket, run)),
        }
        Ok(None)
    }

    fn begin_next(&mut self) -> anyhow::Result<()> {
        self.leaves.take_if(|until| *until <= Instant::now());
        if self.running.is_some() || self.leaves.is_some() {
            return Ok(());
        }
        if let Some(waiting) = self.waiting.pop_front() {
            let content = jupyter::execute(&waiting.run.code, false);
            let id = self.kernel.send("execute_request", content)?;
            self.running = Some(Running::new(waiting, id));
        }
        Ok(())
    }

    fn finish_cell(&mut self) {
        let Some(running) = &self.running else { return };
        let Some(idle) = running.idle else { return };
        if running.answered.is_none() && idle.elapsed() < ANSWER_PATIENCE {
            return;
        }
        // Whatever the cell has printed is in the pipes now.
        let there = |pipe: &OwnedFd| rustix::io::ioctl_fionread(pipe).unwrap_or(0) > 0;
        while there(&self.kernel.stdout) || there(&self.kernel.stderr) {
            self.read_output();
            let is_endless = self.running.as_ref().is_some_and(|running| {
                running.idle.is_some_and(|idle| idle.elapsed() > ANSWER_PATIENCE)
            });
            if is_endless {
                break;
            }
        }
        if let Some(mut running) = self.running.take() {
            running.finish();
            self.leaves = running.leaves.then(|| Instant::now() + LEAVE);
            self.answers.push(running.answer);
        }
    }

    /// True: the cell takes no notice of its interrupts.
    fn act_on_deadlines(&mut self) -> bool {
        let now = Instant::now();
        let is_over = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        for waiting in std::mem::take(&mut self.waiting) {
            if is_over(waiting.deadline) {
                self.answers.push(waiting.give_up());
            } else {
                self.waiting.push_back(waiting);
            }
        }
        let Some(running) = &mut self.running else { return false };
        match (running.timed_out, running.interrupts) {
            (None, _) if is_over(running.deadline) => {
                running.answer.say(&KernelEvent::TimedOut);
                running.timed_out = Some(now);
            }
            (Some(since), 0 | 1) if is_over(Some(since + INTERRUPT_AGAIN)) => {}
            (Some(since), 2..) if is_over(Some(since + GIVE_UP)) => return true,
            (None | Some(_), _) => return false,
        }
        running.interrupts += 1;
        self.kernel.interrupt();
        false
    }

    /// A kernel that began before its session did takes over the session's environment and directory.
    fn settle(&mut self, start: &Start) -> anyhow::Result<Result<(), Failure>> {
        if let Err(failure) = launch::check_directory(start) {
            return Ok(Err(failure));
        }
        let environment: serde_json::Map<String, serde_json::Value> = start
            .environment
            .iter()
            .map(|(name, value)| (name.clone(), value.as_str().into()))
            .collect();
        // JSON's texts are Python's, too.
        let environment = serde_json::Value::from(serde_json::Value::from(environment).to_string());
        let directory =
            serde_json::Value::from(String::from_utf8_lossy(&start.directory)).to_string();
        // Expressions only, so that nothing is left behind. The backend that draws is the kernel's own choice.
        let code = format!(
            "[__import__('os').environ.pop(name) for name in \
             set(__import__('os').environ) - set(__import__('json').loads({environment})) - {{'MPLBACKEND'}}]\n\
             __import__('os').environ.update(__import__('json').loads({environment}))\n\
             __import__('os').chdir({directory}) if __import__('os').path.isdir({directory}) else None\n\
             __import__('signal').raise_signal({RENEW})"
        );
        let id = self.kernel.send("execute_request", jupyter::execute(&code, true))?;
        let end = Instant::now() + SETTLE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut ready = [PollFd::new(&self.kernel.shell, PollFlags::IN)];
            if poll(&mut ready, left.try_into().ok().as_ref()) == Ok(0) {
                let message = "the kernel does not answer; restart the session";
                return Ok(Err(refuse(ErrorCode::Busy, message)));
            }
            anyhow::ensure!(self.kernel.shell.fill()?, "the kernel has closed its socket");
            while let Some(message) = self.kernel.shell.next() {
                if let (parent, Said::Answer { is_ok, .. }) = jupyter::understand(message)?
                    && parent == id
                {
                    let message = "the kernel could not take over the session's environment";
                    return Ok(is_ok
                        .then_some(())
                        .ok_or_else(|| refuse(ErrorCode::Internal, message)));
                }
            }
        }
    }

    fn end_all(&mut self, end: &CellEnd) {
        if let Some(mut running) = self.running.take() {
            running.end(end.clone());
            self.answers.push(running.answer);
        }
        for waiting in std::mem::take(&mut self.waiting) {
            let mut answer = waiting.answer;
            answer.say(&KernelEvent::Failed(refuse(
                ErrorCode::Conflict,
                "the kernel ended before it came to this cell; restart the session, or send the cell again if it was restarted",
            )));
            self.answers.push(answer);
        }
    }
}

fn too_many(_: &KernelRun) -> Failure {
    let message = format!(
        "{MOST_WAITING} cells wait in this session already; wait for some to end, or use another session"
    );
    refuse(ErrorCode::Busy, message)
}
