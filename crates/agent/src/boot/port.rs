//! Finding the virtio-serial port that leads to the host. Only udev would give it a name under `/dev`.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::fs::{CWD, Mode, OFlags, openat};

use super::mounts::pause;

const PORTS: &str = "/sys/class/virtio-ports";
const DEADLINE: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(5);

pub(super) fn open() -> anyhow::Result<OwnedFd> {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(device) = find() {
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
            return openat(CWD, &device, flags, Mode::empty())
                .with_context(|| format!("open {device}"));
        }
        if Instant::now() > end {
            bail!("there is no port named {}", protocol::PORT_NAME);
        }
        pause(INTERVAL);
    }
}

fn find() -> Option<String> {
    std::fs::read_dir(PORTS).ok()?.flatten().find_map(|entry| {
        let name = std::fs::read_to_string(entry.path().join("name")).ok()?;
        (name.trim_end() == protocol::PORT_NAME)
            .then(|| format!("/dev/{}", entry.file_name().to_string_lossy()))
    })
}
