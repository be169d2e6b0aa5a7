//! An `atoll serve` in a data directory of its own on the pool.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use api::{CreateSandbox, SandboxId, VolumeId};
use client::{Client, Method, RequestBuilder, SandboxFilter};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStdout, Command},
};

use crate::{Answer, Footprint, interrupt, pause, program, program::target_directory, until};

/// A host on which nothing was prepared builds a kernel first.
const START_DEADLINE: Duration = Duration::from_secs(900);
const END_DEADLINE: Duration = Duration::from_secs(60);
/// A size that was never used here is baked first, and so may be its template.
const CREATE_DEADLINE: Duration = Duration::from_secs(900);
/// Networks are taken down behind the answer to a delete.
pub(crate) const SETTLE_DEADLINE: Duration = Duration::from_secs(30);

/// Shown of a server whose claim fails.
const MOST_COMPLAINTS: usize = 12;

/// How a server is started. The default is what a person would get, at any free port.
#[derive(Debug, Clone)]
pub struct Options {
    /// Another than [`program`].
    pub program: Option<PathBuf>,
    pub listen: String,
    pub arguments: Vec<String>,
    pub environment: Vec<(&'static str, String)>,
    /// Where the data directory is made. Default: the pool.
    pub data_in: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            program: None,
            listen: "127.0.0.1:0".to_owned(),
            arguments: Vec::new(),
            environment: Vec::new(),
            data_in: None,
        }
    }
}

/// How a server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// SIGTERM.
    Asked,
    /// SIGKILL.
    Killed,
}

pub struct Server {
    process: Child,
    url: String,
    key: String,
    client: Client,
    data: TempDir,
    log: PathBuf,
    options: Options,
}

impl Server {
    pub async fn start() -> Self {
        Self::start_with(Options::default()).await
    }

    /// # Panics
    /// It does not start; its log is shown.
    pub async fn start_with(options: Options) -> Self {
        let data = data_directory(&options.data_in.clone().unwrap_or_else(pool));
        interrupt::remember(data.path());
        let log = new_log();
        let (process, url, key) = launch(data.path(), &log, &options).await;
        let client = Client::new(&url, key.as_deref()).expect("the server tells a URL");
        let is_told = key.is_some();
        let key = key.unwrap_or_default();
        let server = Self { process, url, key, client, data, log, options };
        assert!(is_told, "the first start shows a key");
        server
    }

    /// Ends it as told and starts another in the same data directory.
    pub async fn restart(&mut self, end: End) {
        self.stop(end).await;
        self.start_again().await;
    }

    pub async fn start_again(&mut self) {
        let (process, url, key) = launch(self.data.path(), &self.log, &self.options).await;
        assert!(key.is_none(), "only the very first start makes a key");
        self.client = Client::new(&url, Some(&self.key)).expect("the server tells a URL");
        (self.process, self.url) = (process, url);
    }

    /// The server alone: its sandboxes go on.
    pub async fn stop(&mut self, end: End) -> ExitStatus {
        let signal = match end {
            End::Asked => Signal::TERM,
            End::Killed => Signal::KILL,
        };
        kill_process(self.process_id(), signal).expect("the server runs");
        let ended = tokio::time::timeout(END_DEADLINE, self.process.wait()).await;
        ended.expect("the server ends when told to").expect("a child can be waited for")
    }

    /// Of a server that dies of itself, or fails.
    ///
    /// # Panics
    /// It goes on.
    pub async fn ended(&mut self) -> ExitStatus {
        let ended = tokio::time::timeout(END_DEADLINE, self.process.wait()).await;
        ended.expect("the server ends").expect("a child can be waited for")
    }

    /// Starts it again and waits for its end, which comes of itself.
    ///
    /// # Panics
    /// It goes on.
    pub async fn start_to_its_end(&mut self, environment: &[(&str, &str)]) -> ExitStatus {
        let mut command = serve(self.data.path(), &self.log, &self.options);
        self.process = command
            .envs(environment.iter().copied())
            .stdout(Stdio::null())
            .spawn()
            .expect("the program can be started");
        self.ended().await
    }

