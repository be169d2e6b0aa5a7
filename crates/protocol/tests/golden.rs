//! The bytes of every message and frame, as agents in snapshots speak them. A test that fails here means that the host no
//! longer understands them: append a variant instead, or raise the version and keep the old shape beside the new one.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::mem::{Discriminant, discriminant};

use protocol::files::{
    Change, FilesReply, FilesRequest, MakeDirectory, Noticed, Unpack, UploadBegin, UploadStatus,
    What,
};
use protocol::frame::{self, Channel, Kind};
use protocol::hello::{self, Hello};
use protocol::kernel::{
    CellEnd, KernelEnd, KernelEvent, KernelRun, KernelStart, KernelState, KernelStatus,
};
use protocol::message::{
    Command, Entry, EntryKind, ErrorCode, ExecStart, ExecState, ExecStatus, Failure, FileHead,
    FileRead, FileRequest, FileWrite, Listener, ListenerProcess, Mount, Network, ReadRange, Repair,
    TerminalOpen, TerminalStatus, WindowSize, decode, encode,
};
use protocol::transfer::{Outcome, Task, Transfer, TransferFailure, Transferred};
use protocol::{Reply, Request};
use serde::Serialize;
use serde::de::DeserializeOwned;

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hexadecimal: &str) -> Vec<u8> {
    (0..hexadecimal.len() / 2)
        .map(|at| u8::from_str_radix(&hexadecimal[2 * at..2 * at + 2], 16).unwrap())
        .collect()
}

/// Shows all that differ, so that a deliberate change needs one run.
fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(golden: &[(T, &str)]) {
    let changed: Vec<_> = golden
        .iter()
        .filter(|(message, written)| {
            encode(message) != bytes(written)
                || decode::<T>(&bytes(written)).as_ref() != Ok(message)
        })
        .map(|(message, _)| format!("{message:?}\n    {}", hexadecimal(&encode(message))))
        .collect();
    assert!(changed.is_empty(), "other bytes than before:\n{}", changed.join("\n"));
}

fn kinds<T>(golden: &[(T, &str)]) -> usize {
    let all: Vec<Discriminant<T>> =
        golden.iter().map(|(message, _)| discriminant(message)).collect();
    all.iter().enumerate().filter(|(at, one)| !all[..*at].contains(one)).count()
}

fn status() -> ExecStatus {
    ExecStatus {
        state: ExecState::Exited,
        exit_code: Some(137),
        killed_for_memory: true,
        stdout_bytes: 300,
        stderr_bytes: 0,
        truncated: false,
        duration_ms: 1500,
    }
}

fn path(text: &str) -> protocol::message::PathBytes {
    text.as_bytes().to_vec().into()
}

fn mount(slot: u8) -> Mount {
    Mount { slot, path: path("/mnt/data"), read_only: slot >= protocol::WRITABLE_SLOTS }
}

fn window() -> WindowSize {
    WindowSize { rows: 24, columns: 300 }
}

fn terminal(command: Option<Command>) -> TerminalOpen {
    TerminalOpen {
        id: "t-1".into(),
        command,
        working_directory: Some(path("/root")),
        environment: vec![("TERM".into(), "xterm".into())],
        user: Some("panda".into()),
        size: window(),
        linger_ms: 300_000,
    }
}

fn as_panda(request: FileRequest) -> Request {
    Request::FileAs { user: "panda".into(), request }
}

