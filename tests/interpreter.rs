//! Kernels in real guests: state, rich results, interrupts, and what becomes of them when their machine does something.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use api::{CreateSandbox, CreateSnapshot, Fork, SandboxStatus, UpdateLifecycle};
use client::{Client, Method};
use serde_json::{Value, json};
use tests::{Answer, End, Host, Sandbox, Server, pause, small, suite, until, wheel_of};

suite! {
    state_results_and_errors_are_as_the_clients_expect_them,
    a_timeout_interrupts_the_cell_and_keeps_the_session,
    a_dead_kernel_says_so_and_is_restarted,
    a_stream_tells_everything_as_it_happens,
    a_client_that_goes_away_does_not_disturb_its_cell,
    a_cell_that_takes_long_is_kept_alive,
    sessions_survive_hibernation_and_a_restart_of_the_server,
    kernels_of_clones_draw_their_own_random_numbers,
    a_template_without_a_kernel_says_how_to_get_one,
    a_language_has_the_kernel_that_was_installed_for_it,
    a_kernel_that_stands_ready_rests_and_stops_with_its_sandbox;
    soak:
}

/// Two kernels have something to do, or a whole machine comes back.
const SOON: Duration = Duration::from_secs(60);

fn interpreter() -> CreateSandbox {
    CreateSandbox {
        template: Some("code-interpreter".to_owned()),
        ttl_seconds: Some(3600),
        ..CreateSandbox::default()
    }
}

async fn create(sandbox: &Sandbox, body: Value) -> String {
    let answer = Answer::to(sandbox.request(Method::POST, "/repl/sessions").json(&body)).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    answer.json()["id"].as_str().unwrap().to_owned()
}

async fn python(sandbox: &Sandbox) -> String {
    create(sandbox, json!({"language": "python"})).await
}

async fn ask(sandbox: &Sandbox, session: &str, body: Value) -> Answer {
    let route = format!("/repl/sessions/{session}/run");
    Answer::to(sandbox.request(Method::POST, &route).json(&body)).await
}

async fn run(sandbox: &Sandbox, session: &str, code: &str) -> Value {
    let answer = ask(sandbox, session, json!({ "code": code })).await;
    assert_eq!(answer.status, 200, "{code}: {answer:?}");
    answer.json()
}

/// The text of the last expression.
fn text(result: &Value) -> &str {
    let results = result["results"].as_array().unwrap();
    let text = results.iter().rev().find(|result| result["type"] == "text/plain");
    text.unwrap_or_else(|| panic!("no text: {result}"))["data"].as_str().unwrap()
}

fn kinds(result: &Value) -> Vec<&str> {
    let results = result["results"].as_array().unwrap();
    results.iter().map(|result| result["type"].as_str().unwrap()).collect()
}

async fn sessions(sandbox: &Sandbox) -> Vec<(String, String)> {
    let answer = sandbox.get("/repl/sessions").await.json();
    let one = |session: &Value| {
        let text = |name: &str| session[name].as_str().unwrap().to_owned();
        (text("id"), text("status"))
    };
    answer.as_array().unwrap().iter().map(one).collect()
}

