//! Sessions of the interpreter, with a small kernel that speaks Jupyter's protocol; Python's own runs in real guests.
use agent::Options;
use protocol::kernel::{
    CellEnd, Events, KernelEnd, KernelEvent, KernelRun, KernelStart, KernelState,
};
use protocol::message::{ErrorCode, Failure};
use protocol::{Reply, Request};

use crate::support::{Client, Event, refused};

struct Interpreter {
    client: Client,
    environment: Vec<(String, String)>,
    _specifications: tempfile::TempDir,
}

/// All that was said of a cell.
#[derive(Debug, Default, PartialEq)]
struct Said {
    stdout: String,
    stderr: String,
    results: Vec<Vec<(String, String)>>,
    error: Option<String>,
    end: Option<KernelEnd>,
    failed: Option<Failure>,
    timed_out: bool,
    is_ready: bool,
}

impl Interpreter {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let kernel = directory.path().join("kernels/test");
        std::fs::create_dir_all(&kernel).unwrap();
        std::fs::write(kernel.join("kernel.py"), include_str!("kernel.py")).unwrap();
        let specification = r#"{"argv": ["python3", "{resource_dir}/kernel.py", "{connection_file}"],
            "display_name": "test", "language": "test"}"#;
        std::fs::write(kernel.join("kernel.json"), specification).unwrap();
        let program = env!("CARGO_BIN_EXE_atoll-agent").into();
        let client = Client::start_with(Options { program, ..Options::hosted() });
        let path = ("JUPYTER_PATH".to_owned(), directory.path().to_str().unwrap().to_owned());
        let environment = vec![path, ("GIVEN".to_owned(), "é\"$".to_owned())];
        Self { client, environment, _specifications: directory }
    }

    fn with_session(id: &str) -> Self {
        let mut interpreter = Self::start();
        let said = interpreter.create(id, "test");
        assert!(said.is_ready, "{said:?}");
        interpreter
    }

    fn create(&mut self, id: &str, language: &str) -> Said {
        let start = KernelStart {
            id: id.to_owned(),
            language: language.to_owned(),
            environment: self.environment.clone(),
            working_directory: Some(b"/tmp".to_vec().into()),
        };
        let stream = self.client.open(&Request::KernelStart(start));
        self.said(stream)
    }

    fn begin(&mut self, id: &str, code: &str, timeout_ms: u64) -> u32 {
        let (id, code) = (id.to_owned(), code.to_owned());
        let run = KernelRun { id, code, timeout_ms, output_limit: 1 << 20 };
        self.client.open(&Request::KernelRun(run))
    }

    fn run(&mut self, id: &str, code: &str) -> Said {
        let stream = self.begin(id, code, 0);
        self.said(stream)
    }

    fn said(&mut self, stream: u32) -> Said {
        let (mut said, mut events) = (Said::default(), Events::default());
        loop {
            match self.client.next(stream) {
                Event::Data(_, bytes) => events.push(&bytes),
                Event::Finish => return said,
                Event::Reply(Reply::Failed(failure)) => {
                    said.failed = Some(failure);
                    return said;
                }
                other => panic!("{other:?} does not belong to a kernel"),
            }
            while let Some(event) = events.take().unwrap() {
                match event {
                    KernelEvent::Ready => said.is_ready = true,
                    KernelEvent::Stdout(bytes) => {
                        said.stdout += &String::from_utf8_lossy(&bytes);
                    }
                    KernelEvent::Stderr(bytes) => {
                        said.stderr += &String::from_utf8_lossy(&bytes);
                    }
                    KernelEvent::Result(forms) => said.results.push(forms),
                    KernelEvent::Error { traceback, .. } => said.error = Some(traceback),
                    KernelEvent::TimedOut => said.timed_out = true,
                    KernelEvent::Ended(end) => said.end = Some(end),
                    KernelEvent::Failed(failure) => said.failed = Some(failure),
                }
            }
        }
    }

    fn state(&mut self, id: &str) -> Option<KernelState> {
        match self.client.call(&Request::KernelList) {
            Reply::Kernels(all) => {
                all.into_iter().find(|one| one.id == id).map(|kernel| kernel.state)
            }
            other => panic!("sessions were due, not {other:?}"),
        }
    }
}

impl Said {
    fn ended(&self) -> &CellEnd {
        &self.end.as_ref().unwrap_or_else(|| panic!("it ended: {self:?}")).end
    }

    fn text(&self) -> &str {
        let forms = self.results.last().unwrap_or_else(|| panic!("a result: {self:?}"));
        &forms.iter().find(|(kind, _)| kind == "text/plain").unwrap().1
    }