fn requests() -> Vec<(Request, &'static str)> {
    let exec = ExecStart {
        id: "run-1".into(),
        command: Command::Script(b"echo hi".to_vec().into()),
        working_directory: Some(path("/root")),
        environment: vec![("KEY".into(), "value".into())],
        user: Some("panda".into()),
        has_stdin: true,
        timeout_ms: 120_000,
        output_limit: 1 << 20,
    };
    let arguments = ExecStart {
        command: Command::Arguments(vec![b"ls".to_vec().into(), b"-l".to_vec().into()]),
        working_directory: None,
        environment: Vec::new(),
        user: None,
        has_stdin: false,
        timeout_ms: 0,
        ..exec.clone()
    };
    let repair = Repair {
        entropy: [0x11; 32],
        unix_time_ns: 1_800_000_000_000_000_000,
        host_name: "sandbox-1".into(),
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        network: Network { address: [10, 200, 0, 2], prefix: 30, gateway: [10, 200, 0, 1] },
        grow_root: true,
        volumes: vec![mount(0), mount(8)],
    };
    let read = |range| FileRead {
        path: path("/a"),
        range,
        unless_etags: vec!["\"1\"".into()],
        range_if_etag: Some("\"2\"".into()),
    };
    let write = FileWrite {
        path: path("/a"),
        mode: Some(0o640),
        owner: Some("panda:users".into()),
        create_parents: true,
        if_etags: vec!["*".into()],
        only_new: false,
        size: Some(1 << 33),
    };
    let start = KernelStart {
        id: "k".into(),
        language: "python".into(),
        environment: vec![("KEY".into(), "value".into())],
        working_directory: Some(path("/root")),
    };
    let run =
        KernelRun { id: "k".into(), code: "1".into(), timeout_ms: 300, output_limit: 1 << 20 };
    vec![
        (Request::Ping, "00"),
        (
            Request::Repair(repair),
            "0111111111111111111111111111111111111111111111111111111111111111118080d09de9ceb8fd180973616e64626f782d312030313233343536373839616263646566303132333435363738396162636465660ac800021e0ac80001010200092f6d6e742f646174610008092f6d6e742f6461746101",
        ),
        (Request::Sync, "02"),
        (Request::Shutdown { grace_ms: 5000 }, "038827"),
        (Request::Quiesce, "04"),
        (Request::Thaw { unix_time_ns: 1_800_000_000_000_000_000 }, "058080d09de9ceb8fd18"),
        (Request::VolumesMount { volumes: vec![mount(7)] }, "060107092f6d6e742f6461746100"),
        (Request::VolumesUnmount { slots: vec![0, 15] }, "0702000f"),
        (Request::VolumeGrow { slot: 3 }, "0803"),
        (Request::Release { grace_ms: 5000 }, "098827"),
        (
            Request::ExecStart(exec),
            "0a0572756e2d3100076563686f20686901052f726f6f7401034b45590576616c7565010570616e646101c0a907808040",
        ),
        (Request::ExecStart(arguments), "0a0572756e2d310102026c73022d6c0000000000808040"),
        (
            Request::ExecWatch { id: "run-1".into(), stdout_offset: 128, stderr_offset: 1 },
            "0b0572756e2d31800101",
        ),
        (Request::ExecStatus { id: "run-1".into() }, "0c0572756e2d31"),
        (Request::ExecList, "0d"),
        (Request::ExecCancel { id: "run-1".into(), grace_ms: 0 }, "0e0572756e2d3100"),
        (Request::ExecsForget { ids: vec!["a".into(), "b".into()] }, "0f0201610162"),
        (Request::FileRead(read(None)), "10022f610001032231220103223222"),
        (
            Request::FileRead(read(Some(ReadRange::From { start: 5, end: Some(300) }))),
            "10022f6101000501ac0201032231220103223222",
        ),
        (Request::FileRead(read(Some(ReadRange::Last(9)))), "10022f6101010901032231220103223222"),
        (
            Request::FileWrite(write.clone()),
            "11022f6101a003010b70616e64613a75736572730101012a00018080808020",
        ),
        (Request::FileDelete { path: path("/a") }, "12022f61"),
        (Request::DirList { path: path("/a"), depth: 2 }, "13022f6102"),
        (Request::FileStat { path: path("/a") }, "14022f61"),
        (Request::Dial { port: 8080 }, "15903f"),
        (Request::Listeners, "16"),
        (Request::KernelPrepare, "17"),
        (Request::KernelStart(start), "18016b06707974686f6e01034b45590576616c756501052f726f6f74"),
        (Request::KernelRun(run), "19016b0131ac02808040"),
        (Request::KernelRestart { id: "k".into() }, "1a016b"),
        (Request::KernelEnd { id: "k".into() }, "1b016b"),
        (Request::KernelList, "1c"),
        (
            Request::TerminalOpen(terminal(None)),
            "1d03742d310001052f726f6f7401045445524d05787465726d010570616e646118ac02e0a712",
        ),
        (
            Request::TerminalOpen(terminal(Some(Command::Script(b"top".to_vec().into())))),
            "1d03742d31010003746f7001052f726f6f7401045445524d05787465726d010570616e646118ac02e0a712",
        ),
        (
            Request::TerminalAttach { id: "t-1".into(), offset: Some(300), size: Some(window()) },
            "1e03742d3101ac020118ac02",
        ),
        (Request::TerminalResize { id: "t-1".into(), size: window() }, "1f03742d3118ac02"),
        (Request::TerminalSignal { id: "t-1".into(), signal: 2 }, "2003742d3102"),
        (Request::TerminalEnd { id: "t-1".into(), grace_ms: 5000 }, "2103742d318827"),
        (Request::TerminalList, "22"),
        (as_panda(FileRequest::Read(read(None))), "230570616e646100022f610001032231220103223222"),
        (
            as_panda(FileRequest::Write(FileWrite { size: None, ..write })),
            "230570616e646101022f6101a003010b70616e64613a75736572730101012a0000",
        ),
        (as_panda(FileRequest::Delete { path: path("/a") }), "230570616e646102022f61"),
        (as_panda(FileRequest::List { path: path("/a"), depth: 2 }), "230570616e646103022f6102"),
        (as_panda(FileRequest::Stat { path: path("/a") }), "230570616e646104022f61"),
        (Request::Files { user: None, request: FilesRequest::UploadList }, "240004"),
        (
            Request::Files { user: Some("p".into()), request: FilesRequest::UploadList },
            "2401017004",
        ),
    ]
}

