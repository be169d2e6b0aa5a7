//! The measurements of snapshots, forks, hibernation and volumes.

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::{
    figures::{Better, Row, Samples, Target},
    floor::Bake,
    measure::{Bench, Group, IDLE, SETTLE, at_once, milliseconds, private_megabytes, time},
};
use crate::{
    api::{Api, id_of},
    wait,
};

const CHANGED_MIB: usize = 50;
const FORKS: usize = 10;
const ROUNDS: usize = 11;

const fn megabytes(name: &'static str, target: Target) -> Row {
    Row { name, unit: "MB", better: Better::Lower, target }
}

pub(crate) const GROUPS: &[Group] = &[
    Group {
        rows: &[
            time("snapshot_pause", Target::Value(45.0)),
            time("snapshot_stop", Target::None),
            time("snapshot_call", Target::Beyond(250.0)),
            megabytes("snapshot_stored", Target::Ratio(1.1)),
        ],
        measure: Bench::snapshots,
    },
    Group {
        rows: &[
            time("create_from_snapshot", Target::Ratio(1.2)),
            time("create_from_snapshot_first", Target::Ratio(1.5)),
        ],
        measure: Bench::creates_from_snapshots,
    },
    Group {
        rows: &[
            time("fork_10", Target::Ratio(1.3)),
            megabytes("fork_memory", Target::Value(40.0)),
            megabytes("fork_memory_used", Target::None),
        ],
        measure: Bench::forks,
    },
    Group {
        rows: &[time("create_with_volume", Target::Ratio(1.25))],
        measure: Bench::creates_with_volumes,
    },
    Group { rows: &[time("wake", Target::Ratio(1.5))], measure: Bench::wakes },
];

impl Bench {
    fn small_request(&self) -> Value {
        json!({"template": self.template, "ttl_seconds": 3600, "cpu": 1, "memory_mb": 512})
    }

    /// The floor of the pause and the stop: the same saved by hand. Of the call: the snapshot's bytes, written and synced.
    /// Of what is stored: what an unused sandbox's snapshot takes, and the changed bytes. That program is an interpreter, and
    /// changes more than those; so what is stored is measured where nothing else was changed.
    fn snapshots(&self) -> anyhow::Result<Vec<Samples>> {
        let (mut pauses, mut stops) = (Samples::default(), Samples::default());
        let (mut calls, mut stored) = (Samples::default(), Samples::default());
        for round in 0..ROUNDS {
            wait::check_interrupt()?;
            let unused_bytes = self.stored_after("true")?;
            let changed_bytes = self.stored_after(&fill_memory())?;
            let sandbox = self.api.create_patiently(&self.small_request())?;
            let mut ticks = Ticks::start(&self.api, id_of(&sandbox)?)?;
            wait::pause(SETTLE);
            let (begun, snapshot) = (Instant::now(), snapshot_of(&self.api, &sandbox)?);
            let call = begun.elapsed();
            wait::pause(SETTLE);
            let (pause, stop) = ticks.pause_since(begun)?;
            let bytes = own_bytes(&snapshot)?;
            remove_sandbox(&self.api, &sandbox)?;
            drop(ticks);
            let written = self.write_by_hand(bytes)?;
            let stood = self.save_by_hand(round)?;
            if round > 0 {
                pauses.push_times(pause, stood);
                stops.push_times(stop, stood);
                calls.push_times(call, written);
                let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                stored.ours.push(mebibytes(changed_bytes));
                stored.floor.push(mebibytes(unused_bytes) + CHANGED_MIB as f64);
            }
        }
        Ok(vec![pauses, stops, calls, stored])
    }

    fn stored_after(&self, command: &str) -> anyhow::Result<u64> {
        let sandbox = self.api.create_patiently(&self.small_request())?;
        self.api.exec(id_of(&sandbox)?, command)?;
        let bytes = own_bytes(&snapshot_of(&self.api, &sandbox)?)?;
        remove_sandbox(&self.api, &sandbox)?;
        Ok(bytes)
    }

    fn scratch(&self, name: &str) -> PathBuf {
        self.small_floor.sibling(name)
    }

    fn write_by_hand(&self, bytes: u64) -> anyhow::Result<Duration> {
        let path = self.scratch("by-hand");
        let block = vec![b'x'; 1 << 20];
        let start = Instant::now();
        let mut file = File::create(&path).with_context(|| format!("create {}", path.display()))?;
        let mut left = bytes;
        while left > 0 {
            let length = left.min(block.len() as u64);
            file.write_all(&block[..length as usize])?;
            left -= length;
        }
        file.sync_all()?;
        let time = start.elapsed();
        std::fs::remove_file(&path)?;
        Ok(time)
    }

    fn save_by_hand(&self, round: usize) -> anyhow::Result<Duration> {
        let mut guest = self.small_floor.prepare()?.restore()?;
        guest.run(&fill_memory())?;
        let save = guest.save(&self.small_floor, self.scratch(&format!("saved{round}")))?;
        guest.quit()?;
        save.bake.remove()?;
        Ok(save.stood)
    }

