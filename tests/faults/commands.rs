//! Commands, execs and writes into a sandbox.

use std::time::Duration;

use api::{ExecState, ExecStream, StartExec};
use client::{Method, WriteOptions};
use tests::{Host, command, patterned, until};

use super::{Fault, SETTLED, Victim, faults_of};

pub(super) async fn a_command_with_a_key_runs_at_most_once_whatever_is_killed(host: Host) {
    let _room = host.room(1).await;
    let mut victim = Victim::start().await;
    for (number, (point, fault)) in faults_of("keyed").into_iter().enumerate() {
        let (key, ran) = (format!("key-{number}"), format!("/srv/keyed-{number}"));
        let path = format!("/v1/sandboxes/{}/exec", victim.witness);
        let ask = async |victim: &Victim| {
            let request = command(format!("echo ran >> {ran}; echo said"));
            let request = victim.server.request(Method::POST, &path).json(&request);
            request.header("Idempotency-Key", &key).send().await
        };
        victim.arm(&point, fault).await;
        let first = ask(&victim).await;
        assert!(first.is_err() || fault == Fault::Error, "{point}: {first:?}");
        victim.is_over(&point, fault).await;
        let status = ask(&victim).await.unwrap().status().as_u16();
        assert_eq!(ask(&victim).await.unwrap().status(), status, "{point}");
        let counting = command(format!("cat {ran} 2>/dev/null | wc -l"));
        let counted = victim.server.client().exec(&victim.witness, &counting).await.unwrap();
        let times = counted.stdout.trim().parse::<usize>().unwrap();
        // Told as done only if it was done.
        assert!(times <= 1 && (times == 1 || status == 409), "{point}: {times} times, {status}");
        victim.is_sound(&point).await;
    }
    host.end(victim.server).await;
}

pub(super) async fn a_command_runs_at_most_once_whatever_is_killed_or_fails(host: Host) {
    let _room = host.room(1).await;
    let mut victim = Victim::start().await;
    for (number, (point, fault)) in faults_of("exec").into_iter().enumerate() {
        victim.arm(&point, fault).await;
        let ran = format!("/srv/ran-{number}");
        let request = command(format!("echo ran >> {ran}"));
        let done = victim.server.client().exec(&victim.witness, &request).await;
        assert!(done.is_err() || fault == Fault::Error, "{point}: {done:?}");
        victim.is_over(&point, fault).await;
        let client = victim.server.client();
        let count = async || {
            let counting = command(format!("cat {ran} 2>/dev/null | wc -l"));
            let counted = client.exec(&victim.witness, &counting).await.unwrap();
            counted.stdout.trim().parse::<usize>().unwrap()
        };
        if ["exec.started", "exec.ended", "exec.forgetting"].contains(&&*point) {
            until(&point, SETTLED, async || (count().await > 0).then_some(())).await;
        }
        let times = count().await;
        assert!(times <= 1, "{point}: the command ran {times} times");
        assert!(point != "exec.starting" || times == 0, "{point}: it was never sent");
        victim.is_sound(&point).await;
    }
    host.end(victim.server).await;
}