const CODES: [ErrorCode; 13] = [
    ErrorCode::Invalid,
    ErrorCode::NotFound,
    ErrorCode::WrongKind,
    ErrorCode::Denied,
    ErrorCode::Exists,
    ErrorCode::Conflict,
    ErrorCode::NoSpace,
    ErrorCode::TooLarge,
    ErrorCode::PreconditionFailed,
    ErrorCode::NotModified,
    ErrorCode::RangeNotSatisfiable,
    ErrorCode::Busy,
    ErrorCode::Internal,
];

fn replies() -> Vec<(Reply, &'static str)> {
    let head = FileHead {
        size: 1000,
        start: 10,
        length: 20,
        partial: true,
        modified_ns: -1,
        etag: "\"1\"".into(),
    };
    let entry = Entry {
        path: path("/a"),
        kind: EntryKind::Link,
        size: 3,
        mode: 0o777,
        modified_ns: 1_800_000_000_000_000_000,
        user: 1000,
        group: 100,
        target: Some(path("b")),
    };
    let listener = Listener {
        port: 8080,
        address: [127, 0, 0, 1].into(),
        process: Some(ListenerProcess { pid: 300, name: b"python3".to_vec().into() }),
    };
    let failure = Failure { code: ErrorCode::Conflict, message: "it is busy".into() };
    vec![
        (Reply::Done, "00"),
        (Reply::Failed(failure), "01050a69742069732062757379"),
        (Reply::ExecStarted { pid: 300 }, "02ac02"),
        (Reply::ExecEnded(status()), "030101920201ac020000dc0b"),
        (Reply::ExecStatus(ExecStatus { exit_code: None, ..status() }), "04010001ac020000dc0b"),
        (Reply::Execs(vec![("run-1".into(), status())]), "05010572756e2d310101920201ac020000dc0b"),
        (Reply::File(head), "06e8070a14010103223122"),
        (Reply::Written { bytes: 1 << 40, etag: "\"1\"".into() }, "0780808080802003223122"),
        (Reply::Entries(vec![entry]), "0801022f610203ff038080a0bbd29df1fa31e80764010162"),
        (Reply::Connected, "09"),
        (Reply::Listeners(vec![listener]), "0a01903f007f00000101ac0207707974686f6e33"),
        (Reply::Files(FilesReply::Packing), "0f01"),
        (
            Reply::Kernels(vec![kernel(KernelState::Starting), kernel(KernelState::OutOfMemory)]),
            "0b02016b017200016b017204",
        ),
        (Reply::TerminalAttached { offset: 300 }, "0cac02"),
        (Reply::TerminalEnded { exit_code: 129 }, "0d8202"),
        (
            Reply::Terminals(vec![TerminalStatus {
                id: "t-1".into(),
                user: "panda".into(),
                size: window(),
                attached: true,
                exit_code: Some(-1),
                output_bytes: 300,
                age_ms: 300,
            }]),
            "0e0103742d310570616e646118ac02010101ac02ac02",
        ),
    ]
}