    /// Deletes its sandboxes, ends it, and tells what of it is left on the host.
    pub async fn end(mut self) -> Footprint {
        self.delete_all().await;
        let status = self.stop(End::Asked).await;
        assert!(status.success(), "the server ended with {status}\n{}", self.log());
        for _ in 0..SETTLE_DEADLINE.as_millis() / 100 {
            if Footprint::of(self.data()).is_empty() {
                break;
            }
            pause(Duration::from_millis(100)).await;
        }
        Footprint::of(self.data())
    }

    pub async fn delete_all(&self) {
        let databases = self.client.databases().await;
        for database in databases.expect("databases can be listed") {
            match self.client.delete_database(&database.id).await {
                Err(error) if error.status() != Some(404) => panic!("{}: {error}", database.id),
                Ok(()) | Err(_) => {}
            }
        }
        let all = self.client.sandboxes(&SandboxFilter::default()).await;
        for sandbox in all.expect("sandboxes can be listed") {
            match self.client.delete_sandbox(&sandbox.id).await {
                Err(error) if error.status() != Some(404) => panic!("{}: {error}", sandbox.id),
                Ok(()) | Err(_) => {}
            }
        }
    }

    /// Waits for a bake or for room where the server asks to.
    ///
    /// # Panics
    /// It is refused otherwise.
    pub async fn create(&self, request: &CreateSandbox) -> api::Sandbox {
        until("a sandbox", CREATE_DEADLINE, async || {
            match self.client.create_sandbox(request).await {
                Ok(sandbox) => Some(sandbox),
                Err(error) => {
                    let again = error.may_retry_after();
                    pause(again.unwrap_or_else(|| panic!("create a sandbox: {error:?}"))).await;
                    None
                }
            }
        })
        .await
    }

