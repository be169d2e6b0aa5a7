//! Sandboxes with volumes whose machines have run before anybody asked for them.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use api::CreateSandbox;
use tests::{End, Host, Options, Sandbox, Server, address_of_the_host, command, pause, until};
use tokio::{io::AsyncWriteExt, net::TcpListener, process::Command};

use super::{read, swallowing, volume, with, written};

const DEADLINE: Duration = Duration::from_secs(300);
/// Above the template's.
const DISK_MB: u64 = 16_384;
/// What a rehearsal might leave.
const LOOK: &str = "ls -A /tmp /mnt; cut -d' ' -f2,3 /proc/mounts; cut -d' ' -f2 /etc/hosts | wc -w; \
    programs=$(grep -l . /proc/[0-9]*/cmdline); echo \"$programs\" | wc -l";

async fn server(arguments: Vec<String>) -> Server {
    let environment = vec![("ATOLL_LOG", "info,server::sandbox::ahead=debug".to_owned())];
    Server::start_with(Options { arguments, environment, ..Options::default() }).await
}

/// Such a machine is made after somebody could have used one.
async fn out_of_one_ahead(host: &Host, server: &Server, request: &CreateSandbox) -> Sandbox {
    until("a machine that has run ahead is taken", DEADLINE, async || {
        let sandbox = host.sandbox_on(server, request).await;
        let id = sandbox.id.to_string();
        let taken = |line: &str| line.contains("took a machine over") && line.contains(&id);
        if server.log().lines().any(taken) {
            return Some(sandbox);
        }
        sandbox.delete().await;
        pause(Duration::from_secs(1)).await;
        None
    })
    .await
}

async fn greeter() -> SocketAddr {
    let listener = TcpListener::bind((address_of_the_host(), 0)).await.unwrap();
    let bound = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            // Whoever has gone again did connect.
            let _ = connection.write_all(b"hello").await;
        }
    });
    bound
}

pub(super) async fn a_machine_that_has_run_ahead_is_like_any_other(host: Host) {
    let greeter = greeter().await;
    let allowed = format!("{}/32:{}", greeter.ip(), greeter.port());
    let server = server(vec!["--egress-allow".to_owned(), allowed]).await;
    for name in ["first", "second", "third"] {
        volume(&server, name).await;
    }
    let fresh = host.sandbox_on(&server, &with([written("first"), read("third")])).await;
    let expected = fresh.run(LOOK).await;
    fresh.delete().await;

    let first = out_of_one_ahead(&host, &server, &with([written("first"), read("third")])).await;
    assert_eq!(first.run(LOOK).await, expected, "nothing is left of what it has done");
    first.run("echo kept > /mnt/first/file").await;
    // The next one stands still for a while.
    pause(Duration::from_secs(5)).await;
    let larger = CreateSandbox { disk_mb: Some(DISK_MB), ..with([written("second")]) };
    let second = out_of_one_ahead(&host, &server, &larger).await;

    let mut random = BTreeSet::new();
    for sandbox in [&first, &second] {
        sandbox.clock_is_right().await;
        let id = sandbox.id.to_string();
        let names = sandbox.run("cat /etc/machine-id /etc/hostname; hostname").await;
        let host_name = format!("sandbox-{}", &id[..8]);
        let names: Vec<_> = names.lines().collect();
        assert_eq!(names, [id.replace('-', "").as_str(), &host_name, &host_name]);
        assert!(sandbox.run("cat /etc/hosts").await.contains(&host_name));
        random.insert(sandbox.run("cat /proc/sys/kernel/random/uuid").await);
        random.insert(sandbox.run("head -c 16 /dev/urandom | od -An -tx1").await);
        let greeting = format!(
            "timeout 20 bash -c 'exec 3<>/dev/tcp/{}/{} && head -c 5 <&3'",
            greeter.ip(),
            greeter.port()
        );
        assert_eq!(sandbox.run(&greeting).await, "hello");
    }
    assert_eq!(random.len(), 4);
    assert_eq!(second.run("mountpoint -q /mnt/second && ls /mnt").await, "second\n");
    let size = second.run("df -m --output=size / | tail -1").await;
    assert!(size.trim().parse::<u64>().unwrap() > DISK_MB * 9 / 10, "{size}");
    let others = "vdc vdd vde vdf vdg vdh vdi vdj vdk vdl vdm vdn vdo vdp vdq";
    assert_eq!(swallowing(&second, others).await, "");
    first.delete().await;
    let reader = out_of_one_ahead(&host, &server, &with([read("first")])).await;
    assert_eq!(reader.run("cat /mnt/first/file").await, "kept\n");
    reader.delete().await;
    second.delete().await;
    host.end(server).await;
}

/// Of machines that are nobody's.
fn disks(server: &Server) -> Vec<PathBuf> {
    let machines = std::fs::read_dir(server.data().join("machines")).unwrap().flatten();
    machines.map(|machine| machine.path().join("rootfs")).filter(|disk| disk.exists()).collect()
}

/// What comes from the guest of this disk is for nobody.
async fn is_shut(server: &Server, disk: &Path) -> bool {
    let instance = std::fs::read_to_string(server.data().join("instance")).unwrap();
    let slot = disk.parent().unwrap().file_name().unwrap().to_str().unwrap();
    let namespace = format!("atoll-{}-{slot}", instance.trim());
    let forwarding = "/proc/sys/net/ipv4/conf/tap0/forwarding";
    let mut look = Command::new("ip");
    look.args(["netns", "exec", &namespace, "cat", forwarding]);
    look.output().await.unwrap().stdout == b"0\n"
}

pub(super) async fn machines_that_have_run_ahead_end_with_their_server(host: Host) {
    let mut server = server(Vec::new()).await;
    for name in ["held", "other"] {
        volume(&server, name).await;
    }
    let sandbox = out_of_one_ahead(&host, &server, &with([written("held")])).await;
    until("another has run ahead or is about to", DEADLINE, async || {
        for disk in disks(&server) {
            if is_shut(&server, &disk).await {
                return Some(());
            }
        }
        host.sandbox_on(&server, &with([written("other")])).await.delete().await;
        pause(Duration::from_secs(2)).await;
        None
    })
    .await;
    server.restart(End::Killed).await;
    assert_eq!(disks(&server), Vec::<PathBuf>::new());
    let sandbox = sandbox.on(&server);
    assert_eq!(sandbox.exec(command("mountpoint -q /mnt/held")).await.exit_code, 0);
    sandbox.delete().await;
    // Whatever is there is compared with what was.
    host.end(server).await;
}
