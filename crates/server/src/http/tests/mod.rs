//! The API over a real connection, before a real agent: only the virtual machine between them is missing.

mod access;
mod archives;
mod clock;
mod execs;
mod files;
mod idempotency;
mod limits;
mod machine_execs;
mod ports;
mod terminals;
mod uploads;

use std::{
    collections::BTreeMap,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::Arc,
    time::Duration,
};

use api::{AccountId, CreateKey, ErrorBody, SandboxId, Scope};
use machine::guest::Guest;
use reqwest::{Client, Method, RequestBuilder, Response};
use store::layout::Layout;
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};

use crate::{
    App, Config,
    buffers::Buffers,
    clock::Clock,
    config::Capacity,
    database::Databases,
    db::{Db, testing},
    http::{Connections, Idempotency, Rate},
    keys::Keys,
    metrics::Metrics,
    previews::Previews,
    sandbox::{ExecLimits, Sandboxes},
    volume::Volumes,
};

const KEY: &str = "the-key-of-the-setting";

/// A server with one running sandbox, whose guest is this host.
struct Server {
    app: Arc<App>,
    url: String,
    sandbox: SandboxId,
    client: Client,
    /// Where the sandbox's files may go.
    directory: tempfile::TempDir,
    shutdown: Option<oneshot::Sender<()>>,
    serving: Option<JoinHandle<()>>,
    _database: testing::Database,
}

impl Server {
    async fn start() -> Self {
        Self::start_with(BTreeMap::new()).await
    }

    /// The sandbox was created with this environment.
    async fn start_with(environment: BTreeMap<String, String>) -> Self {
        Self::start_at(Clock::default(), environment).await
    }

    async fn start_at(clock: Clock, environment: BTreeMap<String, String>) -> Self {
        Self::start_as(clock, environment, Capacity::default()).await
    }

    async fn start_limited(capacity: Capacity) -> Self {
        Self::start_as(Clock::default(), BTreeMap::new(), capacity).await
    }

    async fn start_as(
        clock: Clock,
        environment: BTreeMap<String, String>,
        capacity: Capacity,
    ) -> Self {
        let config = Config { capacity, ..Config::testing() };
        Self::start_configured(clock, environment, config).await
    }

    async fn start_keeping(execs: ExecLimits) -> Self {
        let config = Config { execs, ..Config::testing() };
        Self::start_configured(Clock::default(), BTreeMap::new(), config).await
    }

    async fn start_configured(
        clock: Clock,
        environment: BTreeMap<String, String>,
        config: Config,
    ) -> Self {
        let (database, directory) = (testing::sqlite(), tempfile::tempdir().unwrap());
        let db = Db::connect(database.url()).await.unwrap();
        let data_dir = directory.path().join("data");
        let config = Config {
            cache_dir: data_dir.join("cache"),
            data_dir,
            api_key: Some(KEY.to_owned()),
            ..config
        };
        let (keys, _) = Keys::open(
            db.clone(),
            clock.clone(),
            config.api_key.clone(),
            Arc::clone(&config.plans),
        )
        .await
        .unwrap();
        let layout = Layout::create(&config.data_dir, &config.cache_dir).unwrap();
        let limits = config.volumes.clone();
        let volumes = Volumes::new(db.clone(), clock.clone(), layout, limits);
        let sandboxes = Sandboxes::testing(db.clone(), clock.clone(), &config).await;
        let templates = sandboxes.templates();
        let sandbox = SandboxId::random();
        sandboxes.insert_running(
            &AccountId::default_account(),
            sandbox,
            guest().await,
            environment,
        );
        let previews = Previews::open(db.clone(), clock.clone()).await.unwrap();
        let databases = Databases::open(db.clone(), clock.clone(), Arc::clone(&sandboxes), &config)
            .await
            .unwrap();
        let app = Arc::new(App {
            previews,
            databases,
            buffers: Buffers::new(config.capacity.buffer_bytes),
            rate: Rate::new(config.capacity.rate_limit),
            idempotency: Idempotency::default(),
            connections: Connections::new(config.capacity.most_connections),
            config,
            clock,
            keys,
            metrics: Arc::new(Metrics::new()),
            sandboxes,
            volumes,
            templates,
            db,
        });

        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (shutdown, stopped) = oneshot::channel();
        let serving = tokio::spawn(super::serve(Arc::clone(&app), listener, async {
            let _ = stopped.await;
        }));
        let client = Client::builder().no_proxy().build().unwrap();
        Self {
            app,
            url,
            sandbox,
            client,
            directory,
            shutdown: Some(shutdown),
            serving: Some(serving),
            _database: database,
        }
    }

    /// With the key of the setting.
    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.anonymous(method, path).bearer_auth(KEY)
    }

    fn anonymous(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("{}{path}", self.url)).timeout(Duration::from_secs(60))
    }

    /// A route of the sandbox.
    fn inside(&self, method: Method, route: &str) -> RequestBuilder {
        self.request(method, &format!("/v1/sandboxes/{}{route}", self.sandbox))
    }

    async fn key(&self, scope: Scope) -> String {
        let request = CreateKey { scope: Some(scope), ..CreateKey::default() };
        self.app.keys.create(&AccountId::default_account(), request).await.unwrap().token
    }

    async fn stop(mut self) {
        self.shutdown.take();
        if let Some(serving) = self.serving.take() {
            tokio::time::timeout(Duration::from_secs(20), serving)
                .await
                .expect("the server stops")
                .unwrap();
        }
    }
}

/// This host, as a sandbox sees its own.
async fn guest() -> Guest {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::thread::spawn(move || agent::serve(OwnedFd::from(theirs), agent::Options::hosted()));
    ours.set_nonblocking(true).unwrap();
    Guest::connect(tokio::net::UnixStream::from_std(ours).unwrap(), Duration::from_secs(10))
        .await
        .unwrap()
}

/// Checks what is the same for every refusal, and returns its code.
async fn refusal(response: Response) -> api::ErrorCode {
    let (status, id) = (response.status(), response.headers()["x-request-id"].clone());
    let text = response.text().await.unwrap();
    let body: ErrorBody =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"));
    assert_eq!(status.as_u16(), body.code.status(), "{text}");
    assert_eq!(body.error, body.detail);
    assert!(!body.error.is_empty());
    assert_eq!(id, body.request_id);
    body.code
}
