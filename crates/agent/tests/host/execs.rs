//! Commands, as users meet them, against the real server on this host.

use std::time::{Duration, Instant};

use crate::support::{Client, Event, exec};
use protocol::Reply;
use protocol::Request;
use protocol::frame::Channel;
use protocol::message::{Command, ErrorCode, ExecState};

#[test]
fn both_streams_and_the_code_come_back() {
    let ran = Client::start().run("echo out; echo err >&2; exit 3");
    assert_eq!(
        (&ran.stdout[..], &ran.stderr[..], ran.exit_code()),
        (&b"out\n"[..], &b"err\n"[..], 3)
    );
    assert_eq!(
        (ran.status().stdout_bytes, ran.status().stderr_bytes, ran.status().truncated),
        (4, 4, false)
    );
}

#[test]
fn both_streams_come_in_the_order_in_which_they_were_printed() {
    let mut client = Client::start();
    let start = exec("for n in 1 2 3 4 5; do echo $n; sleep 0.03; echo $n >&2; sleep 0.03; done");
    let id = start.id.clone();
    let first = client.open(&Request::ExecStart(start));
    client.end_of_exec(first);
    let again = client.open(&Request::ExecWatch { id, stdout_offset: 2, stderr_offset: 0 });
    let mut channels = Vec::new();
    loop {
        match client.next(again) {
            Event::Data(channel, _) => channels.push(channel),
            Event::Finish => break,
            Event::Reply(_) => {}
            Event::Reset => panic!("it is not reset"),
        }
    }
    let expected: Vec<_> = [Channel::Stderr, Channel::Stdout].into_iter().cycle().take(9).collect();
    assert_eq!(channels, expected);
}

#[test]
fn two_hundred_megabytes_are_counted_and_the_first_part_is_kept() {
    let mut client = Client::start();
    let mut start = exec("head -c 200000000 /dev/zero");
    start.output_limit = 10_000_000;
    let stream = client.open(&Request::ExecStart(start));
    let ran = client.end_of_exec(stream);
    assert_eq!(
        (ran.stdout.len(), ran.status().stdout_bytes, ran.status().truncated),
        (10_000_000, 200_000_000, true)
    );
}

#[test]
fn output_longer_than_memory_comes_back_as_it_was() {
    let mut client = Client::start();
    let mut start = exec("seq 1 2000000");
    let id = start.id.clone();
    start.output_limit = 1 << 30;
    let stream = client.open(&Request::ExecStart(start));
    let expected: String = (1..=2_000_000).map(|n| format!("{n}\n")).collect();
    assert!(client.end_of_exec(stream).stdout == expected.as_bytes());
    let offset = 5_000_000;
    let again = client.open(&Request::ExecWatch { id, stdout_offset: offset, stderr_offset: 0 });
    let rest = &expected.as_bytes()[usize::try_from(offset).unwrap()..];
    assert!(client.end_of_exec(again).stdout == rest);
}

#[test]
fn bytes_that_are_no_text_stay_as_they_are() {
    let ran = Client::start().run(r"printf '\377\000\200abc\n\n'");
    assert_eq!(ran.stdout, b"\xff\0\x80abc\n\n");
}

#[test]
fn an_exec_ends_with_its_command_and_not_with_what_it_left_behind() {
    let mut client = Client::start();
    let began = Instant::now();
    let ran = client.run("(sleep 20; echo late) & echo $!");
    assert_eq!(ran.exit_code(), 0);
    assert!(began.elapsed() < Duration::from_secs(10));
    let left: i32 = ran.text().trim().parse().unwrap();
    assert!(is_alive(left), "the background process runs on");
    client.run(&format!("kill {left}"));
}

#[test]
fn what_a_background_process_prints_later_does_not_kill_it() {
    let directory = tempfile::tempdir().unwrap();
    let (go, done) = (directory.path().join("go"), directory.path().join("done"));
    let mut client = Client::start();
    let script = format!(
        "(while [ ! -e {0} ]; do sleep 0.02; done; head -c 1000000 /dev/zero; : > {1}) &",
        go.display(),
        done.display()
    );
    assert_eq!(client.run(&script).exit_code(), 0);
    std::fs::write(&go, "").unwrap();
    client.wait_until("the background process has written all", |_| done.exists());
}

#[test]
fn a_timeout_kills_the_whole_tree_and_keeps_what_was_printed() {
    let mut client = Client::start();
    let mut start = exec("echo before; setsid sleep 47 & echo $!; sleep 48");
    start.timeout_ms = 500;
    let stream = client.open(&Request::ExecStart(start));
    let ran = client.end_of_exec(stream);
    assert_eq!((ran.status().state, ran.exit_code()), (ExecState::TimedOut, 137));
    let grandchild: i32 = ran.text().lines().nth(1).unwrap().parse().unwrap();
    assert!(ran.text().starts_with("before\n"));
    client.wait_until("the grandchild is gone", |_| !is_alive(grandchild));
}

