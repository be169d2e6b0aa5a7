//! What a machine has used since its process was started.

use std::io;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::hypervisor::explained;
use crate::machine::Machine;
use crate::qemu_args::{ROOT, slots};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Of all virtual processors. Emulation is part of it.
    pub vcpu_time: Duration,
    pub root_disk: DiskStatistics,
    /// By their slots' numbers; also of volumes that were detached meanwhile. Slots that were never used are missing.
    pub volumes: Vec<(u8, DiskStatistics)>,
}

/// As the guest asked for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskStatistics {
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
}

impl Machine {
    /// # Errors
    /// QEMU is gone.
    pub async fn statistics(&self) -> Result<Statistics> {
        let asking = async {
            let disks = self.qmp.run("query-blockstats", json!({})).await?;
            let processors = self.qmp.run("query-cpus-fast", json!({})).await?;
            let vcpu_time = vcpu_time(self.pid(), &processors);
            let vcpu_time = vcpu_time.map_err(Error::host("read what the threads of qemu used"))?;
            let of = |device: &str| disk_statistics(&disks, device);
            let volumes = slots().enumerate().filter_map(|(slot, (device, _))| {
                let used = of(&device).filter(|used| *used != DiskStatistics::default())?;
                Some((u8::try_from(slot).ok()?, used))
            });
            let volumes = volumes.collect();
            Ok(Statistics { vcpu_time, root_disk: of(ROOT).unwrap_or_default(), volumes })
        };
        explained(&self.process, asking).await
    }
}

fn disk_statistics(disks: &Value, device: &str) -> Option<DiskStatistics> {
    let path = format!("/machine/peripheral/{device}/");
    let mut disks = disks.as_array()?.iter();
    let disk = disks.find(|disk| disk["qdev"].as_str().is_some_and(|qdev| qdev.starts_with(&path)));
    let figures = &disk?["stats"];
    let figure = |name: &str| figures[name].as_u64().unwrap_or(0);
    Some(DiskStatistics {
        read_bytes: figure("rd_bytes"),
        written_bytes: figure("wr_bytes"),
        reads: figure("rd_operations"),
        writes: figure("wr_operations"),
        flushes: figure("flush_operations"),
    })
}

fn vcpu_time(pid: u32, processors: &Value) -> io::Result<Duration> {
    let threads = processors.as_array().into_iter().flatten();
    let threads: Vec<u64> = threads.filter_map(|thread| thread["thread-id"].as_u64()).collect();
    let mut time = Duration::ZERO;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        // A thread that has ended meanwhile is none of them.
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        // QEMU knows its threads by their numbers in its own namespace, the last in the list.
        let status = read("status");
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let number = numbers.and_then(|numbers| numbers.split_whitespace().last()?.parse().ok());
        if number.is_some_and(|number| threads.contains(&number)) {
            // Nanoseconds on a processor, then those spent waiting for one.
            let used = read("schedstat").split(' ').next().and_then(|word| word.parse().ok());
            time += Duration::from_nanos(used.unwrap_or(0));
        }
    }
    Ok(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_found_by_its_device_and_not_by_one_whose_name_begins_alike() {
        let disks = json!([
            { "qdev": "/machine/peripheral/writable10/virtio-backend", "stats": { "rd_bytes": 1 } },
            { "qdev": "/machine/peripheral/writable1/virtio-backend", "stats": { "rd_bytes": 2, "flush_operations": 3 } },
            { "node-name": "empty-root", "stats": {} },
        ]);
        let found = disk_statistics(&disks, "writable1").unwrap();
        assert_eq!((found.read_bytes, found.flushes, found.writes), (2, 3, 0));
        assert_eq!(disk_statistics(&disks, "root"), None);
    }
}
