//! The host's end of the channel, as small as it can be: it blocks, and gives up after a deadline.
use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use agent::Options;
use protocol::frame::{self, Assembler, Channel, Kind};
use protocol::hello::{self, Hello};
use protocol::message::{Command, ErrorCode, ExecStart, ExecStatus, FileRead, FileWrite};
use protocol::{Reply, Request};

pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Debug, PartialEq)]
pub(crate) enum Event {
    Reply(Reply),
    Data(Channel, Vec<u8>),
    Finish,
    Reset,
}

pub(crate) struct Client {
    socket: UnixStream,
    input: Vec<u8>,
    start: usize,
    last: u32,
    events: HashMap<u32, VecDeque<Event>>,
    assemblers: HashMap<u32, Assembler>,
    /// What the agent still takes, by stream.
    credit: HashMap<u32, usize>,
    agent: Option<std::thread::JoinHandle<anyhow::Result<()>>>,
}

impl Client {
    pub(crate) fn start() -> Self {
        Self::start_with(Options::hosted())
    }

    pub(crate) fn start_with(options: Options) -> Self {
        let (host, guest) = UnixStream::pair().unwrap();
        let agent = std::thread::spawn(move || agent::serve(guest.into(), options));
        let mut client = Self::over(host);
        client.agent = Some(agent);
        client
    }

    pub(crate) fn over(socket: UnixStream) -> Self {
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut client = Self {
            socket,
            input: Vec::new(),
            start: 0,
            last: 0,
            events: HashMap::new(),
            assemblers: HashMap::new(),
            credit: HashMap::new(),
            agent: None,
        };
        client.greet([1; 16]);
        client
    }

    /// A new epoch: nothing of the former streams is heard of again.
    pub(crate) fn greet(&mut self, nonce: [u8; 16]) {
        let greeting = hello::greeting(&Hello { version: protocol::VERSION, nonce });
        self.socket.write_all(&greeting).unwrap();
        self.events.clear();
        self.assemblers.clear();
        loop {
            if let Some((used, version)) = hello::find_answer(&self.input[self.start..], &nonce) {
                assert_eq!(version, protocol::VERSION);
                self.start += used;
                return;
            }
            self.read();
        }
    }

    pub(crate) fn send_raw(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    fn read(&mut self) {
        self.input.drain(..std::mem::take(&mut self.start));
        let length = self.input.len();
        self.input.resize(length + (256 << 10), 0);
        // A child that ends interrupts whoever waits.
        let count = loop {
            match self.socket.read(&mut self.input[length..]) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                other => break other.expect("the agent says something within the deadline"),
            }
        };
        assert!(count > 0, "the agent lives");
        self.input.truncate(length + count);
    }

    pub(crate) fn open(&mut self, request: &Request) -> u32 {
        self.last += 1;
        let mut bytes = Vec::new();
        frame::encode_message(
            &mut bytes,
            Kind::Request,
            self.last,
            &protocol::message::encode(request),
        );
        self.credit.insert(self.last, protocol::INITIAL_CREDIT as usize);
        self.socket.write_all(&bytes).unwrap();
        self.last
    }

