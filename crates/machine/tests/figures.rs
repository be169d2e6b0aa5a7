//! What the steps of a machine's life cost on this host. Not a test of correctness: run it with `--ignored --nocapture`.
#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "the figures are its output, and nobody handles its failures"
)]

mod harness;

use std::time::{Duration, Instant};

use bytes::Bytes;
use harness::{Bake, DEADLINE, place, repair, run, scratch, snapshot, spec};
use machine::guest::{Event, FileRead, FileWrite, Guest, Reply, Request};

const CLONES: usize = 5;
const UPLOAD: usize = 32 << 20;

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn show(what: &str, mut samples: Vec<f64>) {
    samples.sort_by(f64::total_cmp);
    let (median, longest) = (samples[samples.len() / 2], samples[samples.len() - 1]);
    println!("{what:<44} median {median:8.1}  max {longest:8.1}");
}

#[tokio::test]
#[ignore = "prints figures"]
async fn figures_of_a_machine() {
    println!("load of the host: {}", std::fs::read_to_string("/proc/loadavg").unwrap().trim());
    for memory_mib in [512, 2048] {
        println!("guest memory {memory_mib} MiB");
        let begun = Instant::now();
        let bake = Bake::make(spec(1, memory_mib), scratch(&format!("figures-{memory_mib}"))).await;
        println!("{:<44} {:15.1}", "bake, ms", milliseconds(begun));
        clones_of(&bake).await;
        for changed_mb in [0, 50, 200] {
            saves_of(&bake, changed_mb).await;
        }
    }
}

async fn saves_of(bake: &Bake, changed_mb: u32) {
    let (machine, guest) = bake.start(&format!("saved{changed_mb}")).await;
    let script = format!(
        "mkdir /run/m && mount -t tmpfs none /run/m && head -c {changed_mb}M /dev/zero | tr '\\0' x > /run/m/file"
    );
    run(&guest, "fill", &script).await;
    let mut steps = Steps::default();
    let mut stored = 0.0;
    for n in 0..5 {
        let begun = Instant::now();
        machine.flush_disks().await.unwrap();
        steps.add("write back", milliseconds(begun), 0.0);
        let directory = bake.directory.join(format!("save{changed_mb}-{n}"));
        let begun = Instant::now();
        let (_, saved) = snapshot(bake, &machine, &guest, directory).await;
        steps.add("quiesce to thaw, with the clone", milliseconds(begun), 0.0);
        for (name, took) in [
            ("    stop", saved.steps.stop),
            ("    state", saved.steps.state),
            ("    scan", saved.steps.scan),
            ("    copy", saved.steps.copy),
            ("    disk", saved.steps.while_stopped),
            ("    all of it", saved.stood),
        ] {
            steps.add(name, took.as_secs_f64() * 1e3, 0.0);
        }
        stored = saved.written_bytes as f64 / 1e6;
    }
    println!("save with {changed_mb} MB changed; {stored:.1} MB written");
    for (name, wall, _) in steps.0 {
        show(&format!("{name}, ms"), wall);
    }
    machine.into_inner().kill().await.unwrap();
}

