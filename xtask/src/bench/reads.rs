//! Reads of one resource over kept-alive connections, and their floor: the same bytes from a socket without a server
//! behind it.

use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;

use crate::api::Api;

const CONNECTIONS: usize = 4;

/// Answers in one second.
pub(crate) fn rate(url: &str, key: &str, path: &str, duration: Duration) -> anyhow::Result<f64> {
    let start = Instant::now();
    let total: u64 = thread::scope(|scope| {
        let readers: Vec<_> = (0..CONNECTIONS)
            .map(|_| {
                scope.spawn(move || -> anyhow::Result<u64> {
                    let api = Api::new(url, key);
                    let mut count = 0;
                    while start.elapsed() < duration {
                        api.get(path)?;
                        count += 1;
                    }
                    Ok(count)
                })
            })
            .collect();
        readers
            .into_iter()
            .map(|reader| reader.join().expect("a reader does not panic"))
            .sum::<anyhow::Result<u64>>()
    })?;
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

/// Gives the same answer to whatever is asked, on as many connections as come, as long as this program runs.
pub(crate) fn answer_always(body: Vec<u8>) -> anyhow::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listen for the floor's reads")?;
    let url = format!("http://{}", listener.local_addr()?);
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let answer = [head.into_bytes(), body].concat();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = answer.clone();
            thread::spawn(move || repeat(&stream, &answer));
        }
    });
    Ok(url)
}

fn repeat(stream: &TcpStream, answer: &[u8]) -> Option<()> {
    let mut writer = stream.try_clone().ok()?;
    let mut line = String::new();
    let mut reader = BufReader::new(stream);
    while reader.read_line(&mut line).ok()? > 0 {
        if line.trim_end().is_empty() {
            writer.write_all(answer).ok()?;
        }
        line.clear();
    }
    Some(())
}
