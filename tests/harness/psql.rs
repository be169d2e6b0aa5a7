//! The client of PostgreSQL, run once for each question.

use std::{process::Output, time::Duration};

use tokio::process::Command;

/// Of a guest under emulation that is being woken, on a host that has more to do.
const PATIENCE: Duration = Duration::from_secs(200);

/// # Panics
/// It does not end.
pub async fn psql(url: &str, statements: &str) -> Output {
    let ended = Command::new("psql")
        .args([url, "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", statements])
        .env("PGCONNECT_TIMEOUT", "150")
        .kill_on_drop(true)
        .output();
    tokio::time::timeout(PATIENCE, ended).await.expect("psql ends").expect("psql is installed")
}

/// What it answers.
///
/// # Panics
/// It is refused.
pub async fn sql(url: &str, statements: &str) -> String {
    let output = psql(url, statements).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{statements}: {said}");
    String::from_utf8(output.stdout).expect("it answers text").trim().to_owned()
}

/// The time by its own clock, to the microsecond, as a `target_time` is written: between two commits.
pub async fn clock_of(url: &str) -> String {
    sql(
        url,
        r#"SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"#,
    )
    .await
}
