//! A pool without room: what cannot be made is refused and leaves nothing, what runs goes on, and everything works again
//! once there is room.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use api::{CreateSnapshot, SandboxStatus};
use client::Method;
use tests::{Answer, End, Host, Options, Server, command, pool, psql, small, sql, suite, until};

suite! {
    a_full_pool_refuses_creates_and_takes_them_again,
    a_guest_that_fills_the_pool_stands_still_and_goes_on,
    a_sandbox_can_be_deleted_on_a_full_pool,
    what_cannot_be_saved_for_want_of_room_runs_on,
    a_server_starts_again_beside_a_guest_that_stands_still,
    a_database_refuses_writes_before_the_pool_is_full;
    soak:
}

/// For a copy of a root disk: the templates lie on the other file system.
const IMAGE_BYTES: u64 = 6 << 30;
const RESERVE_MIB: u64 = 64;
/// Of a guest under emulation on a host that has more to do.
const DONE: Duration = Duration::from_secs(120);

/// A file system of its own, in a sparse file on the pool.
struct Image {
    file: PathBuf,
    mounted: PathBuf,
}

impl Image {
    fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("image-").tempdir_in(pool()).unwrap();
        let directory = directory.keep();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o711)).unwrap();
        let (file, mounted) = (directory.join("xfs"), directory.join("mounted"));
        File::create(&file).unwrap().set_len(IMAGE_BYTES).unwrap();
        fs::create_dir(&mounted).unwrap();
        let image = Self { file, mounted };
        succeeds(Command::new("mkfs.xfs").arg("-q").arg(&image.file));
        succeeds(Command::new("mount").args(["-o", "loop"]).arg(&image.file).arg(&image.mounted));
        image
    }

    /// So many bytes are left afterwards, or less.
    fn fill(&self, left: u64) {
        let filler = File::create(self.mounted.join("filler")).unwrap();
        let (mut length, mut step) = (0, 1 << 30);
        while step >= 4096 {
            let fits = self.free().checked_sub(left).is_some_and(|spare| spare >= step)
                && rustix::fs::fallocate(
                    &filler,
                    rustix::fs::FallocateFlags::empty(),
                    length,
                    step,
                )
                .is_ok();
            if fits {
                length += step;
            } else {
                step /= 2;
            }
        }
    }

    async fn make_room(&self) {
        let filler = self.mounted.join("filler");
        let freed = fs::metadata(&filler).unwrap().len();
        // The blocks of a file that is only removed are free some time later, also for the next filling.
        File::create(&filler).unwrap();
        fs::remove_file(filler).unwrap();
        // Somebody may have written meanwhile.
        until("what was freed is free", DONE, async || (self.free() >= freed / 2).then_some(()))
            .await;
    }

    fn free(&self) -> u64 {
        let room = rustix::fs::statvfs(&self.mounted).unwrap();
        room.f_bavail * room.f_frsize
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // A server that did not end keeps it busy.
        let _ = Command::new("umount").arg("--lazy").arg(&self.mounted).status();
        let _ = fs::remove_dir_all(self.file.parent().unwrap());
    }
}

fn succeeds(command: &mut Command) {
    let status = command.status().unwrap();
    assert!(status.success(), "{command:?}: {status}");
}

async fn server_on(image: &Image) -> Server {
    let arguments = [
        "--cache-dir".to_owned(),
        pool().join("cache").display().to_string(),
        format!("--disk-reserve={RESERVE_MIB}"),
        "--ready-machines=0".to_owned(),
    ];
    let options = Options {
        arguments: arguments.to_vec(),
        data_in: Some(image.mounted.clone()),
        ..Options::default()
    };
    Server::start_with(options).await
}

async fn refused_create(server: &Server) -> Answer {
    Answer::to(server.request(Method::POST, "/v1/sandboxes").json(&small())).await
}

fn directories(server: &Server) -> usize {
    let count = |path: &Path| fs::read_dir(path).unwrap().count();
    count(&server.data().join("sandboxes")) + count(&server.data().join("machines"))
}

async fn a_full_pool_refuses_creates_and_takes_them_again(host: Host) {
    let image = Image::new();
    let server = server_on(&image).await;
    let _room = host.room(2).await;
    let running = server.create(&small()).await;
    let before = directories(&server);
    assert!(server.log().contains("different file systems"), "it says that creates copy");

    // Below the reserve nothing is begun; above it the copy of the disk finds no room.
    for left in [(RESERVE_MIB / 2) << 20, (RESERVE_MIB + 100) << 20] {
        image.fill(left);
        let refused = refused_create(&server).await;
        assert_eq!(refused.refusal(), (507, "capacity_exceeded".to_owned()), "{left}");
        until("nothing half-made is left", Duration::from_secs(20), async || {
            let listed = server.get("/v1/sandboxes").await.json();
            let is_gone = listed.as_array().unwrap().len() == 1;
            (is_gone && directories(&server) == before).then_some(())
        })
        .await;
        let alive = server.client().exec(&running.id, &command("echo alive")).await.unwrap();
        assert_eq!(alive.stdout, "alive\n");
    }
    image.make_room().await;
    let fresh = server.create(&small()).await;
    let works = server.client().exec(&fresh.id, &command("echo works")).await.unwrap();
    assert_eq!(works.stdout, "works\n");
    host.end(server).await;
}

/// Writes more than there is room for, and tells whether all of it can be read again.
const WRITE: &str = "yes 0123456789 | head -c 300000000 > /root/large && sync && yes 0123456789 | head -c 300000000 | cmp - /root/large && echo same";

