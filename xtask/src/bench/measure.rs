//! The measurements. Ours and the floor's take turns, so that whatever else the host does hits both.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use serde_json::{Value, json};

use super::{
    figures::{Better, Row, Samples, Target},
    floor::{Bake, Guest},
    reads,
};
use crate::{
    api::{Api, id_of},
    server::Server,
    wait,
};

/// After a machine has gone or come, the server makes the next one ready and the host writes back; neither belongs to
/// the next measurement.
pub(super) const SETTLE: Duration = Duration::from_millis(700);
/// What an idle sandbox does after its start is over by then.
pub(super) const IDLE: Duration = Duration::from_secs(5);
const LARGE: usize = 32 << 20;
const AT_ONCE: usize = 8;

pub(crate) struct Bench {
    pub(crate) server: Server,
    pub(crate) api: Api,
    pub(crate) floor: Bake,
    /// Its machines have 1 vCPU and 512 MiB.
    pub(crate) small_floor: Bake,
    pub(crate) template: String,
}

/// Rows that one measurement yields.
pub(crate) struct Group {
    pub(crate) rows: &'static [Row],
    pub(crate) measure: fn(&Bench) -> anyhow::Result<Vec<Samples>>,
}

pub(super) const fn time(name: &'static str, target: Target) -> Row {
    Row { name, unit: "ms", better: Better::Lower, target }
}

const fn rate(name: &'static str, unit: &'static str, target: Target) -> Row {
    Row { name, unit, better: Better::Higher, target }
}

pub(crate) const GROUPS: &[Group] = &[
    Group {
        rows: &[
            time("create_to_exec", Target::RatioAndTail(1.5)),
            time("delete", Target::Value(100.0)),
        ],
        measure: Bench::creates_and_deletes,
    },
    Group { rows: &[time("create_to_exec_8", Target::None)], measure: Bench::creates_at_once },
    Group {
        rows: &[time("exec_true", Target::Ratio(1.3))],
        measure: |bench| bench.execs("true", 100),
    },
    Group {
        rows: &[time("exec_python", Target::None)],
        measure: |bench| bench.execs("python3 -c pass", 20),
    },
    Group {
        rows: &[
            rate("fs_write_32m", "MB/s", Target::Ratio(0.7)),
            rate("fs_read_32m", "MB/s", Target::Ratio(0.7)),
        ],
        measure: Bench::large_files,
    },
    Group { rows: &[time("fs_write_1k", Target::None)], measure: Bench::small_files },
    Group {
        rows: &[Row {
            name: "idle_memory_512m",
            unit: "MB",
            better: Better::Lower,
            target: Target::Value(40.0),
        }],
        measure: Bench::idle_memory,
    },
    Group {
        rows: &[Row {
            name: "leak_500",
            unit: "MB",
            better: Better::Lower,
            // Arenas of the C library settle within this; what leaked for each sandbox would be far above.
            target: Target::Value(8.0),
        }],
        measure: Bench::leak,
    },
    Group { rows: &[rate("api_reads", "1/s", Target::Value(3000.0))], measure: Bench::api_reads },
];

impl Bench {
    pub(crate) fn new(server: Server, floor: Bake, small_floor: Bake, template: &str) -> Self {
        Self { api: server.api(), server, floor, small_floor, template: template.to_owned() }
    }

    pub(super) fn request(&self) -> Value {
        json!({"template": self.template, "ttl_seconds": 3600})
    }

    fn creates_and_deletes(&self) -> anyhow::Result<Vec<Samples>> {
        let (mut creates, mut deletes) = (Samples::default(), Samples::default());
        for round in 0..31 {
            wait::check_interrupt()?;
            let prepared = self.floor.prepare()?;
            wait::pause(SETTLE);
            let start = Instant::now();
            let mut guest = prepared.restore()?;
            guest.run("true")?;
            let floor_create = start.elapsed();
            let start = Instant::now();
            guest.quit()?;
            let floor_delete = start.elapsed();

            wait::pause(SETTLE);
            let start = Instant::now();
            let sandbox = self.api.create(&self.request())?;
            let id = id_of(&sandbox)?;
            self.api.exec(id, "true")?;
            let create = start.elapsed();
            let start = Instant::now();
            self.api.delete(&format!("/v1/sandboxes/{id}"))?;
            let delete = start.elapsed();
            // The first finds cold caches, in both.
            if round > 0 {
                creates.push_times(create, floor_create);
                deletes.push_times(delete, floor_delete);
            }
        }
        Ok(vec![creates, deletes])
    }