async fn state_results_and_errors_are_as_the_clients_expect_them(host: Host) {
    let request = CreateSandbox {
        env: Some([("GIVEN".to_owned(), "é\"$'".to_owned())].into()),
        ..interpreter()
    };
    let sandbox = host.sandbox_of(&request).await;
    let session = python(&sandbox).await;
    let said = run(
        &sandbox,
        &session,
        "import os; x = 41; (os.environ['GIVEN'], os.environ['HOME'], os.getcwd())",
    )
    .await;
    assert_eq!(text(&said), "('é\"$\\'', '/root', '/root')");
    assert_eq!((&said["error"], &said["exit"]), (&Value::Null, &json!(0)));
    assert_eq!(text(&run(&sandbox, &session, "x + 1").await), "42");
    let said =
        run(&sandbox, &session, "print('é'); import sys; print('warn', file=sys.stderr); None")
            .await;
    assert_eq!((&said["stdout"], &said["stderr"]), (&json!("é\n"), &json!("warn\n")));
    assert_eq!(said["results"], json!([]));

    let chart =
        run(&sandbox, &session, "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()")
            .await;
    assert_eq!(kinds(&chart), ["image/png"]);
    assert!(chart["results"][0]["data"].as_str().unwrap().starts_with("iVBORw0KGgo"));
    let chart = run(&sandbox, &session, "plt.plot([3, 1]); 7").await;
    assert_eq!(text(&chart), "7", "without `show` the picture comes as well");
    assert!(kinds(&chart).contains(&"image/png"));
    let table = run(&sandbox, &session, "import pandas as pd\npd.DataFrame({'a': [1, 2]})").await;
    assert_eq!(kinds(&table), ["text/html", "text/plain"]);
    assert!(table["results"][0]["data"].as_str().unwrap().contains("<table"));
    let rich = "from IPython.display import JSON, SVG, Markdown, display\n\
                display(JSON({'a': [1]}), SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'), Markdown('*b*'))";
    let rich = run(&sandbox, &session, rich).await;
    let form = |kind: &str| {
        let found = rich["results"].as_array().unwrap().iter().find(|one| one["type"] == kind);
        found.unwrap_or_else(|| panic!("{kind}: {rich}"))["data"].as_str().unwrap().to_owned()
    };
    assert_eq!(
        serde_json::from_str::<Value>(&form("application/json")).unwrap(),
        json!({"a": [1]})
    );
    assert!(form("image/svg+xml").starts_with("<svg"));
    assert_eq!(form("text/markdown"), "*b*");

    let failed = run(&sandbox, &session, "1/0").await;
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("ZeroDivisionError") && error.contains("line 1"), "{error}");
    assert!(!error.contains('\u{1b}') && failed["exit"] == 1);
    let child = "import subprocess; subprocess.run('echo from a child; printf \"\\\\377\" >&2', shell=True); None";
    let said = run(&sandbox, &session, child).await;
    assert_eq!((&said["stdout"], &said["stderr"]), (&json!("from a child\n"), &json!("\u{fffd}")));
    let much = run(&sandbox, &session, "print('x' * (17 << 20))").await;
    assert_eq!(
        (much["stdout"].as_str().unwrap().len(), &much["truncated"]),
        (16 << 20, &json!(true))
    );

    let other = create(&sandbox, json!({"cwd": "/tmp", "env": {"GIVEN": "own"}})).await;
    let said = run(&sandbox, &other, "import os; (os.environ['GIVEN'], os.getcwd())").await;
    assert_eq!(text(&said), "('own', '/tmp')");
    assert!(run(&sandbox, &other, "x").await["error"].as_str().unwrap().contains("NameError"));
    let (one, two) = tokio::join!(
        run(&sandbox, &session, "import time; time.sleep(1); y = 1; y"),
        run(&sandbox, &session, "y + 1")
    );
    assert!(one["error"].is_null() || two["error"].is_null(), "they take turns: {one} {two}");
    let route = format!("/repl/sessions/{other}");
    assert_eq!(Answer::to(sandbox.request(Method::DELETE, &route)).await.status, 204);
    assert_eq!(Answer::to(sandbox.request(Method::DELETE, &route)).await.status, 404);
    assert_eq!(
        ask(&sandbox, &other, json!({"code": "1"})).await.refusal(),
        (404, "not_found".to_owned())
    );
    assert_eq!(sessions(&sandbox).await, [(session, "idle".to_owned())]);
    for (body, status) in [(json!({}), 400), (json!({"code": "1", "timeout_ms": 0}), 400)] {
        assert_eq!(ask(&sandbox, &other, body.clone()).await.status, status, "{body}");
    }
}