/// Its command ends once there is room.
async fn stands_still(
    server: &Server,
    image: &Image,
) -> (api::Sandbox, tokio::task::JoinHandle<api::ExecResult>) {
    let sandbox = server.create(&small()).await;
    server.client().exec(&sandbox.id, &command("sync")).await.unwrap();
    image.fill(100 << 20);
    let (client, id) = (server.client().clone(), sandbox.id);
    let writing = tokio::spawn(async move { client.exec(&id, &command(WRITE)).await.unwrap() });
    until("the sandbox says that it stands still", Duration::from_secs(120), async || {
        let shown = server.client().sandbox(&sandbox.id).await.unwrap();
        assert_eq!(shown.status, SandboxStatus::Running);
        shown.error.filter(|error| error.contains("disk is full"))
    })
    .await;
    (sandbox, writing)
}

async fn a_guest_that_fills_the_pool_stands_still_and_goes_on(host: Host) {
    let image = Image::new();
    let server = server_on(&image).await;
    let _room = host.room(1).await;
    let (sandbox, writing) = stands_still(&server, &image).await;
    let refused = server.client().exec(&sandbox.id, &command("echo no")).await.unwrap_err();
    assert_eq!(refused.status(), Some(507));
    image.make_room().await;
    let written = writing.await.unwrap();
    assert_eq!((written.stdout.as_str(), written.exit_code), ("same\n", 0), "{written:?}");
    until("the sandbox no longer says so", Duration::from_secs(20), async || {
        let shown = server.client().sandbox(&sandbox.id).await.unwrap();
        shown.error.is_none().then_some(())
    })
    .await;
    host.end(server).await;
}

async fn a_sandbox_can_be_deleted_on_a_full_pool(host: Host) {
    let image = Image::new();
    let server = server_on(&image).await;
    let _room = host.room(1).await;
    let sandbox = server.create(&small()).await;
    image.fill(0);
    server.client().delete_sandbox(&sandbox.id).await.unwrap();
    assert_eq!(server.get(&format!("/v1/sandboxes/{}", sandbox.id)).await.status, 404);
    assert_eq!(directories(&server), 0);
    image.make_room().await;
    server.create(&small()).await;
    host.end(server).await;
}

async fn what_cannot_be_saved_for_want_of_room_runs_on(host: Host) {
    let image = Image::new();
    let server = server_on(&image).await;
    let _room = host.room(1).await;
    let sandbox = server.sandbox(&small()).await;
    let client = server.client();
    let held = sandbox.hold().await;
    sandbox.run("head -c 220000000 /dev/urandom > /dev/shm/much; sync").await;
    let entries = |name: &str| fs::read_dir(server.data().join(name)).unwrap().count();
    // At the first step, and when much was written already: far less than was put into its memory.
    for left in [20 << 20, 140 << 20] {
        image.fill(left);
        for action in ["snapshots", "hibernate", "fork"] {
            let refused = Answer::to(sandbox.request(Method::POST, &format!("/{action}"))).await;
            assert_eq!(refused.refusal(), (507, "capacity_exceeded".to_owned()), "{action} {left}");
            assert_eq!((entries("snapshots"), entries("temporary")), (0, 0), "{action} {left}");
            assert_eq!(sandbox.held().await, held, "{action} {left}");
        }
        assert!(client.snapshots(None).await.unwrap().is_empty());
        image.make_room().await;
    }
    client.hibernate(&sandbox.id).await.unwrap();
    assert_eq!(sandbox.held().await, held);
    let snapshot = client.create_snapshot(&sandbox.id, &CreateSnapshot::default()).await.unwrap();
    client.delete_snapshot(&snapshot.id).await.unwrap();
    drop(sandbox);
    host.end(server).await;
}

async fn a_server_starts_again_beside_a_guest_that_stands_still(host: Host) {
    let image = Image::new();
    let mut server = server_on(&image).await;
    let _room = host.room(1).await;
    let (sandbox, writing) = stands_still(&server, &image).await;
    writing.abort();
    server.restart(End::Killed).await;
    assert_eq!(server.client().sandbox(&sandbox.id).await.unwrap().status, SandboxStatus::Running);
    image.make_room().await;
    until("it goes on", Duration::from_secs(120), async || {
        let look = command("test -s /root/large && echo on");
        let result = server.client().exec(&sandbox.id, &look).await;
        result.ok().filter(|result| result.stdout == "on\n")
    })
    .await;
    host.end(server).await;
}

async fn a_database_refuses_writes_before_the_pool_is_full(host: Host) {
    let _room = host.room(1).await;
    let image = Image::new();
    let server = server_on(&image).await;
    let client = server.client();
    let database = client.create_database(&api::CreateDatabase::default()).await.unwrap();
    let database = client.database_ready(&database.id, DONE * 2).await.unwrap();
    let url = database.connection.clone().unwrap().connection_url;
    sql(&url, "CREATE TABLE kept (x int); INSERT INTO kept VALUES (7)").await;
    let _session = tokio::process::Command::new("psql")
        .args([url.as_str(), "-XAtqc", "SELECT pg_sleep(3000)"])
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    image.fill((RESERVE_MIB / 2 - 4) << 20);
    until("writes are refused", DONE, async || client.database(&database.id).await.unwrap().error)
        .await;
    let refused = psql(&url, "INSERT INTO kept VALUES (8)").await;
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("read-only transaction"), "{said}");
    assert_eq!(sql(&url, "SELECT x FROM kept").await, "7");
    image.make_room().await;
    until("writes are taken", DONE, async || {
        psql(&url, "INSERT INTO kept VALUES (9)").await.status.success().then_some(())
    })
    .await;
    assert_eq!(sql(&url, "SELECT count(*) FROM kept WHERE x = 7").await, "1");
    host.end(server).await;
}
