//! The measurements of many files and of large ones.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::json;

use super::{
    figures::{Better, Row, Samples, Target},
    measure::{Bench, Group, SETTLE, time},
};
use crate::{api::id_of, wait};

const FILES: usize = 10_000;
const FILE_BYTES: usize = 10 << 10;
/// Of them go one by one, for the floor.
const ONE_BY_ONE: usize = 250;
const LARGE: usize = 1 << 30;
const PART: usize = 16 << 20;
const BLOCK: usize = 512;

const fn rate(name: &'static str) -> Row {
    Row { name, unit: "MB/s", better: Better::Higher, target: Target::Ratio(0.7) }
}

pub(crate) const GROUPS: &[Group] = &[
    Group {
        rows: &[time("archive_in", Target::Ratio(0.2)), time("archive_out", Target::Ratio(0.2))],
        measure: Bench::archives,
    },
    Group {
        rows: &[
            rate("file_1g_in"),
            rate("file_1g_out"),
            Row {
                name: "file_1g_memory",
                unit: "MB",
                better: Better::Lower,
                target: Target::Value(50.0),
            },
        ],
        measure: Bench::large_files_by_parts,
    },
];

impl Bench {
    /// The floor: a part of the same files one by one, and as much more time as there are more of them.
    fn archives(&self) -> anyhow::Result<Vec<Samples>> {
        let (mut ins, mut outs) = (Samples::default(), Samples::default());
        let sandbox = self.api.create_patiently(&self.request())?;
        let id = id_of(&sandbox)?;
        self.api.exec(id, "true")?;
        wait::pause(SETTLE);
        let (archive, content) = (archive(), vec![b'x'; FILE_BYTES]);
        let files = format!("/v1/sandboxes/{id}/fs");
        let many = u32::try_from(FILES / ONE_BY_ONE).context("count the files")?;
        for round in 0..4 {
            wait::check_interrupt()?;
            let path = |number: usize| format!("{files}?path=/srv/floor{round}/{number}");
            let start = Instant::now();
            (0..ONE_BY_ONE).try_for_each(|number| self.api.put(&path(number), &content))?;
            let floor_in = start.elapsed() * many;
            let start = Instant::now();
            self.api.put(&format!("{files}/archive?path=/srv/archive{round}"), &archive)?;
            let time_in = start.elapsed();
            let start = Instant::now();
            (0..ONE_BY_ONE).try_for_each(|number| {
                let read = self.api.get(&path(number))?;
                ensure!(read == content, "read a file: it came back changed");
                Ok(())
            })?;
            let floor_out = start.elapsed() * many;
            let start = Instant::now();
            let packed = self.api.get(&format!("{files}/archive?path=/srv/archive{round}"))?;
            let time_out = start.elapsed();
            ensure!(packed.len() >= FILES * FILE_BYTES, "read the archive: it is too short");
            if round > 0 {
                ins.push_times(time_in, floor_in);
                outs.push_times(time_out, floor_out);
            }
            self.api.delete(&format!("{files}?path=/srv/archive{round}"))?;
        }
        self.api.delete(&format!("/v1/sandboxes/{id}"))?;
        Ok(vec![ins, outs])
    }

    /// The floor: the slower of channel and guest disk.
    fn large_files_by_parts(&self) -> anyhow::Result<Vec<Samples>> {
        let (mut ins, mut outs, mut memory) =
            (Samples::default(), Samples::default(), Samples::default());
        let part = vec![b'x'; PART];
        self.with_both(|api, id, guest| {
            let files = format!("/v1/sandboxes/{id}/fs");
            for round in 0..4 {
                wait::check_interrupt()?;
                let mut channel = Duration::ZERO;
                for _ in 0..LARGE / PART {
                    channel += guest.sink(&part)?;
                }
                let floor_in = channel.max(guest.write("/srv/large", LARGE)?);
                let before = self.server.memory_megabytes()?;
                let mut most = before;
                let start = Instant::now();
                let begun = api.post(
                    &format!("{files}/uploads"),
                    &json!({"path": "/srv/large", "size": LARGE, "part_size": PART}),
                )?;
                let upload =
                    format!("{files}/uploads/{}", begun["id"].as_str().unwrap_or_default());
                for number in 1..=LARGE / PART {
                    api.put(&format!("{upload}/parts/{number}"), &part)?;
                    most = most.max(self.server.memory_megabytes()?);
                }
                api.post(&format!("{upload}/complete"), &json!({}))?;
                let time_in = start.elapsed();
                let mut channel = Duration::ZERO;
                for _ in 0..LARGE / PART {
                    channel += guest.source(PART)?;
                }
                let floor_out = channel.max(guest.read("/srv/large")?);
                let start = Instant::now();
                let read = api.drain(&format!("{files}?path=/srv/large"), || {
                    most = most.max(self.server.memory_megabytes()?);
                    Ok(())
                })?;
                let time_out = start.elapsed();
                ensure!(read == LARGE as u64, "read the file: {read} bytes came");
                // The first allocates for good what all need.
                if round > 0 {
                    ins.push_rates_of(LARGE, time_in, floor_in);
                    outs.push_rates_of(LARGE, time_out, floor_out);
                    memory.ours.push(most - before);
                }
            }
            Ok(())
        })?;
        Ok(vec![ins, outs, memory])
    }
}

/// A hundred directories of a hundred files each.
fn archive() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FILES * (FILE_BYTES + BLOCK) + (2 * BLOCK));
    for number in 0..FILES {
        let mut header = [0; BLOCK];
        let mut put = |at: usize, text: &str| {
            header[at..at + text.len()].copy_from_slice(text.as_bytes());
        };
        put(0, &format!("{}/{}", number / 100, number % 100));
        put(100, "0000644\x000000000\x000000000\0");
        put(124, &format!("{FILE_BYTES:011o}\0{:011o}\0        0", 1_700_000_000));
        put(257, "ustar\x0000");
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        bytes.extend_from_slice(&header);
        bytes.resize(bytes.len() + FILE_BYTES, b'x');
    }
    bytes.resize(bytes.len() + 2 * BLOCK, 0);
    bytes
}
