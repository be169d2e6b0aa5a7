//! The HTTP API: the routes on one screen, and what goes around each of them.

mod access;
mod archives;
mod body;
mod changes;
mod compression;
mod connections;
mod databases;
mod edge;
mod etag;
mod events;
mod execs;
mod fields;
mod files;
mod forks;
mod held;
mod idempotency;
mod keep_alive;
mod keys;
mod logs;
mod machine_execs;
mod machines;
mod networks;
mod place;
mod ports;
mod proxy;
mod query;
mod quotas;
mod range;
mod rate;
mod repl;
mod sandboxes;
mod server;
mod snapshots;
mod sse;
mod stopping;
mod templates;
mod terminals;
#[cfg(test)]
mod tests;
mod transfers;
mod transitions;
mod unread;
mod upgrades;
mod uploads;
mod usage;
mod volumes;

use std::sync::Arc;

use axum::{Router, extract::DefaultBodyLimit, middleware};
use utoipa::openapi::{
    OpenApi, RefOr, Response, content::ContentBuilder, path::Operation, schema::Ref, security,
};
use utoipa_axum::{
    router::{OpenApiRouter, UtoipaMethodRouter},
    routes,
};

use self::access::Access;
pub(crate) use self::idempotency::prune;
pub use self::{connections::Connections, idempotency::Idempotency, rate::Rate, server::serve};
use crate::{App, Error};

/// Every route, and who may use it.
#[rustfmt::skip]
fn routes() -> Vec<(Access, UtoipaMethodRouter<Arc<App>>)> {
    use Access::{Full, Metrics, Open, Port, Read, Socket};
    vec![
        (Open,    routes!(server::healthz)),
        (Open,    routes!(server::version)),
        (Open,    routes!(server::openapi_json)),
        (Metrics, routes!(server::metrics)),

        (Read,    routes!(keys::me)),
        (Read,    routes!(keys::list)),
        (Full,    routes!(keys::create)),
        (Full,    routes!(keys::revoke)),
        (Read,    routes!(quotas::get)),
        (Read,    routes!(usage::get)),

        (Read,    routes!(templates::list)),
        (Read,    routes!(templates::get)),
        (Full,    routes!(templates::delete)),
        (Full,    routes!(templates::build)),
        (Read,    routes!(templates::builds)),
        (Read,    routes!(templates::build_status)),
        (Read,    routes!(templates::build_log)),

        (Read,    routes!(sandboxes::list)),
        (Full,    routes!(sandboxes::create)),
        (Read,    routes!(sandboxes::get)),
        (Full,    routes!(sandboxes::delete)),
        (Read,    routes!(sandboxes::lifecycle)),
        (Full,    routes!(sandboxes::update_lifecycle)),
        (Read,    routes!(networks::get)),
        (Full,    routes!(networks::update)),
        (Read,    routes!(events::list)),
        (Read,    routes!(events::metrics)),

        (Full,    routes!(transitions::pause)),
        (Full,    routes!(transitions::resume)),
        (Full,    routes!(transitions::hibernate)),
        (Full,    routes!(transitions::wake)),
        (Full,    routes!(forks::fork)),
        (Full,    routes!(forks::fork_tree)),
        (Full,    routes!(forks::promote)),

        (Full,    routes!(snapshots::create)),
        (Read,    routes!(snapshots::list)),
        (Read,    routes!(snapshots::get)),
        (Full,    routes!(snapshots::delete)),

        (Full,    routes!(volumes::create)),
        (Read,    routes!(volumes::list)),
        (Read,    routes!(volumes::get)),
        (Full,    routes!(volumes::update)),
        (Full,    routes!(volumes::delete)),
        (Full,    routes!(volumes::attach)),
        (Full,    routes!(volumes::detach)),

        (Full,    routes!(databases::create)),
        (Read,    routes!(databases::list)),
        (Read,    routes!(databases::get)),
        (Full,    routes!(databases::connection)),
        (Full,    routes!(databases::update)),
        (Full,    routes!(databases::delete)),
        (Full,    routes!(databases::wake)),
        (Full,    routes!(databases::clone)),
        (Full,    routes!(databases::reset_credentials)),
        (Full,    routes!(databases::failover)),

        (Full,    routes!(machines::create)),
        (Read,    routes!(machines::list)),
        (Read,    routes!(machines::get)),
        (Full,    routes!(machines::delete)),
        (Full,    routes!(machines::start)),
        (Full,    routes!(machines::stop)),
        (Full,    routes!(machines::attach)),
        (Full,    routes!(machines::detach)),

        (Full,    routes!(execs::run)),
        (Full,    routes!(execs::stream)),
        (Full,    routes!(repl::create)),
        (Read,    routes!(repl::list)),
        (Full,    routes!(repl::delete)),
        (Full,    routes!(repl::restart)),
        (Full,    routes!(repl::run)),
        (Full,    routes!(repl::stream)),

        (Read,    routes!(logs::read)),
        (Full,    routes!(machine_execs::start)),
        (Read,    routes!(machine_execs::list)),
        (Read,    routes!(machine_execs::get)),
        (Full,    routes!(machine_execs::cancel)),
        (Read,    routes!(machine_execs::output)),

        (Socket,  routes!(terminals::ssh)),
        (Socket,  routes!(terminals::pty)),
        (Read,    routes!(terminals::list)),
        (Full,    routes!(terminals::end)),

        (Read,    routes!(files::read)),
        (Full,    routes!(files::write)),
        (Full,    routes!(files::delete)),
        (Read,    routes!(files::list)),
        (Read,    routes!(files::stat)),

        (Full,    routes!(transfers::import)),
        (Full,    routes!(transfers::export)),
        (Read,    routes!(ports::list)),
        (Full,    routes!(ports::expose)),
        (Full,    routes!(ports::withdraw)),
        (Full,    routes!(ports::withdraw_one)),
        (Full,    routes!(ports::create_token)),
        (Read,    routes!(ports::tokens)),
        (Full,    routes!(ports::revoke_token)),
        (Port,    routes!(proxy::documented)),
        (Full,    routes!(changes::change)),
        (Full,    routes!(changes::move_to)),
        (Full,    routes!(changes::make_directory)),
        (Read,    routes!(changes::watch)),
        (Full,    routes!(archives::unpack)),
        (Read,    routes!(archives::pack)),
        (Full,    routes!(uploads::begin)),
        (Read,    routes!(uploads::list)),
        (Read,    routes!(uploads::get)),
        (Full,    routes!(uploads::write_part)),
        (Full,    routes!(uploads::complete)),
        (Full,    routes!(uploads::abort)),
    ]
}

