//! The measurements of execs that outlive their client, by the calls that the published machines client makes.

use std::time::Instant;

use anyhow::ensure;
use serde_json::{Value, json};

use super::{
    figures::{Samples, Target},
    measure::{Bench, Group, SETTLE, at_once, milliseconds, time},
};
use crate::{
    api::{Api, id_of},
    wait,
};

const AT_ONCE: usize = 200;
const ROUNDS: usize = 103;

pub(crate) const GROUPS: &[Group] = &[
    Group { rows: &[time("exec_short", Target::Ratio(1.3))], measure: Bench::short_execs },
    Group { rows: &[time("execs_200", Target::None)], measure: Bench::execs_at_once },
];

impl Bench {
    /// The floor: a command of the other dialect, and as many more requests as the client makes beside the start.
    fn short_execs(&self) -> anyhow::Result<Vec<Samples>> {
        let mut samples = Samples::default();
        let sandbox = self.api.create_patiently(&self.request())?;
        let id = id_of(&sandbox)?;
        let path = format!("/v1/sandboxes/{id}");
        self.api.exec(id, "true")?;
        wait::pause(SETTLE);
        for round in 0..ROUNDS {
            wait::check_interrupt()?;
            let mut floor = self.api.exec(id, "true")?;
            let start = Instant::now();
            for _ in 0..REQUESTS {
                self.api.get(&path)?;
            }
            floor += start.elapsed();
            let start = Instant::now();
            run(&self.api, id, &format!("short-{round}"), "true")?;
            if round >= 3 {
                samples.push_times(start.elapsed(), floor);
            }
        }
        self.api.delete(&path)?;
        Ok(vec![samples])
    }

    /// From the first start until each has said its own number.
    fn execs_at_once(&self) -> anyhow::Result<Vec<Samples>> {
        let mut samples = Samples::default();
        let sandbox = self.api.create_patiently(&self.request())?;
        let id = id_of(&sandbox)?;
        self.api.exec(id, "true")?;
        for round in 0..4 {
            wait::check_interrupt()?;
            wait::pause(SETTLE);
            let start = Instant::now();
            at_once((0..AT_ONCE).collect(), |number| {
                let script = format!("echo {number}");
                let said = run(&self.server.api(), id, &format!("all-{round}-{number}"), &script)?;
                ensure!(said == format!("{number}\n"), "exec {number} said {said:?}");
                Ok(())
            })?;
            samples.ours.push(milliseconds(start.elapsed()));
        }
        let listed = self.api.get_json(&format!("/v1/machines/{id}/execs?limit=1000"))?;
        let succeeded = |exec: &&Value| exec["state"] == "succeeded";
        let count = listed["execs"].as_array().into_iter().flatten().filter(succeeded).count();
        ensure!(count >= 4 * AT_ONCE, "account for all execs: {count} have succeeded");
        self.api.delete(&format!("/v1/sandboxes/{id}"))?;
        Ok(vec![samples])
    }
}

/// Beside the start: pages of standard output until one is empty, and one of standard error.
const REQUESTS: usize = 2;

/// As the published client runs a script, to its standard output.
fn run(api: &Api, id: &str, exec: &str, script: &str) -> anyhow::Result<String> {
    let path = format!("/v1/machines/{id}/execs");
    let request = json!({"exec_id": exec, "script": script, "timeout_sec": 120});
    let mut record = api.post(&path, &request)?;
    while record["state"] == "running" {
        record = api.get_json(&format!("{path}/{exec}"))?;
    }
    ensure!(record["state"] == "succeeded", "run a script: {record}");
    let stdout = whole(api, &format!("{path}/{exec}"), "stdout")?;
    whole(api, &format!("{path}/{exec}"), "stderr")?;
    Ok(stdout)
}

fn whole(api: &Api, path: &str, stream: &str) -> anyhow::Result<String> {
    use base64::Engine;
    let (mut bytes, mut offset) = (Vec::new(), 0);
    loop {
        let query = format!("stream={stream}&offset={offset}&limit=65536");
        let page = api.get_json(&format!("{path}/output?{query}"))?;
        let data = page["data"].as_str().unwrap_or_default();
        let next = page["next_offset"].as_u64().unwrap_or(offset);
        if data.is_empty() || next <= offset {
            return Ok(String::from_utf8(bytes)?);
        }
        bytes.extend(base64::engine::general_purpose::STANDARD.decode(data)?);
        offset = next;
    }
}
