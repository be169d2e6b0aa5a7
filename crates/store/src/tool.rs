//! Runs a program of the host with a deadline. Its output is handed on line by line, its last lines are kept for the
//! error.

use std::{
    ffi::OsStr,
    fs::File,
    io::Read,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};

use self::confined::{Confined, Reach};
use crate::{Error, Progress, Result};

mod confined;

/// Lines of a failed tool's output that its error quotes.
const QUOTED_LINES: usize = 12;
const LONGEST_LINE: usize = 4096;

#[derive(Debug)]
pub struct Tool {
    name: String,
    command: Command,
    deadline: Duration,
    accepted: &'static [i32],
    output: Option<File>,
    /// Held until it has ended.
    confined: Option<Confined>,
}

/// What a tool printed, standard output and error together, bounded to the last lines.
#[derive(Debug)]
pub struct Finished {
    pub code: i32,
    pub last_lines: Vec<String>,
}

impl Tool {
    /// It runs in a process group of its own, without standard input, with messages in English.
    pub fn new(name: &str, deadline: Duration) -> Self {
        let mut command = Command::new(name);
        command.env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive").process_group(0);
        #[expect(
            unsafe_code,
            reason = "a hook between fork and exec is the only way to ask for this"
        )]
        // SAFETY: the hook makes one system call and touches no memory that is shared.
        unsafe {
            // Nobody would stop it when we are killed. It is bound to this thread, which waits for it.
            command.pre_exec(|| {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
                    .map_err(Into::into)
            });
        }
        Self {
            name: name.to_owned(),
            command,
            deadline,
            accepted: &[0],
            output: None,
            confined: None,
        }
    }

    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument);
        self
    }

    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.command.args(arguments);
        self
    }

    pub fn directory(mut self, directory: &Path) -> Self {
        self.command.current_dir(directory);
        self
    }

    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// For a tool that reads what a guest wrote: its next argument is the file `image`, and that is all it can reach. It
    /// runs as a user of its own, without network, privileges or our environment.
    pub(crate) fn on_image(self, image: &Path) -> Result<Self> {
        self.confine(image, Reach::Image)
    }

    /// The same for one that fills `image` with files, whoever owns those: it can read all of the host's.
    pub(crate) fn on_image_from_files(self, image: &Path) -> Result<Self> {
        self.confine(image, Reach::Files)
    }

    fn confine(mut self, image: &Path, reach: Reach) -> Result<Self> {
        // Only root can make it somebody else.
        if !rustix::process::geteuid().is_root() {
            return Ok(self.arg(image));
        }
        let confined = Confined::new(image, reach)?;
        self.command.arg(confined.argument());
        confined.confine(&mut self.command);
        self.confined = Some(confined);
        Ok(self)
    }

    /// Exit codes that mean success; only 0 unless this is called.
    pub fn accept(mut self, codes: &'static [i32]) -> Self {
        self.accepted = codes;
        self
    }

    /// Standard output goes there instead of into lines.
    pub fn output_to(mut self, file: File) -> Self {
        self.output = Some(file);
        self
    }

    pub fn run(self) -> Result<Finished> {
        self.run_with(&mut |_| ())
    }

    pub fn run_with(mut self, progress: Progress<'_>) -> Result<Finished> {
        let start = Instant::now();
        self.command.stdin(Stdio::null()).stderr(Stdio::piped());
        match self.output.take() {
            Some(file) => self.command.stdout(file),
            None => self.command.stdout(Stdio::piped()),
        };
        let mut child = self
            .command
            .spawn()
            .map_err(|source| Error::ToolMissing { tool: self.name.clone(), source })?;
        let mut lines = Lines { last: Vec::new(), progress };
        let ended = watch(&mut child, start + self.deadline, &mut lines);
        if !matches!(ended, Ok(true)) {
            kill_group(&child);
        }
        let waited = child.wait();
        let failed =
            |source| Error::Io { doing: "wait for", path: self.name.clone().into(), source };
        if !ended.map_err(|errno| failed(errno.into()))? {
            return Err(Error::ToolTimedOut { tool: self.name, after: self.deadline });
        }
        let status = waited.map_err(failed)?;
        match status.code() {
            Some(code) if self.accepted.contains(&code) => {
                Ok(Finished { code, last_lines: lines.last })
            }
            Some(_) | None => Err(Error::ToolFailed {
                tool: self.name,
                status: describe(status),
                output: lines.last.join(" / "),
            }),
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match status.code() {
        Some(code) => format!("code {code}"),
        None => status.to_string(),
    }
}

/// All of it: a tool that leaves children behind after a failure must not hold files open.
fn kill_group(child: &Child) {
    if let Some(pid) = Pid::from_raw(child.id().cast_signed()) {
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

struct Lines<'a> {
    last: Vec<String>,
    progress: Progress<'a>,
}

impl Lines<'_> {
    fn take(&mut self, pending: &mut Vec<u8>) {
        let line = String::from_utf8_lossy(pending).trim_end().to_owned();
        pending.clear();
        if line.is_empty() {
            return;
        }
        (self.progress)(&line);
        if self.last.len() == QUOTED_LINES {
            self.last.remove(0);
        }
        self.last.push(line);
    }
}

struct Source {
    stream: File,
    pending: Vec<u8>,
    open: bool,
}

impl Source {
    fn new(stream: OwnedFd) -> Self {
        Self { stream: stream.into(), pending: Vec::new(), open: true }
    }

    /// Called when a read will not block.
    fn read(&mut self, lines: &mut Lines<'_>) {
        let mut block = [0; 16384];
        match self.stream.read(&mut block) {
            Ok(0) | Err(_) => {
                self.open = false;
                lines.take(&mut self.pending);
            }
            Ok(n) => {
                for &byte in &block[..n] {
                    if byte == b'\n' || byte == b'\r' || self.pending.len() >= LONGEST_LINE {
                        lines.take(&mut self.pending);
                    } else {
                        self.pending.push(byte);
                    }
                }
            }
        }
    }
}

/// Until the process has ended and what it printed is read; `false` at the deadline. Something that it left behind
/// may keep its output open and is not waited for.
fn watch(child: &mut Child, end: Instant, lines: &mut Lines<'_>) -> rustix::io::Result<bool> {
    let pid = Pid::from_raw(child.id().cast_signed()).expect("a child's number is not 0");
    let ended = pidfd_open(pid, PidfdFlags::empty())?;
    let mut sources: Vec<Source> =
        [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)]
            .into_iter()
            .flatten()
            .map(Source::new)
            .collect();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let timeout =
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let mut waiting: Vec<PollFd<'_>> = vec![PollFd::new(&ended, PollFlags::IN)];
        waiting.extend(
            sources
                .iter()
                .filter(|s| s.open)
                .map(|s| PollFd::from_borrowed_fd(s.stream.as_fd(), PollFlags::IN)),
        );
        match poll(&mut waiting, Some(&timeout)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error),
        }
        let has_ended = !waiting[0].revents().is_empty();
        let readable: Vec<bool> = waiting[1..].iter().map(|w| !w.revents().is_empty()).collect();
        let mut read_any = false;
        for (source, readable) in sources.iter_mut().filter(|s| s.open).zip(readable) {
            if readable {
                source.read(lines);
                read_any = true;
            }
        }
        if has_ended && !read_any {
            for source in &mut sources {
                lines.take(&mut source.pending);
            }
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Tool {
        Tool::new("sh", Duration::from_secs(20)).arg("-c").arg(script)
    }

    #[test]
    fn lines_of_both_streams_are_heard() {
        let mut heard = Vec::new();
        shell("echo one; echo two >&2; printf three")
            .run_with(&mut |line| heard.push(line.to_owned()))
            .unwrap();
        heard.sort();
        assert_eq!(heard, ["one", "three", "two"]);
    }

    #[test]
    fn a_failure_quotes_what_was_said_last() {
        let Err(Error::ToolFailed { status, output, .. }) = shell("echo why >&2; exit 3").run()
        else {
            panic!("must fail")
        };
        assert_eq!((status.as_str(), output.as_str()), ("code 3", "why"));
    }

    #[test]
    fn a_tool_that_hangs_is_ended_with_its_children() {
        let tool =
            Tool::new("sh", Duration::from_millis(300)).args(["-c", "sleep 1000 & echo $!; wait"]);
        let mut child = String::new();
        let result = tool.run_with(&mut |line| child = line.to_owned());
        assert!(matches!(result, Err(Error::ToolTimedOut { .. })), "{result:?}");
        let end = Instant::now() + Duration::from_secs(10);
        let stat = format!("/proc/{child}/stat");
        // A zombie that nobody has reaped yet counts as ended.
        while std::fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z ")) {
            assert!(Instant::now() < end, "{child} still runs");
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_a_tool_leaves_behind_is_not_waited_for() {
        let start = Instant::now();
        let mut child = String::new();
        shell("sleep 30 & echo $!").run_with(&mut |line| child = line.to_owned()).unwrap();
        assert!(start.elapsed() < Duration::from_secs(15));
        let _ = rustix::process::kill_process(
            Pid::from_raw(child.parse().unwrap()).unwrap(),
            Signal::KILL,
        );
    }

    #[test]
    fn a_missing_tool_is_told() {
        let result = Tool::new("no-such-tool-here", Duration::from_secs(1)).run();
        assert!(matches!(result, Err(Error::ToolMissing { .. })));
    }
}
