//! The time to live: counted, changed, and run out under whatever goes on.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use api::{CreateSandbox, ExecRequest, SandboxStatus, UpdateLifecycle};
use bytes::Bytes;
use client::{Body, Method};
use futures::stream;
use serde_json::json;
use tests::{Answer, Host, command, pause, small, suite, until};
use tokio::time::Instant;

suite! {
    the_time_to_live_starts_again_when_changed,
    the_time_to_live_runs_out_under_a_command,
    the_time_to_live_runs_out_under_an_upload,
    a_persistent_sandbox_has_no_time_to_live,
    a_time_to_live_of_nothing_is_refused_with_a_reason;
    soak:
}

async fn the_time_to_live_runs_out_under_a_command(host: Host) {
    let sandbox = host.idle_sandbox_of(&CreateSandbox { ttl_seconds: Some(4), ..small() }).await;
    let start = Instant::now();
    let running = async {
        let request = ExecRequest { timeout_seconds: Some(25.0), ..command("sleep 60") };
        let ended = sandbox.client().exec(&sandbox.id, &request).await;
        (ended, start.elapsed())
    };
    let streaming = async {
        let mut events =
            sandbox.client().exec_stream(&sandbox.id, &command("sleep 60")).await.unwrap();
        let mut last = None;
        while let Ok(Some(event)) = events.next().await {
            last = Some(event);
        }
        last
    };
    let ((ended, after), last) = tokio::join!(running, streaming);
    let status = ended.unwrap_err().status();
    assert!([Some(404), Some(410), Some(503)].contains(&status), "{status:?}");
    assert!(after < Duration::from_secs(20), "{after:?}");
    assert!(matches!(last, Some(client::ExecEvent::Failed { .. })), "{last:?}");
    assert_eq!(
        sandbox.get("/fs?path=/etc/hostname").await.refusal(),
        (404, "not_found".to_owned())
    );
    until("it is gone", Duration::from_secs(20), async || {
        (sandbox.get("").await.status == 404).then_some(())
    })
    .await;
    let server = host.server().await;
    let directory = server.data().join("sandboxes").join(sandbox.id.to_string());
    assert!(!directory.exists());
}

async fn the_time_to_live_runs_out_under_an_upload(host: Host) {
    let sandbox = host.idle_sandbox_of(&CreateSandbox { ttl_seconds: Some(4), ..small() }).await;
    let endless = Body::wrap_stream(stream::unfold((), |()| async {
        pause(Duration::from_millis(100)).await;
        Some((Ok::<_, std::io::Error>(Bytes::from_static(&[b'.'; 100])), ()))
    }));
    let request = sandbox.request(Method::PUT, "/fs?path=/srv/job/endless").body(endless);
    let upload = async {
        // The answer, if one comes before the end, is a refusal.
        if let Ok(answer) = request.send().await {
            assert!(answer.status().as_u16() >= 400, "{answer:?}");
        }
        std::future::pending::<()>().await;
    };
    let gone = until("it is gone", Duration::from_secs(30), async || {
        (sandbox.get("").await.status == 404).then_some(())
    });
    tokio::select! {
        () = upload => {}
        () = gone => {}
    }
}

async fn the_time_to_live_starts_again_when_changed(host: Host) {
    let sandbox = host.idle_sandbox_of(&CreateSandbox { ttl_seconds: Some(6), ..small() }).await;
    let client = sandbox.client();
    let changed = client
        .update_lifecycle(
            &sandbox.id,
            &UpdateLifecycle { ttl_seconds: Some(3600), ..UpdateLifecycle::default() },
        )
        .await
        .unwrap();
    let left = changed.expires_at.unwrap() - time::OffsetDateTime::now_utc();
    assert!((3500..=3600).contains(&left.whole_seconds()), "{changed:?}");
    assert_eq!(
        (changed.ttl_seconds, changed.persistent, changed.status),
        (Some(3600), false, SandboxStatus::Running)
    );
    assert_eq!(client.lifecycle(&sandbox.id).await.unwrap(), changed);
    // Past the first time to live.
    let passed = sandbox.created.expires_at.unwrap() + Duration::from_secs(2);
    until("the first time to live is over", Duration::from_secs(20), async || {
        (time::OffsetDateTime::now_utc() > passed).then_some(())
    })
    .await;
    assert_eq!(sandbox.run("echo alive").await, "alive\n");
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
    client
        .update_lifecycle(
            &sandbox.id,
            &UpdateLifecycle { ttl_seconds: Some(1), ..UpdateLifecycle::default() },
        )
        .await
        .unwrap();
    until("it is gone", Duration::from_secs(20), async || {
        (sandbox.get("").await.status == 404).then_some(())
    })
    .await;
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
