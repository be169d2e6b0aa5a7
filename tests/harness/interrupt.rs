//! An interrupted run leaves nothing on the host either: sandboxes would outlive it and their server.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use tokio::signal::unix::{SignalKind, signal};

use crate::Footprint;

/// As a shell tells of a program that was interrupted.
const INTERRUPTED: i32 = 130;

/// Data directories of the servers that run now.
static DIRECTORIES: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

pub(crate) fn remember(data: &Path) {
    DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner).insert(data.to_owned());
}

pub(crate) fn forget(data: &Path) {
    DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner).remove(data);
}

/// Does not return: after the first interrupt or SIGTERM there is no more run.
#[expect(clippy::exit, reason = "the claims under way have no end of their own")]
pub(crate) async fn clean_up_when_interrupted() {
    let interrupt = signal(SignalKind::interrupt());
    let terminate = signal(SignalKind::terminate());
    let (Ok(mut interrupt), Ok(mut terminate)) = (interrupt, terminate) else { return };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    for data in DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        Footprint::end_server(data);
        Footprint::of(data).remove();
        // What cannot be removed now cannot be removed at all.
        let _ = fs::remove_dir_all(data);
    }
    std::process::exit(INTERRUPTED);
}