/// The API as a document, generated from the routes.
pub fn openapi() -> OpenApi {
    let mut document = OpenApiRouter::<Arc<App>>::new();
    for (access, (schemas, mut paths, router)) in routes() {
        for operation in paths.paths.values_mut().flat_map(operations) {
            describe(operation, access);
        }
        document = document.routes((schemas, paths, router));
    }
    let mut document = document.into_openapi();
    "Atoll".clone_into(&mut document.info.title);
    env!("CARGO_PKG_VERSION").clone_into(&mut document.info.version);
    document.info.description = Some("Linux virtual machines for untrusted code.".to_owned());
    document.info.license = None;
    let components = document.components.get_or_insert_default();
    let bearer = security::Http::new(security::HttpAuthScheme::Bearer);
    components.add_security_scheme("key", security::SecurityScheme::Http(bearer));
    let (name, schema) = (
        <api::ErrorBody as utoipa::ToSchema>::name(),
        <api::ErrorBody as utoipa::PartialSchema>::schema(),
    );
    components.schemas.insert(name.into_owned(), schema);
    let (name, schema) = (
        <api::ErrorCode as utoipa::ToSchema>::name(),
        <api::ErrorCode as utoipa::PartialSchema>::schema(),
    );
    components.schemas.insert(name.into_owned(), schema);
    document
}

fn operations(item: &mut utoipa::openapi::PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch]
        .into_iter()
        .filter_map(Option::as_mut)
}

/// What is the same for all: refusals, and the key.
fn describe(operation: &mut Operation, access: Access) {
    let body = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
    let mut refusal = Response::new("Refused; the code says why.");
    refusal.content.insert("application/json".to_owned(), body);
    operation.responses.responses.insert("default".to_owned(), RefOr::T(refusal));
    if access != Access::Open {
        let none: [&str; 0] = [];
        operation.security = Some(vec![security::SecurityRequirement::new("key", none)]);
    }
}

fn router(app: &Arc<App>) -> Router {
    let mut router = Router::new();
    for (access, (_, paths, methods)) in routes() {
        if access == Access::Port {
            // Of every method, and with a look at credentials of its own. What comes is the guest's affair: also its
            // `Idempotency-Key`.
            for path in proxy::ROUTES {
                router = router.route(path, axum::routing::any(proxy::by_path));
            }
            continue;
        }
        let guard = middleware::from_fn_with_state((Arc::clone(app), access), access::admit);
        let once = middleware::from_fn_with_state(Arc::clone(app), idempotency::once);
        for path in paths.paths.keys() {
            let methods = methods.clone().route_layer(once.clone());
            router = router.route(path, methods.route_layer(guard.clone()));
        }
    }
    router
        .fallback(unknown_route)
        .method_not_allowed_fallback(unknown_method)
        // Each handler has a limit that fits it.
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(Arc::clone(app), edge::edge))
        .with_state(Arc::clone(app))
}

async fn unknown_route() -> Error {
    Error::not_found("there is no such route; GET /openapi.json has all of them")
}

async fn unknown_method() -> Error {
    Error::new(
        api::ErrorCode::MethodNotAllowed,
        "this route does not have that method; GET /openapi.json has all of them",
    )
}
