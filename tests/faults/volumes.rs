//! Who holds a volume.

use api::{CreateSandbox, CreateVolume, SandboxStatus, VolumeMount};
use tests::{Host, command, small, until};

use super::{Fault, SETTLED, Victim, faults_of, machines::machine};

pub(super) async fn a_volume_has_one_holder_whatever_is_killed_or_fails_as_it_comes_and_goes(
    host: Host,
) {
    let _room = host.room(1).await;
    let mut victim = Victim::alone().await;
    let id = machine(&victim).await.id;
    let client = victim.server.client();
    client.stop_machine(&id).await.unwrap();
    let request = CreateVolume {
        name: "moved".parse().unwrap(),
        size_mb: Some(64),
        size_gb: None,
        from_volume: None,
    };
    let name = client.create_volume(&request).await.unwrap().name;
    for (operation, after) in [("attach", Some(id)), ("detach", None)] {
        for (point, fault) in faults_of(operation) {
            let client = victim.server.client();
            if operation == "attach" {
                client.detach_volume(&name, Some(&id)).await.unwrap();
            } else {
                client.attach_volume(&name, &id).await.unwrap();
            }
            victim.arm(&point, fault).await;
            let client = victim.server.client();
            let done = if operation == "attach" {
                client.attach_volume(&name, &id).await
            } else {
                client.detach_volume(&name, Some(&id)).await
            };
            assert!(done.is_err(), "{point}: {done:?}");
            victim.is_over(&point, fault).await;
            let client = victim.server.client();
            let (volume, machine) =
                (client.volume(&name).await.unwrap(), client.machine(&id).await.unwrap());
            assert_eq!(volume.attached_to.is_some(), machine.volumes.len() == 1, "{point}");
            let again = if operation == "attach" {
                client.attach_volume(&name, &id).await.unwrap()
            } else {
                client.detach_volume(&name, Some(&id)).await.unwrap()
            };
            assert_eq!(again.attached_to, after, "{point}");
        }
    }
    victim.server.client().delete_volume(&name).await.unwrap();
    host.end(victim.server).await;
}

pub(super) async fn a_sandbox_that_failed_to_wake_lets_go_of_what_it_wrote(host: Host) {
    let _room = host.room(3).await;
    let victim = Victim::start().await;
    let client = victim.server.client();
    let volume = CreateVolume {
        name: "held".parse().unwrap(),
        size_mb: Some(64),
        size_gb: None,
        from_volume: None,
    };
    client.create_volume(&volume).await.unwrap();
    let with = |read_only| {
        let mount = VolumeMount { name: "held".to_owned(), read_only, mount_path: None };
        CreateSandbox { volumes: Some(vec![mount]), ..small() }
    };
    for (number, point) in ["create.guest_connecting", "create.repairing"].iter().enumerate() {
        let writer = victim.server.create(&with(false)).await.id;
        let append = command("echo line >> /mnt/held/lines; sync; wc -l < /mnt/held/lines");
        let counted = client.exec(&writer, &append).await.unwrap().stdout;
        assert_eq!(counted.trim(), (number + 1).to_string());
        client.hibernate(&writer).await.unwrap();
        victim.arm(point, Fault::Error).await;
        assert!(client.wake(&writer).await.is_err(), "{point}");
        // Its memory knows less than the volume holds, so it never comes back; the volume is whole, and free.
        assert_eq!(client.sandbox(&writer).await.unwrap().status, SandboxStatus::Failed);
        until(point, SETTLED, async || {
            client.volume(&volume.name).await.unwrap().attached_to.is_none().then_some(())
        })
        .await;
        client.delete_sandbox(&writer).await.unwrap();
    }
    // What only reads has changed nothing, and can be woken again.
    let reader = victim.server.create(&with(true)).await.id;
    client.hibernate(&reader).await.unwrap();
    victim.arm("create.repairing", Fault::Error).await;
    assert!(client.wake(&reader).await.is_err());
    assert_eq!(client.sandbox(&reader).await.unwrap().status, SandboxStatus::Hibernated);
    let counted = client.exec(&reader, &command("wc -l < /mnt/held/lines")).await.unwrap();
    assert_eq!(counted.stdout, "2\n");
    client.delete_sandbox(&reader).await.unwrap();
    client.delete_volume(&volume.name).await.unwrap();
    victim.is_sound("failed wakes").await;
    host.end(victim.server).await;
}