    /// The floor: an ordinary create.
    fn creates_from_snapshots(&self) -> anyhow::Result<Vec<Samples>> {
        let (mut ahead, mut first) = (Samples::default(), Samples::default());
        let create = |request: &Value| -> anyhow::Result<Duration> {
            wait::pause(SETTLE);
            let start = Instant::now();
            let sandbox = self.api.create_patiently(request)?;
            self.api.exec(id_of(&sandbox)?, "true")?;
            let time = start.elapsed();
            remove_sandbox(&self.api, &sandbox)?;
            Ok(time)
        };
        for _ in 0..ROUNDS {
            wait::check_interrupt()?;
            let source = self.api.create_patiently(&self.small_request())?;
            self.api.exec(id_of(&source)?, &fill_memory())?;
            let snapshot = snapshot_of(&self.api, &source)?;
            remove_sandbox(&self.api, &source)?;
            let request = json!({"from_snapshot": id_of(&snapshot)?, "ttl_seconds": 3600});
            create(&self.small_request())?;
            let ordinary = create(&self.small_request())?;
            first.push_times(create(&request)?, ordinary);
            create(&request)?;
            // By now the server expects another.
            ahead.push_times(create(&request)?, ordinary);
            self.api.delete(&format!("/v1/snapshots/{}", id_of(&snapshot)?))?;
        }
        Ok(vec![ahead, first])
    }

    /// The floor: a save by hand, then as many processes started and restored from it at once. Children are idle until their
    /// first command; what that makes the emulator translate is a row of its own.
    fn forks(&self) -> anyhow::Result<Vec<Samples>> {
        let (mut times, mut idle, mut used) =
            (Samples::default(), Samples::default(), Samples::default());
        for round in 0..4 {
            wait::check_interrupt()?;
            let mut guest = self.small_floor.prepare()?.restore()?;
            guest.run("true")?;
            wait::pause(SETTLE);
            let start = Instant::now();
            let save = guest.save(&self.small_floor, self.scratch(&format!("forked{round}")))?;
            let children = at_once((0..FORKS).collect(), |_| {
                let mut child = save.bake.prepare()?.restore()?;
                child.run("true")?;
                Ok(child)
            })?;
            times.floor.push(milliseconds(start.elapsed()));
            for child in children {
                used.floor.push(private_megabytes(child.pid())?);
                child.quit()?;
            }
            guest.quit()?;
            save.bake.remove()?;

            let parent = self.api.create_patiently(&self.small_request())?;
            self.api.exec(id_of(&parent)?, "true")?;
            wait::pause(SETTLE * 2);
            let start = Instant::now();
            let children = self.fork(&parent)?;
            at_once(children.iter().collect(), |child| {
                self.server.api().exec(id_of(child)?, "true").map(drop)
            })?;
            times.ours.push(milliseconds(start.elapsed()));
            wait::pause(IDLE);
            self.end_children(&children, &mut used)?;
            wait::pause(SETTLE * 2);
            let children = self.fork(&parent)?;
            wait::pause(IDLE);
            self.end_children(&children, &mut idle)?;
            remove_sandbox(&self.api, &parent)?;
            wait::pause(SETTLE * 2);
        }
        Ok(vec![times, idle, used])
    }

    fn fork(&self, parent: &Value) -> anyhow::Result<Vec<Value>> {
        let path = format!("/v1/sandboxes/{}/fork-tree", id_of(parent)?);
        let tree = self.api.post(&path, &json!({"count": FORKS}))?;
        let children = tree["children"].as_array().context("find the children of a fork")?;
        ensure!(children.len() == FORKS, "fork: {} children came", children.len());
        Ok(children.clone())
    }

    /// The instant that they began with goes with the last.
    fn end_children(&self, children: &[Value], memory: &mut Samples) -> anyhow::Result<()> {
        for child in children {
            memory.ours.push(private_megabytes(self.server.machine_of(id_of(child)?)?)?);
        }
        children.iter().try_for_each(|child| remove_sandbox(&self.api, child))
    }

    /// The floor: a create without one.
    fn creates_with_volumes(&self) -> anyhow::Result<Vec<Samples>> {
        let mut samples = Samples::default();
        let name = "bench";
        self.api.post("/v1/volumes", &json!({"name": name, "size_mb": 1024}))?;
        let mut request = self.small_request();
        request["volumes"] = json!([{"name": name}]);
        let create = |request: &Value, command: &str| -> anyhow::Result<Duration> {
            wait::pause(SETTLE);
            let start = Instant::now();
            let sandbox = self.api.create_patiently(request)?;
            let created = start.elapsed();
            self.api.exec(id_of(&sandbox)?, command)?;
            remove_sandbox(&self.api, &sandbox)?;
            Ok(created)
        };
        for round in 0..ROUNDS {
            wait::check_interrupt()?;
            let without = create(&self.small_request(), "true")?;
            let with = create(&request, &format!("mountpoint -q /mnt/{name}"))?;
            if round > 0 {
                samples.push_times(with, without);
            }
        }
        self.api.delete(&format!("/v1/volumes/{name}"))?;
        Ok(vec![samples])
    }