    fn code(&self) -> ErrorCode {
        self.failed.as_ref().unwrap_or_else(|| panic!("a refusal: {self:?}")).code
    }
}

#[test]
fn a_session_keeps_its_state_and_another_has_its_own() {
    let mut interpreter = Interpreter::with_session("a");
    assert_eq!(interpreter.run("a", "x = 41").results, Vec::<Vec<_>>::new());
    let said = interpreter.run("a", "x + 1");
    assert_eq!((said.text(), said.ended()), ("42", &CellEnd::Finished));
    assert!(interpreter.create("b", "test").is_ready);
    let said = interpreter.run("b", "x");
    assert_eq!(said.ended(), &CellEnd::Failed);
    assert!(said.error.unwrap().contains("NameError"));
    assert_eq!(
        interpreter.run("a", "(os.environ['GIVEN'], os.getcwd())").text(),
        "('é\"$', '/tmp')"
    );
}

#[test]
fn what_children_print_is_heard_to_the_last_byte() {
    let mut interpreter = Interpreter::with_session("a");
    let said = interpreter
        .run("a", "print('first'); os.system('echo out; echo err >&2')\nprint('last', end='')");
    assert_eq!((said.stdout.as_str(), said.stderr.as_str()), ("first\nout\nlast", "err\n"));
    let said = interpreter.run("a", "print('x' * 3_000_000)");
    assert_eq!(said.stdout.len(), 1 << 20);
    assert!(said.end.unwrap().truncated);
}

#[test]
fn a_cell_whose_time_is_up_is_interrupted_and_its_session_goes_on() {
    let mut interpreter = Interpreter::with_session("a");
    interpreter.run("a", "x = 41");
    let stream = interpreter.begin("a", "print('begun', flush=True)\nwhile True: pass", 5000);
    let said = interpreter.said(stream);
    assert!(said.timed_out && said.end.as_ref().unwrap().timed_out, "{said:?}");
    assert_eq!((said.stdout.as_str(), said.ended()), ("begun\n", &CellEnd::Failed));
    assert_eq!(interpreter.run("a", "x").text(), "41");
}

#[test]
fn a_cell_that_takes_no_notice_costs_its_session_the_kernel() {
    let mut interpreter = Interpreter::with_session("a");
    interpreter.run("a", "x = 41");
    let code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass";
    let stuck = interpreter.begin("a", code, 5000);
    let waiting = interpreter.begin("a", "x", 0);
    let said = interpreter.said(stuck);
    assert_eq!((said.timed_out, said.ended()), (true, &CellEnd::Restarted));
    assert_eq!(interpreter.said(waiting).code(), ErrorCode::Conflict);
    let said = interpreter.run("a", "os.environ['GIVEN'] if 'x' not in globals() else x");
    assert_eq!(said.text(), "'é\"$'");
}

#[test]
fn cells_of_one_session_wait_for_each_other_up_to_a_bound() {
    let mut interpreter = Interpreter::with_session("a");
    let directory = tempfile::tempdir().unwrap();
    let gate = directory.path().join("gate");
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let shut = format!("print('begun', flush=True); open({gate:?}).read()");
    let first = interpreter.begin("a", &shut, 0);
    // It has begun once it prints; what comes now waits.
    assert!(matches!(interpreter.client.next(first), Event::Data(..)));
    let waiting: Vec<u32> = (0..protocol::kernel::MOST_WAITING)
        .map(|at| interpreter.begin("a", &at.to_string(), 0))
        .collect();
    assert_eq!(interpreter.run("a", "1").code(), ErrorCode::Busy);
    std::fs::write(&gate, "").unwrap();
    interpreter.said(first);
    for (at, stream) in waiting.into_iter().enumerate() {
        assert_eq!(interpreter.said(stream).text(), at.to_string());
    }

    let second = interpreter.begin("a", &shut, 0);
    assert!(matches!(interpreter.client.next(second), Event::Data(..)));
    let impatient = interpreter.begin("a", "1", 300);
    let said = interpreter.said(impatient);
    assert!(said.timed_out && said.end.unwrap().timed_out && said.results.is_empty());
    std::fs::write(&gate, "").unwrap();
    interpreter.said(second);
}

#[test]
fn a_cell_outlives_whoever_waits_for_it() {
    let mut interpreter = Interpreter::with_session("a");
    let stream = interpreter.begin(
        "a",
        "print('begun', flush=True)\nimport time; time.sleep(0.2); x = 7",
        0,
    );
    assert!(matches!(interpreter.client.next(stream), Event::Data(..)));
    interpreter.client.reset(stream);
    let second = interpreter.begin(
        "a",
        "print('begun', flush=True)\nimport time; time.sleep(0.2); y = 8",
        0,
    );
    // The host itself comes back.
    interpreter.client.greet([2; 16]);
    let _ = second;
    assert_eq!(interpreter.run("a", "(x, y)").text(), "(7, 8)");
}