/// Under an id of the client's, at each step of start, run, cancel and output.
pub(super) async fn an_exec_runs_once_and_is_told_truly_whatever_is_killed_or_fails(host: Host) {
    let _room = host.room(1).await;
    let mut victim = Victim::start().await;
    let (piece, options) = (patterned(200_000), WriteOptions::default());
    let client = victim.server.client();
    client.write_file(&victim.witness, "/srv/piece", piece.clone(), &options).await.unwrap();
    for (number, (point, fault)) in faults_of("execs").into_iter().enumerate() {
        let machine = victim.witness;
        let cancels = point.starts_with("execs.cancel");
        let (name, ran) = (format!("e{number}").parse().unwrap(), format!("/srv/exec-{number}"));
        let last = if cancels { "sleep 600" } else { "sleep 1; exit 7" };
        let request = StartExec {
            exec_id: Some(name),
            script: format!("echo ran >> {ran}; cat /srv/piece; {last}"),
            timeout_sec: Some(600.0),
            cwd: None,
            env: None,
            user: None,
            stdin: None,
        };
        let name = request.exec_id.clone().unwrap();
        victim.arm(&point, fault).await;
        let client = victim.server.client();
        let started = client.start_exec(&machine, &request).await;
        // Each may be what comes by the point, and fail there.
        let _ = client.exec_output(&machine, &name, ExecStream::Stdout, 0, Duration::ZERO).await;
        if cancels {
            let _ = client.cancel_exec(&machine, &name).await;
        }
        victim.is_over(&point, fault).await;

        let client = victim.server.client();
        match client.start_exec(&machine, &request).await {
            Ok(_) => assert!(started.is_err(), "{point}: started twice"),
            Err(error) => assert_eq!(error.status(), Some(409), "{point}"),
        }
        if cancels {
            client.cancel_exec(&machine, &name).await.unwrap();
        }
        let exec = client.exec_end(&machine, &name).await.unwrap();
        let counting = command(format!("cat {ran} 2>/dev/null | wc -l"));
        let times = client.exec(&machine, &counting).await.unwrap().stdout;
        let times: usize = times.trim().parse().unwrap();
        assert!(times <= 1, "{point}: it ran {times} times");
        let mut output = Vec::new();
        loop {
            let offset = output.len() as u64;
            let page =
                client.exec_output(&machine, &name, ExecStream::Stdout, offset, SETTLED).await;
            let page = page.unwrap();
            output.extend(page.bytes);
            if page.eof {
                break;
            }
        }
        match exec.state {
            // Its server died before it had asked the guest.
            ExecState::Lost => {
                assert_eq!((point.as_str(), fault), ("execs.reserved", Fault::Kill));
                assert_eq!((exec.exit_code, times), (None, 0), "{point}");
            }
            ExecState::Failed => assert_eq!((exec.exit_code, times), (Some(7), 1), "{point}"),
            ExecState::Cancelled => assert!(cancels && times == 1, "{point}"),
            state @ (ExecState::Running | ExecState::Succeeded | ExecState::Expired) => {
                panic!("{point}: it is {state}")
            }
        }
        if exec.state != ExecState::Lost {
            assert_eq!(exec.stdout_bytes, piece.len() as u64, "{point}");
            let is_cut = point == "execs.output_writing" && fault == Fault::Error;
            assert_eq!(exec.truncated, is_cut, "{point}");
            assert!(if is_cut { piece.starts_with(&output) } else { output == piece }, "{point}");
        }
        victim.is_sound(&point).await;
    }
    host.end(victim.server).await;
}

pub(super) async fn a_write_is_whole_or_not_at_all_whatever_is_killed_or_fails(host: Host) {
    const PATH: &str = "/srv/written/file";
    let _room = host.room(1).await;
    let mut victim = Victim::start().await;
    let mut old = b"the first".to_vec();
    let client = victim.server.client();
    client.write_file(&victim.witness, PATH, old.clone(), &WriteOptions::default()).await.unwrap();
    for (number, (point, fault)) in faults_of("write").into_iter().enumerate() {
        victim.arm(&point, fault).await;
        let new = patterned(700_000 + number);
        let options = WriteOptions::default();
        let client = victim.server.client();
        let written = client.write_file(&victim.witness, PATH, new.clone(), &options).await;
        assert!(written.is_err(), "{point}: {written:?}");
        victim.is_over(&point, fault).await;
        let client = victim.server.client();
        // The guest has put away what it was left with.
        until(&point, SETTLED, async || {
            let listed = client.list_directory(&victim.witness, "/srv/written").await.unwrap();
            (listed.entries.len() == 1).then_some(())
        })
        .await;
        let content = client.read_file(&victim.witness, PATH).await.unwrap();
        let content = content.bytes().await.unwrap();
        assert!(content == old || content == new, "{point}: {} bytes", content.len());
        if fault == Fault::Error {
            assert!(content == old, "{point}: a write that failed has changed the file");
        }
        assert!(point != "write.answering" || content == new, "{point}: the guest had it all");
        old = content.to_vec();
        victim.is_sound(&point).await;
    }
    host.end(victim.server).await;
}