#[test]
fn a_cancel_asks_first_and_kills_after_the_grace() {
    let mut client = Client::start();
    let polite = exec("trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.05; done");
    let stubborn = exec("trap '' TERM; echo ready; while :; do sleep 0.05; done");
    for (start, code, grace_ms) in [(polite, 5, 30_000), (stubborn, 137, 200)] {
        let id = start.id.clone();
        let stream = client.open(&Request::ExecStart(start));
        while !matches!(client.next(stream), Event::Data(..)) {}
        assert_eq!(client.call(&Request::ExecCancel { id: id.clone(), grace_ms }), Reply::Done);
        assert_eq!(client.call(&Request::ExecCancel { id, grace_ms }), Reply::Done);
        let ran = client.end_of_exec(stream);
        assert_eq!((ran.status().state, ran.exit_code()), (ExecState::Cancelled, code));
    }
}

#[test]
fn death_by_signal_n_is_128_and_n() {
    assert_eq!(Client::start().run("kill -USR1 $$").exit_code(), 128 + 10);
}

#[test]
fn without_standard_input_a_reader_gets_its_end() {
    assert_eq!(Client::start().run("cat; echo $?").text(), "0\n");
}

#[test]
fn ten_megabytes_of_standard_input_arrive_whole() {
    let mut client = Client::start();
    let mut start = exec("sha256sum; exit 4");
    start.has_stdin = true;
    let stream = client.open(&Request::ExecStart(start));
    let content: Vec<u8> = (0..10_000_000_u32).map(|n| (n % 251) as u8).collect();
    client.send_data(stream, &content);
    client.finish(stream);
    let ran = client.end_of_exec(stream);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &content).unwrap();
    let expected = client.run(&format!("sha256sum < {}", file.path().display()));
    assert_eq!((ran.stdout, ran.status.unwrap().exit_code), (expected.stdout, Some(4)));
}

#[test]
fn a_command_that_does_not_read_its_input_takes_it_all_the_same() {
    let mut client = Client::start();
    let mut start = exec("exec <&-; sleep 0.3; echo done");
    start.has_stdin = true;
    let stream = client.open(&Request::ExecStart(start));
    client.send_data(stream, &vec![0; 5_000_000]);
    client.finish(stream);
    assert_eq!(client.end_of_exec(stream).text(), "done\n");
}

#[test]
fn a_script_of_a_megabyte_runs_like_a_short_one() {
    let mut client = Client::start();
    let script = format!(
        "a='{}'\ncat\necho ${{#a}} $LINENO \"$0\"; [ -e /proc/$$/fd/9 ] || echo closed",
        "x".repeat(1 << 20)
    );
    let mut start = exec(&script);
    start.has_stdin = true;
    let stream = client.open(&Request::ExecStart(start));
    client.send_data(stream, b"from the input\n");
    client.finish(stream);
    assert_eq!(client.end_of_exec(stream).text(), "from the input\n1048576 3 bash\nclosed\n");
}

#[test]
fn environment_directory_and_defaults_are_those_that_were_asked_for() {
    let mut client = Client::start();
    let mut start = exec("pwd; printf '%s|' \"$V\" \"$HOME\" \"$USER\" \"$LANG\"; umask");
    let value = "a'b\"c\n$d é";
    start.environment = vec![("V".to_owned(), value.to_owned())];
    start.working_directory = Some(b"/usr/../tmp/.".to_vec().into());
    let stream = client.open(&Request::ExecStart(start));
    assert_eq!(
        client.end_of_exec(stream).text(),
        format!("/tmp\n{value}|/root|root|C.UTF-8|0022\n")
    );
}

#[test]
fn a_user_by_name_has_its_number_its_groups_and_its_home() {
    let mut client = Client::start();
    let mut start = exec("id -u; id -G; echo $HOME; cat /proc/self/oom_score_adj");
    start.user = Some("daemon".to_owned());
    let stream = client.open(&Request::ExecStart(start));
    assert_eq!(client.end_of_exec(stream).text(), "1\n1\n/usr/sbin\n0\n");
}

#[test]
fn what_cannot_start_is_refused_with_a_reason() {
    let mut client = Client::start();
    let mut nowhere = exec("true");
    nowhere.working_directory = Some(b"/no/such".to_vec().into());
    let mut nobody = exec("true");
    nobody.user = Some("ghost".to_owned());
    let mut nothing = exec("");
    nothing.command = Command::Arguments(vec![b"no-such-program".to_vec().into()]);
    for start in [nowhere, nobody, nothing] {
        assert_eq!(client.refusal(&Request::ExecStart(start)), ErrorCode::Invalid);
    }
    assert_eq!(client.call(&Request::ExecList), Reply::Execs(Vec::new()));
}

