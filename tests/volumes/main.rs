//! Volumes: whose they are, how they grow, what is left on them, whatever ends and whenever.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

mod ahead;
mod growth;
mod loss;
mod rest;
mod sharing;

use std::{path::PathBuf, time::Duration};

use ahead::{
    a_machine_that_has_run_ahead_is_like_any_other,
    machines_that_have_run_ahead_end_with_their_server,
};
use api::{
    CreateSandbox, CreateVolume, ErrorCode, SandboxId, VolumeMount, VolumeName, VolumeState,
};
use growth::{
    a_full_volume_keeps_its_files_and_goes_on_when_it_grows, a_volume_grows_while_it_is_written,
    nothing_is_kept_on_a_pool_without_room, sizes_and_limits_are_checked,
};
use loss::{
    a_server_that_is_killed_leaves_volumes_with_their_sandboxes,
    what_was_fsynced_is_there_after_a_kill, what_was_fsynced_is_there_after_twenty_kills,
    what_was_not_synced_is_there_after_a_delete_and_an_expiry,
};
use rest::{
    a_process_that_holds_a_volume_is_named_and_all_goes_on,
    a_snapshot_holds_nothing_of_a_volume_and_restores_without_it,
    volumes_stay_as_they_were_through_a_hibernation, volumes_stay_as_they_were_through_a_pause,
};
use sharing::{
    a_clone_is_a_volume_of_its_own, a_disk_without_a_volume_takes_no_bytes,
    a_volume_has_one_writer_or_many_readers, a_volume_is_mounted_where_it_is_asked_to_be,
    a_volume_is_named_by_its_id_or_its_name,
    eight_that_are_written_and_eight_that_are_read_and_no_more,
    names_that_look_like_paths_are_refused, of_two_creates_that_race_one_wins,
};
use tests::{Sandbox, Server, small, suite, until};
use tokio::process::Command;

suite! {
    of_two_creates_that_race_one_wins,
    a_volume_has_one_writer_or_many_readers,
    eight_that_are_written_and_eight_that_are_read_and_no_more,
    a_volume_is_mounted_where_it_is_asked_to_be,
    a_volume_is_named_by_its_id_or_its_name,
    names_that_look_like_paths_are_refused,
    a_disk_without_a_volume_takes_no_bytes,
    a_clone_is_a_volume_of_its_own,
    sizes_and_limits_are_checked,
    nothing_is_kept_on_a_pool_without_room,
    a_volume_grows_while_it_is_written,
    a_full_volume_keeps_its_files_and_goes_on_when_it_grows,
    what_was_not_synced_is_there_after_a_delete_and_an_expiry,
    what_was_fsynced_is_there_after_a_kill,
    a_server_that_is_killed_leaves_volumes_with_their_sandboxes,
    a_snapshot_holds_nothing_of_a_volume_and_restores_without_it,
    a_process_that_holds_a_volume_is_named_and_all_goes_on,
    volumes_stay_as_they_were_through_a_hibernation,
    volumes_stay_as_they_were_through_a_pause,
    a_machine_that_has_run_ahead_is_like_any_other,
    machines_that_have_run_ahead_end_with_their_server;
    soak: what_was_fsynced_is_there_after_twenty_kills,
}

const SIZE_MB: u64 = 64;

fn name(text: &str) -> VolumeName {
    text.parse().unwrap()
}

fn wanted(name: &str, size_mb: u64) -> CreateVolume {
    CreateVolume {
        name: self::name(name),
        size_mb: Some(size_mb),
        size_gb: None,
        from_volume: None,
    }
}

async fn volume(server: &Server, name: &str) -> api::Volume {
    server.client().create_volume(&wanted(name, SIZE_MB)).await.unwrap()
}

fn written(name: &str) -> VolumeMount {
    VolumeMount { name: name.to_owned(), read_only: false, mount_path: None }
}

fn read(name: &str) -> VolumeMount {
    VolumeMount { read_only: true, ..written(name) }
}

fn with(volumes: impl Into<Vec<VolumeMount>>) -> CreateSandbox {
    CreateSandbox { volumes: Some(volumes.into()), ..small() }
}

/// The code with which a create is refused.
async fn refused(server: &Server, request: &CreateSandbox) -> ErrorCode {
    until("a refusal that is none for now", Duration::from_secs(900), async || {
        match server.client().create_sandbox(request).await {
            Ok(sandbox) => panic!("{request:?} made {sandbox:?}"),
            // A bake under way.
            Err(error) if error.may_retry_after().is_some() => None,
            Err(error) => Some(error.code().unwrap_or_else(|| panic!("{error:?}"))),
        }
    })
    .await
}

async fn holder(server: &Server, name: &str) -> Option<SandboxId> {
    let volume = server.client().volume(&self::name(name)).await.unwrap();
    assert_eq!(volume.state == VolumeState::Attached, volume.attached_to.is_some());
    volume.attached_to
}

fn disk(server: &Server, volume: &api::Volume) -> PathBuf {
    server.data().join("volumes").join(volume.id.to_string()).join("disk")
}

/// As the guest left it, or as the server recovered it.
async fn is_clean(server: &Server, volume: &api::Volume) {
    let check = Command::new("e2fsck").arg("-fn").arg(disk(server, volume)).output();
    let output = tokio::time::timeout(Duration::from_secs(60), check).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Names of the disks that swallow what is written to them, or become files.
async fn swallowing(sandbox: &Sandbox, disks: &str) -> String {
    let script = format!(
        "for disk in {disks}; do dd if=/dev/zero of=/dev/$disk bs=4096 count=1 conv=fsync 2>/dev/null && echo $disk; \
         test -f /dev/$disk && echo a file $disk; done; true"
    );
    sandbox.run(&script).await
}
