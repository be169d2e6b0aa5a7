//! Finding the processes of an exec where there are no control groups: its session, and whoever descends from it.

use std::collections::HashSet;

use rustix::process::{Pid, Signal, kill_process};

/// Rounds of looking for processes that were made while others were being signalled.
const ROUNDS: usize = 20;

pub(crate) fn signal(main: i32, signal: Signal) {
    let mut reached = HashSet::new();
    for _ in 0..ROUNDS {
        let new: Vec<i32> =
            members(main, &reached).into_iter().filter(|pid| !reached.contains(pid)).collect();
        if new.is_empty() {
            break;
        }
        for pid in new {
            // Stopped first, so that a parent cannot make more children while its own are found.
            if let Some(process) = Pid::from_raw(pid) {
                if signal == Signal::KILL {
                    let _ = kill_process(process, Signal::STOP);
                } else {
                    let _ = kill_process(process, signal);
                }
            }
            reached.insert(pid);
        }
    }
    if signal == Signal::KILL {
        for process in reached.into_iter().filter_map(Pid::from_raw) {
            let _ = kill_process(process, signal);
        }
    }
}

fn members(main: i32, known: &HashSet<i32>) -> HashSet<i32> {
    let all = processes();
    let mut members: HashSet<i32> = all
        .iter()
        .filter(|process| process.pid == main || process.session == main)
        .map(|process| process.pid)
        .collect();
    members.extend(known);
    loop {
        let before = members.len();
        for process in &all {
            if members.contains(&process.parent) {
                members.insert(process.pid);
            }
        }
        if members.len() == before {
            return members;
        }
    }
}

struct Process {
    pid: i32,
    parent: i32,
    session: i32,
}

fn processes() -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| process(entry.file_name().to_str()?.parse().ok()?)).collect()
}

fn process(pid: i32) -> Option<Process> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which may hold anything: state, parent, group, session.
    let rest = &stat[stat.iter().rposition(|&byte| byte == b')')? + 1..];
    let mut fields = std::str::from_utf8(rest).ok()?.split_ascii_whitespace().skip(1);
    let (parent, _, session) = (fields.next()?, fields.next()?, fields.next()?);
    Some(Process { pid, parent: parent.parse().ok()?, session: session.parse().ok()? })
}
