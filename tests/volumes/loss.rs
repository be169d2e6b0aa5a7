//! What is on a volume after its machine, its server or both ended, asked to or not.

use std::time::Duration;

use api::{ErrorCode, UpdateLifecycle, Volume};
use client::ExecEvent;
use rustix::process::{Signal, kill_process};
use tests::{End, Host, Server, command, has_failed, until};

use super::{holder, is_clean, read, refused, volume, with, written};

/// Appends numbered records to a file, and prints the number of each once it is on the disk.
const WRITER: &str = r#"exec python3 -uc '
import os, itertools
file = os.open("/mnt/lost/records", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
begin = os.fstat(file).st_size // 4096
for number in itertools.count(begin):
    os.write(file, (b"%d " % number).ljust(4096, b"x"))
    other = os.open("/mnt/lost/%d" % (number % 64), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(other, os.urandom(1000 + number * 97 % 60000))
    os.close(other)
    os.fsync(file)
    print(number)
'"#;

/// How the machine of a writer ends.
#[derive(Clone, Copy)]
enum Loss {
    Machine,
    MachineAndServer,
}

/// Kills it in the midst of its writes; `acknowledged` is the last record that was told to be on the disk.
async fn lose(
    server: &mut Server,
    volume: &Volume,
    moment: Duration,
    loss: Loss,
    acknowledged: &mut Option<u64>,
) {
    let sandbox = server.create(&with([written("lost")])).await;
    let client = server.client().clone();
    let kept = "python3 - <<'end'\nimport os\nsize = os.stat('/mnt/lost/records').st_size if os.path.exists('/mnt/lost/records') else 0\n\
        data = open('/mnt/lost/records', 'rb').read() if size else b''\n\
        assert all(data[n * 4096:].startswith(b'%d x' % n) for n in range(size // 4096)), 'a record is torn'\nprint(size // 4096)\nend";
    let found = client.exec(&sandbox.id, &command(kept)).await.unwrap();
    assert_eq!(found.exit_code, 0, "{found:?}");
    let found: u64 = found.stdout.trim().parse().unwrap();
    assert!(acknowledged.is_none_or(|last| found > last), "{found} records of {acknowledged:?}");

    let mut events = client.exec_stream(&sandbox.id, &command(WRITER)).await.unwrap();
    let machine = server.machine_of(&sandbox.id);
    let mut printed = String::new();
    let mut kill_at = None;
    loop {
        let next = match kill_at {
            None => events.next().await,
            Some(at) => match tokio::time::timeout_at(at, events.next()).await {
                Ok(next) => next,
                Err(_) => break,
            },
        };
        let Ok(Some(ExecEvent::Stdout(chunk))) = next else { panic!("{next:?}") };
        printed.push_str(&chunk);
        kill_at.get_or_insert_with(|| tokio::time::Instant::now() + moment);
    }
    if let Loss::MachineAndServer = loss {
        server.stop(End::Killed).await;
    }
    kill_process(machine, Signal::KILL).unwrap();
    // What was on its way counts as well: it was told after it was on the disk.
    while let Ok(Ok(Some(ExecEvent::Stdout(chunk)))) =
        tokio::time::timeout(Duration::from_secs(5), events.next()).await
    {
        printed.push_str(&chunk);
    }
    let whole = printed.rfind('\n').map_or("", |end| &printed[..end]);
    *acknowledged = Some(whole.lines().last().unwrap().parse().unwrap());
    if let Loss::MachineAndServer = loss {
        server.start_again().await;
        assert_eq!(holder(server, "lost").await, None, "free once a server runs");
    } else {
        until("the volume is free", Duration::from_secs(30), async || {
            holder(server, "lost").await.is_none().then_some(())
        })
        .await;
    }
    is_clean(server, volume).await;
    has_failed(server, &sandbox.id).await;
}

async fn kills(host: Host, count: u64) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    let volume = server.client().create_volume(&super::wanted("lost", 512)).await.unwrap();
    let mut acknowledged = None;
    for turn in 0..count {
        let loss = if turn % 2 == 0 { Loss::Machine } else { Loss::MachineAndServer };
        let moment = Duration::from_millis(200 + turn * 379 % 900);
        lose(&mut server, &volume, moment, loss, &mut acknowledged).await;
    }
    let reader = server.create(&with([read("lost")])).await;
    let found = server
        .client()
        .exec(&reader.id, &command("echo $(($(stat -c %s /mnt/lost/records) / 4096))"))
        .await
        .unwrap();
    assert!(found.stdout.trim().parse::<u64>().unwrap() > acknowledged.unwrap());
    host.end(server).await;
}

pub(super) async fn what_was_fsynced_is_there_after_a_kill(host: Host) {
    kills(host, 2).await;
}

pub(super) async fn what_was_fsynced_is_there_after_twenty_kills(host: Host) {
    kills(host, 20).await;
}

pub(super) async fn a_server_that_is_killed_leaves_volumes_with_their_sandboxes(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    volume(&server, "held").await;
    let sandbox = server.create(&with([written("held")])).await;
    let run = async |server: &Server, cmd: &str| {
        let result = server.client().exec(&sandbox.id, &command(cmd)).await.unwrap();
        assert_eq!(result.exit_code, 0, "{result:?}");
        result.stdout
    };
    run(&server, "(while sleep 0.1; do date >> /mnt/held/log; done) >/dev/null 2>&1 &").await;
    for end in [End::Killed, End::Asked] {
        server.restart(end).await;
        assert_eq!(holder(&server, "held").await, Some(sandbox.id));
        for request in [with([written("held")]), with([read("held")])] {
            assert_eq!(refused(&server, &request).await, ErrorCode::Conflict);
        }
        let lines = run(&server, "wc -l < /mnt/held/log").await;
        until("it is written on", Duration::from_secs(20), async || {
            (run(&server, "wc -l < /mnt/held/log").await != lines).then_some(())
        })
        .await;
    }
    // A new server can still make it larger, save it and let go of it.
    let grow = api::UpdateVolume { size_mb: Some(128), size_gb: None };
    server.client().update_volume(&super::name("held"), &grow).await.unwrap();
    assert!(
        run(&server, "df -m --output=size /mnt/held | tail -1")
            .await
            .trim()
            .parse::<u64>()
            .unwrap()
            > 100
    );
    server.client().delete_sandbox(&sandbox.id).await.unwrap();
    assert_eq!(holder(&server, "held").await, None);
    let held = server.client().volume(&super::name("held")).await.unwrap();
    is_clean(&server, &held).await;
    host.end(server).await;
}

pub(super) async fn what_was_not_synced_is_there_after_a_delete_and_an_expiry(host: Host) {
    let server = host.server().await;
    let volumes = [volume(&server, "deleted").await, volume(&server, "expired").await];
    // Somebody who does not let go by himself has files open.
    let write = |name: &str| {
        format!(
            "head -c 3000000 /dev/zero | tr '\\0' v > /mnt/{name}/file; \
             setsid sh -c 'trap \"\" TERM; exec 3>>/mnt/{name}/file; echo last >&3; while :; do sleep 1; done' >/dev/null 2>&1 & \
             until tail -1 /mnt/{name}/file | grep -q last; do sleep 0.05; done"
        )
    };
    let deleted = host.sandbox_of(&with([written("deleted")])).await;
    deleted.run(&write("deleted")).await;
    deleted.delete().await;
    let expired = host.sandbox_of(&with([written("expired")])).await;
    expired.run(&write("expired")).await;
    let soon = UpdateLifecycle { ttl_seconds: Some(1), ..UpdateLifecycle::default() };
    server.client().update_lifecycle(&expired.id, &soon).await.unwrap();
    until("it has expired", Duration::from_secs(40), async || {
        holder(&server, "expired").await.is_none().then_some(())
    })
    .await;
    drop(expired);
    for volume in &volumes {
        is_clean(&server, volume).await;
    }
    let reader = host.sandbox_of(&with([read("deleted"), read("expired")])).await;
    let shown = reader
        .run(
            "for at in /mnt/deleted /mnt/expired; do stat -c %s $at/file; tail -c 5 $at/file; done",
        )
        .await;
    assert_eq!(shown, "3000005\nlast\n3000005\nlast\n");
}