#[test]
fn arguments_are_passed_as_they_are() {
    let mut client = Client::start();
    let mut start = exec("");
    let arguments = ["printf", "%s,", "a b", "", "$HOME", "'"];
    start.command =
        Command::Arguments(arguments.iter().map(|one| one.as_bytes().to_vec().into()).collect());
    let stream = client.open(&Request::ExecStart(start));
    assert_eq!(client.end_of_exec(stream).text(), "a b,,$HOME,',");
}

#[test]
fn a_file_without_a_shebang_is_run_by_the_shell() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("script");
    std::fs::write(&path, "echo \"$1\"\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut start = exec("");
    let path = path.to_str().unwrap().as_bytes().to_vec();
    start.command = Command::Arguments(vec![path.into(), b"said".to_vec().into()]);
    let mut client = Client::start();
    let stream = client.open(&Request::ExecStart(start));
    assert_eq!(client.end_of_exec(stream).text(), "said\n");
}

#[test]
fn many_are_forgotten_at_once_but_none_that_runs() {
    let mut client = Client::start();
    let mut ids = Vec::new();
    for _ in 0..3 {
        let start = exec("true");
        ids.push(start.id.clone());
        let stream = client.open(&Request::ExecStart(start));
        client.end_of_exec(stream);
    }
    let running = exec("sleep 600");
    ids.push(running.id.clone());
    let stream = client.open(&Request::ExecStart(running));
    ids.push("never-was".to_owned());
    assert_eq!(client.call(&Request::ExecsForget { ids: ids.clone() }), Reply::Done);
    assert_eq!(client.refusal(&Request::ExecStatus { id: ids[0].clone() }), ErrorCode::NotFound);
    assert_eq!(client.refusal(&Request::ExecStatus { id: ids[2].clone() }), ErrorCode::NotFound);
    client.call(&Request::ExecCancel { id: ids[3].clone(), grace_ms: 0 });
    client.end_of_exec(stream);
}

#[test]
fn an_id_is_used_once_until_it_is_forgotten() {
    let mut client = Client::start();
    let start = exec("echo once");
    let id = start.id.clone();
    let stream = client.open(&Request::ExecStart(start.clone()));
    client.end_of_exec(stream);
    assert_eq!(client.refusal(&Request::ExecStart(start.clone())), ErrorCode::Conflict);
    assert_eq!(client.call(&Request::ExecsForget { ids: vec![id.clone()] }), Reply::Done);
    assert_eq!(client.call(&Request::ExecsForget { ids: vec![id.clone()] }), Reply::Done);
    assert_eq!(client.refusal(&Request::ExecStatus { id }), ErrorCode::NotFound);
    let stream = client.open(&Request::ExecStart(start));
    assert_eq!(client.end_of_exec(stream).text(), "once\n");
}

#[test]
fn an_exec_survives_its_watcher_and_is_watched_again() {
    let mut client = Client::start();
    let start = exec("echo one; sleep 0.4; echo two");
    let id = start.id.clone();
    let stream = client.open(&Request::ExecStart(start));
    while !matches!(client.next(stream), Event::Data(..)) {}
    client.greet([9; 16]);
    let again = client.open(&Request::ExecWatch { id, stdout_offset: 4, stderr_offset: 0 });
    assert_eq!(client.end_of_exec(again).text(), "two\n");
}

#[test]
fn a_thousand_short_commands_leave_nothing_behind() {
    let mut client = Client::start();
    let before = descriptors();
    for _ in 0..1000 {
        let start = exec("true");
        let id = start.id.clone();
        let stream = client.open(&Request::ExecStart(start));
        assert_eq!(client.end_of_exec(stream).exit_code(), 0);
        client.call(&Request::ExecsForget { ids: vec![id] });
    }
    // Other tests of this program have descriptors, too.
    assert!(descriptors() < before + 300, "{before} before, {} after", descriptors());
    assert_eq!(client.call(&Request::ExecList), Reply::Execs(Vec::new()));
}

#[test]
fn fifty_at_once_do_not_wait_for_the_one_that_is_not_read() {
    let mut client = Client::start();
    let slow = client.open(&Request::ExecStart(exec("head -c 20000000 /dev/zero")));
    let others: Vec<u32> =
        (0..49).map(|_| client.open(&Request::ExecStart(exec("seq 1 20000")))).collect();
    let expected: usize = (1..=20_000).map(|n: u32| n.to_string().len() + 1).sum();
    for stream in others {
        assert_eq!(client.end_of_exec(stream).stdout.len(), expected);
    }
    assert_eq!(client.end_of_exec(slow).stdout.len(), 20_000_000);
}

