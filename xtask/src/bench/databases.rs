//! The measurements of databases: made, copied, woken, used.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::{
    figures::{Better, Row, Samples, Target},
    measure::{Bench, Group, SETTLE, time},
};
use crate::{api::id_of, wait};

const ROUNDS: usize = 11;
const CLONES: usize = 5;
const PGBENCH_ROUNDS: usize = 3;
const PGBENCH_SECONDS: u64 = 15;
/// 1 GB that PostgreSQL does not compress.
const FILL: &str = "CREATE TABLE filler (body text); ALTER TABLE filler ALTER body SET STORAGE EXTERNAL; \
     INSERT INTO filler SELECT repeat(md5(n::text), 32768) FROM generate_series(1, 1000) n; CHECKPOINT";
const PATIENCE: Duration = Duration::from_secs(300);

pub(crate) const GROUPS: &[Group] = &[
    Group {
        rows: &[
            time("database_ready", Target::Value(2500.0)),
            time("database_wake", Target::Value(2500.0)),
        ],
        measure: Bench::databases,
    },
    Group {
        rows: &[time("database_clone", Target::Value(3000.0))],
        measure: Bench::database_clones,
    },
    Group {
        rows: &[Row {
            name: "pgbench_ratio",
            unit: "1/s",
            better: Better::Higher,
            target: Target::Ratio(0.8),
        }],
        measure: Bench::pgbench,
    },
];

impl Bench {
    fn databases(&self) -> anyhow::Result<Vec<Samples>> {
        let (mut ready, mut wake) = (Samples::default(), Samples::default());
        for round in 0..=ROUNDS {
            wait::check_interrupt()?;
            wait::pause(SETTLE);
            let begun = Instant::now();
            let database = self.database("/v1/databases", &json!({}))?;
            psql(url(&database)?, "SELECT 1")?;
            let made = begun.elapsed();

            let id = id_of(&database)?;
            self.api.post_empty(&format!("/v1/sandboxes/{id}/hibernate"))?;
            self.wait_for(id, "hibernated")?;
            wait::pause(SETTLE);
            let begun = Instant::now();
            psql(url(&database)?, "SELECT 1")?;
            let woken = begun.elapsed();
            self.api.delete(&format!("/v1/databases/{id}"))?;
            // The first may find a size that is to be baked.
            if round > 0 {
                ready.ours.push(made.as_secs_f64() * 1000.0);
                wake.ours.push(woken.as_secs_f64() * 1000.0);
            }
        }
        Ok(vec![ready, wake])
    }

    fn database_clones(&self) -> anyhow::Result<Vec<Samples>> {
        let source = self.database("/v1/databases", &json!({"always_on": true}))?;
        psql(url(&source)?, FILL)?;
        let id = id_of(&source)?;
        let mut samples = Samples::default();
        for _ in 0..CLONES {
            wait::check_interrupt()?;
            wait::pause(SETTLE);
            let begun = Instant::now();
            let clone = self.database(&format!("/v1/databases/{id}/clone"), &json!({}))?;
            psql(url(&clone)?, "SELECT 1")?;
            samples.ours.push(begun.elapsed().as_secs_f64() * 1000.0);
            self.api.delete(&format!("/v1/databases/{}", id_of(&clone)?))?;
        }
        self.api.delete(&format!("/v1/databases/{id}"))?;
        Ok(vec![samples])
    }

    /// The floor: the same in the guest, over its loopback.
    fn pgbench(&self) -> anyhow::Result<Vec<Samples>> {
        let database = self.database("/v1/databases", &json!({"always_on": true}))?;
        let id = id_of(&database)?;
        pgbench(url(&database)?, &["-i", "-q"])?;
        let text = |field: &str| database[field].as_str().unwrap_or_default();
        let inside = format!(
            "PGPASSWORD={} /usr/lib/postgresql/17/bin/pgbench -n -c 4 -T {PGBENCH_SECONDS} -h 127.0.0.1 -U {} {}",
            text("password"),
            text("username"),
            text("database")
        );
        let seconds = PGBENCH_SECONDS.to_string();
        let mut samples = Samples::default();
        for _ in 0..PGBENCH_ROUNDS {
            wait::check_interrupt()?;
            let ours = pgbench(url(&database)?, &["-n", "-c", "4", "-T", &seconds])?;
            samples.ours.push(rate_in(&ours)?);
            let path = format!("/v1/sandboxes/{id}/exec");
            let told = self.api.post(&path, &json!({"cmd": inside}))?;
            samples.floor.push(rate_in(told["stdout"].as_str().unwrap_or_default())?);
        }
        self.api.delete(&format!("/v1/databases/{id}"))?;
        Ok(vec![samples])
    }

    /// One that can be reached.
    fn database(&self, path: &str, request: &Value) -> anyhow::Result<Value> {
        let begun = self.api.post(path, request)?;
        let database = self.wait_for(id_of(&begun)?, "running")?;
        ensure!(database["connection_url"].is_string(), "make a database: {database}");
        Ok(database)
    }

    fn wait_for(&self, id: &str, status: &str) -> anyhow::Result<Value> {
        let end = Instant::now() + PATIENCE;
        loop {
            // The server waits for one that is being made.
            let database = self.api.get_json(&format!("/v1/databases/{id}"))?;
            if database["status"] == status {
                return Ok(database);
            }
            ensure!(Instant::now() < end, "wait for a database that is {status}: {database}");
            wait::check_interrupt()?;
        }
    }
}

fn url(database: &Value) -> anyhow::Result<&str> {
    database["connection_url"].as_str().with_context(|| format!("find the URL in {database}"))
}

fn psql(url: &str, statements: &str) -> anyhow::Result<String> {
    run(Command::new("psql").args([url, "-XAtqc", statements]))
}

fn pgbench(url: &str, arguments: &[&str]) -> anyhow::Result<String> {
    run(Command::new("pgbench").args(arguments).arg(url))
}

fn run(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "run {:?}: {said}", command.get_program());
    Ok(String::from_utf8(output.stdout)?)
}

/// `tps = 123.4 (without initial connection time)`
fn rate_in(told: &str) -> anyhow::Result<f64> {
    let rate = told.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next());
    let rate = rate.with_context(|| format!("find a rate in {told}"))?;
    rate.parse().with_context(|| format!("read a rate of {rate}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_found_among_what_pgbench_says() {
        let told = "latency average = 3 ms\ntps = 12.5 (without initial connection time)\n";
        assert_eq!(rate_in(told).unwrap(), 12.5);
        assert!(rate_in("nothing").is_err());
    }
}