fn upload() -> UploadStatus {
    UploadStatus {
        id: "u".into(),
        path: path("/a"),
        size: Some(300),
        part_size: 128,
        parts: vec![(1, 2)],
        bytes: 256,
    }
}

fn files_requests() -> Vec<(FilesRequest, &'static str)> {
    let write = FileWrite {
        path: path("/a"),
        mode: None,
        owner: None,
        create_parents: true,
        if_etags: Vec::new(),
        only_new: true,
        size: None,
    };
    let owner = Some("panda".to_owned());
    vec![
        (
            FilesRequest::Unpack(Unpack { path: path("/a"), owner: owner.clone() }),
            "00022f61010570616e6461",
        ),
        (FilesRequest::Pack { path: path("/a") }, "01022f61"),
        (
            FilesRequest::UploadBegin(UploadBegin { id: "u".into(), write, part_size: 300 }),
            "020175022f61000001000100ac02",
        ),
        (FilesRequest::UploadStatus { id: "u".into() }, "030175"),
        (FilesRequest::UploadList, "04"),
        (FilesRequest::UploadPart { id: "u".into(), number: 1, length: 300 }, "05017501ac02"),
        (
            FilesRequest::UploadComplete { id: "u".into(), size: Some(300), sha256: Some([1; 32]) },
            "06017501ac02010101010101010101010101010101010101010101010101010101010101010101",
        ),
        (FilesRequest::UploadAbort { id: "u".into() }, "070175"),
        (
            FilesRequest::Move { from: path("/a"), to: path("/b"), overwrite: true },
            "08022f61022f6201",
        ),
        (
            FilesRequest::MakeDirectory(MakeDirectory {
                path: path("/a"),
                mode: Some(0o755),
                owner: owner.clone(),
                create_parents: true,
            }),
            "09022f6101ed03010570616e646101",
        ),
        (
            FilesRequest::Change(Change {
                path: path("/a"),
                mode: Some(0o644),
                owner,
                modified_ns: Some(-1),
            }),
            "0a022f6101a403010570616e64610101",
        ),
        (FilesRequest::Watch { path: path("/a"), recursive: true }, "0b022f6101"),
    ]
}

fn files_replies() -> Vec<(FilesReply, &'static str)> {
    let entry = Entry {
        path: path("/a"),
        kind: EntryKind::File,
        size: 3,
        mode: 0o644,
        modified_ns: 1,
        user: 0,
        group: 0,
        target: None,
    };
    vec![
        (FilesReply::Unpacked { entries: 300, bytes: 1 }, "00ac0201"),
        (FilesReply::Packing, "01"),
        (FilesReply::Upload(upload()), "020175022f6101ac0280010101028002"),
        (FilesReply::Uploads(vec![upload()]), "03010175022f6101ac0280010101028002"),
        (FilesReply::Entry(entry), "04022f610003a40302000000"),
        (FilesReply::Watching, "05"),
    ]
}