    fn send(&mut self, kind: Kind, stream: u32, payload: &[u8]) {
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, kind, Channel::Content, stream, false, payload);
        match self.socket.write_all(&bytes) {
            // It has ended meanwhile; what it said last is still to be read.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
            sent => sent.unwrap(),
        }
    }

    /// Waits for credit, and stops once the agent has said how it ends.
    pub(crate) fn send_data(&mut self, stream: u32, data: &[u8]) {
        for piece in data.chunks(frame::MAX_PAYLOAD) {
            while self.credit[&stream] < piece.len() {
                let events = self.events.get(&stream).into_iter().flatten();
                if events.into_iter().any(|event| matches!(event, Event::Reply(Reply::Failed(_)))) {
                    return;
                }
                self.take_frame();
            }
            *self.credit.get_mut(&stream).unwrap() -= piece.len();
            self.send(Kind::Data, stream, piece);
        }
    }

    pub(crate) fn finish(&mut self, stream: u32) {
        self.send(Kind::Finish, stream, &[]);
    }

    pub(crate) fn reset(&mut self, stream: u32) {
        self.send(Kind::Reset, stream, &[]);
    }

    fn take_frame(&mut self) {
        loop {
            let (frame, used) =
                frame::decode(&self.input[self.start..]).expect("the agent sends whole frames");
            self.start += used;
            let Some(frame) = frame else {
                self.read();
                continue;
            };
            let (stream, payload) = (frame.header.stream, frame.payload.to_vec());
            let event = match frame.header.kind {
                Kind::Reply => {
                    let Some(whole) =
                        self.assemblers.entry(stream).or_default().push(&frame).unwrap()
                    else {
                        return;
                    };
                    Event::Reply(protocol::message::decode(&whole).unwrap())
                }
                Kind::Data => Event::Data(frame.header.channel, payload),
                Kind::Finish => Event::Finish,
                Kind::Reset => Event::Reset,
                Kind::Credit => {
                    let granted = u32::from_le_bytes(payload.try_into().unwrap()) as usize;
                    *self.credit.get_mut(&stream).unwrap() += granted;
                    return;
                }
                Kind::Hello | Kind::Request => panic!("only the host sends those"),
            };
            self.events.entry(stream).or_default().push_back(event);
            return;
        }
    }

    /// The next event of this stream; data is granted again as it is taken.
    pub(crate) fn next(&mut self, stream: u32) -> Event {
        loop {
            if let Some(event) = self.events.get_mut(&stream).and_then(VecDeque::pop_front) {
                if let Event::Data(_, data) = &event {
                    let bytes = u32::try_from(data.len()).unwrap();
                    self.send(Kind::Credit, stream, &bytes.to_le_bytes());
                }
                return event;
            }
            self.take_frame();
        }
    }

    /// Of what was read already.
    pub(crate) fn has(&self, stream: u32) -> bool {
        self.events.get(&stream).is_some_and(|events| !events.is_empty())
    }

    pub(crate) fn reply(&mut self, stream: u32) -> Reply {
        match self.next(stream) {
            Event::Reply(reply) => reply,
            other => panic!("a reply was due, not {other:?}"),
        }
    }

    pub(crate) fn call(&mut self, request: &Request) -> Reply {
        let stream = self.open(request);
        self.reply(stream)
    }

    pub(crate) fn refusal(&mut self, request: &Request) -> ErrorCode {
        refused(self.call(request))
    }

    /// Everything an exec prints from now on, and how it ended.
    pub(crate) fn end_of_exec(&mut self, stream: u32) -> Ran {
        let mut ran = Ran { stdout: Vec::new(), stderr: Vec::new(), status: None };
        loop {
            match self.next(stream) {
                Event::Reply(Reply::ExecStarted { .. }) => {}
                Event::Reply(Reply::ExecEnded(status)) => ran.status = Some(status),
                Event::Data(Channel::Stdout, data) => ran.stdout.extend_from_slice(&data),
                Event::Data(Channel::Stderr, data) => ran.stderr.extend_from_slice(&data),
                Event::Finish => return ran,
                other => panic!("{other:?} does not belong to an exec"),
            }
        }
    }

    pub(crate) fn run(&mut self, script: &str) -> Ran {
        let stream = self.open(&Request::ExecStart(exec(script)));
        self.end_of_exec(stream)
    }

    pub(crate) fn write(&mut self, request: FileWrite, content: &[u8]) -> Reply {
        let stream = self.open(&Request::FileWrite(request));
        self.send_data(stream, content);
        self.finish(stream);
        self.reply(stream)
    }

    pub(crate) fn read_file(&mut self, path: &[u8]) -> Vec<u8> {
        let stream = self.open(&Request::FileRead(file_read(path)));
        let head = match self.reply(stream) {
            Reply::File(head) => head,
            other => panic!("a file was due, not {other:?}"),
        };
        let content = self.content(stream);
        assert_eq!(content.len() as u64, head.length);
        content
    }

    pub(crate) fn content(&mut self, stream: u32) -> Vec<u8> {
        let mut content = Vec::new();
        loop {
            match self.next(stream) {
                Event::Data(Channel::Content, data) => content.extend_from_slice(&data),
                Event::Finish => return content,
                other => panic!("{other:?} does not belong to a file"),
            }
        }
    }

    /// Until the condition holds; `what` names it.
    pub(crate) fn wait_until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let end = std::time::Instant::now() + DEADLINE;
        while !holds(self) {
            assert!(std::time::Instant::now() < end, "waited in vain until {what}");
            std::thread::yield_now();
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Some(agent) = self.agent.take() {
            let ended = agent.join();
            if !std::thread::panicking() {
                ended.expect("the agent does not panic").expect("the agent ends well");
            }
        }
        remove_what_kernels_left();
    }
}

/// In a guest the agent itself removes it, when a session's process has ended; here its processes end after it.
fn remove_what_kernels_left() {
    for entry in std::fs::read_dir("/run").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(process) = name.strip_prefix("atoll-kernel-")
            && !Path::new("/proc").join(process).exists()
        {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) status: Option<ExecStatus>,
}

impl Ran {
    pub(crate) fn status(&self) -> &ExecStatus {
        self.status.as_ref().expect("an exec that has ended")
    }

    pub(crate) fn exit_code(&self) -> i32 {
        self.status().exit_code.expect("an exec that has ended has a code")
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

pub(crate) fn refused(reply: Reply) -> ErrorCode {
    match reply {
        Reply::Failed(failure) => failure.code,
        other => panic!("a refusal was due, not {other:?}"),
    }
}

pub(crate) fn exec(script: &str) -> ExecStart {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    ExecStart {
        id: format!("exec-{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)),
        command: Command::Script(script.as_bytes().to_vec().into()),
        working_directory: None,
        environment: Vec::new(),
        user: None,
        has_stdin: false,
        timeout_ms: 0,
        output_limit: 64 << 20,
    }
}

pub(crate) fn file_write(path: &[u8]) -> FileWrite {
    FileWrite {
        path: path.to_vec().into(),
        mode: None,
        owner: None,
        create_parents: false,
        if_etags: Vec::new(),
        only_new: false,
        size: None,
    }
}

pub(crate) fn file_read(path: &[u8]) -> FileRead {
    FileRead {
        path: path.to_vec().into(),
        range: None,
        unless_etags: Vec::new(),
        range_if_etag: None,
    }
}
