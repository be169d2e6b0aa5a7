//! What sandboxes of one snapshot do not share: random numbers, names, and the time at which it was taken.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::collections::BTreeSet;

use api::{CreateSnapshot, SnapshotId};
use futures::future::join_all;
use tests::{Host, Sandbox, small, suite};

suite! {
    clones_are_strangers_from_their_first_command_on,
    a_clone_of_an_old_snapshot_knows_what_time_it_is,
    clones_speak_tls_from_their_first_command_on_and_share_no_keys;
    soak: fifty_clones_are_strangers
}

async fn snapshot_of(sandbox: &Sandbox) -> SnapshotId {
    let request = CreateSnapshot::default();
    sandbox.client().create_snapshot(&sandbox.id, &request).await.unwrap().id
}

async fn strangers(host: Host, count: usize) {
    const SIGNS: &str = "cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | sha256sum; echo $RANDOM $RANDOM $RANDOM; \
         cat /etc/machine-id; hostname; python3 -c 'import uuid; print(uuid.uuid4())'";
    let _room = host.room(3).await;
    let server = host.server().await;
    let source = server.sandbox(&small()).await;
    let signs = source.run(SIGNS).await;
    let snapshot = snapshot_of(&source).await;
    source.delete().await;
    let clones = join_all((0..count).map(async |_| {
        let clone = server.restored(&snapshot).await;
        let signs = clone.run(SIGNS).await;
        (clone, signs)
    }));
    let told: Vec<_> = clones.await.into_iter().map(|(_, signs)| signs).chain([signs]).collect();
    let lines: Vec<Vec<_>> = told.iter().map(|signs| signs.lines().collect()).collect();
    for sign in 0..6 {
        let different: BTreeSet<_> = lines.iter().map(|lines| lines[sign]).collect();
        assert_eq!(different.len(), count + 1, "{told:#?}");
    }
    server.client().delete_snapshot(&snapshot).await.unwrap();
}

async fn clones_are_strangers_from_their_first_command_on(host: Host) {
    strangers(host, 8).await;
}

async fn fifty_clones_are_strangers(host: Host) {
    strangers(host, 50).await;
}

async fn a_clone_of_an_old_snapshot_knows_what_time_it_is(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let source = server.sandbox(&small()).await;
    source.run("date -s '3 days ago'").await;
    let snapshot = snapshot_of(&source).await;
    source.clock_is_right().await;
    source.delete().await;
    let clone = server.restored(&snapshot).await;
    clone.clock_is_right().await;
    server.client().delete_snapshot(&snapshot).await.unwrap();
}

/// Runs while the snapshot is taken. Before it draws, it stirs the generator that OpenSSL keeps in its process.
const TLS_SERVER: &str = r"
import os, socket, ssl
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain('/root/certificate', '/root/key')
listener = socket.create_server(('127.0.0.1', 8443))
ssl.RAND_bytes(16)
open('/root/ready', 'x').close()
while True:
    with context.wrap_socket(listener.accept()[0], server_side=True) as peer:
        ssl.RAND_add(os.urandom(32), 32)
        peer.sendall(ssl.RAND_bytes(16).hex().encode())
";

/// Prints what the server drew, then what identifies the client's part of the session and the keys it led to.
const TLS_CLIENT: &str = r"
import socket, ssl
context = ssl.create_default_context(cafile='/root/certificate')
context.keylog_filename = '/root/keys'
with context.wrap_socket(socket.create_connection(('127.0.0.1', 8443)), server_hostname='localhost') as peer:
    print(peer.recv(100).decode())
lines = [line.split() for line in open(context.keylog_filename) if line[0] != '#']
print(lines[0][1], *sorted(line[2] for line in lines))
";

const CERTIFICATE: &str = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 9 -subj /CN=localhost \
     -addext subjectAltName=DNS:localhost -keyout /root/key -out /root/certificate";

async fn clones_speak_tls_from_their_first_command_on_and_share_no_keys(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let source = server.sandbox(&small()).await;
    source.run(CERTIFICATE).await;
    source.write("/root/server.py", TLS_SERVER).await;
    source.write("/root/client.py", TLS_CLIENT).await;
    source.run("nohup python3 /root/server.py > /root/server.log 2>&1 & until test -e /root/ready; do sleep 0.1; done").await;
    // By this clock, the certificate is not valid yet.
    source.run("date -s '3 days ago'").await;
    let snapshot = snapshot_of(&source).await;
    source.delete().await;
    let clones = join_all((0..2).map(async |_| {
        let clone = server.restored(&snapshot).await;
        let first = clone.run("python3 /root/client.py").await;
        let (drawn, session) = first.trim().split_once('\n').unwrap();
        (drawn.to_owned(), session.to_owned())
    }));
    let told = clones.await;
    let [(one_drew, one), (other_drew, other)] = &told[..] else { panic!("{told:?}") };
    // Four secrets at least, beside the client's random number.
    assert!(one.split(' ').count() > 4, "{told:?}");
    assert!(one.split(' ').all(|secret| !other.contains(secret)), "{told:?}");
    // Of the process that was running: without the stirring, both would have drawn the same.
    assert_ne!(one_drew, other_drew);
    server.client().delete_snapshot(&snapshot).await.unwrap();
}