fn noticed() -> Vec<(Noticed, &'static str)> {
    let noticed = |what, from| Noticed { what, path: path("/a"), is_directory: true, from };
    vec![
        (noticed(What::Created, None), "00022f610100"),
        (noticed(What::Modified, None), "01022f610100"),
        (noticed(What::Changed, None), "02022f610100"),
        (noticed(What::Deleted, None), "03022f610100"),
        (noticed(What::Moved, Some(path("/b"))), "04022f610101022f62"),
        (noticed(What::Overflow, None), "05022f610100"),
        (noticed(What::Gone, None), "06022f610100"),
    ]
}

fn kernel(state: KernelState) -> KernelStatus {
    KernelStatus { id: "k".into(), language: "r".into(), state }
}

fn kernel_events() -> Vec<(KernelEvent, &'static str)> {
    let ended = |end| {
        KernelEvent::Ended(KernelEnd { end, timed_out: true, truncated: false, duration_ms: 300 })
    };
    let failure = Failure { code: ErrorCode::Busy, message: "full".into() };
    vec![
        (KernelEvent::Ready, "00"),
        (KernelEvent::Stdout(b"a".to_vec().into()), "010161"),
        (KernelEvent::Stderr(b"b".to_vec().into()), "020162"),
        (
            KernelEvent::Result(vec![("text/plain".into(), "1".into())]),
            "03010a746578742f706c61696e0131",
        ),
        (
            KernelEvent::Error { name: "E".into(), value: "v".into(), traceback: "t".into() },
            "04014501760174",
        ),
        (KernelEvent::TimedOut, "05"),
        (ended(CellEnd::Finished), "06000100ac02"),
        (ended(CellEnd::Failed), "06010100ac02"),
        (ended(CellEnd::Restarted), "06020100ac02"),
        (ended(CellEnd::Died { how: "exit 1".into() }), "0603066578697420310100ac02"),
        (KernelEvent::Failed(failure), "070b0466756c6c"),
    ]
}

#[test]
fn events_of_kernels_are_written_as_ever() {
    let golden = kernel_events();
    check(&golden);
    assert_eq!(kinds(&golden), 8);
}

#[test]
fn requests_about_files_are_written_as_ever() {
    check(&files_requests());
    assert_eq!(kinds(&files_requests()), 12);
    assert!(decode::<FilesRequest>(&[12]).is_err());
}

#[test]
fn replies_about_files_are_written_as_ever() {
    check(&files_replies());
    assert_eq!(kinds(&files_replies()), 6);
    assert!(decode::<FilesReply>(&[6]).is_err());
    check(&noticed());
    assert!(decode::<What>(&[7]).is_err());
}

#[test]
fn requests_are_written_as_ever() {
    let golden = requests();
    check(&golden);
    // Counts variants; one that is new belongs into the list.
    assert_eq!(kinds(&golden), 37);
    assert!(decode::<Request>(&[37]).is_err());
}

#[test]
fn replies_are_written_as_ever() {
    let golden = replies();
    check(&golden);
    assert_eq!(kinds(&golden), 16);
    assert!(decode::<Reply>(&[16]).is_err());
}

#[test]
fn codes_states_and_kinds_keep_their_numbers() {
    for (number, code) in CODES.into_iter().enumerate() {
        assert_eq!(encode(&code), [u8::try_from(number).unwrap()], "{code:?}");
    }
    assert!(decode::<ErrorCode>(&[13]).is_err());
    let states = [ExecState::Running, ExecState::Exited, ExecState::TimedOut, ExecState::Cancelled];
    for (number, state) in states.into_iter().enumerate() {
        assert_eq!(encode(&state), [u8::try_from(number).unwrap()], "{state:?}");
    }
    assert!(decode::<ExecState>(&[4]).is_err());
    let kinds = [
        EntryKind::File,
        EntryKind::Directory,
        EntryKind::Link,
        EntryKind::Fifo,
        EntryKind::Socket,
        EntryKind::CharDevice,
        EntryKind::BlockDevice,
    ];
    for (number, kind) in kinds.into_iter().enumerate() {
        assert_eq!(encode(&kind), [u8::try_from(number).unwrap()], "{kind:?}");
    }
    assert!(decode::<EntryKind>(&[7]).is_err());
}