    /// For the next start.
    pub fn options_mut(&mut self) -> &mut Options {
        &mut self.options
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The same server, for another key or for none.
    pub fn client_with(&self, key: Option<&str>) -> Client {
        Client::new(&self.url, key).expect("a key is text")
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    pub fn data(&self) -> &Path {
        self.data.path()
    }

    pub fn request(&self, method: Method, path_and_query: &str) -> RequestBuilder {
        self.client.request(method, path_and_query)
    }

    pub async fn get(&self, path_and_query: &str) -> Answer {
        Answer::to(self.request(Method::GET, path_and_query)).await
    }

    pub fn process_id(&self) -> Pid {
        let pid = self.process.id().expect("the server was not waited for yet");
        Pid::from_raw(pid.cast_signed()).expect("a process has a number")
    }

    /// What the server takes for itself; guests are other processes.
    pub fn memory_bytes(&self) -> u64 {
        let status =
            fs::read_to_string(format!("/proc/{}/status", self.process_id().as_raw_nonzero()));
        let status = status.expect("the server runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.expect("a process tells its memory") << 10
    }

    pub fn open_files(&self) -> usize {
        let files = fs::read_dir(format!("/proc/{}/fd", self.process_id().as_raw_nonzero()));
        files.expect("the server runs").count()
    }

    /// The QEMU behind a sandbox: the process that has its root disk open.
    pub fn machine_of(&self, id: &SandboxId) -> Pid {
        self.machine_with(&self.data().join("sandboxes").join(id.to_string()))
    }

    /// The QEMU that has a volume open.
    pub fn machine_of_volume(&self, id: &VolumeId) -> Pid {
        self.machine_with(&self.data().join("volumes").join(id.to_string()))
    }

    fn machine_with(&self, directory: &Path) -> Pid {
        let has_it_open = |pid: &u32| {
            let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            files
                .filter_map(|file| fs::read_link(file.path()).ok())
                .any(|file| file.starts_with(directory))
        };
        let pid = Footprint::of(self.data()).processes.into_iter().find(has_it_open);
        pid.and_then(|pid| Pid::from_raw(pid.cast_signed()))
            .expect("a running sandbox has a machine")
    }

    /// What it has said so far, over all its starts.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Beside a claim that fails: what the server complained of last, which its answers keep to themselves.
    #[expect(clippy::print_stderr, reason = "for whoever reads why a claim has failed")]
    pub(crate) fn tell_complaints(&self) {
        let log = self.log();
        let complaints = log.lines().filter(|line| line.contains("ERROR") || line.contains("WARN"));
        let complaints: Vec<_> = complaints.collect();
        let first = complaints.len().saturating_sub(MOST_COMPLAINTS);
        eprintln!("the server's last complaints ({}):", self.log.display());
        complaints[first..].iter().for_each(|line| eprintln!("    {line}"));
    }
}

impl Drop for Server {
    /// Whatever happened: nothing of a test stays on the host.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.tell_complaints();
        }
        // Fails where it has ended.
        let _ = self.process.start_kill();
        Footprint::of(self.data.path()).remove();
        interrupt::forget(self.data.path());
    }
}

/// The place of everything of Atoll's on this host; its cache of kernels, templates and bakes is shared.
pub fn pool() -> PathBuf {
    std::env::var_os("ATOLL_POOL").map_or_else(|| "/var/lib/atoll".into(), PathBuf::from)
}

fn data_directory(place: &Path) -> TempDir {
    let data = tempfile::Builder::new()
        .prefix("test-")
        .tempdir_in(place)
        .unwrap_or_else(|error| panic!("{error} in {} (`make setup` makes it)", place.display()));
    // Guests' processes run unprivileged and reach their own directory below by name.
    fs::set_permissions(data.path(), Permissions::from_mode(0o711)).expect("it is ours");
    data
}

fn new_log() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let directory = target_directory().join("test-logs");
    fs::create_dir_all(&directory).expect("the target directory can be written");
    let this = std::env::current_exe().ok();
    let suite =
        this.as_ref().and_then(|path| path.file_name()).unwrap_or_default().to_string_lossy();
    let suite = suite.split('-').next().unwrap_or_default();
    let log = directory.join(format!("{suite}-{}.log", COUNT.fetch_add(1, Ordering::Relaxed)));
    File::create(&log).expect("the target directory can be written");
    log
}

async fn launch(data: &Path, log: &Path, options: &Options) -> (Child, String, Option<String>) {
    let mut process = serve(data, log, options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{error}: start {}", program().display()));
    let stdout = process.stdout.take().expect("it was asked for");
    match tokio::time::timeout(START_DEADLINE, announcement(BufReader::new(stdout))).await {
        Ok(Some((url, key))) => (process, url, key),
        Ok(None) | Err(_) => {
            // It may have ended by itself.
            let _ = process.kill().await;
            Footprint::of(data).remove();
            let said = fs::read_to_string(log).unwrap_or_default();
            panic!("the server does not start:\n{said}")
        }
    }
}

fn serve(data: &Path, log: &Path, options: &Options) -> Command {
    let errors = OpenOptions::new().append(true).open(log).expect("the log was made");
    let mut command = Command::new(options.program.clone().unwrap_or_else(program));
    command
        .args(["--json", "serve", "--listen", &options.listen, "--data-dir"])
        .arg(data)
        .args(&options.arguments)
        .env("ATOLL_POOL", pool())
        .env_remove("ATOLL_API_KEY")
        .env_remove("ATOLL_DATA_DIR")
        .envs(options.environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stderr(errors);
    command
}

/// The URL always, and the first time a key as well.
async fn announcement(mut stdout: BufReader<ChildStdout>) -> Option<(String, Option<String>)> {
    let mut text = String::new();
    while stdout.read_line(&mut text).await.ok()? > 0 {
        if let Ok(told) = serde_json::from_str::<serde_json::Value>(&text) {
            let value = |name: &str| told[name].as_str().map(str::to_owned);
            return Some((value("url")?, value("key")));
        }
    }
    None
}