async fn a_timeout_interrupts_the_cell_and_keeps_the_session(host: Host) {
    let sandbox = host.sandbox_of(&interpreter()).await;
    let session = python(&sandbox).await;
    run(&sandbox, &session, "x = 41").await;
    for code in [
        "print('begun'); \nwhile True: pass",
        "print('begun'); import subprocess; subprocess.run(['sleep', '1000'])",
    ] {
        let answer = ask(&sandbox, &session, json!({"code": code, "timeout_ms": 6000})).await;
        assert_eq!(
            (answer.status, answer.code()),
            (504, "timed_out".to_owned()),
            "{code}: {answer:?}"
        );
        let body = answer.json();
        assert!(body["error"].as_str().unwrap().contains("timeout"));
        assert_eq!((&body["stdout"], &body["timed_out"]), (&json!("begun\n"), &json!(true)));
    }
    assert_eq!(text(&run(&sandbox, &session, "x").await), "41");
    let stubborn = "while True:\n  try:\n    while True: pass\n  except KeyboardInterrupt: pass";
    let answer = ask(&sandbox, &session, json!({"code": stubborn, "timeout_ms": 6000})).await;
    assert_eq!(answer.status, 504);
    let error = answer.json()["error"].as_str().unwrap().to_owned();
    assert!(error.contains("restarted"), "{error}");
    // On a loaded host the answer may come before the new kernel does.
    let said = until("a new kernel answers", SOON, async || {
        let answer = ask(&sandbox, &session, json!({"code": "x"})).await;
        (answer.status == 200).then(|| answer.json())
    })
    .await;
    assert!(said["error"].as_str().unwrap().contains("NameError"), "{said}");
}