#[test]
fn frames_are_written_as_ever() {
    let all = [
        (Kind::Hello, Channel::Content, "a70100000403020104000000b67b9d2261626364"),
        (Kind::Request, Channel::Content, "a702000104030201040000004ac876ee61626364"),
        (Kind::Reply, Channel::Content, "a7030000040302010400000027ca1b8a61626364"),
        (Kind::Data, Channel::Content, "a70400010403020104000000b2f7719a61626364"),
        (Kind::Data, Channel::Stdout, "a70401000403020104000000cf88c86261626364"),
        (Kind::Data, Channel::Stderr, "a704020104030201040000008f27849e61626364"),
        (Kind::Finish, Channel::Content, "a70500000403020104000000d51ee1a861626364"),
        (Kind::Credit, Channel::Content, "a7060001040302010400000029ad0a6461626364"),
        (Kind::Reset, Channel::Content, "a7070000040302010400000044af670061626364"),
    ];
    let mut changed = BTreeSet::new();
    for (at, (kind, channel, written)) in all.into_iter().enumerate() {
        let mut frame = Vec::new();
        frame::encode(&mut frame, kind, channel, 0x0102_0304, at % 2 == 1, b"abcd");
        if frame != bytes(written) {
            changed.insert(format!("{kind:?} {channel:?} {}", hexadecimal(&frame)));
        }
    }
    assert!(changed.is_empty(), "{changed:#?}");
}

#[test]
fn the_handshake_is_written_as_ever() {
    let greeting = hello::greeting(&Hello { version: 1, nonce: [0x22; 16] });
    let (zeroes, frame) = greeting.split_at(frame::MAX_FRAME);
    assert!(zeroes.iter().all(|&byte| byte == 0));
    assert_eq!(
        hexadecimal(frame),
        "a7010000000000001100000009f408430122222222222222222222222222222222"
    );
    assert_eq!(
        hexadecimal(&hello::answer(&[0x22; 16], 1)),
        "61746f6c6c2d6167656e742d686572652222222222222222222222222222222201000000"
    );
}

#[test]
fn transfers_are_written_as_ever() {
    let file = FileWrite {
        path: path("/a"),
        mode: None,
        owner: None,
        create_parents: true,
        if_etags: Vec::new(),
        only_new: false,
        size: None,
    };
    let transfer = |task| Transfer {
        task,
        url: "http://a".into(),
        headers: vec![("b".into(), "c".into())],
        deadline_ms: 300,
    };
    check(&[
        (
            transfer(Task::Import { file, sha256: Some("0f".into()) }),
            "00022f610000010000000102306608687474703a2f2f610101620163ac02",
        ),
        (
            transfer(Task::Export { path: path("/a"), method: "PUT".into() }),
            "01022f610350555408687474703a2f2f610101620163ac02",
        ),
    ]);
    let done = Transferred { bytes: 300, sha256: "0f".into(), status: 200, etag: None };
    let answered = TransferFailure::Answered {
        status: 403,
        code: Some("AccessDenied".into()),
        message: "no".into(),
    };
    let failure = Failure { code: ErrorCode::NotFound, message: "it".into() };
    let outcomes = [
        (Outcome::Done(done), "00ac02023066c80100"),
        (Outcome::Failed(TransferFailure::Invalid("a".into())), "01000161"),
        (Outcome::Failed(TransferFailure::File(failure)), "010101026974"),
        (Outcome::Failed(answered), "01029303010c41636365737344656e696564026e6f"),
        (Outcome::Failed(TransferFailure::Unreachable("a".into())), "01030161"),
        (Outcome::Failed(TransferFailure::Digest { sha256: "0f".into() }), "0104023066"),
        (Outcome::Failed(TransferFailure::OutOfTime), "0105"),
    ];
    check(&outcomes);
}
