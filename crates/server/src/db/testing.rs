//! Databases for tests: a SQLite file, and a PostgreSQL cluster of its own that ends with the test process.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use api::{AccountId, DatabaseId, DatabaseSize, NetworkPolicy, SandboxId};
use machine::network::Traffic;
use tokio::sync::OnceCell;

use super::{DatabaseRow, SandboxRow};
use crate::{
    database::{Credentials, DatabaseState},
    sandbox::{State, Target},
};

pub(crate) enum Database {
    Sqlite { url: String, _directory: tempfile::TempDir },
    Postgres { url: String },
}

impl Database {
    pub(crate) fn url(&self) -> &str {
        match self {
            Self::Sqlite { url, .. } | Self::Postgres { url } => url,
        }
    }
}

/// A fresh one of each kind.
pub(crate) async fn databases() -> Vec<Database> {
    vec![sqlite(), postgres().await]
}

pub(crate) fn sqlite() -> Database {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    Database::Sqlite {
        url: format!("sqlite:{}", directory.path().join("rows.sqlite").display()),
        _directory: directory,
    }
}

/// A fresh database in the cluster that the tests of this process share.
async fn postgres() -> Database {
    static CLUSTER: OnceCell<PathBuf> = OnceCell::const_new();
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let directory = CLUSTER
        .get_or_init(|| async {
            tokio::task::spawn_blocking(start_cluster).await.expect("the start does not panic")
        })
        .await;
    let name = format!("test{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let socket = directory.display().to_string();
    let made = tokio::process::Command::new("createdb")
        .args(["-h", &socket, "-U", "postgres", &name])
        .status()
        .await;
    assert!(made.is_ok_and(|status| status.success()), "createdb failed");
    Database::Postgres { url: format!("postgres:///{name}?host={socket}&user=postgres") }
}

/// One that is being made.
pub(crate) fn database_row(port: u16) -> DatabaseRow {
    DatabaseRow {
        id: DatabaseId::random(),
        account: AccountId::default_account(),
        label: String::new(),
        size: DatabaseSize::OneG,
        cpu: 1,
        always_on: false,
        idle_seconds: 300,
        port,
        state: DatabaseState::Provisioning,
        error: None,
        credentials: Credentials::random(),
        origin: Credentials::of_template(),
        cloned_from: None,
        target_time: None,
        created_at: 1,
    }
}

/// A database's.
pub(crate) fn sandbox_row(id: SandboxId) -> SandboxRow {
    SandboxRow {
        id,
        account: AccountId::default_account(),
        template: "postgres".parse().expect("it is a template's name"),
        bake: "key".to_owned(),
        from_snapshot: None,
        cpu: 1,
        memory_mb: 1024,
        disk_mb: 2048,
        state: State::Creating,
        target: Target::Running,
        metadata: BTreeMap::new(),
        environment: BTreeMap::new(),
        created_at: 1,
        ttl_seconds: None,
        expires_at: None,
        ttl_left_ms: None,
        idle_seconds: None,
        slot: None,
        boot_ms: 0,
        error: None,
        network: NetworkPolicy::default(),
        past_traffic: Traffic::default(),
        name: None,
        durable: true,
        keeps_root: false,
        cold_boot: false,
        managed: true,
        databases: Vec::new(),
    }
}

/// Debian keeps the server's programs off the PATH.
fn programs() -> PathBuf {
    let mut found: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .expect("PostgreSQL is installed for the tests (package postgresql)")
        .filter_map(|entry| Some(entry.ok()?.path().join("bin")))
        .filter(|path| path.join("initdb").exists())
        .collect();
    found.sort();
    found.pop().expect("PostgreSQL has its programs")
}

/// Makes a cluster in `$2/data` with the programs in `$1` and runs it until process `$3` is gone, then removes `$2`.
/// PostgreSQL refuses to run as root; where the tests do, it runs as `postgres`.
const KEEPER: &str = r#"
    as_postgres() {
        if [ "$(id -u)" = 0 ]; then exec setpriv --reuid=postgres --regid=postgres --clear-groups -- "$@"; else exec "$@"; fi
    }
    (as_postgres "$1/initdb" --no-sync --auth=trust --encoding=UTF8 --username=postgres --pgdata "$2/data") || exit 1
    as_postgres "$1/postgres" -D "$2/data" -k "$2" -c listen_addresses= -c fsync=off &
    server=$!
    while kill -0 "$3" 2>/dev/null; do sleep 0.2; done
    kill -INT $server; wait $server; rm -rf "$2"
"#;

/// Returns the directory of its socket.
#[expect(
    clippy::zombie_processes,
    reason = "the keeper outlives this process, to clean up after it"
)]
fn start_cluster() -> PathBuf {
    let directory = tempfile::Builder::new()
        .prefix("pg")
        .tempdir()
        .expect("a temporary directory can be made")
        .keep();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o777))
        .expect("the directory is ours");
    let log = fs::File::create(directory.join("log")).expect("the directory is ours");
    Command::new("sh")
        .args(["-c", KEEPER, "sh"])
        .arg(programs())
        .arg(&directory)
        .arg(std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("a descriptor can be copied"))
        .stderr(log)
        .spawn()
        .expect("a shell can be started");
    let ready = (0..600).any(|_| {
        let mut question = Command::new(programs().join("pg_isready"));
        let ready = question
            .arg("-q")
            .arg("-h")
            .arg(&directory)
            .status()
            .is_ok_and(|status| status.success());
        if !ready {
            wait_a_little();
        }
        ready
    });
    assert!(
        ready,
        "PostgreSQL does not answer; {}",
        fs::read_to_string(directory.join("log")).unwrap_or_default()
    );
    directory
}

#[expect(
    clippy::disallowed_methods,
    reason = "on a blocking thread, between two looks at another process"
)]
fn wait_a_little() {
    std::thread::sleep(std::time::Duration::from_millis(100));
}