async fn a_dead_kernel_says_so_and_is_restarted(host: Host) {
    let sandbox = host.sandbox_of(&interpreter()).await;
    let session = python(&sandbox).await;
    let child =
        "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True).pid";
    let child = text(&run(&sandbox, &session, child).await).to_owned();
    let said = run(
        &sandbox,
        &session,
        "print('last words'); import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    )
    .await;
    assert_eq!((&said["stdout"], &said["exit"]), (&json!("last words\n"), &json!(1)));
    assert!(said["error"].as_str().unwrap().contains("the kernel died by signal 9"), "{said}");
    let refused = ask(&sandbox, &session, json!({"code": "1"})).await;
    assert_eq!(refused.refusal(), (409, "conflict".to_owned()));
    assert!(refused.text().contains("restart"));
    assert_eq!(sessions(&sandbox).await, [(session.clone(), "dead".to_owned())]);
    let gone = format!("test -e /proc/{child} && echo there || echo gone");
    assert_eq!(sandbox.run(&gone).await, "gone\n");
    let route = format!("/repl/sessions/{session}/restart");
    let restarted = Answer::to(sandbox.request(Method::POST, &route)).await;
    assert_eq!((restarted.status, &restarted.json()["id"]), (200, &json!(session)));
    assert_eq!(text(&run(&sandbox, &session, "1 + 1").await), "2");

    let hungry = "print('before', flush=True)\nx = []\nwhile True: x.append(b'x' * (64 << 20))";
    let said = run(&sandbox, &session, hungry).await;
    assert_eq!((&said["stdout"], &said["exit"]), (&json!("before\n"), &json!(1)));
    assert!(said["error"].as_str().unwrap().contains("memory"), "{said}");
    assert_eq!(sessions(&sandbox).await, [(session, "dead".to_owned())]);
}

/// Name and data of each event.
async fn events(sandbox: &Sandbox, session: &str, code: &str) -> Vec<(String, Value)> {
    let route = format!("/repl/sessions/{session}/run/stream");
    let answer =
        Answer::to(sandbox.request(Method::POST, &route).json(&json!({ "code": code }))).await;
    assert_eq!(answer.header("content-type"), "text/event-stream; charset=utf-8");
    let text = answer.text();
    assert!(text.is_ascii(), "{text}");
    let events = text.split("\n\n").filter_map(|event| {
        let (name, data) = event.strip_prefix("event: ")?.split_once("\ndata: ")?;
        Some((name.to_owned(), serde_json::from_str(data).unwrap()))
    });
    events.collect()
}

async fn a_stream_tells_everything_as_it_happens(host: Host) {
    let sandbox = host.sandbox_of(&interpreter()).await;
    let session = python(&sandbox).await;
    let code = "import sys\nprint('é')\nprint('w', file=sys.stderr)\n{'a': 1}";
    let all = events(&sandbox, &session, code).await;
    let of = |name: &str| {
        all.iter().find(|event| event.0 == name).unwrap_or_else(|| panic!("{all:?}")).1.clone()
    };
    assert_eq!((of("stdout"), of("stderr")), (json!({"chunk": "é\n"}), json!({"chunk": "w\n"})));
    assert_eq!(of("result"), json!({"type": "text/plain", "data": "{'a': 1}"}));
    let (last, done) = all.last().unwrap();
    assert_eq!((last.as_str(), &done["exit"]), ("done", &json!(0)));
    let all = events(&sandbox, &session, "1/0").await;
    assert!(
        all[0].0 == "error" && all[0].1["error"].as_str().unwrap().contains("line 1"),
        "{all:?}"
    );
    assert_eq!(all.last().unwrap().1["exit"], 1);

    // What is printed first is there before the cell has ended.
    let route = format!("/repl/sessions/{session}/run/stream");
    let code = json!({"code": "print('first')\nimport os\nos.mkfifo('/tmp/gate'); open('/tmp/gate').read()"});
    let mut answer = sandbox.request(Method::POST, &route).json(&code).send().await.unwrap();
    let mut heard = String::new();
    while !heard.contains("first") {
        heard += std::str::from_utf8(&answer.chunk().await.unwrap().expect("it goes on")).unwrap();
    }
    assert!(!heard.contains("done"));
    sandbox.run("echo > /tmp/gate").await;
    while let Some(piece) = answer.chunk().await.unwrap() {
        heard += std::str::from_utf8(&piece).unwrap();
    }
    assert!(heard.contains("event: done"), "{heard}");
}

async fn a_client_that_goes_away_does_not_disturb_its_cell(host: Host) {
    let sandbox = host.sandbox_of(&interpreter()).await;
    let session = python(&sandbox).await;
    let patch = UpdateLifecycle { idle_seconds: Some(1), ..UpdateLifecycle::default() };
    sandbox.client().update_lifecycle(&sandbox.id, &patch).await.unwrap();
    let route = format!("/repl/sessions/{session}/run/stream");
    let code = json!({"code": "print('begun')\nimport time; time.sleep(4); open('/root/end', 'w').close(); x = 7"});
    let mut answer = sandbox.request(Method::POST, &route).json(&code).send().await.unwrap();
    answer.chunk().await.unwrap().expect("it has begun");
    drop(answer);
    // A cell that runs is use of its sandbox, though nobody waits for it.
    until("it hibernates", SOON, async || {
        let sandbox = sandbox.client().sandbox(&sandbox.id).await.unwrap();
        (sandbox.status == SandboxStatus::Hibernated).then_some(())
    })
    .await;
    assert!(sandbox.client().stat_file(&sandbox.id, "/root/end").await.is_ok());
    assert_eq!(text(&run(&sandbox, &session, "x").await), "7");
}

async fn a_cell_that_takes_long_is_kept_alive(host: Host) {
    let sandbox = host.sandbox_of(&interpreter()).await;
    let session = python(&sandbox).await;
    let answer = ask(&sandbox, &session, json!({"code": "import time; time.sleep(18); 5"})).await;
    assert!(answer.status == 200 && answer.text().starts_with(' '), "{answer:?}");
    assert_eq!(text(&answer.json()), "5");
    // A limit beyond what clients wait for can only be told in the body.
    let long = json!({"code": "while True: pass", "timeout_ms": 28_000});
    let answer = ask(&sandbox, &session, long).await;
    let body = answer.json();
    assert_eq!(
        (answer.status, &body["timed_out"], &body["exit"]),
        (200, &json!(true), &json!(124))
    );
    assert!(body["error"].as_str().unwrap().contains("timeout"));
}

async fn sessions_survive_hibernation_and_a_restart_of_the_server(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let sandbox = server.sandbox(&interpreter()).await;
    let session = python(&sandbox).await;
    run(&sandbox, &session, "x = list(range(3))").await;
    sandbox.client().hibernate(&sandbox.id).await.unwrap();
    assert_eq!(text(&run(&sandbox, &session, "x").await), "[0, 1, 2]");
    server.restart(End::Killed).await;
    let sandbox = sandbox.on(&server);
    assert_eq!(sessions(&sandbox).await, [(session.clone(), "idle".to_owned())]);
    assert_eq!(text(&run(&sandbox, &session, "x").await), "[0, 1, 2]");

    // A cell that runs is use of its sandbox, though no server that runs has been asked for it.
    let route = format!("/repl/sessions/{session}/run/stream");
    let code = json!({"code": "print('begun')\nimport os\nos.mkfifo('/tmp/gate'); open('/tmp/gate').read(); y = 8"});
    let mut answer = sandbox.request(Method::POST, &route).json(&code).send().await.unwrap();
    answer.chunk().await.unwrap().expect("it has begun");
    server.restart(End::Killed).await;
    let sandbox = sandbox.on(&server);
    let patch = UpdateLifecycle { idle_seconds: Some(1), ..UpdateLifecycle::default() };
    sandbox.client().update_lifecycle(&sandbox.id, &patch).await.unwrap();
    pause(Duration::from_secs(8)).await;
    let status = async || sandbox.client().sandbox(&sandbox.id).await.unwrap().status;
    assert_eq!(status().await, SandboxStatus::Running);
    sandbox.run("echo > /tmp/gate").await;
    until("it hibernates", SOON, async || {
        (status().await == SandboxStatus::Hibernated).then_some(())
    })
    .await;
    assert_eq!(text(&run(&sandbox, &session, "y").await), "8");
    sandbox.delete().await;
    host.end(server).await;
}

async fn said_by(client: &Client, id: &api::SandboxId, session: &str, code: &str) -> Value {
    let route = format!("/v1/sandboxes/{id}/repl/sessions/{session}/run");
    let answer =
        Answer::to(client.request(Method::POST, &route).json(&json!({ "code": code }))).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

async fn kernels_of_clones_draw_their_own_random_numbers(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let client = server.client();
    let parent = server.sandbox(&interpreter()).await;
    let session = python(&parent).await;
    // It draws while its machine is copied, too.
    let begin =
        "import random, numpy, threading, time\nrandom.seed(1); numpy.random.seed(1); kept = 41";
    run(&parent, &session, begin).await;
    let draw = "(kept, random.random(), numpy.random.rand())";
    let forked =
        client.fork(&parent.id, &Fork { count: Some(1), ..Fork::default() }).await.unwrap();
    let child = forked.sandbox;
    let ours = text(&run(&parent, &session, draw).await).to_owned();
    let theirs = text(&said_by(client, &child.id, &session, draw).await).to_owned();
    assert!(ours.starts_with("(41, 0.1343") && theirs.starts_with("(41, "), "{ours} {theirs}");
    assert_ne!(ours, theirs);
    client.delete_sandbox(&child.id).await.unwrap();
    let snapshot = client.create_snapshot(&parent.id, &CreateSnapshot::default()).await.unwrap().id;
    parent.delete().await;
    let mut drawn = Vec::new();
    for _ in 0..2 {
        let clone = server.restored(&snapshot).await;
        drawn.push(text(&run(&clone, &session, draw).await).to_owned());
        clone.delete().await;
    }
    assert!(drawn[0] != drawn[1] && drawn[0] != ours, "{drawn:?}");
    client.delete_snapshot(&snapshot).await.unwrap();
    // Each first session of a template comes from one kernel that was baked.
    let mut drawn = Vec::new();
    for _ in 0..2 {
        let sandbox = server.sandbox(&interpreter()).await;
        let session = python(&sandbox).await;
        let code = "import random, numpy; (random.random(), numpy.random.rand())";
        drawn.push(text(&run(&sandbox, &session, code).await).to_owned());
        sandbox.delete().await;
    }
    assert_ne!(drawn[0], drawn[1]);
}

async fn a_template_without_a_kernel_says_how_to_get_one(host: Host) {
    let sandbox = host.sandbox_of(&small()).await;
    for (language, way) in
        [("python", "pip install ipykernel"), ("bash", "kernelspec"), ("node", "kernelspec")]
    {
        let request =
            sandbox.request(Method::POST, "/repl/sessions").json(&json!({"language": language}));
        let refused = Answer::to(request).await;
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "{language}");
        assert!(refused.text().contains(way), "{}", refused.text());
    }
    assert_eq!(sessions(&sandbox).await, []);
}

async fn a_language_has_the_kernel_that_was_installed_for_it(host: Host) {
    let wheels = [("bash_kernel", "0.10.0"), ("filetype", "1.2.0")];
    let sandbox = host.sandbox_of(&interpreter()).await;
    for (name, version) in wheels {
        sandbox.write(format!("/tmp/{name}.whl"), wheel_of(name, version).await).await;
    }
    sandbox
        .run(
            "for wheel in /tmp/*.whl; do python3 -m zipfile -e $wheel /usr/lib/python3/dist-packages; done
            python3 -m bash_kernel.install",
        )
        .await;
    let session = create(&sandbox, json!({"language": "Bash", "cwd": "/tmp"})).await;
    let listed = sandbox.get("/repl/sessions").await.json();
    assert_eq!(listed[0]["language"], "bash");
    run(&sandbox, &session, "x=41").await;
    let said = run(&sandbox, &session, "pwd; echo $((x + 1))é").await;
    assert_eq!((&said["stdout"], &said["exit"]), (&json!("/tmp\n42é\n"), &json!(0)));
    let failed = run(&sandbox, &session, "(exit 3)").await;
    assert_eq!((&failed["error"], &failed["exit"]), (&json!("3"), &json!(1)));
    let long = json!({"code": "echo begun; sleep 1000", "timeout_ms": 6000});
    let answer = ask(&sandbox, &session, long).await;
    let stdout = answer.json()["stdout"].as_str().unwrap().to_owned();
    assert!(answer.status == 504 && stdout.starts_with("begun\n"), "{answer:?}");
    // What the interrupted command leaves on its line may come with the next one.
    let said = run(&sandbox, &session, "echo kept-$x").await;
    assert!(said["stdout"].as_str().unwrap().contains("kept-41\n"), "{said}");
    let all = events(&sandbox, &session, "echo streamed").await;
    let is_said = |(name, data): &(String, Value)| {
        name == "stdout" && data["chunk"].as_str().unwrap().contains("streamed")
    };
    assert!(all.iter().any(is_said), "{all:?}");
}

async fn a_kernel_that_stands_ready_rests_and_stops_with_its_sandbox(host: Host) {
    let sandbox = host.sandbox_of(&interpreter()).await;
    // Before anybody has used it.
    sandbox.client().hibernate(&sandbox.id).await.unwrap();
    let session = python(&sandbox).await;
    assert_eq!(text(&run(&sandbox, &session, "1 + 1").await), "2");
    sandbox.delete().await;

    let sandbox = host.sandbox_of(&interpreter()).await;
    for step in ["stop", "start"] {
        let route = format!("/v1/machines/{}/{step}", sandbox.id);
        let answer = Answer::to(sandbox.client().request(Method::POST, &route)).await;
        assert_eq!(answer.status, 200, "{step}: {answer:?}");
    }
    let session = python(&sandbox).await;
    assert_eq!(text(&run(&sandbox, &session, "2 + 1").await), "3");
    let refused = Answer::to(
        sandbox.request(Method::POST, "/repl/sessions").json(&json!({"cwd": "/nowhere"})),
    );
    assert_eq!(refused.await.refusal(), (400, "invalid_request".to_owned()));
}
