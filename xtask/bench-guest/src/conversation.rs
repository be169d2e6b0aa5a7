//! Lines from the host, each answered by one line that begins with `ok` or `failed`.
//!
//! | line | what follows it | answer |
//! |---|---|---|
//! | `ping` | | `ok` |
//! | `run N` | a script of N bytes, for `/bin/bash -c` | `ok NANOSECONDS` from fork to wait |
//! | `sink N` | N bytes | `ok` once all are read |
//! | `source N` | | `ok`, then N bytes |
//! | `put N PATH` | N bytes | `ok` once they are in the file and synced |
//! | `write N PATH` | | `ok NANOSECONDS` to write and sync N bytes |
//! | `read PATH` | | `ok NANOSECONDS` to read the file |

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Read, Write},
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};

const BLOCK: usize = 64 << 10;

pub(crate) fn converse(port_name: &str) -> anyhow::Result<()> {
    let path = find_port(port_name).context("find the port")?;
    // One file for both ways: a port has a single opener.
    let mut output =
        fs::OpenOptions::new().read(true).write(true).open(&path).context("open the port")?;
    let mut input = BufReader::with_capacity(BLOCK, Patient(output.try_clone()?));
    let mut line = String::new();
    loop {
        line.clear();
        input.read_line(&mut line).context("read a line")?;
        let answer = match act(line.trim_end(), &mut input) {
            Ok(Answer::Done) => "ok\n".to_owned(),
            Ok(Answer::Took(time)) => format!("ok {}\n", time.as_nanos()),
            Ok(Answer::Bytes(count)) => {
                output.write_all(b"ok\n")?;
                write_blocks(&mut output, count)?;
                continue;
            }
            Err(error) => format!("failed to {error:#}\n"),
        };
        output.write_all(answer.as_bytes()).context("answer")?;
    }
}

enum Answer {
    Done,
    Took(Duration),
    Bytes(u64),
}

fn act(line: &str, input: &mut impl Read) -> anyhow::Result<Answer> {
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["ping"] => Ok(Answer::Done),
        ["run", length] => {
            let mut script = String::new();
            input.take(length.parse()?).read_to_string(&mut script)?;
            run(&script).map(Answer::Took)
        }
        ["sink", length] => {
            copy_blocks(input, &mut io::sink(), length.parse()?).map(|()| Answer::Done)
        }
        ["source", length] => Ok(Answer::Bytes(length.parse()?)),
        ["put", length, path] => {
            let mut file = File::create(path).with_context(|| format!("create {path}"))?;
            copy_blocks(input, &mut file, length.parse()?)?;
            file.sync_all()?;
            Ok(Answer::Done)
        }
        ["write", length, path] => {
            let start = Instant::now();
            let mut file = File::create(path).with_context(|| format!("create {path}"))?;
            write_blocks(&mut file, length.parse()?)?;
            file.sync_all()?;
            Ok(Answer::Took(start.elapsed()))
        }
        ["read", path] => {
            let start = Instant::now();
            let mut file = File::open(path).with_context(|| format!("open {path}"))?;
            let length = file.metadata()?.len();
            copy_blocks(&mut file, &mut io::sink(), length)?;
            Ok(Answer::Took(start.elapsed()))
        }
        _ => bail!("understand `{line}`"),
    }
}

fn run(script: &str) -> anyhow::Result<Duration> {
    let start = Instant::now();
    let status = Command::new("/bin/bash")
        .args(["-c", script])
        .env_clear()
        // As every command of a sandbox has it. The locale alone is a seventh of the time of `true`: bash reads a dozen files.
        .envs([
            ("HOME", "/root"),
            ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
            ("LANG", "C.UTF-8"),
            ("USER", "root"),
            ("LOGNAME", "root"),
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("start bash")?;
    ensure!(status.success(), "run `{script}`: {status}");
    Ok(start.elapsed())
}

fn copy_blocks(from: &mut impl Read, to: &mut impl Write, mut count: u64) -> anyhow::Result<()> {
    let mut block = vec![0; BLOCK];
    while count > 0 {
        let wanted = count.min(BLOCK as u64) as usize;
        let length = from.read(&mut block[..wanted])?;
        ensure!(length > 0, "read on: {count} bytes are missing");
        to.write_all(&block[..length])?;
        count -= length as u64;
    }
    Ok(())
}

fn write_blocks(to: &mut impl Write, mut count: u64) -> anyhow::Result<()> {
    let block = vec![b'x'; BLOCK];
    while count > 0 {
        let length = count.min(BLOCK as u64);
        to.write_all(&block[..length as usize])?;
        count -= length;
    }
    Ok(())
}

/// While the host's end is closed, a port reads as ended.
struct Patient(File);

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buffer)? {
                0 => pause(),
                length => return Ok(length),
            }
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "there is no executor here")]
fn pause() {
    std::thread::sleep(Duration::from_millis(2));
}

fn find_port(name: &str) -> anyhow::Result<PathBuf> {
    for entry in fs::read_dir("/sys/class/virtio-ports")? {
        let entry = entry?;
        if fs::read_to_string(entry.path().join("name"))?.trim_end() == name {
            return Ok(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    bail!("find one that is named {name}")
}