#[test]
fn a_dead_kernel_says_so_and_can_be_restarted() {
    let mut interpreter = Interpreter::with_session("a");
    let said = interpreter.run("a", "print('last words', flush=True); os._exit(3)");
    assert_eq!(said.stdout, "last words\n");
    assert_eq!(said.ended(), &CellEnd::Died { how: "with exit code 3".to_owned() });
    let said = interpreter.run("a", "1");
    assert_eq!(said.code(), ErrorCode::Conflict);
    assert!(said.failed.unwrap().message.contains("restart"));
    assert_eq!(interpreter.state("a"), Some(KernelState::Dead));
    let stream = interpreter.client.open(&Request::KernelRestart { id: "a".to_owned() });
    assert!(interpreter.said(stream).is_ready);
    assert_eq!(interpreter.run("a", "1 + 1").text(), "2");
}

#[test]
fn a_cell_is_not_given_to_a_kernel_that_is_about_to_end() {
    let mut interpreter = Interpreter::with_session("a");
    let last = interpreter.begin("a", "leave()", 0);
    let next = interpreter.begin("a", "1", 0);
    assert_eq!(interpreter.said(last).ended(), &CellEnd::Finished);
    assert_eq!(interpreter.said(next).code(), ErrorCode::Conflict);
    interpreter.client.wait_until("the session is dead", |client| {
        matches!(client.call(&Request::KernelList), Reply::Kernels(all) if all[0].state == KernelState::Dead)
    });
}

#[test]
fn a_directory_that_is_not_there_is_refused() {
    let mut interpreter = Interpreter::start();
    let start = KernelStart {
        id: "a".to_owned(),
        language: "test".to_owned(),
        environment: interpreter.environment.clone(),
        working_directory: Some(b"/nowhere".to_vec().into()),
    };
    let stream = interpreter.client.open(&Request::KernelStart(start));
    let said = interpreter.said(stream);
    assert_eq!(said.code(), ErrorCode::Invalid);
    assert!(said.failed.unwrap().message.contains("/nowhere"));
    interpreter.client.wait_until("nothing is left", |client| {
        client.call(&Request::KernelList) == Reply::Kernels(Vec::new())
    });
}

#[test]
fn a_session_ends_with_all_that_it_has_begun() {
    let mut interpreter = Interpreter::with_session("a");
    let code = "__import__('subprocess').Popen(['sleep', '1000']).pid";
    let child: i32 = interpreter.run("a", code).text().parse().unwrap();
    assert_eq!(interpreter.client.call(&Request::KernelEnd { id: "a".to_owned() }), Reply::Done);
    interpreter.client.wait_until("the child is gone", |_| {
        let status = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        status.is_empty() || status.contains(") Z ")
    });
    assert_eq!(interpreter.state("a"), None);
    let again = Request::KernelEnd { id: "a".to_owned() };
    assert_eq!(refused(interpreter.client.call(&again)), ErrorCode::NotFound);
    assert_eq!(interpreter.run("a", "1").code(), ErrorCode::NotFound);
    let listed = interpreter.client.call(&Request::ExecList);
    assert_eq!(listed, Reply::Execs(Vec::new()), "sessions are no execs");
}

#[test]
fn a_language_without_a_kernel_is_refused_with_a_way_to_get_one() {
    let mut interpreter = Interpreter::start();
    let said = interpreter.create("a", "cobol");
    assert_eq!(said.code(), ErrorCode::Invalid);
    assert!(said.failed.unwrap().message.contains("kernelspec"));
    interpreter.client.wait_until("nothing is left", |client| {
        client.call(&Request::KernelList) == Reply::Kernels(Vec::new())
    });
    assert!(interpreter.create("a", "test").is_ready, "the id is free again");
    assert_eq!(interpreter.create("a", "test").code(), ErrorCode::Conflict);
}

#[test]
fn results_come_in_all_their_forms() {
    let mut interpreter = Interpreter::with_session("a");
    let said = interpreter.run("a", "show({'image/png': 'QQ==\\n', 'text/plain': 'picture'}); show({'application/json': {'a': 1}})\n7");
    let forms: Vec<_> =
        said.results.iter().flatten().map(|(kind, data)| (kind.as_str(), data.as_str())).collect();
    assert_eq!(forms, [("image/png", "QQ=="), ("application/json", "{\"a\":1}")]);
}
