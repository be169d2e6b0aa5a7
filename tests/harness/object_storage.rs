//! A server that speaks S3, with a bucket `bucket`.
#![expect(clippy::unwrap_used, reason = "a test without it has nothing to test")]

use std::{net::Ipv4Addr, process::Stdio, time::Duration};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use crate::python_with;

const START_DEADLINE: Duration = Duration::from_secs(120);

pub struct ObjectStorage {
    pub port: u16,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    _process: Child,
}

impl ObjectStorage {
    /// # Panics
    /// It does not start.
    pub async fn start(address: Ipv4Addr) -> Self {
        let python = python_with("object_storage").await;
        let mut process = Command::new(python)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/object_storage.py"))
            .arg(address.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let input = process.stdin.take().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        let first = tokio::time::timeout(START_DEADLINE, output.next_line()).await.unwrap();
        let first: Value = serde_json::from_str(&first.unwrap().unwrap()).unwrap();
        let port = first["port"].as_u64().unwrap().try_into().unwrap();
        Self { port, input, output, _process: process }
    }

    /// An address that leads to the object by itself, for so long.
    ///
    /// # Panics
    /// It does not answer.
    pub async fn signed(&mut self, method: &str, key: &str, seconds: u32) -> String {
        let order = format!("{method} {key} {seconds}\n");
        self.input.write_all(order.as_bytes()).await.unwrap();
        let url = tokio::time::timeout(START_DEADLINE, self.output.next_line()).await.unwrap();
        url.unwrap().unwrap()
    }
}