    fn creates_at_once(&self) -> anyhow::Result<Vec<Samples>> {
        let mut samples = Samples::default();
        for _ in 0..4 {
            wait::check_interrupt()?;
            let prepared =
                (0..AT_ONCE).map(|_| self.floor.prepare()).collect::<anyhow::Result<Vec<_>>>()?;
            wait::pause(SETTLE);
            let start = Instant::now();
            let guests = at_once(prepared, |prepared| {
                let mut guest = prepared.restore()?;
                guest.run("true")?;
                Ok((start.elapsed(), guest))
            })?;
            for (time, guest) in guests {
                samples.floor.push(milliseconds(time));
                guest.quit()?;
            }

            wait::pause(SETTLE * 2);
            let start = Instant::now();
            let created = at_once((0..AT_ONCE).collect(), |_| {
                let api = self.server.api();
                // As the clients do where the server asks to come again; the wait counts.
                let sandbox = wait::until(
                    "room for a sandbox",
                    Duration::from_secs(60),
                    Duration::from_millis(50),
                    || {
                        api.create_unless_busy(
                            &json!({"template": self.template, "ttl_seconds": 3600}),
                        )
                    },
                )?;
                api.exec(id_of(&sandbox)?, "true")?;
                Ok((start.elapsed(), sandbox))
            })?;
            for (time, sandbox) in created {
                samples.ours.push(milliseconds(time));
                self.api.delete(&format!("/v1/sandboxes/{}", id_of(&sandbox)?))?;
            }
            wait::pause(SETTLE * 2);
        }
        Ok(vec![samples])
    }

    /// The floor: fork, exec and wait as the guest sees them, and one round trip of the channel.
    fn execs(&self, command: &str, count: usize) -> anyhow::Result<Vec<Samples>> {
        let mut samples = Samples::default();
        self.with_both(|api, id, guest| {
            for round in 0..count + 3 {
                wait::check_interrupt()?;
                let floor = guest.run(command)? + guest.ping()?;
                let ours = api.exec(id, command)?;
                if round >= 3 {
                    samples.push_times(ours, floor);
                }
            }
            Ok(())
        })?;
        Ok(vec![samples])
    }

    /// The floor: the slower of channel and guest disk.
    fn large_files(&self) -> anyhow::Result<Vec<Samples>> {
        let (mut writes, mut reads) = (Samples::default(), Samples::default());
        let bytes = vec![b'x'; LARGE];
        self.with_both(|api, id, guest| {
            let path = format!("/v1/sandboxes/{id}/fs?path=/srv/large");
            for round in 0..11 {
                wait::check_interrupt()?;
                let floor_write = guest.sink(&bytes)?.max(guest.write("/srv/large", LARGE)?);
                let start = Instant::now();
                api.put(&path, &bytes)?;
                let write = start.elapsed();
                let floor_read = guest.source(LARGE)?.max(guest.read("/srv/large")?);
                let start = Instant::now();
                let content = api.get(&path)?;
                let read = start.elapsed();
                anyhow::ensure!(
                    content == bytes,
                    "read what was written: 32 MiB came back changed"
                );
                if round > 0 {
                    writes.push_rates(write, floor_write);
                    reads.push_rates(read, floor_read);
                }
            }
            Ok(())
        })?;
        Ok(vec![writes, reads])
    }

    fn small_files(&self) -> anyhow::Result<Vec<Samples>> {
        let mut samples = Samples::default();
        let bytes = [b'x'; 1024];
        self.with_both(|api, id, guest| {
            let path = format!("/v1/sandboxes/{id}/fs?path=/srv/small");
            for round in 0..63 {
                wait::check_interrupt()?;
                let floor = guest.put("/srv/small", &bytes)?;
                let start = Instant::now();
                api.put(&path, &bytes)?;
                if round >= 3 {
                    samples.push_times(start.elapsed(), floor);
                }
            }
            Ok(())
        })?;
        Ok(vec![samples])
    }

