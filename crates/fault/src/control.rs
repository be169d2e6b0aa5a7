//! What the points do, by `FAILPOINTS` and by lines from a socket: `POINT=1*return(kill)`.

use std::{
    io::{self, BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
};

use rustix::process::{Signal, getpid, kill_process};

/// Names the socket.
const SOCKET: &str = "ATOLL_FAILPOINTS";

/// From here on the points do as they are told.
///
/// # Errors
/// The socket cannot be made.
pub fn obey() -> io::Result<()> {
    // Dropping it would disarm all points.
    std::mem::forget(fail::FailScenario::setup());
    let Some(path) = std::env::var_os(SOCKET) else { return Ok(()) };
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(path)?;
    std::thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            // Whoever asked has gone.
            let _ = answer(&connection);
        }
    });
    Ok(())
}

/// One line each way for every point.
fn answer(mut connection: &UnixStream) -> io::Result<()> {
    for line in BufReader::new(connection).lines() {
        let line = line?;
        let (point, action) = line.split_once('=').unwrap_or((&line, "off"));
        let told = match fail::cfg(point, action) {
            Ok(()) => "done".to_owned(),
            Err(error) => error,
        };
        writeln!(connection, "{told}")?;
    }
    Ok(())
}

/// # Errors
/// It was told to fail.
pub fn reach(point: &'static str) -> io::Result<()> {
    let Some(action) = fail::eval(point, Option::unwrap_or_default) else { return Ok(()) };
    tracing::warn!(point, action, "on purpose");
    if action == "kill" {
        // As a crash would have it: nothing is flushed, nothing is dropped.
        let _ = kill_process(getpid(), Signal::KILL);
        std::thread::park();
    }
    Err(io::Error::other(format!("failed on purpose at {point}")))
}