/// Wall-clock and processor milliseconds of each step: on a busy host only the latter can be compared.
#[derive(Default)]
struct Steps(Vec<(&'static str, Vec<f64>, Vec<f64>)>);

impl Steps {
    fn add(&mut self, name: &'static str, wall: f64, processor: f64) {
        let at = self.0.iter().position(|step| step.0 == name).unwrap_or_else(|| {
            self.0.push((name, Vec::new(), Vec::new()));
            self.0.len() - 1
        });
        self.0[at].1.push(wall);
        self.0[at].2.push(processor);
    }

    async fn measure<T>(
        &mut self,
        name: &'static str,
        pid: u32,
        work: impl Future<Output = T>,
    ) -> T {
        let (begun, before) = (Instant::now(), processor_milliseconds(pid));
        let result = work.await;
        self.add(name, milliseconds(begun), processor_milliseconds(pid) - before);
        result
    }
}

fn processor_milliseconds(pid: u32) -> f64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let nanoseconds = threads.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e6
}

async fn clones_of(bake: &Bake) {
    let mut steps = Steps::default();
    let mut memory: [Vec<f64>; 2] = Default::default();
    for n in 0..CLONES {
        let directory = bake.clone_disk(&format!("clone{n}"));
        let begun = Instant::now();
        let prepared = bake.prepare(place(directory.clone())).await;
        let (wall, pid) = (milliseconds(begun), prepared.pid());
        tokio::time::sleep(Duration::from_millis(300)).await;
        steps.add("process started ahead", wall, processor_milliseconds(pid));

        let (whole, before) = (Instant::now(), processor_milliseconds(pid));
        let disk = directory.join("rootfs");
        let loaded = steps.measure("load of the state", pid, bake.load(prepared, &disk)).await;
        let machine = harness::Running::from(loaded.unwrap());
        let connecting = async {
            machine.resume().await.unwrap();
            machine.connect_guest(DEADLINE).await.unwrap()
        };
        let guest = steps.measure("resume to handshake", pid, connecting).await;
        let repairing = guest.call(Request::Repair(repair()), DEADLINE);
        steps.measure("repair", pid, repairing).await.unwrap();
        steps.add("load to repaired", milliseconds(whole), processor_milliseconds(pid) - before);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let private = || machine.private_memory_bytes().unwrap() as f64 / f64::from(1 << 20);
        memory[0].push(private());
        steps.measure("idle for a second", pid, tokio::time::sleep(Duration::from_secs(1))).await;
        steps.measure("first exec", pid, run(&guest, "first", "echo hi")).await;
        steps.measure("second exec", pid, run(&guest, "second", "echo hi")).await;
        memory[1].push(private());
        if n + 1 == CLONES {
            throughput(&guest).await;
        }
        machine.into_inner().kill().await.unwrap();
    }
    for (name, wall, processor) in steps.0 {
        show(&format!("{name}, ms"), wall);
        show("    of processor time", processor);
    }
    let [idle, used] = memory;
    show("private memory of an idle clone, MiB", idle);
    show("    after two execs", used);
}

async fn throughput(guest: &Guest) {
    let rate = |since: Instant| UPLOAD as f64 / 1e6 / since.elapsed().as_secs_f64();
    let mut pings = Vec::new();
    for _ in 0..50 {
        let begun = Instant::now();
        guest.call(Request::Ping, DEADLINE).await.unwrap();
        pings.push(milliseconds(begun));
    }
    show("round trip, ms", pings);
    for path in ["/tmp/upload", "/root/upload"] {
        let path = || path.as_bytes().to_vec().into();
        let begun = Instant::now();
        let write = FileWrite {
            path: path(),
            mode: None,
            owner: None,
            create_parents: false,
            if_etags: Vec::new(),
            only_new: false,
            size: Some(UPLOAD as u64),
        };
        let stream = guest.open(Request::FileWrite(write)).unwrap();
        let piece = Bytes::from(vec![0x5a; 64 * 1024]);
        for _ in 0..UPLOAD / piece.len() {
            stream.send(piece.clone()).await.unwrap();
        }
        stream.finish().await.unwrap();
        let written = stream.next().await.unwrap().unwrap();
        assert!(
            matches!(written, Event::Reply(Reply::Written { bytes, .. }) if bytes == UPLOAD as u64),
            "{written:?}"
        );
        println!("{:<44} {:15.1}", format!("write of 32 MiB to {:?}, MB/s", "upload"), rate(begun));

        let begun = Instant::now();
        let read =
            FileRead { path: path(), range: None, unless_etags: Vec::new(), range_if_etag: None };
        let stream = guest.open(Request::FileRead(read)).unwrap();
        let mut length = 0;
        while let Some(event) = stream.next().await {
            match event.unwrap() {
                Event::Data(_, bytes) => length += bytes.len(),
                Event::Reply(_) => {}
                Event::Finished => break,
            }
        }
        assert_eq!(length, UPLOAD);
        println!("{:<44} {:15.1}", "read of it, MB/s", rate(begun));
    }
}