#[test]
fn a_full_disk_costs_output_and_nothing_else() {
    let small = SmallDisk::new("2m");
    let mut options = agent::Options::hosted();
    options.spill_directory = small.path();
    let mut client = Client::start_with(options);
    let ran = client.run("head -c 8000000 /dev/zero; echo err >&2");
    assert_eq!(
        (ran.exit_code(), ran.status().stdout_bytes, ran.status().truncated),
        (0, 8_000_000, true)
    );
    assert_eq!(ran.stderr, b"err\n");
}

#[test]
fn what_a_full_disk_has_cost_is_not_waited_for() {
    let small = SmallDisk::new("1m");
    let mut options = agent::Options::hosted();
    options.spill_directory = small.path();
    let mut client = Client::start_with(options);
    let start = exec("head -c 8000000 /dev/zero");
    let id = start.id.clone();
    let stream = client.open(&Request::ExecStart(start));
    client.end_of_exec(stream);
    let again = client.open(&Request::ExecWatch { id, stdout_offset: 0, stderr_offset: 0 });
    let ran = client.end_of_exec(again);
    assert!(ran.stdout.len() <= 1 << 20 && ran.status().truncated);
}

#[test]
fn output_of_many_ended_execs_is_kept() {
    let mut client = Client::start();
    let ids: Vec<String> = (0..300)
        .map(|_| {
            let start = exec("seq 1 11000");
            let id = start.id.clone();
            let stream = client.open(&Request::ExecStart(start));
            client.end_of_exec(stream);
            id
        })
        .collect();
    let expected: String = (1..=11_000).map(|n| format!("{n}\n")).collect();
    for id in ids {
        let stream = client.open(&Request::ExecWatch { id, stdout_offset: 0, stderr_offset: 0 });
        assert!(client.end_of_exec(stream).text() == expected);
    }
}

#[test]
fn a_shutdown_ends_what_runs_and_answers_last() {
    let mut client = Client::start();
    let stream = client.open(&Request::ExecStart(exec(
        "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done",
    )));
    while !matches!(client.next(stream), Event::Data(..)) {}
    let stop = client.open(&Request::Shutdown { grace_ms: 20_000 });
    assert_eq!(client.end_of_exec(stream).text(), "saved\n");
    assert_eq!(client.reply(stop), Reply::Done);
}

/// Where this host has a version 2 hierarchy: execs in groups of their own.
mod in_groups {
    use super::*;
    use crate::lent::Hierarchy;

    fn start() -> Option<(Client, Hierarchy)> {
        let hierarchy = Hierarchy::new()?;
        let mut options = agent::Options::hosted();
        options.groups = Some(hierarchy.path().to_owned());
        Some((Client::start_with(options), hierarchy))
    }

    #[test]
    fn a_timeout_reaches_a_grandchild_whose_parents_are_gone() {
        let Some((mut client, _hierarchy)) = start() else { return };
        let mut start = exec("(setsid sleep 49 & echo $!); cat /proc/self/cgroup; sleep 50");
        start.timeout_ms = 500;
        let stream = client.open(&Request::ExecStart(start));
        let ran = client.end_of_exec(stream);
        assert_eq!(ran.status().state, ExecState::TimedOut);
        assert!(ran.text().contains("/work/"), "it ran in a group: {}", ran.text());
        let grandchild: i32 = ran.text().lines().next().unwrap().parse().unwrap();
        client.wait_until("the grandchild is gone", |_| !is_alive(grandchild));
    }

    #[test]
    fn groups_are_used_again_and_do_not_add_up() {
        let Some((mut client, hierarchy)) = start() else { return };
        for _ in 0..50 {
            assert_eq!(client.run("true").exit_code(), 0);
        }
        assert!(hierarchy.groups() <= 4, "{} groups", hierarchy.groups());
    }

    #[test]
    fn the_group_of_a_background_process_goes_when_it_ends() {
        let Some((mut client, hierarchy)) = start() else { return };
        for _ in 0..8 {
            assert_eq!(client.run("sleep 0.5 &").exit_code(), 0);
        }
        client.wait_until("the groups are gone", |client| {
            client.call(&Request::Ping);
            hierarchy.groups() <= 2
        });
    }
}

fn is_alive(pid: i32) -> bool {
    // A zombie that nobody reaps is as dead as can be.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| !rest.trim().is_empty() && !rest.trim_start().starts_with('Z'))
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A file system that is soon full.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(format!("size={size}")).unwrap();
        rustix::mount::mount(
            "tmpfs",
            directory.path(),
            "tmpfs",
            rustix::mount::MountFlags::empty(),
            options.as_c_str(),
        )
        .expect("these tests run as root");
        Self(directory)
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().to_owned()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}
