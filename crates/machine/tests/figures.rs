//! What the steps of a machine's life cost on this host. Not a test of correctness: run it with `--ignored --nocapture`.
#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "the figures are its output, and nobody handles its failures"
)]

mod common;

use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{Bake, DEADLINE, place, repair, run, scratch, spec};
use machine::guest::{Event, FileRead, FileWrite, Guest, Reply, Request};

const CLONES: usize = 8;
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
    for memory_mib in [512, 2048] {
        println!("guest memory {memory_mib} MiB");
        let begun = Instant::now();
        let bake = Bake::make(spec(1, memory_mib), scratch(&format!("figures-{memory_mib}"))).await;
        println!("{:<44} {:15.1}", "bake, ms", milliseconds(begun));
        clones_of(&bake).await;
    }
}

async fn clones_of(bake: &Bake) {
    let mut steps: [Vec<f64>; 7] = Default::default();
    let mut memory = Vec::new();
    for n in 0..CLONES {
        let directory = bake.clone_disk(&format!("clone{n}"));
        let begun = Instant::now();
        let prepared = bake.prepare(place(directory.clone())).await;
        steps[0].push(milliseconds(begun));
        tokio::time::sleep(Duration::from_millis(300)).await;

        let whole = Instant::now();
        let machine =
            common::Running::from(bake.load(prepared, &directory.join("rootfs")).await.unwrap());
        steps[1].push(milliseconds(whole));
        let step = Instant::now();
        machine.resume().await.unwrap();
        let guest = machine.connect_guest(DEADLINE).await.unwrap();
        steps[2].push(milliseconds(step));
        let step = Instant::now();
        guest.call(Request::Repair(repair()), DEADLINE).await.unwrap();
        steps[3].push(milliseconds(step));
        steps[4].push(milliseconds(whole));
        let step = Instant::now();
        run(&guest, "first", "echo hi").await;
        steps[5].push(milliseconds(step));
        let step = Instant::now();
        run(&guest, "second", "echo hi").await;
        steps[6].push(milliseconds(step));
        tokio::time::sleep(Duration::from_secs(1)).await;
        memory.push(machine.private_memory_bytes().unwrap() as f64 / f64::from(1 << 20));
        if n + 1 == CLONES {
            throughput(&guest).await;
        }
        machine.into_inner().kill().await.unwrap();
    }
    let [prepare, load, handshake, repair, whole, first, second] = steps;
    show("process started ahead, ms", prepare);
    show("load of the state, ms", load);
    show("resume to handshake, ms", handshake);
    show("repair, ms", repair);
    show("load to repaired, ms", whole);
    show("first exec, ms", first);
    show("second exec, ms", second);
    show("private memory of an idle clone, MiB", memory);
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