    /// The floor: a create.
    fn wakes(&self) -> anyhow::Result<Vec<Samples>> {
        let mut samples = Samples::default();
        for round in 0..ROUNDS {
            wait::check_interrupt()?;
            wait::pause(SETTLE);
            let start = Instant::now();
            let sandbox = self.api.create_patiently(&self.small_request())?;
            self.api.exec(id_of(&sandbox)?, "true")?;
            let create = start.elapsed();
            let path = format!("/v1/sandboxes/{}", id_of(&sandbox)?);
            self.api.post_empty(&format!("{path}/hibernate"))?;
            wait::pause(SETTLE);
            let start = Instant::now();
            self.api.post_empty(&format!("{path}/wake"))?;
            self.api.exec(id_of(&sandbox)?, "true")?;
            let wake = start.elapsed();
            remove_sandbox(&self.api, &sandbox)?;
            if round > 0 {
                samples.push_times(wake, create);
            }
        }
        Ok(vec![samples])
    }
}

impl Bake {
    /// Of what was saved, not of what was baked first.
    fn remove(&self) -> anyhow::Result<()> {
        let directory = self.directory();
        std::fs::remove_dir_all(directory)
            .with_context(|| format!("remove {}", directory.display()))
    }
}

fn snapshot_of(api: &Api, sandbox: &Value) -> anyhow::Result<Value> {
    api.post(&format!("/v1/sandboxes/{}/snapshots", id_of(sandbox)?), &json!({}))
}

/// Of a snapshot that is removed after the call was timed.
fn own_bytes(snapshot: &Value) -> anyhow::Result<u64> {
    snapshot["size_bytes"].as_u64().with_context(|| format!("find the size in {snapshot}"))
}

fn remove_sandbox(api: &Api, sandbox: &Value) -> anyhow::Result<()> {
    api.delete(&format!("/v1/sandboxes/{}", id_of(sandbox)?))
}

/// In a file system that is memory.
fn fill_memory() -> String {
    format!(
        "mkdir -p /run/bench && mount -t tmpfs none /run/bench && head -c {CHANGED_MIB}M /dev/urandom > /run/bench/file"
    )
}

/// A program in a sandbox that has changed memory and says every 5 ms what its clock shows, and when that was heard here.
struct Ticks {
    heard: mpsc::Receiver<(Instant, Duration)>,
    all: Vec<(Instant, Duration)>,
}

impl Ticks {
    /// Ends when the sandbox does.
    fn start(api: &Api, sandbox: &str) -> anyhow::Result<Self> {
        let program = format!(
            "import os, time\nchanged = bytearray(os.urandom(1 << 20) * {CHANGED_MIB})\n\
             while True:\n    print(time.monotonic_ns(), flush=True)\n    time.sleep(0.005)\n"
        );
        let path = format!("/v1/sandboxes/{sandbox}/exec/stream");
        let command = format!("exec python3 -c '{program}'");
        let body = api.post_stream(&path, &json!({"cmd": command, "timeout_seconds": 600}))?;
        let (sender, heard) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(body).lines() {
                let now = Instant::now();
                let Ok(line) = line else { return };
                // What came in one piece was heard at once; the first of it is what the wait was for.
                let Some(data) = line.strip_prefix("data: ") else { continue };
                let Ok(data) = serde_json::from_str::<Value>(data) else { continue };
                let first = data["chunk"].as_str().and_then(|chunk| chunk.lines().next());
                let Some(guest) = first.and_then(|number| number.parse().ok()) else { continue };
                if sender.send((now, Duration::from_nanos(guest))).is_err() {
                    return;
                }
            }
        });
        let first = heard.recv_timeout(Duration::from_secs(60)).context("hear the first tick")?;
        Ok(Self { heard, all: vec![first] })
    }

    /// The largest gap heard since then, and how much longer it was for us than for the guest, whose clock stands when its
    /// processors do.
    fn pause_since(&mut self, begun: Instant) -> anyhow::Result<(Duration, Duration)> {
        self.all.extend(self.heard.try_iter());
        let gaps = self.all.windows(2).filter(|pair| pair[1].0 > begun);
        let longest = gaps.map(|pair| pair[1].0 - pair[0].0).max().context("hear a tick")?;
        let before = self.all.iter().rev().find(|tick| tick.0 <= begun).context("hear a tick")?;
        let last = self.all.last().context("hear a tick")?;
        let (ours, theirs) = (last.0 - before.0, last.1.saturating_sub(before.1));
        Ok((longest, ours.saturating_sub(theirs)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_clock_that_stood_shows_in_its_ticks() {
        let (_sender, heard) = mpsc::channel();
        let start = Instant::now();
        let tick = |host: u64, guest: u64| {
            (start + Duration::from_millis(host), Duration::from_millis(1000 + guest))
        };
        let all = vec![tick(0, 0), tick(5, 5), tick(45, 15), tick(50, 20)];
        let mut ticks = Ticks { heard, all };
        let (longest, stood) = ticks.pause_since(start + Duration::from_millis(6)).unwrap();
        assert_eq!((longest.as_millis(), stood.as_millis()), (40, 30));
    }
}