    /// Of a sandbox that has answered since its restore and has not been used yet.
    fn idle_memory(&self) -> anyhow::Result<Vec<Samples>> {
        let mut samples = Samples::default();
        for _ in 0..3 {
            let mut guest = self.small_floor.prepare()?.restore()?;
            guest.ping()?;
            let mut request = self.request();
            request["cpu"] = json!(1);
            request["memory_mb"] = json!(512);
            let sandbox = self.api.create_patiently(&request)?;
            let id = id_of(&sandbox)?;
            wait::pause(IDLE);
            wait::check_interrupt()?;
            samples.floor.push(private_megabytes(guest.pid())?);
            samples.ours.push(private_megabytes(self.server.machine_of(id)?)?);
            self.api.delete(&format!("/v1/sandboxes/{id}"))?;
            guest.quit()?;
        }
        Ok(vec![samples])
    }

    /// The floor: the same client and the same bytes, from a socket without a server.
    fn api_reads(&self) -> anyhow::Result<Vec<Samples>> {
        let mut samples = Samples::default();
        let sandbox = self.api.create_patiently(&self.request())?;
        let path = format!("/v1/sandboxes/{}", id_of(&sandbox)?);
        let floor_url = reads::answer_always(self.api.get(&path)?)?;
        wait::pause(SETTLE);
        for _ in 0..5 {
            wait::check_interrupt()?;
            let duration = Duration::from_secs(2);
            samples.floor.push(reads::rate(&floor_url, &self.server.key, &path, duration)?);
            samples.ours.push(reads::rate(&self.server.url, &self.server.key, &path, duration)?);
        }
        self.api.delete(&path)?;
        Ok(vec![samples])
    }

    /// One sandbox and one guest of the floor, side by side.
    pub(super) fn with_both(
        &self,
        mut measure: impl FnMut(&Api, &str, &mut Guest) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut guest = self.floor.prepare()?.restore()?;
        let sandbox = self.api.create_patiently(&self.request())?;
        let id = id_of(&sandbox)?;
        self.api.exec(id, "true")?;
        wait::pause(SETTLE);
        measure(&self.api, id, &mut guest)?;
        self.api.delete(&format!("/v1/sandboxes/{id}"))?;
        guest.quit()
    }
}

impl Samples {
    pub(super) fn push_times(&mut self, ours: Duration, floor: Duration) {
        self.ours.push(milliseconds(ours));
        self.floor.push(milliseconds(floor));
    }

    /// Of [`LARGE`] bytes, in MiB per second.
    fn push_rates(&mut self, ours: Duration, floor: Duration) {
        self.push_rates_of(LARGE, ours, floor);
    }

    pub(super) fn push_rates_of(&mut self, bytes: usize, ours: Duration, floor: Duration) {
        let megabytes = (bytes >> 20) as f64;
        self.ours.push(megabytes / ours.as_secs_f64());
        self.floor.push(megabytes / floor.as_secs_f64());
    }
}

pub(super) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Runs `action` for all inputs at the same time.
pub(super) fn at_once<I: Send, T: Send>(
    inputs: Vec<I>,
    action: impl Fn(I) -> anyhow::Result<T> + Sync,
) -> anyhow::Result<Vec<T>> {
    let action = &action;
    thread::scope(|scope| {
        let running: Vec<_> =
            inputs.into_iter().map(|input| scope.spawn(move || action(input))).collect();
        running
            .into_iter()
            .map(|thread| thread.join().expect("a measurement does not panic"))
            .collect()
    })
}

/// What this process alone holds in memory: pages it has written, swapped ones included. Pages of files, which all
/// machines share through the page cache, do not count even while one process alone maps them.
pub(super) fn private_megabytes(pid: u32) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let kilobytes = |name: &str| -> anyhow::Result<f64> {
        let line = text
            .lines()
            .find(|line| line.starts_with(name))
            .with_context(|| format!("find {name} in {path}"))?;
        Ok(line.split_whitespace().nth(1).unwrap_or_default().parse()?)
    };
    Ok((kilobytes("Private_Dirty:")? + kilobytes("Swap:")?) / 1024.0)
}
