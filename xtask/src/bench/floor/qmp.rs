//! The least QMP that a restore needs.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::wait;

const LIMIT: Duration = Duration::from_secs(120);

pub(super) struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl Qmp {
    pub(super) fn connect(path: &Path) -> anyhow::Result<Self> {
        let writer = connect(path)?;
        let mut qmp = Self { reader: BufReader::new(writer.try_clone()?), writer };
        qmp.read().context("read QEMU's greeting")?;
        qmp.call("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    pub(super) fn call(&mut self, command: &str, arguments: &Value) -> anyhow::Result<Value> {
        let line = json!({"execute": command, "arguments": arguments}).to_string() + "\n";
        self.writer.write_all(line.as_bytes()).with_context(|| format!("send `{command}`"))?;
        loop {
            let mut answer =
                self.read().with_context(|| format!("read the answer to `{command}`"))?;
            if let Some(error) = answer.get("error") {
                bail!("tell qemu `{command}`: {error}");
            }
            // Anything else is an event.
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    fn read(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            bail!("find qemu: it is gone");
        }
        Ok(serde_json::from_str(&line)?)
    }
}

/// To a socket that QEMU is about to make.
pub(super) fn connect(path: &Path) -> anyhow::Result<UnixStream> {
    let stream = wait::until("QEMU's socket", LIMIT, Duration::from_millis(1), || {
        Ok(UnixStream::connect(path).ok())
    })?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    Ok(stream)
}
