//! `/ports`: what listens in a sandbox, and what is shown of it; `/preview-token`: who else may look.

use std::{collections::BTreeMap, sync::Arc};

use api::{
    CreatePreviewToken, ExposePort, NewPreviewToken, Port, PortList, PreviewTokenList, SandboxId,
};
use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use machine::guest::Listener;

use super::{
    body::{Id, InMachine, Input, Output, ok},
    idempotency::ShownOnce,
    query::Query,
};
use crate::{App, Error, keys::Caller};

/// Of one sandbox.
const MOST_EXPOSED: usize = 1000;

/// What listens, also on 127.0.0.1, and what was exposed. Nothing is woken to be asked.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/ports", tag = "ports", params(("id" = String, Path,)),
    responses((status = 200, body = PortList)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<PortList>, Error> {
    let listeners = app.sandboxes.listeners(&caller.account, &id).await?;
    let exposed = app.db.exposed_ports(&id).await?;
    Ok(ok(PortList { ports: shown(listeners, &exposed) }))
}

fn shown(listeners: Vec<Listener>, exposed: &[u16]) -> Vec<Port> {
    let none = |port| Port {
        port,
        listening: false,
        exposed: exposed.contains(&port),
        addresses: Vec::new(),
        pid: None,
        command: None,
    };
    let mut ports: BTreeMap<u16, Port> = exposed.iter().map(|&port| (port, none(port))).collect();
    for listener in listeners {
        let port = ports.entry(listener.port).or_insert_with(|| none(listener.port));
        port.listening = true;
        port.addresses.push(listener.address.to_string());
        if let Some(process) = listener.process.filter(|_| port.pid.is_none()) {
            port.pid = Some(process.pid);
            let name = String::from_utf8_lossy(&process.name);
            port.command = Some(name.chars().filter(|letter| !letter.is_control()).collect());
        }
    }
    ports.into_values().collect()
}

/// Lists the port from now on, whether something listens or not. All ports can be reached either way.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/ports", tag = "ports", params(("id" = String, Path,)), request_body = ExposePort,
    responses((status = 201, body = Port)))]
pub(super) async fn expose(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<ExposePort>,
) -> Result<Response, Error> {
    app.sandboxes.get(&caller.account, &id)?;
    let port = check_port(request.port)?;
    let listeners = app.sandboxes.listeners(&caller.account, &id).await?;
    let mut exposed = app.db.exposed_ports(&id).await?;
    if !exposed.contains(&port) {
        if exposed.len() >= MOST_EXPOSED {
            return Err(Error::conflict(format!(
                "this sandbox has {MOST_EXPOSED} exposed ports; withdraw some"
            )));
        }
        app.db.expose_port(&id, port).await?;
        exposed.push(port);
    }
    let port = shown(listeners, &exposed).into_iter().find(|shown| shown.port == port);
    Ok(Output(StatusCode::CREATED, port).into_response())
}

/// No longer listed unless something listens. Idempotent.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/ports", tag = "ports",
    params(("id" = String, Path,), ("port" = u16, Query,)), responses((status = 204)))]
pub(super) async fn withdraw(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
) -> Result<StatusCode, Error> {
    app.sandboxes.get(&caller.account, &id)?;
    let port = query.number("port")?.ok_or_else(|| Error::invalid("`port` is missing"))?;
    withdraw_port(&app, &caller, &id, port).await
}

/// No longer listed unless something listens. Idempotent.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/ports/{port}", tag = "ports",
    params(("id" = String, Path,), ("port" = u16, Path,)), responses((status = 204)))]
pub(super) async fn withdraw_one(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, port): InMachine,
) -> Result<StatusCode, Error> {
    withdraw_port(&app, &caller, &id, port.parse().unwrap_or(0)).await
}

async fn withdraw_port(
    app: &App,
    caller: &Caller,
    id: &SandboxId,
    port: u16,
) -> Result<StatusCode, Error> {
    app.sandboxes.get(&caller.account, id)?;
    app.db.withdraw_port(id, check_port(port)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A token by which anyone may use this one port of this sandbox, without a key. Shown this once.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/preview-token", tag = "ports", params(("id" = String, Path,)),
    request_body = CreatePreviewToken, responses((status = 201, body = NewPreviewToken)))]
pub(super) async fn create_token(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<CreatePreviewToken>,
) -> Result<Response, Error> {
    app.sandboxes.get(&caller.account, &id)?;
    let port = check_port(request.port)?;
    let mut new = app.previews.create(&caller, id, port, request.ttl_seconds).await?;
    new.host = app.config.previews.suffix.as_ref().map(|suffix| format!("{port}-{id}.{suffix}"));
    let mut response = Output(StatusCode::CREATED, new).into_response();
    response.extensions_mut().insert(ShownOnce);
    Ok(response)
}

/// Those that are valid, oldest first, without the token itself.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/preview-token", tag = "ports", params(("id" = String, Path,)),
    responses((status = 200, body = PreviewTokenList)))]
pub(super) async fn tokens(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<PreviewTokenList>, Error> {
    app.sandboxes.get(&caller.account, &id)?;
    Ok(ok(PreviewTokenList { tokens: app.previews.list(&id).await? }))
}

/// From now on the token is refused. What it has opened already goes on. Idempotent.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/preview-token/{token}", tag = "ports",
    params(("id" = String, Path,), ("token" = String, Path, description = "Its id")), responses((status = 204)))]
pub(super) async fn revoke_token(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, token): InMachine,
) -> Result<StatusCode, Error> {
    app.sandboxes.get(&caller.account, &id)?;
    let token = token.parse().map_err(|_| {
        Error::not_found("a preview token is revoked by its id; list them with GET …/preview-token")
    })?;
    app.previews.revoke(&id, &token).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn check_port(port: u16) -> Result<u16, Error> {
    if port == 0 {
        return Err(Error::invalid("`port` must be between 1 and 65535"));
    }
    Ok(port)
}

#[cfg(test)]
mod tests {
    use machine::guest::ListenerProcess;

    use super::*;

    #[test]
    fn a_port_is_listed_once_with_all_its_addresses() {
        let listener = |port, address: &str, name: Option<&str>| Listener {
            port,
            address: address.parse().unwrap(),
            process: name
                .map(|name| ListenerProcess { pid: 7, name: name.as_bytes().to_vec().into() }),
        };
        let listeners = vec![
            listener(8080, "127.0.0.1", None),
            listener(80, "0.0.0.0", Some("nginx\n")),
            listener(8080, "::1", Some("python3")),
        ];
        let ports = shown(listeners, &[443, 8080]);
        let seen: Vec<_> = ports
            .iter()
            .map(|port| (port.port, port.listening, port.exposed, port.command.as_deref()))
            .collect();
        assert_eq!(
            seen,
            [
                (80, true, false, Some("nginx")),
                (443, false, true, None),
                (8080, true, true, Some("python3"))
            ]
        );
        assert_eq!(ports[2].addresses, ["127.0.0.1", "::1"]);
    }
}
