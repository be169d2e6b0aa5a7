//! The time to live: counted, changed, and run out under whatever goes on.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use api::{CreateSandbox, SandboxStatus, UpdateLifecycle};
use bytes::Bytes;
use client::{Body, Method};
use futures::stream;
use serde_json::json;
use tests::{Answer, Host, Sandbox, command, pause, small, suite, until};
use time::OffsetDateTime;

suite! {
    the_time_to_live_starts_again_when_changed,
    the_time_to_live_runs_out_under_a_command,
    the_time_to_live_runs_out_under_an_upload,
    a_persistent_sandbox_has_no_time_to_live,
    a_time_to_live_of_nothing_is_refused_with_a_reason;
    soak:
}

/// From the end of a time to live, on a slow host.
const SOON: Duration = Duration::from_secs(90);

/// Whoever sets so little may hear no more of it.
async fn let_expire(sandbox: &Sandbox) {
    let update = UpdateLifecycle { ttl_seconds: Some(1), ..UpdateLifecycle::default() };
    match sandbox.client().update_lifecycle(&sandbox.id, &update).await {
        Err(error) if error.status() != Some(404) => panic!("{error:?}"),
        Ok(_) | Err(_) => {}
    }
}

async fn is_gone(sandbox: &Sandbox) {
    until("it is gone", SOON, async || (sandbox.get("").await.status == 404).then_some(())).await;
}

async fn is_there(sandbox: &Sandbox, path: &str) {
    until(path, SOON, async || {
        (sandbox.exec(command(format!("test -e {path}"))).await.exit_code == 0).then_some(())
    })
    .await;
}

async fn the_time_to_live_runs_out_under_a_command(host: Host) {
    let sandbox = host.idle_sandbox_of(&small()).await;
    let [one, other] =
        ["/srv/run", "/srv/stream"].map(|path| command(format!("touch {path}; sleep infinity")));
    let running = sandbox.client().exec(&sandbox.id, &one);
    let streaming = async {
        let streamed = sandbox.client().exec_stream(&sandbox.id, &other).await;
        let (mut events, mut last) = (streamed.unwrap(), None);
        while let Ok(Some(event)) = events.next().await {
            last = Some(event);
        }
        last
    };
    let expiring = async {
        is_there(&sandbox, "/srv/run").await;
        is_there(&sandbox, "/srv/stream").await;
        let_expire(&sandbox).await;
    };
    let (ended, last, ()) = tokio::join!(running, streaming, expiring);
    let error = ended.unwrap_err();
    // An answer that has begun, to be kept alive, breaks off.
    let broke_off = matches!(error, client::Error::Interrupted { .. });
    assert!(broke_off || matches!(error.status(), Some(404 | 410 | 503)), "{error:?}");
    assert!(matches!(last, Some(client::ExecEvent::Failed { .. })), "{last:?}");
    assert_eq!(
        sandbox.get("/fs?path=/etc/hostname").await.refusal(),
        (404, "not_found".to_owned())
    );
    is_gone(&sandbox).await;
    let server = host.server().await;
    let directory = server.data().join("sandboxes").join(sandbox.id.to_string());
    until("its directory is gone", SOON, async || (!directory.exists()).then_some(())).await;
}

async fn the_time_to_live_runs_out_under_an_upload(host: Host) {
    let sandbox = host.idle_sandbox_of(&small()).await;
    let endless = Body::wrap_stream(stream::unfold((), |()| async {
        pause(Duration::from_millis(100)).await;
        Some((Ok::<_, std::io::Error>(Bytes::from_static(&[b'.'; 100])), ()))
    }));
    let request = sandbox.request(Method::PUT, "/fs?path=/srv/upload/endless").body(endless);
    let upload = async {
        // The answer, if one comes before the end, is a refusal.
        if let Ok(answer) = request.send().await {
            assert!(answer.status().as_u16() >= 400, "{answer:?}");
        }
        std::future::pending::<()>().await;
    };
    let expiring = async {
        is_there(&sandbox, "/srv/upload").await;
        let_expire(&sandbox).await;
        is_gone(&sandbox).await;
    };
    tokio::select! {
        () = upload => {}
        () = expiring => {}
    }
}

async fn the_time_to_live_starts_again_when_changed(host: Host) {
    let short = CreateSandbox { ttl_seconds: Some(30), ..small() };
    let sandbox = host.idle_sandbox_of(&short).await;
    let client = sandbox.client();
    let before = OffsetDateTime::now_utc();
    let update = UpdateLifecycle { ttl_seconds: Some(3600), ..UpdateLifecycle::default() };
    let changed = client.update_lifecycle(&sandbox.id, &update).await.unwrap();
    let began = changed.expires_at.unwrap() - Duration::from_secs(3600);
    // The server tells times that tremble by less than a second.
    let around =
        before - Duration::from_secs(1)..=OffsetDateTime::now_utc() + Duration::from_secs(1);
    assert!(around.contains(&began), "{changed:?}");
    assert_eq!(
        (changed.ttl_seconds, changed.persistent, changed.status),
        (Some(3600), false, SandboxStatus::Running)
    );
    assert_eq!(client.lifecycle(&sandbox.id).await.unwrap(), changed);
    for bad in [
        json!({"ttl_seconds": 0}),
        json!({"ttl_seconds": -5}),
        json!({"ttl_seconds": "x"}),
        json!({"persistent": 1}),
        json!({"ttl_seconds": 5, "persistent": true}),
    ] {
        let refused = Answer::to(sandbox.request(Method::PATCH, "/lifecycle").json(&bad)).await;
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "{bad}");
    }
    assert_eq!(
        client.lifecycle(&sandbox.id).await.unwrap(),
        changed,
        "a refused change changes nothing"
    );
    // With this one, which was made later, the first time to live is over.
    let unchanged = host.idle_sandbox_of(&short).await;
    is_gone(&unchanged).await;
    assert_eq!(sandbox.run("echo alive").await, "alive\n");
    let_expire(&sandbox).await;
    is_gone(&sandbox).await;
}

async fn a_persistent_sandbox_has_no_time_to_live(host: Host) {
    let sandbox = host
        .sandbox_of(&CreateSandbox { ttl_seconds: None, persistent: Some(true), ..small() })
        .await;
    let shown = sandbox.get("").await.json();
    assert_eq!(
        (&shown["persistent"], shown.get("expires_at"), shown.get("ttl_seconds")),
        (&json!(true), None, None)
    );
    let update = UpdateLifecycle { persistent: Some(false), ..UpdateLifecycle::default() };
    let changed = sandbox.client().update_lifecycle(&sandbox.id, &update).await.unwrap();
    assert!(
        !changed.persistent && changed.expires_at.is_some() && changed.ttl_seconds.is_some(),
        "{changed:?}"
    );
    let update = UpdateLifecycle { persistent: Some(true), ..UpdateLifecycle::default() };
    let changed = sandbox.client().update_lifecycle(&sandbox.id, &update).await.unwrap();
    assert!(
        changed.persistent && changed.expires_at.is_none() && changed.ttl_seconds.is_none(),
        "{changed:?}"
    );
}

async fn a_time_to_live_of_nothing_is_refused_with_a_reason(host: Host) {
    let server = host.server().await;
    for ttl in [0, -1, i64::MIN, i64::MAX] {
        let refused = server
            .client()
            .create_sandbox(&CreateSandbox { ttl_seconds: Some(ttl), ..small() })
            .await
            .unwrap_err();
        assert_eq!(refused.status(), Some(400), "{ttl}");
        assert!(refused.to_string().contains("ttl_seconds"), "{refused}");
    }
}
